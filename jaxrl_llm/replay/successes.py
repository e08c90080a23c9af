"""Right rollouts of earlier visits, replayed beside the fresh rollouts of their prompt."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.replay import group_batches
from jaxrl_llm.replay.rollout_buffer import RolloutBuffer, StoredGroup, cut, padded, row_metrics
from jaxrl_llm.types import Batch, JsonObject, Settings


class Successes:
  """The latest right rollouts of each prompt, without duplicates. arXiv:2507.07451 (RLEP)."""

  def __init__(self, count: int, most: int, buffer: RolloutBuffer):
    """`count` are replayed at a visit, of the `most` that are stored per prompt."""
    self.rows, self.most, self.buffer = count, most, buffer

  def slots(self, prompts: int) -> int:
    """No slot beside those of the sampled prompts."""
    del prompts
    return 0

  def keep(self, batch: Batch, mixed_P: np.ndarray, step: int) -> None:
    """Adds the right rows of a batch, of any group, and drops the oldest ones of their prompt."""
    del mixed_P
    P = len(batch.prompts.index_P)
    right_B = (np.asarray(batch.correct_B) > 0.5) & (np.asarray(batch.rollout.length_B) > 0)
    right_PxG = right_B.reshape(P, -1)
    batch = batch._replace(success_B=None)
    for slot in np.flatnonzero(right_PxG.any(1)):
      group = group_batches.slots(batch, np.array([slot]))
      right = group_batches.rows(group, np.flatnonzero(right_PxG[slot]))
      stored = self.buffer.groups.get(int(group.prompts.index_P[0]))
      if stored is not None:
        right = group_batches.one_slot([padded(stored.batch, batch), right])
      newest = _without_duplicates(right)[-self.most :]
      self.buffer.add(StoredGroup(cut(group_batches.rows(right, newest)), step))

  def join(self, batch: Batch, seed: int, step: int) -> Batch:
    """Adds `rows` rows to the G fresh rows of each group: replays drawn by (seed, step, prompt), or empty rows.

    `replayed_B` is 1 for them: they have no recorded log-probs, and the update computes those of its first weights. A
    group without fresh rows gets no replays.
    """
    P = len(batch.prompts.index_P)
    batch = batch._replace(replayed_B=np.zeros_like(np.asarray(batch.reward_B)))
    fresh_P = (np.asarray(batch.rollout.length_B).reshape(P, -1) > 0).any(1)
    replays = [
      self._replays(group_batches.slots(batch, np.array([p])), bool(fresh_P[p]), seed, step)
      for p in range(P)
    ]
    return group_batches.beside(batch, group_batches.joined(replays))

  def _replays(self, group: Batch, draws: bool, seed: int, step: int) -> Batch:
    """A slot of `rows` rows: stored ones of the group's prompt if it `draws`, then empty ones."""
    prompt = int(group.prompts.index_P[0])
    stored = self.buffer.groups.get(prompt) if draws else None
    rows = group_batches.rows(group, np.zeros(0, int))
    if stored is not None:
      random = np.random.default_rng((seed, 3, step, prompt))
      chosen = random.permutation(len(stored.batch.reward_B))[: self.rows]
      rows = padded(group_batches.rows(stored.batch, chosen), group)
      if group.success_B is not None:
        rows = rows._replace(success_B=rows.correct_B)
    return group_batches.without_log_probs(group_batches.with_rows(rows, self.rows))

  def metrics(self, batch: Batch, fresh: int) -> dict[str, float]:
    """Metrics of a batch, whose slots are all `fresh`, and of the buffer."""
    del fresh
    return row_metrics(batch, self.buffer)

  def state_dict(self) -> JsonObject:
    """State for the checkpoint."""
    return dict(groups=self.buffer.state_dict())

  def load_state_dict(self, state: Settings) -> None:
    """Restore from `state_dict`."""
    self.buffer.load_state_dict(state['groups'])


def _without_duplicates(batch: Batch) -> np.ndarray:
  """Numbers of the rows of one slot, each sequence of tokens at its last place."""
  rollout = batch.rollout
  last: dict[bytes, int] = {}
  for row, length in enumerate(np.asarray(rollout.length_B)):
    tokens = np.asarray(rollout.tokens_BxT[row, :length], np.int32).tobytes()
    last.pop(tokens, None)
    last[tokens] = row
  return np.array(list(last.values()), int)
