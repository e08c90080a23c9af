"""The best and the worst rollouts of a group alone are learned. arXiv:2604.06916 (Sol-RL)."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.replay.partial_rollouts import blank
from jaxrl_llm.types import Batch, JsonObject, Settings


class Extremes:
  """Learns `best` rows of the highest rewards and `worst` of the lowest of each slot; the others count nowhere."""

  rows = 0  # that join the groups of fresh rows

  def __init__(self, best: int, worst: int):
    self.best, self.worst = best, worst

  def slots(self, prompts: int) -> int:
    """No slot beside those of the sampled prompts."""
    del prompts
    return 0

  def join(self, batch: Batch, seed: int, step: int) -> Batch:
    """The batch without its other rows, whose length becomes 0: advantages are among those that are learned."""
    del seed, step
    length_B, P = np.asarray(batch.rollout.length_B), len(batch.prompts.index_P)
    slots = zip(np.asarray(batch.reward_B).reshape(P, -1), length_B.reshape(P, -1) > 0, strict=True)
    kept_B = np.concatenate([extremes(r, e, self.best, self.worst) for r, e in slots])
    return batch._replace(rollout=blank(batch.rollout, kept_B))

  def keep(self, batch: Batch, mixed_P: np.ndarray, step: int) -> None:
    """Stores nothing: no rollout is learned after its step."""

  def metrics(self, batch: Batch, fresh: int) -> dict[str, float]:
    """Metrics of a joined batch: its rows."""
    del fresh
    return {'replay/rows': int((np.asarray(batch.rollout.length_B) > 0).sum())}

  def state_dict(self) -> JsonObject:
    """No state."""
    return {}

  def load_state_dict(self, state: Settings) -> None:
    """No state."""


def extremes(reward_G: np.ndarray, exists_G: np.ndarray, best: int, worst: int) -> np.ndarray:
  """The `best` highest and the `worst` lowest rewards among rows that exist, bool [G]; all where there are no more.

  Of equal rewards the first rows are the better ones.
  """
  kept_G, row_N = np.zeros(len(reward_G), bool), np.flatnonzero(exists_G)
  ordered_N = row_N[np.argsort(-reward_G[row_N].astype(float), kind='stable')]
  kept_G[ordered_N[:best]] = True
  kept_G[ordered_N[max(len(ordered_N) - worst, 0) :]] = True
  return kept_G
