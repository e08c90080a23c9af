"""One right completion of each prompt, injected into its group when no row of that is right."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.replay import group_batches, rollout_buffer
from jaxrl_llm.replay.rollout_buffer import RolloutBuffer, StoredGroup, cut, padded
from jaxrl_llm.types import Batch, JsonObject, Settings


class TrajectoryCache:
  """The newest right completion of each prompt, whose place in the loss is that of a wrong row.

  arXiv:2601.05787 (BEPA, LEVEL-2; reconstructed).
  """

  rows = 0  # that join the groups of fresh rows: a cached one replaces a fresh one

  def __init__(self, buffer: RolloutBuffer):
    """`buffer` holds one row of each prompt."""
    self.buffer = buffer

  def slots(self, prompts: int) -> int:
    """No slot beside those of the sampled prompts."""
    del prompts
    return 0

  def keep(self, batch: Batch, mixed_P: np.ndarray, step: int) -> None:
    """Stores the first right row of each group, in place of its prompt's earlier one.

    The prompts of the batch may carry hints, which are not stored: `join` takes the prompt of the fresh group.
    """
    del mixed_P
    P = len(batch.prompts.index_P)
    right_PxG = _right(batch).reshape(P, -1)
    batch = batch._replace(success_B=None)
    for slot in np.flatnonzero(right_PxG.any(1)):
      group = group_batches.slots(batch, np.array([slot]))
      # The rows of a group are exchangeable, so that the first right one is any of them.
      first = right_PxG[slot].argmax(keepdims=True)
      self.buffer.add(StoredGroup(cut(group_batches.rows(group, first)), step))

  def join(self, batch: Batch, seed: int, step: int) -> Batch:
    """Replaces a row of each all-wrong group by the cached one of its prompt, where there is one.

    (seed, step, prompt) draw the row. `replayed_B` is 1 for a cached one: it has no recorded log-probs, and the update
    computes those of its first weights behind the prompt of the batch. A group without fresh rows stays as it is.
    """
    P = len(batch.prompts.index_P)
    batch = batch._replace(replayed_B=np.zeros_like(np.asarray(batch.reward_B)))
    groups = [group_batches.slots(batch, np.array([p])) for p in range(P)]
    return group_batches.joined([self._injected(group, seed, step) for group in groups])

  def _injected(self, group: Batch, seed: int, step: int) -> Batch:
    prompt = int(group.prompts.index_P[0])
    stored = self.buffer.groups.get(prompt)
    exists_B = np.asarray(group.rollout.length_B) > 0
    if stored is None or not exists_B.any() or _right(group).any():
      return group
    cached = group_batches.without_log_probs(padded(stored.batch, group))
    if group.success_B is not None:
      cached = cached._replace(success_B=cached.correct_B)
    at = np.random.default_rng((seed, 12, step, prompt)).choice(np.flatnonzero(exists_B))
    return group_batches.with_row(group, int(at), cached)

  def metrics(self, batch: Batch, fresh: int) -> dict[str, float]:
    """Metrics of a batch, whose slots are all `fresh`, and of the cache."""
    del fresh
    return rollout_buffer.row_metrics(batch, self.buffer)

  def state_dict(self) -> JsonObject:
    """State for the checkpoint."""
    return dict(groups=self.buffer.state_dict())

  def load_state_dict(self, state: Settings) -> None:
    """Restore from `state_dict`."""
    self.buffer.load_state_dict(state['groups'])


def _right(batch: Batch) -> np.ndarray:
  """Which rows exist and are right, bool [B]."""
  return (np.asarray(batch.correct_B) > 0.5) & (np.asarray(batch.rollout.length_B) > 0)
