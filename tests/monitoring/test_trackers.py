"""Trackers: TensorBoard and offline W&B files, failing trackers, and the profiler window."""

from __future__ import annotations

import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxrl_llm.checkpointing import metrics_log
from jaxrl_llm.config import loading as configs
from jaxrl_llm.monitoring import trace_window, trackers
from jaxrl_llm.runner import validate
from jaxrl_llm.types import UserError


def row(step: int, score: float, **more):
  return {'training/global_step': step, 'critic/score/mean': score} | more


def open_trackers(root, *names, start=0, warnings=None):
  warn = warnings.append if warnings is not None else pytest.fail
  return trackers.Trackers(names, str(root), configs.default(), start, warn)


def test_tensorboard_shows_repeated_steps_once(tmp_path):
  reader = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator')
  for start, scores in ((0, [0.0, 0.1, 0.2, 0.3]), (2, [0.7, 0.8, 0.9])):
    with open_trackers(tmp_path, 'tensorboard', start=start) as tracked:
      for i, score in enumerate(scores):
        tracked.log(start + i, row(start + i, np.float32(score), name='words', bad=float('nan')))
  events = reader.EventAccumulator(str(tmp_path / 'tensorboard'))
  events.Reload()
  assert events.Tags()['scalars'] == ['critic/score/mean']
  points = [(e.step, round(e.value, 4)) for e in events.Scalars('critic/score/mean')]
  assert points == [(0, 0.0), (1, 0.1), (2, 0.7), (3, 0.8), (4, 0.9)]


def test_wandb_continues_one_offline_run_of_a_folder(tmp_path, monkeypatch):
  pytest.importorskip('wandb')
  for name, value in dict(
    MODE='offline', SILENT='true', CONFIG_DIR=tmp_path, CACHE_DIR=tmp_path
  ).items():
    monkeypatch.setenv(f'WANDB_{name}', str(value))
  for start in (0, 1):
    with open_trackers(tmp_path, 'wandb', start=start) as tracked:
      for step in range(start, 30):  # in blocks of 32 KiB, which may cut a name in two
        tracked.log(step, row(step, 0.25, odd_name_of_a_metric=1.0))
  run_id = (tmp_path / 'wandb_id').read_text()
  files = sorted(tmp_path.glob(f'wandb/offline-run-*/run-{run_id}.wandb'))
  assert files and all(b'odd_name_of_a_metric' in path.read_bytes() for path in files)


def test_neither_package_is_imported_by_default():
  code = 'import sys, jaxrl_llm.train; print({"tensorboard", "wandb"} & {*sys.modules})'
  out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  assert out.stdout.strip() == 'set()'


class Recorder:
  def __init__(self, calls):
    self.calls = calls

  def log(self, *arguments):
    self.calls.append(arguments)

  def close(self):
    pass


class Fails:
  def __init__(self, *_):
    pass

  def log(self, *_):
    raise OSError('no space left')

  def close(self):
    raise RuntimeError('closed after it failed')


def test_a_failing_tracker_is_dropped_and_the_others_go_on(tmp_path, monkeypatch):
  calls = []
  classes = dict(fails=Fails, broken=lambda *_: 1 / 0, good=lambda *_: Recorder(calls))
  monkeypatch.setattr(
    trackers, 'TRACKERS', {name: (create, 'os') for name, create in classes.items()}
  )
  warnings = []
  with open_trackers(tmp_path, 'fails', 'broken', 'good', warnings=warnings) as tracked:
    tracked.log(0, row(0, 0.5))
    tracked.log(1, row(1, 0.6))
  assert [step for step, _ in calls] == [0, 1] and calls[1][1] == {'critic/score/mean': 0.6}
  assert (
    len(warnings) == 2
    and 'broken stopped (ZeroDivisionError' in warnings[0]
    and 'no space left' in warnings[1]
  )


def test_a_row_reaches_the_callback_after_it_is_on_disk(tmp_path):
  path, calls = str(tmp_path / 'metrics.jsonl'), []
  on_row = lambda step, row: calls.append((step, len(metrics_log.read(path))))  # noqa: E731
  with metrics_log.Writer(path, 0, on_row=on_row) as writer:
    for step in range(3):
      writer.write(row(step, 0.0))
  assert calls == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize(
  'changes, message',
  [
    (
      dict(monitoring=dict(trackers=('mlflow',))),
      "config.monitoring.trackers holds 'mlflow'; choose among: tensorboard, wandb",
    ),
    (
      dict(monitoring=dict(profile=dict(steps='3'))),
      "config.monitoring.profile.steps='3' must be two step numbers",
    ),
    (dict(monitoring=dict(profile=dict(steps='5:5'))), 'the first below the second'),
  ],
)
def test_bad_settings_are_refused(changes, message):
  config = configs.default()
  config.update(changes)
  with pytest.raises(UserError, match=message):
    validate.validate(config)


def test_a_missing_package_is_reported_with_the_remedy(monkeypatch):
  monkeypatch.setattr(trackers.importlib.util, 'find_spec', lambda _: None)
  with pytest.raises(UserError, match=r"not installed: pip install -e '[^']*\[wandb\]'"):
    trackers.check(('wandb',))


def test_a_trace_covers_its_window(tmp_path, monkeypatch):
  events = []
  monkeypatch.setattr(jax.profiler, 'start_trace', lambda folder: events.append(('start', folder)))
  monkeypatch.setattr(jax.profiler, 'stop_trace', lambda: events.append('stop'))
  for first, steps, last in ((0, 10, 5), (5, 8, 8), (7, 10, 10), (11, 13, 13)):
    trace = trace_window.TraceWindow('4:8', str(tmp_path))
    traced = []
    for step in range(first, steps):
      trace.before_step(step, ())
      traced.append(bool(events) and events[-1] != 'stop')
    trace.stop(())
    assert traced == [4 <= step < 8 for step in range(first, steps)], last
    assert events in ([], [('start', str(tmp_path / 'profile')), 'stop'])
    events.clear()
