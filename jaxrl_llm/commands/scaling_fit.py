"""Scaling fits: a sigmoid of compute, fitted to a metric of a run directory, with a band and a plot."""

from __future__ import annotations

import glob
import json
import os
from typing import NamedTuple

import numpy as np

from jaxrl_llm.checkpointing import metrics_log, safe_files
from jaxrl_llm.config import extras
from jaxrl_llm.types import UserError

# Metrics whose sum over steps is the compute spent.
COMPUTE = {
  'seconds': ('timing_s/step',),
  'tokens': ('generate/tokens', 'training/trained_tokens'),
  'steps': (),
}
_MIN_POINTS = 6  # three unknowns, and residuals to estimate the error from
_DRAWS = 200
_GRID = 12


class Fit(NamedTuple):
  """R(C) = R0 + (A − R0) / (1 + (Cmid / C)^B)."""

  start: float  # R0: the level before any compute; not fitted
  top: float  # A: the asymptote
  slope: float  # B: the exponent
  middle: float  # Cmid: the compute at half of the gain
  error: float  # root mean square of the residuals


def curve(compute_N: np.ndarray, fit: Fit) -> np.ndarray:
  """R(C) of a fit, [N]; R0 at C = 0. arXiv:2510.13786 (ScaleRL)."""
  ratio = fit.middle / np.maximum(compute_N, 1e-12 * fit.middle)
  return fit.start + (fit.top - fit.start) / (1 + ratio**fit.slope)


def fit(
  compute_N: np.ndarray, reward_N: np.ndarray, start: float, *, bounds: tuple[float, float]
) -> Fit:
  """Least squares for A, B and Cmid from the best points of a grid over (A, Cmid); A within `bounds`.

  Raises UserError for fewer than 6 points. arXiv:2510.13786 (ScaleRL), which takes A and Cmid from the grid.
  """
  if len(compute_N) < _MIN_POINTS:
    raise UserError(
      f'--mode=fit has {len(compute_N)} points, and a curve of three unknowns needs {_MIN_POINTS}; train longer, '
      'lower --skip, or choose a --metric of every step such as critic/score/mean.'
    )
  low, high = _middles(compute_N)
  grid = [
    Fit(start, top, 1.0, np.exp(middle), 0.0)
    for top in np.linspace(*bounds, _GRID + 2)[1:-1]
    for middle in np.linspace(low, high, _GRID + 2)[1:-1]
  ]
  squared_error = lambda point: float(((curve(compute_N, point) - reward_N) ** 2).sum())  # noqa: E731
  starts = sorted(grid, key=squared_error)[:3]
  fits = [_descend(compute_N, reward_N, point, bounds) for point in starts]
  return min(fits, key=lambda fitted: fitted.error)


def _middles(compute_N: np.ndarray) -> tuple[float, float]:
  """Bounds of log Cmid."""
  return np.log(compute_N.min() / 10), np.log(compute_N.max() * 10)


def _descend(
  compute_N: np.ndarray, reward_N: np.ndarray, initial: Fit, bounds: tuple[float, float]
) -> Fit:
  """Least squares from `initial`."""
  from scipy import optimize

  as_fit = lambda x: Fit(initial.start, x[0], np.exp(x[1]), np.exp(x[2]), 0.0)  # noqa: E731
  low, high = _middles(compute_N)
  # Slopes from 0.1 to 10: flatter or steeper curves do not determine the asymptote.
  box = np.array([bounds, (np.log(0.1), np.log(10.0)), (low, high)]).T
  start = np.clip((initial.top, np.log(initial.slope), np.log(initial.middle)), *box)
  residual = lambda x: curve(compute_N, as_fit(x)) - reward_N  # noqa: E731
  solution = optimize.least_squares(residual, start, bounds=box)
  return as_fit(solution.x)._replace(error=float(np.sqrt(2 * solution.cost / len(compute_N))))


