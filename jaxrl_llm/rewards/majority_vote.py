"""Who says which rollouts of a group are right, besides the row's own answer.

Every public function here may be named in `config.rewards.vote.fn`; it makes the settings of the vote, or None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np


class Majority(NamedTuple):
  """Settings of a vote; `resolve_vote` fills in how an answer is found in a text."""

  learn_from: int  # rollouts of each group that are learned from, the first ones; 0 = all
  extract: Callable[[str], Hashable] | None = None

  def count(self, texts: Sequence[str | None], rollouts: int) -> tuple[np.ndarray, np.ndarray]:
    """(agree_B bool, winner_P): who gives the most frequent answer, and the first row that does, or −1.

    Of answers given equally often the one given first wins. A text without an answer, or None for a row that does
    not exist, has no vote and agrees with nobody. Source: arXiv:2504.16084 (TTRL).
    """
    agree_B, winner_P = np.zeros(len(texts), bool), []
    for start in range(0, len(texts), rollouts):
      group = [None if text is None else self.extract(text) for text in texts[start:][:rollouts]]
      votes = Counter(answer for answer in group if answer is not None)
      if votes:
        # A Counter keeps the order of first occurrence, and max takes the first of equals.
        best = max(votes, key=votes.get)
        agree_B[start : start + rollouts] = [answer == best for answer in group]
      winner_P.append(start + group.index(best) if votes else -1)
    return agree_B, np.array(winner_P, np.int64)


def none() -> None:
  """The grader's reward, by the row's own answer. Source: none."""
  return None


def majority(*, learn_from: int = 0) -> Majority:
  """R = 1 where a rollout gives its group's most frequent answer, else 0; the row's answer serves the log alone.

  `learn_from` n: all rollouts vote, the first n of each group are learned from (32 of 64 in the official code), and
  the curriculum hears of these; 0 = all. Source: arXiv:2504.16084 (TTRL).
  """
  return Majority(learn_from)
