"""Majority answers of a prompt's groups over visits. Numpy on the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np


def mode(values: Sequence[Hashable]) -> tuple[Hashable, float]:
  """(the most frequent value or None in a tie, its share of all values).

  None does not count as a value, but counts in the share. In a tie the share is that of each tied value; the authors'
  choice there is not known. arXiv:2604.03993 (OLR).
  """
  counts = Counter(v for v in values if v is not None).most_common(2)
  if not counts:
    return None, 0.0
  tie = len(counts) > 1 and counts[0][1] == counts[1][1]
  return None if tie else counts[0][0], counts[0][1] / len(values)


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
  after: int = 4,
) -> str | None:
  """The last visit's majority answer if it replaces the label, else None.

  It does from visit number after + 1 on, if the slope of the majority's share over all visits is at least `min_slope`
  and the answer is the unique mode of the majorities of all visits. A share that is high from the start has no slope
  and never qualifies: that is the published rule. arXiv:2604.03993 (OLR; constants of its code, which counts epochs).
  """
  if len(answer_V) <= after or answer_V[-1] is None or slope(share_V) < min_slope:
    return None
  return answer_V[-1] if mode(answer_V)[0] == answer_V[-1] else None
