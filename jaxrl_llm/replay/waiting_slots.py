"""Slots that wait for room in a batch: whole groups, and single rows of prompts of their own."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.replay import group_batches
from jaxrl_llm.replay.rollout_buffer import padded
from jaxrl_llm.types import Batch, JsonObject, Settings


class WaitingSlots:
  """Batches of one slot without padding, oldest first; groups come before single rows."""

  def __init__(self) -> None:
    self.groups: list[Batch] = []
    self.singles: list[Batch] = []

  def __len__(self) -> int:
    return len(self.groups) + len(self.singles)

  def fill(self, batch: Batch, changed: dict[int, Batch | None]) -> Batch:
    """The batch with slots `changed`, and with waiting slots in place of empty ones and of those changed to None.

    Of the single rows that wait on, those that would fill two more batches stay; older ones are dropped.
    """
    P = len(batch.prompts.index_P)
    n_P = (np.asarray(batch.rollout.length_B).reshape(P, -1) > 0).sum(1)
    slots: list[Batch] = []
    for p in range(P):
      slot = changed.get(p, group_batches.slots(batch, np.array([p])) if n_P[p] else None)
      slots.append(self._next(batch) if slot is None else slot)
    del self.singles[: -2 * P]
    return group_batches.joined(slots)

  def _next(self, like: Batch) -> Batch:
    """The slot that waits longest, which leaves, or an empty one."""
    waiting = self.groups or self.singles
    if not waiting:
      return group_batches.empty_slots(like, 1)
    slot, rows = waiting.pop(0), len(like.reward_B) // len(like.prompts.index_P)
    return padded(slot if len(slot.reward_B) == rows else group_batches.with_rows(slot, rows), like)

  def state_dict(self) -> JsonObject:
    """State for the checkpoint."""
    lists = dict(groups=self.groups, singles=self.singles)
    return {name: [group_batches.plain(slot) for slot in slots] for name, slots in lists.items()}

  def load_state_dict(self, state: Settings) -> None:
    """Restore from `state_dict`."""
    self.groups, self.singles = (
      [group_batches.from_plain(slot) for slot in state[name]] for name in ('groups', 'singles')
    )
