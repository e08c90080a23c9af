"""Trackers, read back by their own clients; failing trackers, and the profiler window."""

from __future__ import annotations

import json
import pathlib
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request

import jax
import numpy as np
import pytest

from jaxrl_llm import train
from jaxrl_llm.checkpointing import config_changes, metrics_log
from jaxrl_llm.config import loading as configs
from jaxrl_llm.monitoring import prometheus_endpoint, trace_window, trackers
from jaxrl_llm.runner import validate
from jaxrl_llm.types import UserError


def row(step: int, score: float, **more):
  return {'training/global_step': step, 'critic/score/mean': score} | more


def open_trackers(root, *names, start=0, warnings=None, **monitoring):
  warn = warnings.append if warnings is not None else pytest.fail
  config = configs.default()
  config.monitoring.update(monitoring)
  return trackers.Trackers(names, str(root), config, start, warn)


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
  is_whole = lambda: all(b'odd_name_of_a_metric' in path.read_bytes() for path in files)  # noqa: E731
  deadline = time.monotonic() + 30  # a process of wandb's writes the files, and may end them later
  while not is_whole() and time.monotonic() < deadline:
    time.sleep(0.1)
  assert files and is_whole()


@pytest.mark.parametrize('uri', ['', 'sqlite', 'file'])
def test_mlflow_continues_one_run_of_a_folder(uri, tmp_path, monkeypatch):
  mlflow = pytest.importorskip('mlflow')
  root = tmp_path / 'dapo'
  root.mkdir()
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
  stores = dict(sqlite=f'sqlite:///{tmp_path}/shared.db', file=(tmp_path / 'store').as_uri())
  store = stores.get(uri, f'sqlite:///{root}/mlflow.db')
  monkeypatch.setenv('MLFLOW_TRACKING_URI', stores.get(uri, ''))
  many = {f'many/{i}': 1.0 for i in range(1100)}  # more than a request of MLflow holds
  for start, scores, steps in ((0, [0.0, 0.1], 10), (1, [0.2, 0.3], 20)):
    with open_trackers(root, 'mlflow', start=start, alarms=dict(steps=steps)) as tracked:
      for step, score in enumerate(scores, start):
        more = {'val-core/sums/acc/mean@1': 0.5, 'bad': float('nan')} | many
        tracked.log(step, row(step, np.float32(score), **more))
        running = mlflow.MlflowClient(store).get_run((root / 'mlflow_id').read_text())
        assert running.info.status == 'RUNNING'
  client = mlflow.MlflowClient(store)
  experiment = client.get_experiment_by_name('jaxrl_llm')
  (run,) = client.search_runs([experiment.experiment_id])
  assert run.info.run_name == 'dapo' and run.info.status == 'FINISHED'
  assert run.info.run_id == (root / 'mlflow_id').read_text()
  names = {'critic/score/mean', 'val-core/sums/acc/mean_1'} | many.keys()
  assert run.data.metrics.keys() == names
  history = client.get_metric_history(run.info.run_id, 'critic/score/mean')
  points = [(m.step, round(m.value, 4)) for m in history]
  assert sorted(points) == [(0, 0.0), (1, 0.1), (1, 0.2), (2, 0.3)]
  flat = config_changes.flatten(json.loads(configs.default().to_json()))
  assert run.data.params.keys() == flat.keys()
  assert run.data.params['monitoring.alarms.steps'] == '10'


TRACKIO = """
import sys
from jaxrl_llm.config import loading
from jaxrl_llm.monitoring import trackers

start = int(sys.argv[2])
with trackers.Trackers(['trackio'], sys.argv[1], loading.default(), start, sys.exit) as tracked:
  for step in (start, start + 1):
    row = {'training/global_step': step, 'critic/score/mean': 0.25 + start, 'bad': float('nan')}
    tracked.log(step, row)
"""


def test_trackio_continues_one_run_of_a_folder(tmp_path, monkeypatch):
  pytest.importorskip('trackio')
  monkeypatch.setenv('TRACKIO_DIR', str(tmp_path / 'trackio'))

  def python(code, *flags):  # a process each: Trackio reads its folder when it is imported
    call = [sys.executable, '-c', code, *map(str, flags)]
    return subprocess.run(call, capture_output=True, text=True, check=True).stdout

  for name in ('a/dapo', 'b/dapo'):  # two folders of the same name are two runs
    (tmp_path / name).mkdir(parents=True)
  for name, start in (('a/dapo', 0), ('b/dapo', 0), ('a/dapo', 1)):
    assert python(TRACKIO, tmp_path / name, start) == ''
  read = """
import json
import trackio
from trackio.sqlite_storage import SQLiteStorage
runs = trackio.Api().runs('jaxrl_llm')
print(json.dumps({r.name: [r.config, SQLiteStorage.get_logs('jaxrl_llm', r.name)] for r in runs}))
"""
  runs = json.loads(python(read))
  first, second = (f'dapo-{(tmp_path / x / "dapo/trackio_id").read_text()}' for x in 'ab')
  assert runs.keys() == {first, second} and runs[first][0]['steps'] == configs.default().steps
  points = {name: [(p['step'], p['critic/score/mean']) for p in runs[name][1]] for name in runs}
  assert points == {
    first: [(0, 0.25), (1, 0.25), (1, 1.25), (2, 1.25)],
    second: [(0, 0.25), (1, 0.25)],
  }
  assert 'bad' not in runs[first][1][0]


