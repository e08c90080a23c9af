"""Assignment of slots to candidates under eligibility, domain quotas and audits."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from jaxrl_llm.types import UserError

Select = Callable[[np.ndarray, int, np.random.Generator], np.ndarray]


def no_room(slots: int, free_N: np.ndarray) -> UserError:
  """The error of fewer free prompts than slots."""
  held = len(free_N) - int(free_N.sum())
  running = f', of which {held} have unfinished rollouts' if held else ''
  return UserError(
    f'config.prompts={slots} is more than the {len(free_N)} prompts of the data{running}; lower it or '
    'raise config.data.size.'
  )


def assign_slots(
  worth: np.ndarray,
  slots: int,
  random: np.random.Generator,
  select: Select,
  barred: np.ndarray | None = None,
  domain: np.ndarray | None = None,
  quota_D: np.ndarray | None = None,
) -> np.ndarray:
  """Positions of `slots` candidates: of each domain its quota of eligible ones, chosen by `select`.

  Other domains fill the slots that a domain cannot, and barred candidates those that no domain can.
  """
  free = np.ones(len(worth), bool) if barred is None else ~barred
  taken = np.zeros(0, int)
  for d, quota in enumerate(() if quota_D is None else quota_D):
    own = np.flatnonzero(free & (domain == d))
    if count := min(quota, len(own)):
      taken = np.concatenate([taken, own[select(worth[own], count, random)]])
  free[taken] = False
  left = np.flatnonzero(free)
  fill = min(slots - len(taken), len(left))
  if fill:
    taken = np.concatenate([taken, left[select(worth[left], fill, random)]])
  if len(taken) < slots:
    others = np.flatnonzero(barred)
    drawn = random.choice(others, slots - len(taken), replace=False, shuffle=False)
    taken = np.concatenate([taken, drawn])
  # Audits replace the last positions: in the order of domains these were always the last domain's.
  return taken if quota_D is None else random.permutation(taken)


def audit_count(before: int, slots: int, share: float) -> int:
  """The number of audits among the next `slots`, so that ⌊share·total⌋ of all slots so far are audits.

  `before` is the number of earlier slots. 4 slots a step at 5 % give one audit every fifth step; steps may have
  different numbers of slots.
  """
  # The tolerance corrects products such as 0.29 * 100 = 28.999…
  return math.floor((before + slots) * share + 1e-9) - math.floor(before * share + 1e-9)


def replace_with_audits(
  index: np.ndarray,
  count: int,
  free_N: np.ndarray,
  barred: np.ndarray,
  random: np.random.Generator,
) -> np.ndarray:
  """Replaces the last `count` of a choice, which have the lowest utility, by draws from `barred` prompts.

  Where none are barred, draws are from `free_N`, bool [N], without the remaining choice. Fewer are replaced where fewer
  are barred.
  """
  if len(barred):
    barred = barred[~np.isin(barred, index)]
    count = min(count, len(barred))
    drawn = random.choice(barred, count, replace=False, shuffle=False)
    return np.concatenate([index[: len(index) - count], drawn])
  remaining = index[: len(index) - count]
  excluded = np.union1d(remaining, np.flatnonzero(~free_N))
  # The r-th prompt that is not excluded is r plus the number of excluded ones before it.
  rank = random.choice(len(free_N) - len(excluded), count, replace=False, shuffle=False)
  before = excluded - np.arange(len(excluded))
  return np.concatenate([remaining, rank + np.searchsorted(before, rank, side='right')])


def consumed_candidates(
  pool: np.ndarray, chosen: np.ndarray, replaced: np.ndarray, skipped: np.ndarray | None
) -> np.ndarray:
  """Candidates that are not considered again in their epoch.

  All of `pool`, whose utilities were compared, except those at positions `replaced`, whose slots went to audits. With
  `skipped` (bool, barred) candidates were taken in order instead: those after the last position of `chosen` are
  considered later, and before it only the chosen and the skipped ones are consumed. Audits consume no candidates.
  """
  consumed = np.ones(len(pool), bool)
  if skipped is not None:
    consumed = skipped & (np.arange(len(pool)) < chosen.max(initial=-1))
    consumed[chosen] = True
  consumed[replaced] = False
  return pool[consumed]
