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


def audits(before: int, slots: int, share: float) -> int:
  """How many of the next `slots` are audits, so that of all slots up to and with them ⌊share·slots⌋ are.

  `before` slots were handed out earlier. Even 4 slots a step at 5 % give one every fifth step, and steps may have
  different numbers of slots.
  """
  # The nudge mends 0.29 * 100 = 28.999…
  return math.floor((before + slots) * share + 1e-9) - math.floor(before * share + 1e-9)


def audit(
  index: np.ndarray,
  count: int,
  free_N: np.ndarray,
  barred: np.ndarray,
  random: np.random.Generator,
) -> np.ndarray:
  """The last `count` of a choice, the least useful, give way to draws from `barred` prompts.

  Where none are barred, from all of `free_N` bool [N] but those that stay. Fewer give way where fewer are barred.
  """
  if len(barred):
    barred = barred[~np.isin(barred, index)]
    count = min(count, len(barred))
    drawn = random.choice(barred, count, replace=False, shuffle=False)
    return np.concatenate([index[: len(index) - count], drawn])
  kept = index[: len(index) - count]
  out = np.union1d(kept, np.flatnonzero(~free_N))
  # The r-th prompt that is not out, without a list of them: r, moved past those out before it.
  rank = random.choice(len(free_N) - len(out), count, replace=False, shuffle=False)
  before = out - np.arange(len(out))
  return np.concatenate([kept, rank + np.searchsorted(before, rank, side='right')])


def used(
  pool: np.ndarray, stay: np.ndarray, give_way: np.ndarray, skipped: np.ndarray | None
) -> np.ndarray:
  """Candidates that are not considered again in their epoch, when those at places `stay` are asked.

  All of `pool`, as a utility compared them, but for those at places `give_way`, whose slots went to audits. With
  `skipped` (barred, bool) they were taken in their order instead: those behind the last place of `stay` are still to
  come, and before it only the skipped ones are used up. Audits come besides: they use up nothing.
  """
  looked_at = np.ones(len(pool), bool)
  if skipped is not None:
    looked_at = skipped & (np.arange(len(pool)) < stay.max(initial=-1))
    looked_at[stay] = True
  looked_at[give_way] = False
  return pool[looked_at]
