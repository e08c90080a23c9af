"""Numbers by step, few enough to draw: curves with bands, and how a distribution moved."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_POINTS, _COLUMNS, _BINS = 160, 48, 24


def curve(steps: np.ndarray, values: np.ndarray, points: int = _POINTS) -> dict[str, list]:
  """x, y, lo, hi: means over equal stretches of steps, ± one standard deviation of the steps around each.

  The deviation is that of a window of a thirtieth of the run, 5 steps at least, so that short runs have a band, too.
  Raises nothing; values that are not finite are left out. Source: none.
  """
  known = np.isfinite(values)
  steps, values = steps[known], values[known]
  if not len(steps):
    return dict(x=[], y=[], lo=[], hi=[])
  cuts = np.linspace(0, len(steps), min(points, len(steps)) + 1).astype(int)
  half = max(len(steps) // 60, 2)
  told = []
  for a, b in zip(cuts, cuts[1:], strict=False):
    window = values[max(a - half, 0) : b + half]
    mean, spread = values[a:b].mean(), window.std()
    middle = window.mean()
    told.append((steps[a:b].mean(), mean, middle, middle - spread, middle + spread))
  x, y, middle, lo, hi = (_short(column) for column in zip(*told, strict=True))
  return dict(x=x, y=y, mid=middle, lo=lo, hi=hi)


def curves(rows: list[dict[str, Any]], step: str) -> dict[str, dict[str, list]]:
  """name → `curve`, of every metric that is a number in some row. Source: none."""
  columns: dict[str, tuple[list, list]] = {}
  for row in rows:
    for name, value in row.items():
      if isinstance(value, int | float) and name != step:
        x, y = columns.setdefault(name, ([], []))
        x.append(row[step])
        y.append(value)
  return {
    name: curve(np.array(x, float), np.array(y, float)) for name, (x, y) in sorted(columns.items())
  }


def spread(
  steps: np.ndarray, values: np.ndarray, low: float | None = None, high: float | None = None
) -> dict[str, Any]:
  """How a distribution moved: shares in bins of the value for stretches of steps, and quantiles of each stretch.

  x: [first, last] step of each; edges of the bins; share [stretch][bin]; p10, p50, p90. A few values that are whole
  numbers get a bin each. Source: none.
  """
  if not len(values):
    return dict(x=[], edges=[], share=[], p10=[], p50=[], p90=[], mean=[], count=[])
  edges = _edges(values, low, high)
  different = np.unique(steps)
  each = -(-len(different) // _COLUMNS)
  cuts = [different[a : a + each] for a in range(0, len(different), each)]
  first = np.array([cut[0] for cut in cuts])
  at = np.searchsorted(first, steps, side='right') - 1
  told: dict[str, list] = dict(x=[], share=[], p10=[], p50=[], p90=[], mean=[], count=[])
  for index, cut in enumerate(cuts):
    own = values[at == index]
    told['x'].append([int(cut[0]), int(cut[-1])])
    told['share'].append(_short(np.histogram(own, edges)[0] / len(own)))
    told['count'].append(len(own))
    told['mean'].append(_short([own.mean()])[0])
    for name, q in (('p10', 0.1), ('p50', 0.5), ('p90', 0.9)):
      told[name].append(_short([np.quantile(own, q)])[0])
  return told | dict(edges=_short(edges))


def _edges(values: np.ndarray, low: float | None, high: float | None) -> np.ndarray:
  low = float(values.min()) if low is None else low
  high = float(values.max()) if high is None else high
  different = np.unique(values)
  if len(different) <= 2 * _BINS and np.array_equal(different, np.rint(different)):
    if high - low <= 2 * _BINS:  # each whole number in the middle of its own
      return np.arange(math.floor(low), math.ceil(high) + 2) - 0.5
  return np.linspace(low, high if high > low else low + 1, _BINS + 1)


def _short(values: Any) -> list[float]:
  """Four significant digits are more than a screen shows."""
  return [float(f'{x:.4g}') for x in values]
