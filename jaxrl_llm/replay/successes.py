"""Right rollouts of earlier visits, replayed beside the fresh rollouts of their prompt."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxrl_llm.replay.array_records import each
from jaxrl_llm.types import Array, Batch, JsonObject, Settings


class StoredRollout(NamedTuple):
  """One right rollout."""

  tokens: np.ndarray  # int32 [its length]
  reward: float
  reason: int


class Successes:
  """Prompt → its latest right rollouts, without duplicates."""

  def __init__(self, count: int, most: int):
    """`count` are replayed at a visit, of the `most` that are stored per prompt."""
    self.rows, self.most = count, most
    self.rollouts: dict[int, list[StoredRollout]] = {}

  def slots(self, prompts: int) -> int:
    """No slot beside those of the sampled prompts."""
    del prompts
    return 0

  def keep(self, batch: Batch, mixed_P: np.ndarray, step: int) -> None:
    """Adds the right rows of a batch, of any group, and drops the oldest ones. arXiv:2507.07451 (RLEP)."""
    del mixed_P, step
    rollout, index_P = batch.rollout, np.asarray(batch.prompts.index_P)
    G = len(rollout.length_B) // len(index_P)
    for b in np.flatnonzero((batch.correct_B > 0.5) & (rollout.length_B > 0)):
      tokens = rollout.tokens_BxT[b, : rollout.length_B[b]].astype(np.int32)
      stored = self.rollouts.setdefault(int(index_P[b // G]), [])
      stored[:] = [old for old in stored if not np.array_equal(old.tokens, tokens)]
      stored.append(StoredRollout(tokens, float(batch.reward_B[b]), int(rollout.reason_B[b])))
      del stored[: -self.most]

  def join(self, batch: Batch, seed: int, step: int) -> Batch:
    """Adds `rows` rows to the G fresh rows of each group: replays drawn by (seed, step, prompt), or empty rows.

    `replayed_B` is 1 for them: they have no recorded log-probs, and the update computes those of its first weights. A
    group without fresh rows gets no replays. arXiv:2507.07451 (RLEP).
    """
    index_P = np.asarray(batch.prompts.index_P)
    P, M = len(index_P), self.rows
    fresh_P = (np.asarray(batch.rollout.length_B).reshape(P, -1) > 0).any(1)
    # Zeros with the shapes and types of the batch, M rows per prompt.
    first = np.repeat(np.arange(P) * (len(batch.reward_B) // P), M)
    more = each(lambda x: np.zeros_like(np.asarray(x)[first]), batch.rollout)
    more = more._replace(
      weight_B=np.ones_like(more.weight_B), version_BxT=np.full_like(more.version_BxT, -1)
    )
    reward_B, right_B = (np.zeros_like(np.asarray(batch.reward_B)[first]) for _ in range(2))
    for p in np.flatnonzero(fresh_P):
      for at, stored in enumerate(self._draw(int(index_P[p]), seed, step), start=p * M):
        more.tokens_BxT[at, : len(stored.tokens)] = stored.tokens
        more.length_B[at], more.reason_B[at] = len(stored.tokens), stored.reason
        reward_B[at], right_B[at] = stored.reward, 1

    def joined(a: Array, b: np.ndarray) -> np.ndarray:
      return _joined(np.asarray(a), b, P)

    return batch._replace(
      rollout=each(joined, batch.rollout, more),
      reward_B=joined(batch.reward_B, reward_B),
      correct_B=joined(batch.correct_B, right_B),
      success_B=None if batch.success_B is None else joined(batch.success_B, right_B),
      replayed_B=joined(np.zeros_like(batch.reward_B), np.ones_like(reward_B)),
    )

  def _draw(self, index: int, seed: int, step: int) -> list[StoredRollout]:
    stored = self.rollouts.get(index, [])
    random = np.random.default_rng((seed, 3, step, index))
    return [stored[i] for i in random.permutation(len(stored))[: self.rows]]

  def metrics(self, batch: Batch, fresh: int) -> dict[str, float]:
    """Metrics of a batch, whose slots are all `fresh`, and of the store."""
    del fresh
    if batch.replayed_B is None:
      return {}
    length_B = batch.rollout.length_B[batch.replayed_B > 0]
    return {'replay/rows': int((length_B > 0).sum()), 'replay/prompts': len(self.rollouts)}

  def state_dict(self) -> JsonObject:
    """State for the checkpoint."""
    return {str(index): [list(x) for x in stored] for index, stored in self.rollouts.items()}

  def load_state_dict(self, state: Settings) -> None:
    """Restore from `state_dict`."""
    self.rollouts = {
      int(index): [StoredRollout(np.asarray(t, np.int32), float(r), int(s)) for t, r, s in stored]
      for index, stored in state.items()
    }


def _joined(a: np.ndarray, b: np.ndarray, prompts: int) -> np.ndarray:
  """Rows of a and of b, group by group."""
  # Sizes are explicit because reshape with −1 fails for arrays of no features.
  by_prompt = [x.reshape(prompts, len(x) // prompts, *x.shape[1:]) for x in (a, b)]
  both = np.concatenate(by_prompt, axis=1)
  return both.reshape(len(a) + len(b), *both.shape[2:])
