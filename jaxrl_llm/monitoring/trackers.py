"""Copies of a run's numbers for TensorBoard and Weights & Biases; metrics.jsonl stays the record.

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
from typing import Any, Protocol

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.checkpointing.metrics_log import STEP
from jaxrl_llm.types import UserError


class Tracker(Protocol):
  """Where numbers go; neither method may raise for a number."""

  def log(self, step: int, numbers: dict[str, float]) -> None:
    """Numbers of one step."""

  def close(self) -> None:
    """Writes out what is left."""


class TensorBoard:
  """Event files in WORKDIR/tensorboard. A start says from which step on what older files hold is void."""

  def __init__(self, root: str, config: dict[str, Any], start: int):
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    self._event, self._summary = event_pb2.Event, summary_pb2.Summary
    self._writer = EventFileWriter(os.path.join(root, 'tensorboard'))
    began = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._writer.add_event(self._event(wall_time=time.time(), step=start, session_log=began))

  def log(self, step: int, numbers: dict[str, float]) -> None:
    values = [self._summary.Value(tag=k, simple_value=v) for k, v in numbers.items()]
    summary = self._summary(value=values)
    self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
    self._writer.flush()  # whoever looks at a run looks at it now

  def close(self) -> None:
    self._writer.close()


class Wandb:
  """A run of Weights & Biases, named after the folder and continued by later starts; files in WORKDIR/wandb.

  Project, entity and mode are what WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE say.
  """

  def __init__(self, root: str, config: dict[str, Any], start: int):
    import wandb

    self._run = wandb.init(
      project=os.environ.get('WANDB_PROJECT', 'jaxrl_llm'),
      name=os.path.basename(root),
      id=_run_id(os.path.join(root, 'wandb_id')),
      resume='allow',
      dir=root,
      config=config,
    )
    # Steps that are taken again after a kill are below the service's own counter, which it would drop.
    self._run.define_metric('*', step_metric=STEP)

  def log(self, step: int, numbers: dict[str, float]) -> None:
    self._run.log(numbers | {STEP: step})

  def close(self) -> None:
    self._run.finish()


def _run_id(path: str) -> str:
  try:
    return safe_files.read(path).decode().strip()
  except FileNotFoundError:
    made = secrets.token_hex(6)
    safe_files.write(path, made)
    return made


# name → (class, the module that it needs). An extra of the same name installs it.
TRACKERS: dict[str, tuple[Callable[[str, dict, int], Tracker], str]] = {
  'tensorboard': (TensorBoard, 'tensorboard'),
  'wandb': (Wandb, 'wandb'),
}


def check(names: Sequence[str]) -> None:
  """Raises UserError for a tracker that does not exist or is not installed. Source: none."""
  for name in names:
    if name not in TRACKERS:
      raise UserError(
        f'config.monitoring.trackers holds {name!r}; choose among: {", ".join(TRACKERS)}; metrics.jsonl is always written.'
      )
    if importlib.util.find_spec(TRACKERS[name][1]) is None:
      raise UserError(
        f"config.monitoring.trackers holds {name!r}, which is not installed: pip install 'jaxrl_llm[{name}]'."
      )


class Trackers:
  """All of `names`, opened in the first process; use in `with`. A tracker that fails is left out from then on."""

  def __init__(
    self, names: Sequence[str], root: str, config: Any, start: int, warn: Callable[[str], None]
  ):
    """start: the first step that this run will write."""
    self._warn, self._open = warn, {}
    told = json.loads(config.to_json())
    for name in names:
      self._try(name, lambda make=TRACKERS[name][0]: make(root, told, start), keep=True)

  def __enter__(self) -> Trackers:
    return self

  def __exit__(self, *_: Any) -> None:
    for name, tracker in list(self._open.items()):
      self._try(name, tracker.close)

  def log(self, step: int, row: dict[str, Any]) -> None:
    """The finite numbers of `row`."""
    numbers = {k: float(v) for k, v in row.items() if _is_number(v) and k != STEP}
    for name, tracker in list(self._open.items()):
      self._try(name, lambda tracker=tracker: tracker.log(step, numbers))

  def _try(self, name: str, call: Callable[[], Any], keep: bool = False) -> None:
    # A full disk or a service that is down is no reason to lose the run: its record is another file.
    try:
      made = call()
    except Exception as error:
      self._open.pop(name, None)
      self._warn(
        f'config.monitoring.trackers: {name} stopped ({type(error).__name__}: {error}); the run goes on'
      )
      return
    if keep:
      self._open[name] = made


def _is_number(value: Any) -> bool:
  value = value.item() if hasattr(value, 'item') else value
  return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
