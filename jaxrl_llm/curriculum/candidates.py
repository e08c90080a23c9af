"""Which prompts are considered at a step. free_N, slots, seed, passes_N → distinct indices.

`free_N` bool: prompts that are not running already, at least `slots` of them. `passes_N` int32: in how many epochs of
the stream a prompt has been considered. Every public function here may be named in `config.curriculum.candidates.fn`.
"""

from __future__ import annotations

import numpy as np

from jaxrl_llm.curriculum import setting_checks


def everything(free_N: np.ndarray, slots: int, seed: int, passes_N: np.ndarray) -> np.ndarray:
  """All prompts. Source: arXiv:2510.26374 (BOTS)."""
  del slots, seed, passes_N
  return np.flatnonzero(free_N)


def stream(
  free_N: np.ndarray, slots: int, seed: int, passes_N: np.ndarray, *, multiple: int = 16
) -> np.ndarray:
  """The next slots·multiple prompts of an endless stream, shuffled anew each epoch.

  Every epoch considers each prompt once, however many slots a step has: the place in the stream is `passes_N`, not the
  number of the step. A prompt that is running keeps its place and comes when it is free. A window that reaches into the
  next epoch takes prompts of it that it does not hold already. Raises UserError for a `multiple` that is no whole
  number from 1 up. arXiv:2507.04632 (MoPPS; multiple 16 on MATH, 8 elsewhere).
  """
  setting_checks.whole('candidates.multiple', multiple, 1)
  window, parts = min(slots * multiple, int(free_N.sum())), []
  epoch, last = (int(x) for x in (passes_N.min(), passes_N.max()))
  while window > 0 and epoch <= last:
    order = np.random.default_rng((seed, 1, epoch)).permutation(len(free_N))
    parts.append(order[(free_N & (passes_N == epoch))[order]][:window])
    window, epoch = window - len(parts[-1]), epoch + 1
  return np.concatenate(parts)
