"""Candidate prompts of a step: free_N, slots, seed, passes_N, random → distinct indices.

`free_N` bool: prompts without unfinished rollouts, at least `slots` of them. `passes_N` int32: the number of epochs of
the stream in which a prompt was considered. `random`: generator of the step. Every public function may be named in
`config.curriculum.candidates.fn`.
"""

from __future__ import annotations

import numpy as np

from jaxrl_llm.curriculum import setting_checks


def everything() -> None:
  """All prompts without unfinished rollouts. arXiv:2510.26374 (BOTS)."""


def subset(
  free_N: np.ndarray,
  slots: int,
  seed: int,
  passes_N: np.ndarray,
  random: np.random.Generator,
  *,
  limit: int = 65536,
) -> np.ndarray:
  """All prompts without unfinished rollouts; where they are more than `limit`, a random subset drawn anew in each step.

  Without a limit, utilities and noise of a million prompts are computed to choose 64. At least `slots` prompts, in
  ascending order. Raises UserError for a `limit` that is not a whole number of at least 1.
  """
  del seed, passes_N
  setting_checks.check_integer('candidates.limit', limit, 1)
  free, count = np.flatnonzero(free_N), max(limit, slots)
  return free if len(free) <= count else np.sort(random.choice(free, count, False, shuffle=False))


def encoded(
  free_N: np.ndarray, slots: int, seed: int, passes_N: np.ndarray, random: np.random.Generator
) -> np.ndarray:
  """The prompts that the last step encoded for `prior_pooling.hidden_state`, besides its own.

  The features of all others are older than the policy. `free_N` holds these prompts alone, or all free ones as long as
  fewer than `slots` of them are encoded, at most 65,536 at random.
  """
  return subset(free_N, slots, seed, passes_N, random)


def stream(
  free_N: np.ndarray,
  slots: int,
  seed: int,
  passes_N: np.ndarray,
  random: np.random.Generator,
  *,
  multiple: int = 16,
) -> np.ndarray:
  """The next slots·multiple prompts of an endless stream, reshuffled each epoch.

  Every epoch considers each prompt once, for any number of slots: the position in the stream is `passes_N`, not the
  step. A prompt that is not free keeps its position. A window that reaches into the next epoch takes further prompts
  from it. Raises UserError for a `multiple` that is not a whole number of at least 1.
  arXiv:2507.04632 (MoPPS; multiple 16 on MATH, 8 elsewhere).
  """
  del random
  setting_checks.check_integer('candidates.multiple', multiple, 1)
  window, parts = min(slots * multiple, int(free_N.sum())), []
  epoch, last = (int(x) for x in (passes_N.min(), passes_N.max()))
  while window > 0 and epoch <= last:
    order = np.random.default_rng((seed, 1, epoch)).permutation(len(free_N))
    parts.append(order[(free_N & (passes_N == epoch))[order]][:window])
    window, epoch = window - len(parts[-1]), epoch + 1
  return np.concatenate(parts)
