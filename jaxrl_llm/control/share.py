"""What a prompt's prior is. (evidence of kinds, kind_N) → prior_Nx2 of Beta pseudo-counts.

`pooled_Kx2` holds (right, wrong) counts of all visits to prompts of each kind, aged by `kind_decay`
a visit.
Every public function here may be named in `config.curriculum.share.fn`.
"""

from __future__ import annotations

import numpy as np

from jaxrl_llm.control import setting


def none(pooled_Kx2: np.ndarray, kind_N: np.ndarray) -> np.ndarray:
  """Beta(1, 1) for every prompt. Source: arXiv:2507.04632 (MoPPS)."""
  del pooled_Kx2
  return np.ones((len(kind_N), 2))


def kind(
  pooled_Kx2: np.ndarray, kind_N: np.ndarray, *, strength: float = 2.0, floor: float = 1.0
) -> np.ndarray:
  """Beta(s·m, s·(1 − m)), m = (right + floor) / (right + wrong + 2·floor) of the prompt's kind.

  A prompt never seen is expected to do as its kind does now. `strength` is how alike prompts of a
  kind are, in pseudo-counts: small keeps room for difference between them, so the chance of a mixed
  group stays that of a Beta-binomial and not of one shared rate. Source: none (empirical Bayes).
  """
  setting.within('share.strength', strength, 0, open_low=True)
  setting.within('share.floor', floor, 0, open_low=True)
  rate_K = (pooled_Kx2[:, 0] + floor) / (pooled_Kx2.sum(1) + 2 * floor)
  rate_N = rate_K[kind_N]
  return strength * np.stack([rate_N, 1 - rate_N], axis=1)
