"""Logging of a run: metrics and choices files, trackers, console, profiler trace, live report."""

from __future__ import annotations

import contextlib
import json
import os
import types
from collections.abc import Sequence

import jax
import numpy as np
from absl import logging

from jaxrl_llm import report
from jaxrl_llm.checkpointing import metrics_log, run_dir, safe_files, storage
from jaxrl_llm.config.schema import Config
from jaxrl_llm.monitoring import alarms, console, trace_window, trackers
from jaxrl_llm.profiling import roofline
from jaxrl_llm.runner import grading, log_records
from jaxrl_llm.runner.context import Landed, PendingStep, RunContext
from jaxrl_llm.types import JsonObject, TrainState, UserError

_COMPILING = dict(
  fused='the step (update and generation in one program)',
  lag='the step (update and generation in one program; grading lags behind)',
  split='update and generation, a program each',
)
_HISTOGRAM_BINS = 20  # of expected success, on the console
_HISTOGRAM_PROMPTS = 10_000  # sampled for that histogram, at most


class RunLogger:
  """Logs the steps of a run, as a context manager. Every process calls every method; the first one writes."""

  def __init__(
    self,
    context: RunContext,
    directory: run_dir.RunDirectory,
    screen: console.Console,
    start: int,
    first_row: int,
  ):
    """`start` is the first step to take, `first_row` the first one to grade, which is earlier in lag mode."""
    config, first = context.config, jax.process_index() == 0
    self._context, self._directory, self._screen = context, directory, screen
    names = config.monitoring.trackers if first else ()
    with contextlib.ExitStack() as stack:
      open_ = stack.enter_context
      self._trackers = open_(
        trackers.Trackers(names, directory.root, config, first_row, screen.warn)
      )
      also = self._trackers.log
      self._metrics = open_(metrics_log.Writer(directory.metrics, first_row, first, on_row=also))
      self._choices = open_(metrics_log.Writer(directory.choices, start, first, sync=False))
      self._stack = stack.pop_all()
    self._trace = trace_window.TraceWindow(config.monitoring.profile.steps, directory.root)
    if first and config.monitoring.profile.steps:
      self._write_roofline(trace_window.window(config.monitoring.profile.steps))
    rows = context.tables.train.rows
    self._report = report.LiveReport(
      directory.root, config.monitoring.report_every_s, context.selection.curriculum, rows, first
    )
    self._compile_times = _CompileTimes(config, first)

  def __enter__(self) -> RunLogger:
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: types.TracebackType | None,
  ) -> None:
    self._stack.__exit__(kind, error, traceback)

  def before_compilation(self) -> None:
    """Announce the first call of a start, which compiles."""
    self._screen.compiling(_COMPILING[self._context.config.mode], self._compile_times.last())

  def after_compilation(self, seconds: float) -> None:
    """Keep the compilation time for the next start."""
    self._compile_times.keep(seconds)

  def before_step(self, index: int, state: TrainState) -> None:
    """Start or stop the profiler trace where due."""
    self._info(self._trace.before_step(index, state))

  def log_choice(self, record: JsonObject) -> None:
    """Write a row of choices.jsonl: see `log_records.choice`."""
    self._choices.write(record)

  def log_step(self, pending: PendingStep, landed: Landed, timing: dict[str, float]) -> None:
    """Log a graded step. Raises UserError where an alarm or too many failures end the run."""
    context, metrics = self._context, landed.metrics | timing | log_records.memory()
    health, raised = context.health.observe(metrics)
    self._metrics.write(metrics | health)
    self._screen.step(metrics, self._difficulty)
    for alarm in raised:
      self._screen.warn(alarm.text + self._dump(pending, alarm))
    check_skipped(metrics, context.config)
    context.grading.failures.check()
    context.health.check(raised)
    if pending.step % context.config.monitoring.rollouts_every == 0:
      self._directory.write_rollouts(pending.step, landed.rollout_records)
      if context.grading.labels is not None:
        self._directory.write_suspects(grading.suspect_labels(context))
    self._report.write_if_due()

  def log_evaluation(self, step: int, evaluation: JsonObject) -> None:
    """Send an evaluation to the trackers; its file is written already."""
    self._trackers.log(step, evaluation.get('metrics', {}))

  def after_last_step(self, state: TrainState) -> None:
    """Stop the profiler trace."""
    self._info(self._trace.stop(state))

  def finish(self) -> None:
    """Write the final report; the files of the context manager are closed already."""
    self._report.write()
    self._screen.finish(storage.shown(self._directory.root))

  def _info(self, text: str) -> None:
    if text:
      self._screen.info(text)

  def _write_roofline(self, steps: tuple[int, int] | None) -> None:
    """Writes lower bounds of the time of the traced steps, for the report."""
    bounds = roofline.report(self._context.spec) | dict(steps=steps)
    path = os.path.join(self._directory.root, 'profile', report.ROOFLINE_FILE)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    run_dir.write(path, json.dumps(bounds))

  def _difficulty(self) -> Sequence[float]:
    """Shares of the prompts by expected success, one for each bin."""
    count = len(self._context.tables.train.rows)
    index = np.unique(np.linspace(0, count - 1, min(count, _HISTOGRAM_PROMPTS)).astype(int))
    alpha, beta = self._context.selection.curriculum.posterior(index)
    histogram, _ = np.histogram(alpha / (alpha + beta), _HISTOGRAM_BINS, (0, 1))
    return (histogram / len(index)).tolist()

  def _dump(self, pending: PendingStep, alarm: alarms.Alarm) -> str:
    """Writes the batch of a skipped update; the end of the warning that names the files."""
    if alarm.name != 'non_finite':
      return ''
    if pending.trained_batch is None:
      return ' The batch went with the process that this run continues.'
    arrays, records = log_records.batch_dump(self._context, pending.trained_batch)
    path = self._directory.write_non_finite(pending.step, arrays, records)
    return f' The batch is in {path}.npz, in words in {path}.jsonl.'


