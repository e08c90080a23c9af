"""Majority answers of a prompt's groups over visits. Numpy on the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np


def majority(answers: Sequence[str | None]) -> tuple[str | None, float]:
  """(the most frequent answer of a group, its share of all completions), or (None, 0) in a tie.

  None is a completion without an answer, and counts as an answer of its own. arXiv:2604.03993 (OLR).
  """
  counts = Counter(x for x in answers if x is not None).most_common(2)
  second = counts[1][1] if len(counts) > 1 else int(None in answers)
  if not counts or counts[0][1] == second:
    return None, 0.0
  return counts[0][0], counts[0][1] / len(answers)


def slope(share_V: Sequence[float]) -> float:
  """Least squares of the shares over visits, per visit; 0 for fewer than two. arXiv:2604.03993 (OLR)."""
  if len(share_V) < 2:
    return 0.0
  t_V = np.arange(len(share_V)) - (len(share_V) - 1) / 2
  return float(t_V @ np.asarray(share_V, np.float64) / (t_V @ t_V))


def refined(
  answer_V: Sequence[str | None],
  share_V: Sequence[float],
  *,
  min_slope: float = 0.05,
  after: int = 5,
) -> str | None:
  """The last visit's majority answer if it replaces the label, else None.

  It does from visit number after + 1 on, if the slope of the majority's share over all visits is at least `min_slope`
  and the answer is the unique mode of the majorities of all visits, in which None, a tie, counts as one more. A share
  that is high from the start has no slope and never qualifies: that is the published rule. In the official code a tie
  may become the label, which no completion agrees with; here the label stays. arXiv:2604.03993 (OLR; constants of its
  code, which counts epochs).
  """
  if len(answer_V) <= after or answer_V[-1] is None or slope(share_V) < min_slope:
    return None
  (most, count), *others = Counter(answer_V).most_common(2)
  unique = not others or others[0][1] < count
  return answer_V[-1] if unique and most == answer_V[-1] else None
