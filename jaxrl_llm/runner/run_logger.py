"""What a run tells while it goes: files, trackers, the trace, the report and the screen."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from jaxrl_llm import report
from jaxrl_llm.checkpointing import metrics_log, run_dir, safe_files
from jaxrl_llm.monitoring import alarms, trace_window, trackers
from jaxrl_llm.profiling import roofline
from jaxrl_llm.runner import host_step, log_records
from jaxrl_llm.runner.host_step import Parts
from jaxrl_llm.types import UserError

_COMPILING = dict(
  fused='the step (update and generation in one program)',
  lag='the step (update and generation in one program; grading lags one step behind)',
  split='update and generation, a program each',
)
_BINS = 20  # of expected success, on the screen
_LOOKED_AT = 10_000  # prompts at most, for that


class Journal:
  """Use in `with`. In a run of many processes each calls every method, and the first one writes."""

  def __init__(self, parts: Parts, folder: Any, screen: Any, start: int, first_row: int):
    """start: the first step to be taken; first_row: the first one to be landed, which a lagging host does later."""
    config, first = parts.config, jax.process_index() == 0
    self._parts, self._folder, self._screen = parts, folder, screen
    names = config.monitoring.trackers if first else ()
    with contextlib.ExitStack() as stack:
      open_ = stack.enter_context
      self._trackers = open_(trackers.Trackers(names, folder.root, config, first_row, screen.warn))
      also = self._trackers.log
      self._rows = open_(metrics_log.Writer(folder.metrics, first_row, first, also=also))
      self._choices = open_(metrics_log.Writer(folder.choices, start, first, sync=False))
      self._stack = stack.pop_all()
    self._trace = trace_window.TraceWindow(config.monitoring.profile.steps, folder.root)
    if first and config.monitoring.profile.steps:
      self._floor(trace_window.window(config.monitoring.profile.steps))
    rows = parts.tables.train.rows
    self._live = report.LiveReport(
      folder.root, config.monitoring.report_every_s, parts.curriculum, rows, first
    )
    self._compiled = _Compiled(config, first)

  def __enter__(self) -> Journal:
    return self

  def __exit__(self, *raised: Any) -> None:
    self._stack.__exit__(*raised)

  def compiling(self) -> None:
    """Before the first call of a start, which compiles."""
    self._screen.compiling(_COMPILING[self._parts.config.mode], self._compiled.last())

  def compiled(self, seconds: float) -> None:
    """That call has returned."""
    self._compiled.keep(seconds)

  def begins(self, index: int, state: Any) -> None:
    """Before a step."""
    self._say(self._trace.before_step(index, state))

  def chose(self, told: dict[str, Any]) -> None:
    """Which prompts a step asks, and why: see `tell.choice`."""
    self._choices.write(told)

  def landed(
    self, flight: host_step.Flight, landed: host_step.Landed, timing: dict[str, float]
  ) -> None:
    """A graded batch. Raises UserError where an alarm or too many failures end the run."""
    parts, row = self._parts, landed.row | timing | log_records.memory()
    held, alarms = parts.health.observe(row)
    self._rows.write(row | held)
    self._screen.step(row, self._difficulty)
    for alarm in alarms:
      self._screen.warn(alarm.text + self._exhibited(flight, alarm))
    _check(row, parts.config)
    parts.failures.check()
    parts.health.check(alarms)
    if flight.index % parts.config.monitoring.rollouts_every == 0:
      self._folder.write_rollouts(flight.index, landed.told)
      if parts.labels is not None:
        self._folder.write_suspects(host_step.suspects(parts))
    self._live.write_if_due()

  def examined(self, step: int, found: dict[str, Any]) -> None:
    """An evaluation, which is in its file by now."""
    self._trackers.log(step, found.get('metrics', {}))

  def ends(self, state: Any) -> None:
    """After the last step."""
    self._say(self._trace.stop(state))

  def finish(self) -> None:
    """All is written but the report."""
    self._live.write()
    self._screen.finish(self._folder.root)

  def _say(self, text: str) -> None:
    if text:
      self._screen.say(text)

  def _floor(self, steps: tuple[int, int]) -> None:
    """What the traced steps take at best, for the report."""
    told = roofline.report(self._parts.spec) | dict(steps=steps)
    path = os.path.join(self._folder.root, 'profile', report.ROOFLINE_FILE)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    run_dir.write(path, json.dumps(told))

  def _difficulty(self) -> Sequence[float]:
    """Shares of the prompts by expected success."""
    count = len(self._parts.tables.train.rows)
    index = np.unique(np.linspace(0, count - 1, min(count, _LOOKED_AT)).astype(int))
    alpha, beta = self._parts.curriculum.posterior(index)
    return (np.histogram(alpha / (alpha + beta), _BINS, (0, 1))[0] / len(index)).tolist()

  def _exhibited(self, flight: host_step.Flight, alarm: alarms.Alarm) -> str:
    """Where the batch of a skipped update lies, for the message."""
    if alarm.name != 'non_finite':
      return ''
    if flight.learned is None:
      return ' The batch went with the process that this run continues.'
    told = log_records.exhibit(self._parts, flight.learned)
    path = self._folder.write_non_finite(flight.index, *told)
    return f' The batch is in {path}.npz, in words in {path}.jsonl.'


class _Compiled:
  """How long programs took to compile, kept beside them in jax's cache of compiled programs, where there is one."""

  def __init__(self, config: Any, first: bool):
    folder = jax.config.jax_compilation_cache_dir
    self._path = os.path.join(folder, 'seconds.json') if folder and first else ''
    sizes = dict(
      mesh=config.mesh.to_dict(), prompts=config.prompts, kind=jax.devices()[0].device_kind
    )
    told = json.loads(config.to_json())
    self._key = run_dir.fingerprint(told | dict(sizes=json.loads(json.dumps(sizes, default=str))))

  def last(self) -> float | None:
    return self._read().get(self._key)

  def keep(self, seconds: float) -> None:
    if not self._path:
      return
    try:
      os.makedirs(os.path.dirname(self._path), exist_ok=True)
      run_dir.write(self._path, json.dumps(self._read() | {self._key: round(seconds, 1)}))
    except OSError as error:  # all runs of a machine share this folder; a hint is worth no run
      logging.warning('%s was not written: %s', self._path, error)

  def _read(self) -> dict[str, float]:
    try:
      entries = json.loads(safe_files.read(self._path)).items()
    except (OSError, ValueError, AttributeError):
      return {}
    return {key: value for key, value in entries if isinstance(value, int | float)}


def _check(row: dict[str, float], config: Any) -> None:
  skipped = row['actor/skipped_updates']
  if skipped >= config.optimizer.max_skipped:
    raise UserError(
      f'config.optimizer.max_skipped={config.optimizer.max_skipped} updates in a row had a non-finite '
      'gradient; lower config.optimizer.learning_rate and restart from the last checkpoint.'
    )
