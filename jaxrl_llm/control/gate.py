"""Last changes to a choice. (chosen index, size, step, random generator) → index, all distinct.

Every public function here may be named in `config.curriculum.gate.fn`.
"""

from __future__ import annotations

import math

import numpy as np

from jaxrl_llm.control import setting


def none(index: np.ndarray, size: int, step: int, random: np.random.Generator) -> np.ndarray:
  """As chosen. Source: none."""
  del size, step, random
  return index


def audit(
  index: np.ndarray, size: int, step: int, random: np.random.Generator, *, share: float = 0.05
) -> np.ndarray:
  """That share of slots goes to prompts drawn uniformly from all but the chosen ones that stay.

  Exact over the run, ⌊(step + 1)·slots·share⌋ slots up to and with a step, so that even 4 slots at
  5 % give one every fifth step. The least useful choices give way. Keeps the posterior of prompts
  that a utility would never choose again from going stale. Source: none.
  """
  setting.within('gate.share', share, 0, 1)
  slots = len(index)
  # The nudge mends 0.29 * 100 = 28.999…
  count = math.floor((step + 1) * slots * share + 1e-9) - math.floor(step * slots * share + 1e-9)
  kept = index[: slots - count]
  others = np.ones(size, bool)
  others[kept] = False
  drawn = random.choice(np.flatnonzero(others), count, replace=False, shuffle=False)
  return np.concatenate([kept, drawn])
