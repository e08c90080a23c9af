"""Groups that generation left unfinished: they take part in the next step, and are learned from when whole."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.replay.array_records import each
from jaxrl_llm.types import UNFINISHED, Prompts, Rollout, Turns


class PartialRollouts:
  """Holds prompts and rollouts between two steps: tokens, their log-probabilities and weight versions."""

  def __init__(self, rollouts: int, max_age: int, shards: int = 1):
    """Groups of `rollouts`; one that was begun more than `max_age` steps ago is dropped.

    Prompts are cut over `shards` devices in their order: a held group stays on the one where its keys
    and values may lie. Source: none.
    """
    self.G, self.max_age, self.shards = rollouts, max_age, shards
    self.prompts: Prompts | None = None
    self.rollout: Rollout | None = None
    self.place_H: np.ndarray | None = None  # where each group stood among the prompts

  def __len__(self) -> int:
    return 0 if self.prompts is None else len(self.prompts.index_P)

  def begin(self, fresh: Prompts, empty: Rollout) -> tuple[Prompts, Rollout]:
    """What is held, then `fresh`, in each shard; and the tokens that these rows have, `empty` for the fresh ones.

    Source: arXiv:2509.18521 (APRIL).
    """
    if not len(self):
      return fresh, empty
    rows, order_P = len(self) * self.G, self._order(len(fresh.index_P))
    row_B = (order_P[:, None] * self.G + np.arange(self.G)).reshape(-1)
    prompts = each(lambda *x: _joined(*x)[order_P], self.prompts, fresh)
    return prompts, each(lambda x, y: _joined(x, y[rows:])[row_B], self.rollout, empty)

  def _order(self, fresh: int) -> np.ndarray:
    """Of all groups, the held ones and then the fresh ones: which stands where."""
    held, P = len(self), len(self) + fresh
    shard_H = self.place_H * self.shards // P
    rank_H = np.arange(held) - np.searchsorted(shard_H, shard_H)
    order_P = np.full(P, -1)
    order_P[shard_H * (P // self.shards) + rank_H] = np.arange(held)
    order_P[order_P < 0] = np.arange(held, P)
    return order_P

  def keep(self, prompts: Prompts, rollout: Rollout, step: int) -> tuple[np.ndarray, int]:
    """Holds the groups with an unfinished row; returns which are whole, [P] bool, and how many were dropped.

    A group is dropped when it would enter step `step` + 1 older than `max_age`: nothing is learned from
    half a group, and its first tokens come from weights too old. Source: arXiv:2509.18521 (APRIL),
    the bound on age from C3PO++, arXiv:2510.18855 (abstract).
    """
    whole_P = (rollout.reason_B != UNFINISHED).reshape(-1, self.G).all(1)
    young_P = step + 1 - prompts.born_P <= self.max_age
    held_P = ~whole_P & young_P
    self.prompts = each(lambda x: x[held_P], prompts)
    self.rollout = each(lambda x: x[np.repeat(held_P, self.G)], rollout)
    self.place_H = np.flatnonzero(held_P)
    return whole_P, int((~whole_P & ~young_P).sum())

  def state_dict(self) -> dict:
    """For the checkpoint. Source: none."""
    if not len(self):
      return {}
    rollout = self.rollout._asdict()
    if rollout['turns'] is not None:
      rollout['turns'] = rollout['turns']._asdict()
    return dict(prompts=self.prompts._asdict(), rollout=rollout, place_H=self.place_H)

  def load_state_dict(self, state: dict) -> None:
    """Back from `state_dict`. Source: none."""
    if state:
      self.prompts, self.rollout = Prompts(**state['prompts']), Rollout(**state['rollout'])
      if self.rollout.turns is not None:
        self.rollout = self.rollout._replace(turns=Turns(**self.rollout.turns))
      self.place_H = state['place_H']


def blank(rollout: Rollout, keep_B: np.ndarray) -> Rollout:
  """The rollout with all but the rows to keep emptied: no token of theirs counts anywhere. Source: none."""
  return rollout._replace(length_B=np.where(keep_B, rollout.length_B, 0))


def _joined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  return np.concatenate([a, b]).astype(a.dtype)
