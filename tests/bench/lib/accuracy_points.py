"""Accuracy against time: the points of an arm, when it reached an accuracy, and medians over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tests.bench.lib import results


class Point(NamedTuple):
  """One evaluation of an arm."""

  step: int  # of the arm's own counting
  rollouts: int  # sampled so far
  seconds: float  # since the process started, without evaluations
  accuracy: float  # greedy, in percent of the held-out prompts


Runs = Mapping[str, Sequence[Sequence[Point]]]  # arm → the points of each seed


class Clock:
  """Points of an arm, from the lines that it prints and the times at which they arrive.

  Lines are the events of config.monitoring.console=json: `step` states how many rollouts were sampled; the first
  `evaluating` stops the clock, and `evaluation` starts it again.
  """

  def __init__(self, start_s: float):
    self.points: list[Point] = []
    self.evaluation_s = 0.0
    self._start_s, self._stopped_s, self._rollouts = start_s, math.nan, 0

  def observe(self, event: Mapping, now_s: float) -> None:
    """Adds an event that arrived at `now_s`."""
    if event.get('event') == 'step':
      self._rollouts += int(event['perf/rollouts'])
    elif event.get('event') == 'evaluating' and math.isnan(self._stopped_s):
      self._stopped_s = now_s
    elif event.get('event') == 'evaluation' and not math.isnan(self._stopped_s):
      seconds = self._stopped_s - self._start_s - self.evaluation_s
      accuracy = 100 * event['val-core/all/acc/greedy']
      self.points.append(Point(int(event['step']), self._rollouts, seconds, accuracy))
      self.evaluation_s += now_s - self._stopped_s
      self._stopped_s = math.nan


def first_reached(points: Sequence[Point], threshold: float) -> Point | None:
  """The first of two consecutive points at or above the threshold, in percent; None without such a pair."""
  for point, following in zip(points, points[1:], strict=False):
    if min(point.accuracy, following.accuracy) >= threshold:
      return point
  return None


def median_reached(runs: Sequence[Sequence[Point]], threshold: float, field: str) -> float:
  """The median over seeds of `seconds` or `rollouts` to the threshold; inf where half of the seeds do not reach it."""
  found = [first_reached(points, threshold) for points in runs]
  return statistics.median(math.inf if x is None else float(getattr(x, field)) for x in found)


def reached_table(runs: Runs, thresholds: Sequence[float], titles: Mapping[str, str]) -> str:
  """Median seconds and rollouts of each arm to each accuracy, and the ratios of the first arm to the others."""
  arms = [arm for arm in titles if runs.get(arm)]
  header = ['accuracy reached']
  header += [f'{titles[arm]}: seconds (seeds)' for arm in arms]
  header += [f'{titles[arm]}: rollouts' for arm in arms]
  header += [f'seconds: {titles[arm]} / {titles[arms[0]]}' for arm in arms[1:]]
  rows = []
  for threshold in thresholds:
    seconds = [median_reached(runs[arm], threshold, 'seconds') for arm in arms]
    rollouts = [median_reached(runs[arm], threshold, 'rollouts') for arm in arms]
    row = [f'{threshold:g} %']
    row += [f'{_number(s)}{_seeds(runs[a], threshold)}' for s, a in zip(seconds, arms, strict=True)]
    row += [_number(x) for x in rollouts]
    row += [_ratio(s, seconds[0]) for s in seconds[1:]]
    rows.append(row)
  return results.table(header, rows)


def last_table(runs: Runs, titles: Mapping[str, str]) -> str:
  """First and last accuracy, seconds and rollouts of each arm; means over seeds."""
  header = ['arm', 'seeds', 'accuracy before', 'accuracy at the end', 'seconds', 'rollouts']
  rows = []
  for arm, title in titles.items():
    if not runs.get(arm):
      continue
    mean = lambda get: statistics.fmean(map(get, runs[arm]))  # noqa: E731, B023
    rows.append(
      [
        title,
        str(len(runs[arm])),
        f'{mean(lambda points: points[0].accuracy):.1f} %',
        f'{mean(lambda points: points[-1].accuracy):.1f} %',
        f'{mean(lambda points: points[-1].seconds):.0f}',
        f'{mean(lambda points: points[-1].rollouts):.0f}',
      ]
    )
  return results.table(header, rows)


def median_curve(runs: Sequence[Sequence[Point]], field: str) -> tuple[list[float], list[float]]:
  """(x, accuracy) of each evaluation that all seeds have: medians over seeds."""
  count = min(map(len, runs))
  of: Callable[[int, str], float] = lambda i, name: statistics.median(  # noqa: E731
    float(getattr(points[i], name)) for points in runs
  )
  return [of(i, field) for i in range(count)], [of(i, 'accuracy') for i in range(count)]


def _number(value: float) -> str:
  return '—' if math.isinf(value) else f'{value:.0f}'


def _seeds(runs: Sequence[Sequence[Point]], threshold: float) -> str:
  """The seconds of each seed, in brackets."""
  if len(runs) < 2:
    return ''
  found = [first_reached(points, threshold) for points in runs]
  return f' ({", ".join("—" if x is None else f"{x.seconds:.0f}" for x in found)})'


def _ratio(a: float, b: float) -> str:
  return '—' if math.isinf(a) or math.isinf(b) or not b else f'{a / b:.2f}'
