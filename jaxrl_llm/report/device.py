"""Device time of the traced steps (config.monitoring.profile.steps), compared with the roofline of the chip."""

from __future__ import annotations

import json
import os

import numpy as np
from absl import logging

from jaxrl_llm.checkpointing import metrics_log, safe_files
from jaxrl_llm.profiling import xplane
from jaxrl_llm.report.rollouts import JsonObject

ROOFLINE_FILE = 'floor.json'  # written by the run: see jaxrl_llm/profiling/roofline.py
_CACHE_FILE = 'parts.json'  # the parsed trace, because parsing takes long


def device_report(folder: str, rows: list[JsonObject]) -> JsonObject | None:
  """Returns device time by part and kind of operation, in seconds per step, and the roofline; None without a trace.

  `rows` are the metrics of the run.
  """
  profile = os.path.join(folder, 'profile')
  paths = xplane.newest(profile)
  trace = _read_trace(profile, paths) if paths else None
  if not trace:
    return None
  program = _read_json(os.path.join(profile, ROOFLINE_FILE)) or {}
  first, stop = program.get('steps') or (0, 1)
  steps = max(stop - first, 1)
  per_step = lambda seconds: float(f'{seconds / steps:.4g}')  # noqa: E731
  return dict(
    steps=[first, stop - 1],
    devices=trace['devices'],
    parts={
      part: {kind: per_step(s) for kind, s in kinds.items()}
      for part, kinds in trace['parts'].items()
    },
    busy={part: per_step(s) for part, s in trace['busy'].items()},
    span=per_step(trace['span_s']),
    top=[
      [name, kind, part, per_step(s), round(count / steps)]
      for name, kind, part, s, count in trace['top']
    ],
    kind=program.get('device_kind', ''),
    chip_known=bool(program.get('chip')),
    roofline=_roofline(program, trace['busy'], rows, first, stop) if 'update' in program else [],
  )


def _roofline(
  program: JsonObject,
  busy: dict[str, float],
  rows: list[JsonObject],
  first: int,
  stop: int,
) -> list[JsonObject]:
  """Per half of one step: measured seconds, operations, bytes read, and the shortest possible seconds."""
  traced = [row for row in rows if first <= row.get(metrics_log.STEP, -1) < stop]
  iterations = [row['generate/rounds'] for row in traced if 'generate/rounds' in row]
  steps = max(stop - first, 1)
  update, loop, prefill = program['update'], program['round'], program['prefill']
  halves = [
    dict(
      part='update',
      flops=update['flops'],
      bytes=None,
      seconds=update.get('seconds'),
      measured=busy.get('update', 0.0) / steps,
    )
  ]
  if iterations:
    count = float(np.mean(iterations))  # decode iterations of a step
    seconds = None
    if 'seconds' in loop:
      seconds = count * loop['seconds'] + prefill['seconds']
    halves.append(
      dict(
        part='generate',
        flops=count * loop['flops'] + prefill['flops'],
        bytes=count * loop['bytes'],
        seconds=seconds,
        measured=busy.get('generate', 0.0) / steps,
      )
    )
  return [half for half in halves if half['measured'] > 0]


def _read_trace(profile: str, paths: list[str]) -> JsonObject | None:
  """The parsed trace, from the cache file if the trace has not changed. A damaged trace is logged and yields None."""
  key = [[os.path.relpath(path, profile), os.path.getsize(path)] for path in paths]
  cached = _read_json(os.path.join(profile, _CACHE_FILE)) or {}
  if cached.get('of') == key:
    return cached['found']
  try:
    trace = xplane.read(paths)
  except Exception as error:  # the format may be of another version; the rest of the page stands
    logging.warning('the trace in %s cannot be read: %s: %s', profile, type(error).__name__, error)
    trace = None
  try:
    safe_files.write(os.path.join(profile, _CACHE_FILE), json.dumps(dict(of=key, found=trace)))
  except OSError:  # a read-only folder
    pass
  return trace


def _read_json(path: str) -> JsonObject | None:
  try:
    value = json.loads(safe_files.read(path))
  except (OSError, ValueError):
    return None
  return value if isinstance(value, dict) else None
