"""Short right and long wrong rollouts first; the others of their groups later, and ever more seldom. RoRecomp."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxrl_llm.replay import group_batches
from jaxrl_llm.replay.rollout_buffer import (
  RolloutBuffer,
  StoredGroup,
  cut,
  padded,
  slots_of_share,
)
from jaxrl_llm.types import Batch, JsonObject, Settings


class Schedule(NamedTuple):
  """How often the other rollouts are learned."""

  least: float  # probability of compensation in a step, at the end
  fall_steps: int

  def probability_at(self, step: int) -> float:
    """least + (1 − least)·(1 + cos(π·min(step / fall_steps, 1))) / 2."""
    progress = min(step / self.fall_steps, 1.0)
    return self.least + (1 - self.least) * (1 + math.cos(math.pi * progress)) / 2


class Recomposition:
  """Learns the priority rows of mixed groups in their step, and the others once, in slots of their own.

  arXiv:2509.25958 (RoRecomp), reconstructed from the abstract.
  """

  rows = 0  # that join the groups of fresh rows

  def __init__(self, kept: float, share: float, schedule: Schedule, buffer: RolloutBuffer):
    """`kept` of a group's right rows and of its wrong rows have priority; `share` of a batch's slots are for others."""
    self.kept, self.share, self.schedule, self.buffer = kept, share, schedule, buffer

  def slots(self, prompts: int) -> int:
    """Slots for stored groups beside those of `prompts` sampled ones. Raises UserError where there is none."""
    return slots_of_share(self.share, prompts)

  def join(self, batch: Batch, seed: int, step: int) -> Batch:
    """Adds slots behind the fresh ones: stored groups, which leave the buffer, or no rows; drawn by (seed, step).

    All rows of a group determine advantages. Of fresh groups the priority rows are learned, of stored ones the others.
    """
    batch = batch._replace(success_B=None)
    fresh = np.asarray(batch.prompts.index_P)
    count, drawn = self.slots(len(fresh)), []
    self.buffer.drop_old(step)
    if np.random.default_rng((seed, 9, step)).random() < self.schedule.probability_at(step):
      drawn = self.buffer.draw(count, seed, step, set(fresh.tolist()))
    for group in drawn:
      self.buffer.drop(group.prompt)
    empty = group_batches.empty_slots(batch, count - len(drawn))
    joined = group_batches.joined([batch, *(padded(g.batch, batch) for g in drawn), empty])
    priority_PxG, learned_PxG = _priority(joined, self.kept), _in_mixed_groups(joined)
    learned_PxG[: len(fresh)] &= priority_PxG[: len(fresh)]
    learned_PxG[len(fresh) :] &= ~priority_PxG[len(fresh) :]
    return group_batches.in_copies(joined, learned_PxG.ravel().astype(float))

  def keep(self, batch: Batch, mixed_P: np.ndarray, step: int) -> None:
    """Stores the mixed groups of a graded batch that have rows without priority."""
    others_P = (_in_mixed_groups(batch) & ~_priority(batch, self.kept)).any(1)
    for slot in np.flatnonzero(mixed_P & others_P):
      group = cut(group_batches.slots(batch._replace(success_B=None), np.array([slot])))
      self.buffer.add(StoredGroup(group, step))

  def metrics(self, batch: Batch, fresh: int) -> dict[str, float]:
    """Metrics of a batch with `fresh` sampled slots, and of the buffer."""
    P = len(batch.prompts.index_P)
    learned_B = (np.asarray(batch.rollout.weight_B) > 0) & (np.asarray(batch.rollout.length_B) > 0)
    learned_PxG = learned_B.reshape(P, -1)
    rows = {'replay/rows': int(learned_PxG[fresh:].sum())}
    return rows | {'replay/priority_rows': int(learned_PxG[:fresh].sum())} | self.buffer.metrics()

  def state_dict(self) -> JsonObject:
    """State for the checkpoint."""
    return dict(groups=self.buffer.state_dict())

  def load_state_dict(self, state: Settings) -> None:
    """Restore from `state_dict`."""
    self.buffer.load_state_dict(state['groups'])


def priority(correct_G: np.ndarray, length_G: np.ndarray, kept: float) -> np.ndarray:
  """The shortest ⌈kept·n⌉ of n right rows and the longest ⌈kept·n⌉ of n wrong ones, bool [G].

  Rows of length 0 are none. Of equal lengths the first rows come first.
  """
  chosen_G = np.zeros(len(length_G), bool)
  for right, sign in ((True, 1), (False, -1)):
    rows = np.flatnonzero((length_G > 0) & ((correct_G > 0.5) == right))
    ordered = rows[np.argsort(sign * length_G[rows].astype(int), kind='stable')]
    chosen_G[ordered[: math.ceil(kept * len(rows))]] = True
  return chosen_G


def _priority(batch: Batch, kept: float) -> np.ndarray:
  """`priority` of every slot, bool [P, G]."""
  P = len(batch.prompts.index_P)
  correct_PxG, length_PxG = (
    np.asarray(x).reshape(P, -1) for x in (batch.correct_B, batch.rollout.length_B)
  )
  groups = zip(correct_PxG, length_PxG, strict=True)
  return np.stack([priority(correct_G, length_G, kept) for correct_G, length_G in groups])


def _in_mixed_groups(batch: Batch) -> np.ndarray:
  """Rows of slots whose rewards differ, bool [P, G]."""
  P = len(batch.prompts.index_P)
  exists_PxG = np.asarray(batch.rollout.length_B).reshape(P, -1) > 0
  reward_PxG = np.asarray(batch.reward_B, float).reshape(P, -1)
  high_P = np.where(exists_PxG, reward_PxG, -np.inf).max(1)
  low_P = np.where(exists_PxG, reward_PxG, np.inf).min(1)
  return exists_PxG & (high_P - low_P > group_batches.SAME)[:, None]
