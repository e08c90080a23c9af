"""A page over many runs: a table with a filter, curves of the chosen runs, and the fields in which they differ."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TypeVar

from jaxrl_llm.checkpointing import metrics_log, run_dir, safe_files
from jaxrl_llm.monitoring import update_metrics
from jaxrl_llm.report import alarm_history, results, series
from jaxrl_llm.report.rollouts import JsonObject
from jaxrl_llm.report.run_reader import flatten, on_cpu

_DEPTH = 4  # folders below the parent that are searched
_CURVES = ('critic/score/mean', 'curriculum/observed_success', 'response_length/mean')
_POINTS = 60  # of a curve
_LAST_SHARE = 10  # the last reward is the mean over this part of the steps: a tenth

_Json = TypeVar('_Json', dict, list)


def is_run(folder: str) -> bool:
  """Whether a folder is a run directory."""
  return os.path.isfile(os.path.join(folder, 'config.json')) and any(
    os.path.exists(os.path.join(folder, name)) for name in ('environment.json', 'metrics.jsonl')
  )


def find(parent: str) -> list[str]:
  """The run directories in a folder and below it, sorted. Folders inside a run are not searched."""
  found: list[str] = []

  def search(folder: str, depth: int) -> None:
    if is_run(folder):
      found.append(folder)
    elif depth:
      try:
        with os.scandir(folder) as entries:
          names = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
      except OSError:
        return
      for name in names:
        search(os.path.join(folder, name), depth - 1)

  search(parent, _DEPTH)
  return found


def read_all(folders: Sequence[str], page: str) -> list[JsonObject]:
  """A summary of each run; links are relative to the folder of the file `page`. No rollout is read."""
  base = os.path.dirname(os.path.abspath(page))
  shared = os.path.commonpath([os.path.abspath(folder) for folder in folders]) if folders else ''
  if shared in [os.path.abspath(folder) for folder in folders]:
    shared = os.path.dirname(shared)
  return [_summary(folder, shared, base) for folder in folders]


def _summary(folder: str, shared: str, base: str) -> JsonObject:
  rows = [
    update_metrics.without_idle(row)
    for row in metrics_log.read(os.path.join(folder, 'metrics.jsonl'))
  ]
  config = _read(os.path.join(folder, 'config.json'), {})
  starts = _read(os.path.join(folder, 'environment.json'), [])
  first = starts[0] if starts and isinstance(starts[0], dict) else {}
  checks = alarm_history.check_results(rows, config, on_cpu(starts))
  found = results.evaluations(folder)
  report = os.path.join(folder, 'report.html')
  return dict(
    name=os.path.relpath(os.path.abspath(folder), shared),
    link=_link(report, base) if os.path.isfile(report) else '',
    model=str(config.get('model', '')),
    done=rows[-1][metrics_log.STEP] + 1 if rows else 0,
    steps=config.get('steps', 0),
    started=str(first.get('time', '')),
    minutes=_minutes(folder, rows),
    reward=_last(rows, 'critic/score/mean'),
    evaluations=[_evaluation(found[0]), _evaluation(found[-1])] if found else [],
    health=alarm_history.summary(checks),
    state=_state(checks),
    curves={
      name: curve
      for name, curve in series.curves(rows, metrics_log.STEP, _POINTS).items()
      if name in _CURVES
    },
    config=flatten(config),
  )


def _evaluation(evaluation: JsonObject) -> JsonObject:
  return dict(step=evaluation['step'], measures=evaluation['measures'])


def _state(checks: list[JsonObject]) -> str:
  states = [check['state'] for check in checks]
  return next((s for s in ('failing', 'recovered', 'passing') if s in states), 'not_recorded')


def _last(rows: list[JsonObject], name: str) -> float | None:
  values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
  last = values[-max(len(values) // _LAST_SHARE, 1) :]
  return float(f'{sum(last) / len(last):.4g}') if last else None


def _minutes(folder: str, rows: list[JsonObject]) -> float:
  """Minutes of steps, compilation, evaluations and checkpoints."""
  other = _read(os.path.join(folder, run_dir.TIMING), {}).values()
  step = (row.get('timing_s/step') for row in rows)
  seconds = sum(x for x in (*other, *step) if isinstance(x, int | float))
  return float(f'{seconds / 60:.3g}')


def _link(path: str, base: str) -> str:
  return os.path.relpath(os.path.abspath(path), base).replace(os.sep, '/')


def _read(path: str, default: _Json) -> _Json:
  try:
    value = json.loads(safe_files.read(path).decode(errors='replace'))
  except (OSError, ValueError):
    return default
  return value if isinstance(value, type(default)) else default
