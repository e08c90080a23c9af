"""Groups with unfinished rollouts: they continue in the next step, and the update uses them when they are complete."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.replay.array_records import each
from jaxrl_llm.types import UNFINISHED, JsonObject, Prompts, Rollout, Settings, Turns


class PartialRollouts:
  """Stores prompts and rollouts between two steps: tokens, their log-probabilities and weight versions."""

  def __init__(self, rollouts: int, max_age: int, shards: int = 1):
    """Groups of `rollouts`; groups that started more than `max_age` steps ago are dropped.

    Prompts are split over `shards` devices in order. A stored group stays on its device, where its keys and values may
    be cached.
    """
    self.G, self.max_age, self.shards = rollouts, max_age, shards
    self.prompts: Prompts | None = None
    self.rollout: Rollout | None = None
    self.place_H: np.ndarray | None = None  # the position of each group among the prompts

  def __len__(self) -> int:
    return 0 if self.prompts is None else len(self.prompts.index_P)

  def begin(self, fresh: Prompts, empty: Rollout) -> tuple[Prompts, Rollout]:
    """Stored prompts, then `fresh` ones, in each shard; and their rows so far, `empty` for the fresh ones.

    arXiv:2509.18521 (APRIL).
    """
    if not len(self):
      return fresh, empty
    rows, order_P = len(self) * self.G, self._order(len(fresh.index_P))
    row_B = (order_P[:, None] * self.G + np.arange(self.G)).reshape(-1)
    prompts = each(lambda *x: _joined(*x)[order_P], self.prompts, fresh)
    return prompts, each(lambda x, y: _joined(x, y[rows:])[row_B], self.rollout, empty)

  def _order(self, fresh: int) -> np.ndarray:
    """The order of all groups, as indices into the stored groups followed by the fresh ones."""
    stored, P = len(self), len(self) + fresh
    shard_H = self.place_H * self.shards // P
    rank_H = np.arange(stored) - np.searchsorted(shard_H, shard_H)
    order_P = np.full(P, -1)
    order_P[shard_H * (P // self.shards) + rank_H] = np.arange(stored)
    order_P[order_P < 0] = np.arange(stored, P)
    return order_P

  def keep(self, prompts: Prompts, rollout: Rollout, step: int) -> tuple[np.ndarray, int]:
    """Stores the groups with an unfinished row; returns which groups are complete, bool [P], and the number dropped.

    A group older than `max_age` at step `step` + 1 is dropped, because its first tokens come from weights that are too
    old, and the update needs complete groups. arXiv:2509.18521 (APRIL),
    the bound on age from C3PO++, arXiv:2510.18855 (abstract).
    """
    complete_P = (rollout.reason_B != UNFINISHED).reshape(-1, self.G).all(1)
    young_P = step + 1 - prompts.born_P <= self.max_age
    stored_P = ~complete_P & young_P
    self.prompts = each(lambda x: x[stored_P], prompts)
    self.rollout = each(lambda x: x[np.repeat(stored_P, self.G)], rollout)
    self.place_H = np.flatnonzero(stored_P)
    return complete_P, int((~complete_P & ~young_P).sum())

  def state_dict(self) -> JsonObject:
    """State for the checkpoint."""
    if not len(self):
      return {}
    rollout = self.rollout._asdict()
    if rollout['turns'] is not None:
      rollout['turns'] = rollout['turns']._asdict()
    return dict(prompts=self.prompts._asdict(), rollout=rollout, place_H=self.place_H)

  def load_state_dict(self, state: Settings) -> None:
    """Restore from `state_dict`."""
    if state:
      self.prompts, self.rollout = Prompts(**state['prompts']), Rollout(**state['rollout'])
      if self.rollout.turns is not None:
        self.rollout = self.rollout._replace(turns=Turns(**self.rollout.turns))
      self.place_H = state['place_H']


def blank(rollout: Rollout, keep_B: np.ndarray) -> Rollout:
  """The rollout with length 0 in all rows but those to keep, so that their tokens do not count."""
  return rollout._replace(length_B=np.where(keep_B, rollout.length_B, 0))


def _joined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  return np.concatenate([a, b]).astype(a.dtype)
