"""From many verdicts to one number: of a rubric's criteria, of a reply's steps, of comparisons in a group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence


def points(points_C: Sequence[float], met_C: Sequence[float]) -> float:
  """Σ pᵢ·mᵢ / Σ of the pᵢ above 0, clipped to [0, 1]; mᵢ in [0, 1] says how far criterion i is met. Source: none.

  A criterion with points below 0 is a fault: it takes away from what others earn. So HealthBench counts a reply
  (third-party notes; there the mean over replies is clipped, and not each).
  """
  earned = sum(p * m for p, m in zip(points_C, met_C, strict=True))
  return min(max(earned / sum(p for p in points_C if p > 0), 0.0), 1.0)


# How the verdicts on a reply's steps, each in [0, 1], become its reward.
OF_STEPS: dict[str, Callable[[Sequence[float]], float]] = dict(
  mean=lambda sound_N: sum(sound_N) / len(sound_N),
  min=min,
  product=math.prod,
  last=lambda sound_N: sound_N[-1],
)


def preference(weight_C: Sequence[float], side_C: Sequence[int]) -> float:
  """(1 + Σ wᵢ·sᵢ / Σ wᵢ) / 2 in [0, 1], sᵢ = 1 where criterion i prefers the first of two, −1 the second, 0 neither.

  Source: none.
  """
  return (1 + sum(w * s for w, s in zip(weight_C, side_C, strict=True)) / sum(weight_C)) / 2


def opponents(count: int, each: int) -> Iterator[tuple[int, int]]:
  """Who is compared with whom, first and second: i with i + 1, …, i + each modulo count; 0: with all others.

  Each of `count` is first as often as second. With all others, each pair is compared in both orders. Source: none.
  """
  each = min(each or count - 1, count - 1)
  return ((i, (i + d) % count) for i in range(count) for d in range(1, each + 1))
