"""Copies of the numbers: TensorBoard reads them, W&B keeps them offline, and a tracker that fails costs no run."""

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


def opened(root, *names, start=0, said=None):
  warn = said.append if said is not None else pytest.fail
  return trackers.Trackers(names, str(root), configs.default(), start, warn)


def test_tensorboard_reads_what_was_written_and_forgets_steps_that_were_taken_again(tmp_path):
  reader = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator')
  for start, scores in ((0, [0.0, 0.1, 0.2, 0.3]), (2, [0.7, 0.8, 0.9])):
    with opened(tmp_path, 'tensorboard', start=start) as tracked:
      for i, score in enumerate(scores):
        tracked.log(start + i, row(start + i, np.float32(score), name='words', bad=float('nan')))
  found = reader.EventAccumulator(str(tmp_path / 'tensorboard'))
  found.Reload()
  assert found.Tags()['scalars'] == ['critic/score/mean']
  told = [(e.step, round(e.value, 4)) for e in found.Scalars('critic/score/mean')]
  assert told == [(0, 0.0), (1, 0.1), (2, 0.7), (3, 0.8), (4, 0.9)]


def test_wandb_keeps_one_run_of_a_folder_without_a_network(tmp_path, monkeypatch):
  pytest.importorskip('wandb')
  for name, value in dict(
    MODE='offline', SILENT='true', CONFIG_DIR=tmp_path, CACHE_DIR=tmp_path
  ).items():
    monkeypatch.setenv(f'WANDB_{name}', str(value))
  for start in (0, 1):
    with opened(tmp_path, 'wandb', start=start) as tracked:
      for step in range(start, 30):  # in blocks of 32 KiB, which may cut a name in two
        tracked.log(step, row(step, 0.25, odd_name_of_a_metric=1.0))
  own = (tmp_path / 'wandb_id').read_text()
  files = sorted(tmp_path.glob(f'wandb/offline-run-*/run-{own}.wandb'))
  assert files and all(b'odd_name_of_a_metric' in path.read_bytes() for path in files)


def test_neither_is_imported_unless_asked_for():
  code = 'import sys, jaxrl_llm.train; print({"tensorboard", "wandb"} & {*sys.modules})'
  out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  assert out.stdout.strip() == 'set()'


class Keeps:
  def __init__(self, kept):
    self.kept = kept

  def log(self, *told):
    self.kept.append(told)

  def close(self):
    pass


class Fails:
  def __init__(self, *_):
    pass

  def log(self, *_):
    raise OSError('no space left')

  def close(self):
    raise RuntimeError('closed after it failed')


def test_one_that_fails_is_left_out_and_the_others_go_on(tmp_path, monkeypatch):
  kept = []
  made = dict(fails=Fails, broken=lambda *_: 1 / 0, good=lambda *_: Keeps(kept))
  monkeypatch.setattr(trackers, 'TRACKERS', {name: (make, 'os') for name, make in made.items()})
  said = []
  with opened(tmp_path, 'fails', 'broken', 'good', said=said) as tracked:
    tracked.log(0, row(0, 0.5))
    tracked.log(1, row(1, 0.6))
  assert [step for step, _ in kept] == [0, 1] and kept[1][1] == {'critic/score/mean': 0.6}
  assert (
    len(said) == 2 and 'broken stopped (ZeroDivisionError' in said[0] and 'no space left' in said[1]
  )


def test_a_row_is_told_once_it_is_on_the_disk(tmp_path):
  path, told = str(tmp_path / 'metrics.jsonl'), []
  also = lambda step, row: told.append((step, len(metrics_log.read(path))))  # noqa: E731
  with metrics_log.Writer(path, 0, also=also) as writer:
    for step in range(3):
      writer.write(row(step, 0.0))
  assert told == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize(
  'changes, words',
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
def test_bad_settings_are_one_sentence(changes, words):
  config = configs.default()
  config.update(changes)
  with pytest.raises(UserError, match=words):
    validate.validate(config)


def test_one_that_is_not_installed_is_told_with_the_remedy(monkeypatch):
  monkeypatch.setattr(trackers.importlib.util, 'find_spec', lambda _: None)
  with pytest.raises(UserError, match=r"not installed: pip install 'jaxrl_llm\[wandb\]'"):
    trackers.check(('wandb',))


def test_a_trace_covers_its_window(tmp_path, monkeypatch):
  events = []
  monkeypatch.setattr(jax.profiler, 'start_trace', lambda folder: events.append(('start', folder)))
  monkeypatch.setattr(jax.profiler, 'stop_trace', lambda: events.append('stop'))
  for first, steps, last in ((0, 10, 5), (5, 8, 8), (7, 10, 10), (11, 13, 13)):
    trace = trace_window.TraceWindow('4:8', str(tmp_path))
    seen = []
    for step in range(first, steps):
      trace.before_step(step, ())
      seen.append(bool(events) and events[-1] != 'stop')
    trace.stop(())
    assert seen == [4 <= step < 8 for step in range(first, steps)], last
    assert events in ([], [('start', str(tmp_path / 'profile')), 'stop'])
    events.clear()
