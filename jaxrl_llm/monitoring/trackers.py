"""Copies of a run's metrics for TensorBoard, Weights & Biases, MLflow, Trackio and Prometheus.

metrics.jsonl remains the record. No package is imported unless config.monitoring.trackers names it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from jaxrl_llm.checkpointing import config_changes, safe_files
from jaxrl_llm.checkpointing.metrics_log import STEP
from jaxrl_llm.config import extras
from jaxrl_llm.monitoring import prometheus_endpoint
from jaxrl_llm.types import JsonObject, UserError

if TYPE_CHECKING:
  from jaxrl_llm.config.schema import Config, MonitoringConfig


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


class Mlflow:
  """A run of MLflow, named after the run directory and continued by later starts; its id in WORKDIR/mlflow_id.

  MLFLOW_TRACKING_URI names the server or store, WORKDIR/mlflow.db by default; MLFLOW_EXPERIMENT_NAME the experiment.
  The parameters are the config of the first start, because MLflow does not let a parameter change.
  """

  def __init__(self, root: str, config: JsonObject, start: int):
    from mlflow import MlflowClient, entities

    self._metric = entities.Metric
    # Not mlflow.get_tracking_uri(): its default is a file in the current folder.
    uri = os.environ.get('MLFLOW_TRACKING_URI') or f'sqlite:///{root}/mlflow.db'
    self._client = MlflowClient(uri)
    path = os.path.join(root, 'mlflow_id')
    if os.path.exists(path):
      self._run_id = safe_files.read(path).decode().strip()
      self._client.update_run(self._run_id, status='RUNNING')
      return
    experiment = self._experiment(os.environ.get('MLFLOW_EXPERIMENT_NAME', 'jaxrl_llm'))
    run = self._client.create_run(experiment, run_name=os.path.basename(root))
    self._run_id = run.info.run_id
    flat = config_changes.flatten(config)
    params = [entities.Param(_mlflow_name(k), str(v)) for k, v in flat.items()]
    self._client.log_batch(self._run_id, params=params)
    safe_files.write(path, self._run_id)

  def log(self, step: int, numbers: dict[str, float]) -> None:
    time_ms = int(time.time() * 1000)
    metrics = [self._metric(_mlflow_name(k), v, time_ms, step) for k, v in numbers.items()]
    self._client.log_batch(self._run_id, metrics=metrics)

  def close(self) -> None:
    self._client.set_terminated(self._run_id)

  def _experiment(self, name: str) -> str:
    found = self._client.get_experiment_by_name(name)
    return found.experiment_id if found is not None else self._client.create_experiment(name)


def _mlflow_name(name: str) -> str:
  """`name` with '_' for the characters that MLflow refuses, such as '@'."""
  return re.sub(r'[^\w/. :-]', '_', name)


class Trackio:
  """A run of Trackio, named after the run directory and continued by later starts.

  TRACKIO_PROJECT names the project, TRACKIO_DIR the folder of Trackio's database, TRACKIO_SPACE_ID a Space.
  """

  def __init__(self, root: str, config: JsonObject, start: int):
    import trackio

    self._finish = trackio.finish  # unlike Run.finish, which is called once more when Python exits
    # Trackio finds a run by its name alone, and folders of different places may have one name.
    run_id = _run_id(os.path.join(root, 'trackio_id'))
    with contextlib.redirect_stdout(sys.stderr):  # a console of JSON lines is read by programs
      self._run = trackio.init(
        project=os.environ.get('TRACKIO_PROJECT', 'jaxrl_llm'),
        name=f'{os.path.basename(root)}-{run_id}',
        resume='allow',
        config=config,
        embed=False,
      )

  def log(self, step: int, numbers: dict[str, float]) -> None:
    self._run.log(numbers, step=step)

  def close(self) -> None:
    with contextlib.redirect_stdout(sys.stderr):
      self._finish()


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
  'mlflow': (Mlflow, 'mlflow'),
  'trackio': (Trackio, 'trackio'),
  prometheus_endpoint.NAME: (prometheus_endpoint.Prometheus, 'prometheus_client'),
}


def check(monitoring: MonitoringConfig) -> None:
  """Raises UserError for a tracker that does not exist, is not installed or has a wrong setting."""
  prometheus_endpoint.check(monitoring)
  for name in monitoring.trackers:
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