def band(
  compute_N: np.ndarray,
  reward_N: np.ndarray,
  fitted: Fit,
  at_M: np.ndarray,
  *,
  bounds: tuple[float, float],
  seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
  """The 5 % and 95 % quantiles over bootstrap fits: R [2, M] at compute `at_M`, and (A, B, Cmid) [2, 3].

  Moving-block bootstrap: residuals are redrawn in runs of about √N neighbors, since neighboring steps are correlated.
  """
  random, middle_N = np.random.default_rng(seed), curve(compute_N, fitted)
  residual_N, N = reward_N - middle_N, len(compute_N)
  width = max(1, int(np.sqrt(N)))
  curves, parameters = [], []
  for _ in range(_DRAWS):
    starts = random.integers(0, N - width + 1, -(-N // width))
    drawn = np.concatenate([residual_N[s : s + width] for s in starts])[:N]
    refitted = _descend(compute_N, middle_N + drawn, fitted, bounds)
    curves.append(curve(at_M, refitted))
    parameters.append(refitted[1:4])
  quantiles = 0.05, 0.95
  return np.quantile(curves, quantiles, axis=0), np.quantile(parameters, quantiles, axis=0)


def series(folder: str, metric: str, compute: str) -> tuple[np.ndarray, np.ndarray]:
  """(compute spent [N], metric after it [N]), from metrics.jsonl, or from eval/ for metrics named val-core/….

  Raises UserError for a folder without a run, and for a metric that the run does not have.
  """
  if compute not in COMPUTE:
    raise UserError(f'--compute={compute} is unknown; choose one of: {", ".join(COMPUTE)}.')
  path = os.path.join(folder, 'metrics.jsonl')
  if not os.path.isfile(path):
    raise UserError(f'--workdir={folder} has no metrics.jsonl; give the folder of a run.')
  rows = metrics_log.read(path)
  names = COMPUTE[compute]
  costs = [sum(row.get(n, 0.0) for n in names) if names else 1.0 for row in rows]
  spent = np.concatenate([[0.0], np.cumsum(costs)])
  if metric.startswith('val-core/'):
    files = sorted(glob.glob(os.path.join(folder, 'eval', 'step_*.json')))
    records = [json.loads(safe_files.read(path)) for path in files]
    points = [(spent[r['step']], r['metrics'][metric]) for r in records if metric in r['metrics']]
    valid = sorted({k for record in records for k in record['metrics']})
  else:
    points = [(spent[i + 1], row[metric]) for i, row in enumerate(rows) if metric in row]
    valid = sorted({k for row in rows for k in row})
  if not points:
    raise UserError(f'--metric={metric} is not in the run of {folder}; it has: {", ".join(valid)}.')
  compute_N, reward_N = np.array(points, float).T
  return compute_N, reward_N


def run(folders: list[str], metric: str, compute: str, skip: float, plot: str) -> None:
  """Fit and print each run's curve; draw them to the file `plot` (.svg, .png, .pdf), where it is not ''.

  `skip` is the share of compute at the beginning that is left out of the fit. R0 is the mean of the first
  tenth of the points. Raises UserError for bad input. arXiv:2510.13786 (ScaleRL).
  """
  if not 0 <= skip < 1:
    raise UserError(f'--skip={skip} must be at least 0 and below 1: a share of the compute.')
  drawn = []
  for folder in folders:
    compute_N, reward_N = series(folder, metric, compute)
    start = float(reward_N[: max(1, len(reward_N) // 10)].mean())
    used_N = (compute_N > 0) & (compute_N >= skip * compute_N.max())
    room = max(1.0, reward_N.max()) - start
    bounds = (start + 1e-3 * room, start + room) if room > 0 else (start, start + 1.0)
    fitted = fit(compute_N[used_N], reward_N[used_N], start, bounds=bounds)
    at_M = np.geomspace(compute_N[compute_N > 0].min(), 4 * compute_N.max(), 100)
    low_high, spread = band(compute_N[used_N], reward_N[used_N], fitted, at_M, bounds=bounds)
    print(_line(folder, metric, compute, fitted, spread, compute_N.max()))
    drawn.append((folder, compute_N, reward_N, at_M, curve(at_M, fitted), low_high))
  if plot:
    _draw(drawn, metric, compute, plot)
    print(f'drawn: {plot}')


def _line(
  folder: str, metric: str, compute: str, fitted: Fit, spread: np.ndarray, spent: float
) -> str:
  (a, b, c), (x, y, z) = spread
  doubled = curve(np.array([2 * spent]), fitted)[0]
  return (
    f'{folder}: {metric} = {fitted.start:.3f} + (A − {fitted.start:.3f}) / (1 + (Cmid / C)^B)\n'
    f'  A {fitted.top:.3f} [{a:.3f}, {x:.3f}]  B {fitted.slope:.2f} [{b:.2f}, {y:.2f}]  '
    f'Cmid {fitted.middle:.4g} [{c:.4g}, {z:.4g}] {compute}  (90 % of redrawn residuals)\n'
    f'  error {fitted.error:.3f}; at twice the compute spent ({2 * spent:.4g}): {doubled:.3f}'
  )


def _draw(drawn: list, metric: str, compute: str, path: str) -> None:
  try:
    import matplotlib
  except ImportError as error:
    raise UserError(
      f'--plot needs matplotlib: {extras.install("plot")}, or leave --plot out.'
    ) from error
  matplotlib.use('agg')
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(figsize=(7, 4.5), layout='constrained')
  for folder, compute_N, reward_N, at_M, curve_M, (low_M, high_M) in drawn:
    (line,) = axes.plot(at_M, curve_M, label=os.path.basename(os.path.normpath(folder)))
    axes.fill_between(at_M, low_M, high_M, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.plot(compute_N, reward_N, '.', color=line.get_color(), alpha=0.4, markersize=4)
  axes.set(xscale='log', xlabel=f'compute, {compute}', ylabel=metric)
  axes.legend(frameon=False)
  axes.grid(alpha=0.3)
  try:
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    figure.savefig(path)
  except (OSError, ValueError) as error:
    raise UserError(
      f'--plot={path} cannot be written ({error}); name a .svg, .png or .pdf file.'
    ) from error
  finally:
    plt.close(figure)
