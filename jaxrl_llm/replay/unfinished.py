"""Groups that generation left unfinished: they take part in the next step, and are learnt from when whole."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.types import UNFINISHED, Prompts, Rollout


class Unfinished:
  """Holds prompts and rollouts between two steps: tokens, their log-probabilities and weight versions."""

  def __init__(self, rollouts: int, max_age: int):
    """Groups of `rollouts`; one that was begun more than `max_age` steps ago is dropped. Source: none."""
    self.G, self.max_age = rollouts, max_age
    self.prompts: Prompts | None = None
    self.rollout: Rollout | None = None

  def __len__(self) -> int:
    return 0 if self.prompts is None else len(self.prompts.index_P)

  def begin(self, fresh: Prompts, empty: Rollout) -> tuple[Prompts, Rollout]:
    """What is held, then `fresh`; and the tokens that these rows have, `empty` for the fresh ones.

    Source: arXiv:2509.18521 (APRIL).
    """
    if not len(self):
      return fresh, empty
    rows = len(self) * self.G
    prompts = Prompts(*map(_joined, self.prompts, fresh))
    return prompts, Rollout(
      *(_joined(x, y[rows:]) for x, y in zip(self.rollout, empty, strict=True))
    )

  def keep(self, prompts: Prompts, rollout: Rollout, step: int) -> tuple[np.ndarray, int]:
    """Holds the groups with an unfinished row; returns which are whole, [P] bool, and how many were dropped.

    A group is dropped when it would enter step `step` + 1 older than `max_age`: nothing is learnt from
    half a group, and its first tokens come from weights too old. Source: arXiv:2509.18521 (APRIL),
    the bound on age from C3PO++, arXiv:2510.18855 (abstract).
    """
    whole_P = (rollout.reason_B != UNFINISHED).reshape(-1, self.G).all(1)
    young_P = step + 1 - prompts.born_P <= self.max_age
    held_P = ~whole_P & young_P
    self.prompts = Prompts(*(x[held_P] for x in prompts))
    self.rollout = Rollout(*(x[np.repeat(held_P, self.G)] for x in rollout))
    return whole_P, int((~whole_P & ~young_P).sum())

  def state_dict(self) -> dict:
    """For the checkpoint. Source: none."""
    if not len(self):
      return {}
    return dict(prompts=self.prompts._asdict(), rollout=self.rollout._asdict())

  def load_state_dict(self, state: dict) -> None:
    """Back from `state_dict`. Source: none."""
    if state:
      self.prompts, self.rollout = Prompts(**state['prompts']), Rollout(**state['rollout'])


def blank(rollout: Rollout, keep_B: np.ndarray) -> Rollout:
  """The rollout with all but the rows to keep emptied: no token of theirs counts anywhere. Source: none."""
  return rollout._replace(length_B=np.where(keep_B, rollout.length_B, 0))


def _joined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  return np.concatenate([a, b]).astype(a.dtype)
