"""Least-squares lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Line(NamedTuple):
  """y = intercept + slope · x, and the share of the variance of y that it explains."""

  slope: float
  intercept: float
  r2: float


def fit(x: Sequence[float], y: Sequence[float]) -> Line:
  """The line with the smallest sum of squared errors in y; R² is 1 where all y are equal."""
  slope, intercept = np.polyfit(x, y, 1)
  y_N = np.asarray(y, float)
  residual = np.square(y_N - intercept - slope * np.asarray(x)).sum()
  total = np.square(y_N - y_N.mean()).sum()
  return Line(float(slope), float(intercept), float(1 - residual / total) if total else 1.0)
