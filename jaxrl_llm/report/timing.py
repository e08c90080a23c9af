"""The time of a run by phase: update, rollout, grading, evaluation and the rest."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.checkpointing import metrics_log
from jaxrl_llm.report.rollouts import JsonObject

_TIME_RANGES = 40  # columns of the chart of step times
_BOTH = 'gen_update'  # the two halves of a step in one measurement


def step_times(rows: list[JsonObject], device: JsonObject | None = None) -> JsonObject:
  """Seconds of each part of the steps. 'other' is the rest of timing_s/step.

  Where a step was timed as a whole, the traced steps of `device` split it into update and rollout, and `split` says so.
  """
  keys = sorted({k for row in rows for k in row if k.startswith('timing_s/')} - {'timing_s/step'})
  steps = np.array([row[metrics_log.STEP] for row in rows], int)

  def column(key: str) -> np.ndarray:
    return np.array([row[key] if isinstance(row.get(key), int | float) else 0.0 for row in rows])

  seconds = {key.removeprefix('timing_s/'): column(key) for key in keys}
  if _BOTH in seconds and 'update' in seconds:  # halves that were timed apart
    del seconds[_BOTH]
  rest = column('timing_s/step') - sum(seconds.values(), np.zeros(len(rows)))
  seconds['other'] = np.maximum(rest, 0)
  share = _update_share(device)
  if split := share is not None and _BOTH in seconds:
    both = seconds.pop(_BOTH)
    seconds = dict(update=both * share, rollout=both * (1 - share)) | seconds
  ranges = [each for each in np.array_split(np.arange(len(rows)), _TIME_RANGES) if len(each)]
  return dict(
    x=[[int(steps[each[0]]), int(steps[each[-1]])] for each in ranges],
    mean={name: [float(f'{x[each].mean():.4g}') for each in ranges] for name, x in seconds.items()},
    total={name: float(f'{x.sum():.5g}') for name, x in seconds.items()},
    split=split,
  )


def _update_share(device: JsonObject | None) -> float | None:
  """The update's share of the device's busy time in the traced steps; None without a trace."""
  busy = (device or {}).get('busy', {})
  update, rollout = busy.get('update', 0.0), busy.get('generate', 0.0)
  return update / (update + rollout) if update and rollout else None
