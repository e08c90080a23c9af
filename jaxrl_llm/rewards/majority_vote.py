"""Majority votes that replace the row's answer as the label of a group.

`config.rewards.vote.fn` may name every public function of this module; it returns the settings of the vote, or None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np


class Majority(NamedTuple):
  """Settings of a vote; `resolve_vote` sets `extract`."""

  learn_from: int  # number of rollouts of each group that are learned from, the first ones; 0 = all
  extract: Callable[[str], Hashable] | None = None

  def count(self, texts: Sequence[str | None], rollouts: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (agree_B bool, winner_P): which rows give the most frequent answer, and the first such row or −1.

    Ties go to the answer that occurs first. A text without an answer, or None for an empty row, has no vote and does
    not agree. arXiv:2504.16084 (TTRL).
    """
    agree_B, winner_P = np.zeros(len(texts), bool), []
    for start in range(0, len(texts), rollouts):
      group = [None if text is None else self.extract(text) for text in texts[start:][:rollouts]]
      votes = Counter(answer for answer in group if answer is not None)
      if votes:
        # A Counter keeps the order of first occurrence, and max returns the first of equals.
        best = max(votes, key=votes.get)
        agree_B[start : start + rollouts] = [answer == best for answer in group]
      winner_P.append(start + group.index(best) if votes else -1)
    return agree_B, np.array(winner_P, np.int64)


def none() -> None:
  """No vote: rewards by the row's answer."""
  return None


def majority(*, learn_from: int = 0) -> Majority:
  """R = 1 where a rollout gives its group's most frequent answer, else 0, arXiv:2504.16084 (TTRL).

  The row's answer is only logged. All rollouts vote; the first `learn_from` of each group (32 of 64 in the official
  code, 0 = all) are learned from and counted by the curriculum.
  """
  return Majority(learn_from)
