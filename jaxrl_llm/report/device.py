"""What a trace of `config.monitoring.profile.steps` says of the device, and how far that is from what the chip could do."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
from absl import logging

from jaxrl_llm.checkpointing import metrics_log, safe_files
from jaxrl_llm.profiling import xplane

ROOFLINE_FILE = 'floor.json'  # what the run wrote of its program: see jaxrl_llm/profiling/roofline.py
_READ = 'parts.json'  # what was read of the newest trace: reading it again takes long


def device(folder: str, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
  """Device time by part and kind, seconds of one step, and the floors beside it; None where nothing was traced.

  `rows` are the run's metrics. Source: none.
  """
  where = os.path.join(folder, 'profile')
  paths = xplane.newest(where)
  found = _read(where, paths) if paths else None
  if not found:
    return None
  told = _json(os.path.join(where, ROOFLINE_FILE)) or {}
  first, last = told.get('steps') or (0, 1)
  steps, each = max(last - first, 1), lambda x: float(f'{x / max(last - first, 1):.4g}')
  return dict(
    steps=[first, last - 1],
    devices=found['devices'],
    parts={p: {k: each(s) for k, s in kinds.items()} for p, kinds in found['parts'].items()},
    busy={p: each(s) for p, s in found['busy'].items()},
    span=each(found['span_s']),
    top=[
      [name, kind, part, each(s), round(times / steps)]
      for name, kind, part, s, times in found['top']
    ],
    kind=told.get('device_kind', ''),
    known=bool(told.get('chip')),
    floors=_floors(told, found['busy'], rows, first, last) if 'update' in told else [],
  )


def _floors(told: dict, busy: dict, rows: list[dict], first: int, last: int) -> list[dict]:
  """Of each half of one step: seconds measured, what was computed and read, and the seconds that the chip needs."""
  own = [row for row in rows if first <= row.get(metrics_log.STEP, -1) < last]
  rounds = [row['generate/rounds'] for row in own if 'generate/rounds' in row]
  count = float(np.mean(rounds)) if rounds else None
  steps = max(last - first, 1)
  update, loop, prefill = told['update'], told['round'], told['prefill']
  found = [
    dict(
      part='update',
      flops=update['flops'],
      bytes=None,
      seconds=update.get('seconds'),
      measured=busy.get('update', 0.0) / steps,
    )
  ]
  if count is not None:
    seconds = None
    if 'seconds' in loop:
      seconds = count * loop['seconds'] + prefill['seconds']
    found.append(
      dict(
        part='generate',
        flops=count * loop['flops'] + prefill['flops'],
        bytes=count * loop['bytes'],
        seconds=seconds,
        measured=busy.get('generate', 0.0) / steps,
      )
    )
  return [one for one in found if one['measured'] > 0]


def _read(where: str, paths: list[str]) -> dict[str, Any] | None:
  """Of the newest trace; what is damaged is a warning."""
  key = [[os.path.relpath(path, where), os.path.getsize(path)] for path in paths]
  kept = _json(os.path.join(where, _READ)) or {}
  if kept.get('of') == key:
    return kept['found']
  try:
    found = xplane.read(paths)
  except (
    Exception
  ) as error:  # a format of another version: the page is worth more than this part of it
    logging.warning('the trace in %s cannot be read: %s: %s', where, type(error).__name__, error)
    found = None
  try:
    safe_files.write(os.path.join(where, _READ), json.dumps(dict(of=key, found=found)))
  except OSError:  # a folder of somebody else's
    pass
  return found


def _json(path: str) -> dict[str, Any] | None:
  try:
    told = json.loads(safe_files.read(path))
  except (OSError, ValueError):
    return None
  return told if isinstance(told, dict) else None
