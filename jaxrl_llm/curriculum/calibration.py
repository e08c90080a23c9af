"""Calibration of the posterior: predictions compared with observed success rates and mixed groups."""

from __future__ import annotations

import numpy as np

_BINS = 10


def calibration_metrics(latest_Vx4: np.ndarray, history_Vx4: np.ndarray) -> dict[str, float]:
  """Means of the latest step, calibration error and Brier score of the history.

  Columns are predicted success rate, predicted probability of a mixed group, observed success rate, and whether the
  group was mixed.
  """
  metrics = {}
  if len(latest_Vx4):
    mean = latest_Vx4.mean(0)
    metrics = {
      'curriculum/predicted_success': float(mean[0]),
      'curriculum/observed_success': float(mean[2]),
      'curriculum/predicted_mixed': float(mean[1]),
      'curriculum/mixed_share': float(mean[3]),
    }
  past = history_Vx4
  return metrics | {
    'curriculum/calibration_error': calibration_error(past[:, 0], past[:, 2]),
    'curriculum/brier': float(((past[:, 1] - past[:, 3]) ** 2).mean()),
  }


def calibration_error(predicted: np.ndarray, observed: np.ndarray) -> float:
  """Σ_bins share · |mean predicted − mean observed|, ten bins of the prediction."""
  bins = np.minimum((predicted * _BINS).astype(int), _BINS - 1)
  gaps = [
    (bins == b).mean() * abs(predicted[bins == b].mean() - observed[bins == b].mean())
    for b in np.unique(bins)
  ]
  return float(sum(gaps))
