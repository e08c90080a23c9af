"""What a prompt's groups of answers agree on, visit after visit. Numpy on the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np


def mode(values: Sequence[Hashable]) -> tuple[Hashable, float]:
  """(the value that is most frequent, its share of all); None for the value in a tie or if it is None.

  None is left out of the count and not of the share. In a tie the share is that of each of the tied:
  it is not known what the authors record there. Source: arXiv:2604.03993 (OLR).
  """
  counts = Counter(v for v in values if v is not None).most_common(2)
  if not counts:
    return None, 0.0
  tie = len(counts) > 1 and counts[0][1] == counts[1][1]
  return None if tie else counts[0][0], counts[0][1] / len(values)


def slope(share_V: Sequence[float]) -> float:
  """Least squares of the shares over visits, per visit; 0 for fewer than two. Source: arXiv:2604.03993 (OLR)."""
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
  """The last visit's majority answer if it may stand for the label, else None.

  It may from visit number after + 1 on, where the slope of the majority's share over all visits is at
  least `min_slope` and it is the unique mode of the majorities of all visits, its own among them.
  A share that is high from the start has no slope and never qualifies: that is the published rule.
  Source: arXiv:2604.03993 (OLR; constants of its code, which counts epochs).
  """
  if len(answer_V) <= after or answer_V[-1] is None or slope(share_V) < min_slope:
    return None
  return answer_V[-1] if mode(answer_V)[0] == answer_V[-1] else None
