"""Which prompts are considered at a step. size, slots, seed, step → distinct indices.

Every public function here may be named in `config.curriculum.candidates.fn`.
"""

from __future__ import annotations

import numpy as np

from jaxrl_llm.control import setting


def everything(size: int, slots: int, seed: int, step: int) -> np.ndarray:
  """All prompts. Source: arXiv:2510.26374 (BOTS)."""
  del slots, seed, step
  return np.arange(size)


def stream(size: int, slots: int, seed: int, step: int, *, multiple: int = 16) -> np.ndarray:
  """The next slots·multiple prompts of an endless stream, shuffled anew each epoch.

  Every epoch is cut into whole windows, and the remainder is left out: a window that crossed into
  the next epoch could hold a prompt twice. Raises UserError for a `multiple` that is no whole
  number from 1 up.
  Source: arXiv:2507.04632 (MoPPS; multiple 16 on MATH, 8 elsewhere).
  """
  setting.whole('candidates.multiple', multiple, 1)
  window = min(slots * multiple, size)
  epoch, number = divmod(step, size // window)
  order = np.random.default_rng((seed, 1, epoch)).permutation(size)
  return order[number * window : (number + 1) * window]