class _CompileTimes:
  """Compilation times of earlier starts, in a file beside jax's cache of compiled programs, where there is one."""

  def __init__(self, config: Config, first: bool):
    folder = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    self._path = os.path.join(folder, 'seconds.json') if folder and first else ''
    sizes = dict(
      mesh=config.mesh.to_dict(), prompts=config.prompts, kind=jax.devices()[0].device_kind
    )
    settings = json.loads(config.to_json())
    self._key = run_dir.fingerprint(
      settings | dict(sizes=json.loads(json.dumps(sizes, default=str)))
    )

  def last(self) -> float | None:
    return self._read().get(self._key)

  def keep(self, seconds: float) -> None:
    if not self._path:
      return
    try:
      os.makedirs(os.path.dirname(self._path), exist_ok=True)
      run_dir.write(self._path, json.dumps(self._read() | {self._key: round(seconds, 1)}))
    except OSError as error:  # all runs of a machine share this folder, and none needs the file
      logging.warning('%s was not written: %s', self._path, error)

  def _read(self) -> dict[str, float]:
    try:
      entries = json.loads(safe_files.read(self._path)).items()
    except (OSError, ValueError, AttributeError):
      return {}
    return {key: value for key, value in entries if isinstance(value, int | float)}


def check_skipped(metrics: dict[str, float], config: Config) -> None:
  """Raises UserError where as many updates in a row were skipped as config.optimizer.max_skipped allows."""
  skipped = metrics['actor/skipped_updates']
  if skipped >= config.optimizer.max_skipped:
    raise UserError(
      f'config.optimizer.max_skipped={config.optimizer.max_skipped} updates in a row had a non-finite '
      'gradient; lower config.optimizer.learning_rate and restart from the last checkpoint.'
    )
