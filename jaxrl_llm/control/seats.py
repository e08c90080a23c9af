"""Who sits in which slot: the stages' choices under bars, domains and audits."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

Pick = Callable[[np.ndarray, int, np.random.Generator], np.ndarray]


def seat(
  worth: np.ndarray,
  slots: int,
  random: np.random.Generator,
  pick: Pick,
  barred: np.ndarray | None = None,
  domain: np.ndarray | None = None,
  quota_D: np.ndarray | None = None,
) -> np.ndarray:
  """Positions of `slots` candidates: of each domain its quota of those not barred, as `pick` chooses.

  What a domain lacks the others fill, and what all lack is drawn from the barred. Source: none.
  """
  if barred is None and quota_D is None:
    return pick(worth, slots, random)
  free = np.ones(len(worth), bool) if barred is None else ~barred
  taken = np.zeros(0, int)
  for d, quota in enumerate(() if quota_D is None else quota_D):
    own = np.flatnonzero(free & (domain == d))
    if count := min(quota, len(own)):
      taken = np.concatenate([taken, own[pick(worth[own], count, random)]])
  free[taken] = False
  left = np.flatnonzero(free)
  fill = min(slots - len(taken), len(left))
  if fill:
    taken = np.concatenate([taken, left[pick(worth[left], fill, random)]])
  if len(taken) < slots:
    others = np.flatnonzero(barred)
    drawn = random.choice(others, slots - len(taken), replace=False, shuffle=False)
    taken = np.concatenate([taken, drawn])
  # By domains in turn, the last one's would always be those that give way to audits.
  return taken if quota_D is None else random.permutation(taken)


def audits(step: int, slots: int, share: float) -> int:
  """⌊(step + 1)·slots·share⌋ up to and with a step, so that even 4 slots at 5 % give one every fifth. Source: none."""
  # The nudge mends 0.29 * 100 = 28.999…
  return math.floor((step + 1) * slots * share + 1e-9) - math.floor(step * slots * share + 1e-9)


def audit(
  index: np.ndarray, count: int, size: int, barred: np.ndarray, random: np.random.Generator
) -> np.ndarray:
  """The last `count` of a choice, the least useful, give way to draws from `barred` prompts.

  Where none are barred, from all but those that stay. Fewer give way where fewer are barred. Source: none.
  """
  if len(barred):
    barred = barred[~np.isin(barred, index)]
    count = min(count, len(barred))
    drawn = random.choice(barred, count, replace=False, shuffle=False)
    return np.concatenate([index[: len(index) - count], drawn])
  kept = index[: len(index) - count]
  # The r-th prompt that is not kept, without a list of them: r, moved past the kept ones before it.
  rank = random.choice(size - len(kept), count, replace=False, shuffle=False)
  before = np.sort(kept) - np.arange(len(kept))
  return np.concatenate([kept, rank + np.searchsorted(before, rank, side='right')])
