"""Aggregation of verdicts to one reward: criteria of a rubric, steps of a completion, comparisons in a group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence


def points(points_C: Sequence[float], met_C: Sequence[float]) -> float:
  """Returns Σ pᵢ·mᵢ / Σ of the pᵢ above 0, clipped to [0, 1]; mᵢ in [0, 1] is the degree to which criterion i is met.

  A criterion with negative points is a fault and reduces the sum. This is the rule of HealthBench (third-party notes),
  which clips the mean over completions instead of each.
  """
  earned = sum(p * m for p, m in zip(points_C, met_C, strict=True))
  return min(max(earned / sum(p for p in points_C if p > 0), 0.0), 1.0)


def before_error(sound_N: Sequence[float], before_N: Sequence[float]) -> float:
  """Returns the share of the completion before its first step with a verdict below ½; 1 without such a step."""
  wrong = (before for sound, before in zip(sound_N, before_N, strict=True) if sound < 0.5)
  return next(wrong, 1.0)


# Aggregations of the verdicts on the steps of a completion, each in [0, 1], and the share of its text before each.
OF_STEPS: dict[str, Callable[[Sequence[float], Sequence[float]], float]] = dict(
  mean=lambda sound_N, _: sum(sound_N) / len(sound_N),
  min=lambda sound_N, _: min(sound_N),
  product=lambda sound_N, _: math.prod(sound_N),
  last=lambda sound_N, _: sound_N[-1],
  before_error=before_error,
)


def preference(weight_C: Sequence[float], side_C: Sequence[int]) -> float:
  """Returns (1 + Σ wᵢ·sᵢ / Σ wᵢ) / 2 in [0, 1]; sᵢ = 1 if criterion i prefers the first text, −1 the second, else 0."""
  return (1 + sum(w * s for w, s in zip(weight_C, side_C, strict=True)) / sum(weight_C)) / 2


def opponents(count: int, each: int) -> Iterator[tuple[int, int]]:
  """Yields the compared pairs (first, second): i with i + 1, …, i + each modulo count; each = 0: with all others.

  Every index is first as often as second. With all others, each pair is compared in both orders.
  """
  each = min(each or count - 1, count - 1)
  return ((i, (i + d) % count) for i in range(count) for d in range(1, each + 1))