def free_port():
  with socket.create_server(('127.0.0.1', 0)) as server:
    return server.getsockname()[1]


def test_prometheus_reads_the_newest_values(tmp_path):
  parser = pytest.importorskip('prometheus_client.parser')
  port = free_port()
  with open_trackers(tmp_path, 'prometheus', prometheus=dict(port=port)) as tracked:

    def scrape():
      with urllib.request.urlopen(f'http://127.0.0.1:{port}/metrics', timeout=5) as reply:
        families = list(parser.text_string_to_metric_families(reply.read().decode()))
      assert all(family.type == 'gauge' and len(family.samples) == 1 for family in families)
      return {f.name: (f.documentation, f.samples[0].value) for f in families}

    assert scrape() == {}
    tracked.log(0, {'val-core/sums/acc/mean@1': 0.5})
    odd = {'7/ümlaut:x': 3.0, 'a/b': 1.0, 'a_b': 2.0, 'bad': float('nan')}
    for step, score in ((6, 0.25), (7, np.float32(0.5))):
      tracked.log(step, row(step, score, **odd))
    assert scrape() == {
      'jaxrl_llm_val_core_sums_acc_mean_1': ('val-core/sums/acc/mean@1', 0.5),
      'jaxrl_llm_training_global_step': ('training/global_step', 7.0),
      'jaxrl_llm_critic_score_mean': ('critic/score/mean', 0.5),
      'jaxrl_llm_7__mlaut_x': ('7/ümlaut:x', 3.0),
      'jaxrl_llm_a_b': ('a/b', 1.0),
      'jaxrl_llm_a_b_2': ('a_b', 2.0),
    }
    addresses = {line.split()[1] for line in open('/proc/net/tcp') if f':{port:04X} ' in line}
    assert f'0100007F:{port:04X}' in addresses and f'00000000:{port:04X}' not in addresses
  with pytest.raises(urllib.error.URLError):  # the port is free again
    scrape()


def test_a_port_in_use_is_reported_before_the_model_is_loaded(tmp_path, monkeypatch):
  pytest.importorskip('prometheus_client')
  monkeypatch.setattr('jaxrl_llm.runner.setup.build_context', lambda *_: pytest.fail('loaded'))
  config, other = configs.default(), configs.default()
  with socket.create_server(('127.0.0.1', 0)) as server:
    port = server.getsockname()[1]
    config.monitoring.update(trackers=('prometheus',), prometheus=dict(port=port))
    with pytest.raises(UserError, match=f'prometheus.port={port} is in use on 127.0.0.1; name a'):
      train.run(config, str(tmp_path / 'run'))
    other.monitoring.prometheus.port = port
    prometheus_endpoint.check_free(other.monitoring)  # of a run without this tracker
  prometheus_endpoint.check_free(config.monitoring)
  config.monitoring.prometheus.host = '192.0.2.1'
  with pytest.raises(UserError, match="'192.0.2.1' port [0-9]+ cannot be opened"):
    prometheus_endpoint.check_free(config.monitoring)


def test_no_package_is_imported_by_default():
  # A dependency of the package imports prometheus_client; tests/test_layers.py reads our own imports.
  packages = {module for _, module in trackers.TRACKERS.values()} - {'prometheus_client'}
  code = f'import sys, jaxrl_llm.train; print({packages} & {{*sys.modules}})'
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
      dict(monitoring=dict(trackers=('neptune',))),
      "config.monitoring.trackers holds 'neptune'; choose among: tensorboard, wandb, mlflow",
    ),
    (
      dict(monitoring=dict(prometheus=dict(port=65536))),
      'config.monitoring.prometheus.port=65536 must be between 1 and 65535',
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


@pytest.mark.parametrize('name', trackers.TRACKERS)
def test_a_missing_package_is_reported_with_the_remedy(name, monkeypatch):
  monkeypatch.setattr(trackers.importlib.util, 'find_spec', lambda _: None)
  config = configs.default()
  config.monitoring.trackers = (name,)
  with pytest.raises(UserError, match=rf"not installed: pip install -e '[^']*\[{name}\]'"):
    trackers.check(config.monitoring)
  pyproject = pathlib.Path(__file__).parents[2] / 'pyproject.toml'
  assert name in tomllib.loads(pyproject.read_text())['project']['optional-dependencies']


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
