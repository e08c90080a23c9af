"""Reads a run directory for display. Runs may be unfinished and files damaged: such parts are left out."""

from __future__ import annotations

import json
import os
from typing import TypeVar

import numpy as np

from jaxrl_llm.checkpointing import metrics_log, run_dir, safe_files
from jaxrl_llm.monitoring import update_metrics
from jaxrl_llm.report import alarm_history, curriculum, results, series, timing
from jaxrl_llm.report.device import device_report
from jaxrl_llm.report.rollouts import JsonObject, Rollouts, json_lines
from jaxrl_llm.types import UserError

_LISTED_CHOICES = 3000  # the latest choices, listed one by one
_FACTS = ('model', 'mode', 'dtype', 'seed', 'prompts', 'rollouts', 'completion_tokens')

_Json = TypeVar('_Json', dict, list)


def read_run(folder: str, rollouts: Rollouts | None = None) -> JsonObject:
  """Returns everything but the rollouts of a run as JSON values. `rollouts` are those of the folder, read before.

  Raises UserError for a folder that holds no run.
  """
  if not os.path.isfile(os.path.join(folder, 'config.json')):
    raise UserError(
      f'--workdir={folder} is no run directory: it has no config.json; name one, or several with commas.'
    )
  rollouts = rollouts or Rollouts(folder).refresh()
  metrics_path = os.path.join(folder, 'metrics.jsonl')
  rows = [update_metrics.without_idle(row) for row in metrics_log.read(metrics_path)]
  config = _read_json(os.path.join(folder, 'config.json'), {})
  starts = _read_json(os.path.join(folder, 'environment.json'), [])
  checks = alarm_history.check_results(rows, config, on_cpu(starts))
  device = device_report(folder, rows)
  return dict(
    name=os.path.basename(os.path.abspath(folder)),
    done=rows[-1][metrics_log.STEP] + 1 if rows else 0,
    steps=config.get('steps', 0),
    facts=_facts(config, starts),
    config=flatten(config),
    health=checks,
    health_summary=alarm_history.summary(checks),
    curves=series.curves(rows, metrics_log.STEP),
    time=timing.step_times(rows, device) | dict(other_phases=_other_phases(folder)),
    device=device,
    evaluations=results.evaluations(folder),
    examples=results.examples(rollouts),
    weights=_reward_weights(config),
    lengths=series.distribution_by_step(
      rollouts.column('step'), rollouts.column('length'), low=0.0
    ),
    rewards=series.distribution_by_step(rollouts.column('step'), rollouts.column('score')),
    curriculum=_curriculum(folder),
    choices=_choices(folder),
  )


def rollout_index(rollouts: Rollouts) -> JsonObject:
  """Returns the columns that the browser filters by, and the number of rollouts in each file."""
  integers = lambda name: rollouts.column(name).astype(int).tolist()  # noqa: E731
  return dict(
    step=integers('step'),
    prompt=integers('prompt'),
    score=[float(f'{x:.5g}') for x in rollouts.column('score')],
    right=integers('right'),
    reason=integers('reason'),
    length=integers('length'),
    reasons=rollouts.reasons,
    files=[len(file.columns) for file in rollouts.files],
    has_text=[bool(file.text) for file in rollouts.files],
  )


def _other_phases(folder: str) -> dict[str, float]:
  """Seconds outside of the steps, by phase: evaluation, checkpoints, compilation."""
  seconds = _read_json(os.path.join(folder, run_dir.TIMING), {})
  return {k: v for k, v in seconds.items() if isinstance(v, int | float) and v > 0}


def _curriculum(folder: str) -> JsonObject | None:
  report = curriculum.load_json(os.path.join(folder, 'curriculum.json'))
  return None if report is None else curriculum.to_json(report)


def _choices(folder: str) -> JsonObject:
  """Summarizes choices.jsonl: the latest choices as columns, counts of the reasons, predicted success by step."""
  rows = [row for row in json_lines(os.path.join(folder, 'choices.jsonl')) if 'prompt' in row]
  names = ('prompt', 'why', 'worth', 'success', 'mixed', 'visits')
  choices = [
    (row[metrics_log.STEP], *choice, row.get('mean_worth'))
    for row in rows
    for choice in zip(*(row[name] for name in names), strict=True)
  ]
  reasons: dict[str, int] = {}
  for row in rows:
    counts = [(why, 1) for why in row['why']]
    for why, count in [*counts, *((k, len(row.get(k, ()))) for k in ('continued', 'asked'))]:
      reasons[why] = reasons.get(why, 0) + count
  predicted = [(step, success) for step, _, _, _, success, *_ in choices if success is not None]
  steps, success = np.array(predicted, float).reshape(-1, 2).T
  columns = list(zip(*choices[-_LISTED_CHOICES:], strict=True)) or [()] * (len(names) + 2)
  latest = {k: list(v) for k, v in zip(('step', *names, 'mean_worth'), columns, strict=True)}
  return dict(
    latest=latest,
    count=len(choices),
    why=reasons,
    success=series.distribution_by_step(steps, success, 0.0, 1.0),
  )


def _reward_weights(config: JsonObject) -> dict[str, float]:
  """The weight of each reward function, by its name in rollout files."""
  spec = config.get('rewards')
  spec = spec if isinstance(spec, dict) else {}
  weights = {}
  for part in (spec | dict(weight=1.0), *spec.get('parts', ())):
    if isinstance(part, dict) and isinstance(part.get('weight', 1.0), int | float):
      name = part.get('name') or str(part.get('fn', '')).rpartition(':')[2]
      weights[name] = float(part.get('weight', 1.0))
  environment = config.get('environment')
  if isinstance(environment, dict) and environment.get('fn', 'none') != 'none':
    rewards_judge = environment.get('judge') == 'rewards'
    weights['environment'] = float(environment.get('weight', 1.0)) if rewards_judge else 1.0
  return weights


def _facts(config: JsonObject, starts: list[JsonObject]) -> dict[str, str]:
  facts = {name: str(config[name]) for name in _FACTS if name in config}
  last = _last_start(starts)
  devices = last.get('devices') or []
  if devices:
    facts['devices'] = f'{len(devices)} × {str(devices[0]).rstrip("0123456789_:=id")}'
  origin = dict(started=last.get('time'), commit=str(last.get('git') or '')[:10])
  return facts | {k: str(v) for k, v in origin.items() if v} | dict(starts=str(len(starts)))


def on_cpu(starts: list[JsonObject]) -> bool:
  """Whether the newest start ran on CPUs."""
  return 'cpu' in str((_last_start(starts).get('devices') or ['cpu'])[0]).lower()


def _last_start(starts: list[JsonObject]) -> JsonObject:
  return starts[-1] if starts and isinstance(starts[-1], dict) else {}


def flatten(tree: JsonObject, prefix: str = '') -> dict[str, str]:
  """{'a.b': value as JSON} of nested dicts."""
  flat: dict[str, str] = {}
  for key, value in sorted(tree.items()):
    if isinstance(value, dict):
      flat |= flatten(value, f'{prefix}{key}.')
    else:
      flat[prefix + key] = json.dumps(value, ensure_ascii=False)
  return flat


def _read_json(path: str, default: _Json) -> _Json:
  """The content of a JSON file; `default` where it is absent, damaged, or of another type than `default`."""
  try:
    value = json.loads(safe_files.read(path).decode(errors='replace'))
  except (OSError, ValueError):
    return default
  return value if isinstance(value, type(default)) else default
