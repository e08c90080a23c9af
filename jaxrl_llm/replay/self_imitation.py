"""Self-imitation: good rollouts of recent steps, replayed with advantages over the median of recent group means."""

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


class Imitation(NamedTuple):
  """When rollouts are replayed, and how much they count."""

  share: float  # of a batch's slots
  fill: float  # groups that are stored before a replay, in units of these slots
  baselines: int  # group means, at least, whose median is the baseline
  weight: float  # of the term, after its warm-up
  warm_up_steps: int

  def weight_at(self, step: int) -> float:
    """weight·(1 − cos(π·min(step / warm_up_steps, 1))) / 2, for steps from 1 up."""
    progress = min(step / self.warm_up_steps, 1.0)
    return self.weight * (1 - math.cos(math.pi * progress)) / 2


class SelfImitation:
  """Rows above the mean of their group, replayed once there are enough of them, in slots of their own.

  arXiv:2509.22601 (SPEAR).
  """

  rows = 0  # that join the groups of fresh rows

  def __init__(self, settings: Imitation, buffer: RolloutBuffer):
    """An empty store."""
    self.settings, self.buffer = settings, buffer
    self.means: list[tuple[int, list[float]]] = []  # (step, mean reward of each of its groups)

  def slots(self, prompts: int) -> int:
    """Slots for replayed groups beside those of `prompts` sampled ones. Raises UserError where there is none."""
    return slots_of_share(self.settings.share, prompts)

  def baseline(self) -> float:
    """The median of the group means of recent steps, p50 in the paper; infinite before the first step."""
    means = [mean for _, of_step in self.means for mean in of_step]
    return float(np.median(means)) if means else math.inf

  def join(self, batch: Batch, seed: int, step: int) -> Batch:
    """Adds slots behind the fresh ones: once enough groups are stored, some of them, and otherwise none.

    Groups are drawn by (seed, step); the buffer is empty after that. A row counts with its reward minus the baseline as
    advantage, and is left out where that is not positive. Rows keep the log-probs of their sampling.
    """
    batch = batch._replace(success_B=None, imitation_B=np.zeros_like(np.asarray(batch.reward_B)))
    fresh = np.asarray(batch.prompts.index_P)
    count, rows = self.slots(len(fresh)), len(batch.reward_B) // len(fresh)
    self.buffer.drop_old(step)
    weight = self.settings.weight_at(step + 1)
    drawn = []
    for group in self._draw(count, seed, step, set(fresh.tolist())):
      positive = _weighted(self._above(group.batch), weight)
      drawn.append(padded(group_batches.with_rows(positive, rows), batch))
    empty = group_batches.empty_slots(batch, count - len(drawn))
    return group_batches.joined([batch, *drawn, empty])

  def keep(self, batch: Batch, mixed_P: np.ndarray, step: int) -> None:
    """Stores the rows above the mean of their group, and the means of all groups."""
    del mixed_P
    P = len(batch.prompts.index_P)
    reward_PxG, exists_PxG = (
      np.asarray(x).reshape(P, -1) for x in (batch.reward_B, np.asarray(batch.rollout.length_B) > 0)
    )
    mean_P = (reward_PxG * exists_PxG).sum(1) / np.maximum(exists_PxG.sum(1), 1)
    while sum(len(means) for _, means in self.means) > self.settings.baselines:
      self.means.pop(0)
    self.means.append((step, mean_P[exists_PxG.any(1)].tolist()))
    good_PxG = exists_PxG & (reward_PxG - mean_P[:, None] > group_batches.SAME)
    for slot in np.flatnonzero(good_PxG.any(1)):
      group = group_batches.slots(batch._replace(success_B=None), np.array([slot]))
      good = group_batches.rows(group, np.flatnonzero(good_PxG[slot]))
      self.buffer.add(StoredGroup(cut(good), step))

  def metrics(self, batch: Batch, fresh: int) -> dict[str, float]:
    """Metrics of a batch and of the buffer."""
    del fresh
    metrics = {'replay/rows': int((np.asarray(batch.imitation_B) > 0).sum())}
    baseline = {'replay/baseline': self.baseline()} if self.means else {}
    return metrics | self.buffer.metrics() | baseline

  def state_dict(self) -> JsonObject:
    """State for the checkpoint."""
    return dict(groups=self.buffer.state_dict(), means=[list(x) for x in self.means])

  def load_state_dict(self, state: Settings) -> None:
    """Restore from `state_dict`."""
    self.buffer.load_state_dict(state['groups'])
    self.means = [(int(step), [float(x) for x in means]) for step, means in state['means']]

  def _draw(self, count: int, seed: int, step: int, fresh: set[int]) -> list[StoredGroup]:
    """Groups with rows above the baseline, if there are more than fill·count; then no group stays."""
    good = {p for p, g in self.buffer.groups.items() if len(self._above(g.batch).reward_B)}
    if len(good) <= self.settings.fill * count:
      return []
    drawn = self.buffer.draw(count, seed, step, fresh | (self.buffer.groups.keys() - good))
    self.buffer.clear()
    return drawn

  def _above(self, group: Batch) -> Batch:
    """The rows above the baseline, with these advantages."""
    reward_B = np.asarray(group.reward_B)
    advantage_B = (reward_B - self.baseline()).astype(reward_B.dtype)
    group = group._replace(imitation_B=advantage_B)
    return group_batches.rows(group, np.flatnonzero(advantage_B > group_batches.SAME))


def _weighted(batch: Batch, factor: float) -> Batch:
  """The batch with the weight of its rows multiplied."""
  weight_B = np.asarray(batch.rollout.weight_B)
  weight_B = (weight_B * factor).astype(weight_B.dtype)
  return batch._replace(rollout=batch.rollout._replace(weight_B=weight_B))
