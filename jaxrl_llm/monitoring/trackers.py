"""Copies of a run's metrics for TensorBoard and Weights & Biases; metrics.jsonl remains the record.

Neither package is imported unless config.monitoring.trackers names it.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.checkpointing.metrics_log import STEP
from jaxrl_llm.config import extras
from jaxrl_llm.types import JsonObject, UserError

if TYPE_CHECKING:
  from jaxrl_llm.config.schema import Config


class Tracker(Protocol):
  """A destination of metrics. No value of a number may raise."""

  def log(self, step: int, numbers: dict[str, float]) -> None:
    """Records the metrics of one step."""

  def close(self) -> None:
    """Flushes what is buffered."""


class TensorBoard:
  """Event files in WORKDIR/tensorboard. A start event invalidates older records from its step on."""

  def __init__(self, root: str, config: JsonObject, start: int):
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    self._event, self._summary = event_pb2.Event, summary_pb2.Summary
    self._writer = EventFileWriter(os.path.join(root, 'tensorboard'))
    start_log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._writer.add_event(self._event(wall_time=time.time(), step=start, session_log=start_log))

  def log(self, step: int, numbers: dict[str, float]) -> None:
    values = [self._summary.Value(tag=k, simple_value=v) for k, v in numbers.items()]
    summary = self._summary(value=values)
    self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
    self._writer.flush()  # a viewer of a running job expects current data

  def close(self) -> None:
    self._writer.close()


class Wandb:
  """A run of Weights & Biases, named after the run directory and continued by later starts; files in WORKDIR/wandb.

  WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE set project, entity and mode.
  """

  def __init__(self, root: str, config: JsonObject, start: int):
    import wandb

    self._run = wandb.init(
      project=os.environ.get('WANDB_PROJECT', 'jaxrl_llm'),
      name=os.path.basename(root),
      id=_run_id(os.path.join(root, 'wandb_id')),
      resume='allow',
      dir=root,
      config=config,
    )
    # After a kill, steps that are repeated lie below the service's own counter, which would drop them.
    self._run.define_metric('*', step_metric=STEP)

  def log(self, step: int, numbers: dict[str, float]) -> None:
    self._run.log(numbers | {STEP: step})

  def close(self) -> None:
    self._run.finish()


def _run_id(path: str) -> str:
  try:
    return safe_files.read(path).decode().strip()
  except FileNotFoundError:
    run_id = secrets.token_hex(6)
    safe_files.write(path, run_id)
    return run_id


# name → (class, the module that it needs). An extra of the same name installs it.
TRACKERS: dict[str, tuple[Callable[[str, dict, int], Tracker], str]] = {
  'tensorboard': (TensorBoard, 'tensorboard'),
  'wandb': (Wandb, 'wandb'),
}


def check(names: Sequence[str]) -> None:
  """Raises UserError for a tracker that does not exist or is not installed."""
  for name in names:
    if not isinstance(name, str) or name not in TRACKERS:
      raise UserError(
        f'config.monitoring.trackers holds {name!r}; choose among: {", ".join(TRACKERS)}; metrics.jsonl is '
        f'always written.'
      )
    if importlib.util.find_spec(TRACKERS[name][1]) is None:
      raise UserError(
        f'config.monitoring.trackers holds {name!r}, which is not installed: {extras.install(name)}.'
      )


class Trackers:
  """The trackers `names` as a context manager. A tracker that fails is closed with a warning; the others go on."""

  def __init__(
    self, names: Sequence[str], root: str, config: Config, start: int, warn: Callable[[str], None]
  ):
    """`start` is the first step that this run writes; `warn` receives the warnings."""
    self._warn, self._open = warn, {}
    settings = json.loads(config.to_json())
    for name in names:
      tracker = self._attempt(name, lambda create=TRACKERS[name][0]: create(root, settings, start))
      if tracker is not None:
        self._open[name] = tracker

  def __enter__(self) -> Trackers:
    return self

  def __exit__(self, *_: object) -> None:
    for name, tracker in list(self._open.items()):
      self._attempt(name, tracker.close)

  def log(self, step: int, row: JsonObject) -> None:
    """Records the finite numbers of `row`."""
    numbers = {k: float(v) for k, v in row.items() if _is_finite_number(v) and k != STEP}
    for name, tracker in list(self._open.items()):
      self._attempt(name, lambda tracker=tracker: tracker.log(step, numbers))

  def _attempt(self, name: str, call: Callable[[], Any]) -> Any:
    """call(); after an error the tracker is dropped: metrics.jsonl has the same numbers, so the run goes on."""
    try:
      return call()
    except Exception as error:
      self._open.pop(name, None)
      self._warn(
        f'config.monitoring.trackers: {name} stopped ({type(error).__name__}: {error}); the run goes on'
      )
      return None


def _is_finite_number(value: Any) -> bool:
  value = value.item() if hasattr(value, 'item') else value
  return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
