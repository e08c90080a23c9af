"""Time series reduced to the number of points that a chart can show."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from jaxrl_llm.report.rollouts import JsonObject

_POINTS = 160  # of a curve
_COLUMNS = 48  # ranges of steps of a distribution
_BINS = 24


def curve(steps: np.ndarray, values: np.ndarray, points: int = _POINTS) -> dict[str, list[float]]:
  """Returns a curve with a band: x, y, mid, lo and hi, each a list of at most `points` numbers.

  x and y are means over equal ranges of steps. mid, lo and hi are the mean and ± one standard deviation in a window of
  a thirtieth of the run, at least 5 steps, so that short runs have a band, too. Values that are not finite are left
  out.
  """
  finite = np.isfinite(values)
  steps, values = steps[finite], values[finite]
  if not len(steps):
    return dict(x=[], y=[], lo=[], hi=[])
  cuts = np.linspace(0, len(steps), min(points, len(steps)) + 1).astype(int)
  half_window = max(len(steps) // 60, 2)
  rows = []
  for start, stop in zip(cuts, cuts[1:], strict=False):
    window = values[max(start - half_window, 0) : stop + half_window]
    mean, deviation = window.mean(), window.std()
    rows.append(
      (
        steps[start:stop].mean(),
        values[start:stop].mean(),
        mean,
        mean - deviation,
        mean + deviation,
      )
    )
  x, y, mid, lo, hi = (_rounded(column) for column in zip(*rows, strict=True))
  return dict(x=x, y=y, mid=mid, lo=lo, hi=hi)


def curves(
  rows: list[JsonObject], step_key: str, points: int = _POINTS
) -> dict[str, dict[str, list[float]]]:
  """Returns {metric: `curve`} for every metric that is a number in some row."""
  columns: dict[str, tuple[list, list]] = {}
  for row in rows:
    for name, value in row.items():
      if isinstance(value, int | float) and name != step_key:
        x, y = columns.setdefault(name, ([], []))
        x.append(row[step_key])
        y.append(value)
  return {
    name: curve(np.array(x, float), np.array(y, float), points)
    for name, (x, y) in sorted(columns.items())
  }


def distribution_by_step(
  steps: np.ndarray, values: np.ndarray, low: float | None = None, high: float | None = None
) -> dict[str, list]:
  """Returns histograms and quantiles of `values` for consecutive ranges of steps.

  Keys: x, the [first, last] step of each range; edges of the bins; share [range][bin]; p10, p50, p90, mean and count
  [range]. Values that are few different whole numbers get one bin each.
  """
  result: dict[str, list] = dict(x=[], share=[], p10=[], p50=[], p90=[], mean=[], count=[])
  if not len(values):
    return result | dict(edges=[])
  edges = _bin_edges(values, low, high)
  different = np.unique(steps)
  per_range = -(-len(different) // _COLUMNS)
  ranges = [different[a : a + per_range] for a in range(0, len(different), per_range)]
  first_steps = np.array([each[0] for each in ranges])
  range_of_value = np.searchsorted(first_steps, steps, side='right') - 1
  for index, each in enumerate(ranges):
    selected = values[range_of_value == index]
    result['x'].append([int(each[0]), int(each[-1])])
    result['share'].append(_rounded(np.histogram(selected, edges)[0] / len(selected)))
    result['count'].append(len(selected))
    result['mean'] += _rounded([selected.mean()])
    for name, quantile in (('p10', 0.1), ('p50', 0.5), ('p90', 0.9)):
      result[name] += _rounded([np.quantile(selected, quantile)])
  return result | dict(edges=_rounded(edges))


def _bin_edges(values: np.ndarray, low: float | None, high: float | None) -> np.ndarray:
  low = float(values.min()) if low is None else low
  high = float(values.max()) if high is None else high
  different = np.unique(values)
  if len(different) <= 2 * _BINS and np.array_equal(different, np.rint(different)):
    if high - low <= 2 * _BINS:  # one bin per whole number, centered on it
      return np.arange(math.floor(low), math.ceil(high) + 2) - 0.5
  return np.linspace(low, high if high > low else low + 1, _BINS + 1)


def _rounded(values: Iterable[float]) -> list[float]:
  """Four significant digits: a chart resolves no more, and the page stays small."""
  return [float(f'{x:.4g}') for x in values]
