"""Which prompts are considered at a step. size, slots, seed, step → index array.

Every public function here may be named in `config.curriculum.candidates.fn`.
"""

from __future__ import annotations

import numpy as np


def everything(size: int, slots: int, seed: int, step: int) -> np.ndarray:
  """All prompts. Source: arXiv:2510.26374 (BOTS)."""
  del slots, seed, step
  return np.arange(size)


def stream(size: int, slots: int, seed: int, step: int, *, multiple: int = 16) -> np.ndarray:
  """The next slots·multiple prompts of an endless shuffled stream, each epoch in a new order.

  Source: arXiv:2507.04632 (MoPPS; multiple 16 on MATH, 8 elsewhere).
  """
  window = min(slots * multiple, size)
  start, taken = step * window, []
  while sum(map(len, taken)) < window:
    epoch, offset = divmod(start + sum(map(len, taken)), size)
    order = np.random.default_rng((seed, 1, epoch)).permutation(size)
    taken.append(order[offset : offset + window - sum(map(len, taken))])
  return np.unique(np.concatenate(taken))
