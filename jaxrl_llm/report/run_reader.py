"""Reads a run folder for a reader: whatever of it there is, finished or not, damaged or not."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from jaxrl_llm.checkpointing import metrics_log, run_dir, safe_files
from jaxrl_llm.report import alarm_history, curriculum, series
from jaxrl_llm.report.device import device
from jaxrl_llm.report.rollouts import Rollouts, lines
from jaxrl_llm.types import UserError

# Of the batch that was learned.
_OF_UPDATES = (
  'actor/',
  'critic/advantages/',
  'training/rollout_probs_diff',
  'training/trained',
  'frac_reward_zero_std',
)
_CHOICES = 3000  # the latest that are told one by one
_FACTS = ('model', 'mode', 'dtype', 'seed', 'prompts', 'rollouts', 'completion_tokens')


def gather(folder: str, read: Rollouts | None = None) -> dict[str, Any]:
  """All but the rollouts of a run as plain JSON; `read` holds those. UserError for no run folder. Source: none."""
  if not os.path.isfile(os.path.join(folder, 'config.json')):
    raise UserError(
      f'--workdir={folder} is no run folder: it has no config.json; name one, or several with commas.'
    )
  read = read or Rollouts(folder).refresh()
  rows = [learned(row) for row in metrics_log.read(os.path.join(folder, 'metrics.jsonl'))]
  config = _json(os.path.join(folder, 'config.json'), {})
  starts = _json(os.path.join(folder, 'environment.json'), [])
  told = alarm_history.verdicts(rows, config, _on_cpu(starts))
  return dict(
    name=os.path.basename(os.path.abspath(folder)),
    done=rows[-1][metrics_log.STEP] + 1 if rows else 0,
    steps=config.get('steps', 0),
    facts=_facts(config, starts),
    config=_flat(config),
    health=told,
    overall=alarm_history.overall(told),
    curves=series.curves(rows, metrics_log.STEP),
    time=_time(rows) | dict(beside=_beside(folder)),
    device=device(folder, rows),
    evaluations=_evaluations(folder),
    lengths=series.spread(read.column('step'), read.column('length'), low=0.0),
    rewards=series.spread(read.column('step'), read.column('score')),
    curriculum=_curriculum(folder),
    choices=_choices(folder),
  )


def learned(row: dict[str, Any]) -> dict[str, Any]:
  """The row without what an update says that had nothing to learn, as in the first step: zeros. Source: none."""
  if row.get('training/trained_tokens', 1):
    return row
  return {k: v for k, v in row.items() if not k.startswith(_OF_UPDATES)}


def index(read: Rollouts) -> dict[str, Any]:
  """The columns of all rollouts, and which file each came from: what the browser filters by. Source: none."""
  whole = lambda name: read.column(name).astype(int).tolist()  # noqa: E731
  return dict(
    step=whole('step'),
    prompt=whole('prompt'),
    score=[float(f'{x:.5g}') for x in read.column('score')],
    right=whole('right'),
    reason=whole('reason'),
    length=whole('length'),
    reasons=read.reasons,
    files=[len(file.columns) for file in read.files],
    kept=[bool(file.text) for file in read.files],
  )


def _time(rows: list[dict]) -> dict[str, Any]:
  """Seconds of each part of the steps; 'other' is what timing_s/step holds beyond the parts."""
  parts = sorted({k for row in rows for k in row if k.startswith('timing_s/')} - {'timing_s/step'})
  steps = np.array([row[metrics_log.STEP] for row in rows], int)
  number = lambda row, k: row[k] if isinstance(row.get(k), int | float) else 0.0  # noqa: E731
  seconds = {k.removeprefix('timing_s/'): np.array([number(r, k) for r in rows]) for k in parts}
  whole = np.array([number(row, 'timing_s/step') for row in rows])
  seconds['other'] = np.maximum(whole - sum(seconds.values(), np.zeros(len(rows))), 0)
  cuts = [cut for cut in np.array_split(np.arange(len(rows)), 40) if len(cut)]
  mean = lambda x: [float(f'{x[cut].mean():.4g}') for cut in cuts]  # noqa: E731
  return dict(
    x=[[int(steps[cut[0]]), int(steps[cut[-1]])] for cut in cuts],
    mean={name: mean(x) for name, x in seconds.items()},
    total={name: float(f'{x.sum():.5g}') for name, x in seconds.items()},
  )


def _beside(folder: str) -> dict[str, float]:
  """Seconds that went to anything but steps."""
  told = _json(os.path.join(folder, run_dir.TIMING), {})
  return {k: v for k, v in told.items() if isinstance(v, int | float) and v > 0}


def _evaluations(folder: str) -> list[dict[str, Any]]:
  """step and metrics of each evaluation on disk, in order."""
  where, told = os.path.join(folder, 'eval'), []
  for name in sorted(os.listdir(where)) if os.path.isdir(where) else []:
    one = _json(os.path.join(where, name), {}) if name.endswith('.json') else {}
    values = one.get('metrics') if isinstance(one, dict) else None
    if isinstance(values, dict) and isinstance(one.get('step'), int):
      known = {k: v for k, v in sorted(values.items()) if isinstance(v, int | float)}
      told.append(dict(step=one['step'], metrics=known))
  return sorted(told, key=lambda one: one['step'])


def _curriculum(folder: str) -> dict[str, Any] | None:
  """What the run last wrote of its curriculum."""
  found = curriculum.read(os.path.join(folder, 'curriculum.json'))
  return None if found is None else curriculum.plain(found)


def _choices(folder: str) -> dict[str, Any]:
  """The latest choices as columns, how often each reason was given, and how hard the chosen were thought to be."""
  rows = [row for row in lines(os.path.join(folder, 'choices.jsonl')) if 'prompt' in row]
  names = ('prompt', 'why', 'worth', 'success', 'mixed', 'visits')
  flat = [
    (row[metrics_log.STEP], *one, row.get('mean_worth'))
    for row in rows
    for one in zip(*(row[name] for name in names), strict=True)
  ]
  kinds: dict[str, int] = {}
  for row in rows:
    counts = [(why, 1) for why in row['why']]
    for why, count in [*counts, *((k, len(row.get(k, ()))) for k in ('continued', 'asked'))]:
      kinds[why] = kinds.get(why, 0) + count
  believed = [(step, success) for step, _, _, _, success, *_ in flat if success is not None]
  steps, success = np.array(believed, float).reshape(-1, 2).T
  columns = list(zip(*flat[-_CHOICES:], strict=True)) or [()] * (len(names) + 2)
  told = {k: list(v) for k, v in zip(('step', *names, 'mean_worth'), columns, strict=True)}
  return dict(
    latest=told, count=len(flat), why=kinds, success=series.spread(steps, success, 0.0, 1.0)
  )


def _facts(config: dict, starts: list) -> dict[str, str]:
  told = {name: str(config[name]) for name in _FACTS if name in config}
  last = starts[-1] if starts and isinstance(starts[-1], dict) else {}
  devices = last.get('devices') or []
  if devices:
    told['devices'] = f'{len(devices)} × {str(devices[0]).rstrip("0123456789_:=id")}'
  named = dict(started=last.get('time'), commit=str(last.get('git') or '')[:10])
  return told | {k: str(v) for k, v in named.items() if v} | dict(starts=str(len(starts)))


def _on_cpu(starts: list) -> bool:
  last = starts[-1] if starts and isinstance(starts[-1], dict) else {}
  return 'cpu' in str((last.get('devices') or ['cpu'])[0]).lower()


def _flat(tree: Any, prefix: str = '') -> dict[str, str]:
  flat: dict[str, str] = {}
  for key, value in sorted(tree.items()):
    if isinstance(value, dict):
      flat |= _flat(value, f'{prefix}{key}.')
    else:
      flat[prefix + key] = json.dumps(value, ensure_ascii=False)
  return flat


def _json(path: str, otherwise: Any) -> Any:
  """What a JSON file holds; `otherwise` where there is none, it is damaged, or of another kind."""
  try:
    told = json.loads(safe_files.read(path).decode(errors='replace'))
  except (OSError, ValueError):
    return otherwise
  return told if isinstance(told, type(otherwise)) else otherwise
