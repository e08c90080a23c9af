"""Injects a fault into the process of a run: dict(kind=, at=, skip=), see faults.py."""

from __future__ import annotations

import errno
import functools
import os
import pathlib
import shutil
import signal
import threading
import time

import numpy as np

from jaxrl_llm import curriculum, rewards
from jaxrl_llm.checkpointing import checkpoint, metrics_log, object_store, run_dir
from jaxrl_llm.runner import host_step


def die():
  os.kill(os.getpid(), signal.SIGKILL)


def fill_disk():
  raise OSError(errno.ENOSPC, 'No space left on device')


def term():
  os.kill(os.getpid(), signal.SIGTERM)


def term_twice():
  term()
  time.sleep(0.05)
  term()
  np.linalg.svd(np.ones((4000, 4000)))  # seconds inside C, where no Python signal handler runs


def kill_grader():
  """Kill the worker whose process id is written to the file $JUDGES: see judges.py."""
  pid_file = pathlib.Path(os.environ['JUDGES'])
  pid_file.unlink(missing_ok=True)

  def kill():
    while not pid_file.exists() or not pid_file.read_text():
      time.sleep(0.005)
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    print('killed a grader', flush=True)

  threading.Thread(target=kill, daemon=True).start()


def wrap(owner, name, fault, applies=lambda *_: True, after=False):
  """Wrap owner.name so that `fault` runs before (or after) the calls whose arguments satisfy `applies`."""
  real = getattr(owner, name)

  def wrapped(*args, **keywords):
    if not applies(*args):
      return real(*args, **keywords)
    if not after:
      fault()
    result = real(*args, **keywords)
    if after:
      fault()
    return result

  setattr(owner, name, wrapped)


def writes_arrays(folder: str) -> bool:
  """Whether a save has begun to write arrays into `folder`."""
  try:
    return any(f.is_file() for f in pathlib.Path(folder).glob('*.part/device*/**/*'))
  except FileNotFoundError:
    return False  # renamed during the walk


def die_during_save(folder: str):
  def watch():
    while not writes_arrays(folder):
      time.sleep(0.001)
    die()

  watcher = threading.Thread(target=watch, daemon=True)
  watcher.start()
  # Otherwise the save might end before this thread is scheduled.
  wrap(checkpoint, '_seal', watcher.join)


def is_metrics(writer, *_) -> bool:
  return writer._file.name.endswith('metrics.jsonl')


def half_row(fault):
  real = metrics_log.Writer.write

  def write(self, row):
    if not is_metrics(self):
      return real(self, row)
    text = metrics_log._line(row)
    self._file.write(text[: len(text) // 2])
    self._file.flush()
    fault()
    self._file.seek(0, 2)

  metrics_log.Writer.write = write


def name_ends_with(suffix):
  return lambda path, *_: str(path).endswith(suffix)


def is_marker(store, key, *_) -> bool:
  return key.endswith('.complete')


def is_upload(store, key, *_) -> bool:
  return key.startswith('checkpoints/')


def is_commit(source, target) -> bool:
  return 'checkpoints' in source and source.endswith('.part')


def is_old(path, **_) -> bool:
  return str(path).endswith('.old')


def clock_jump(by_s: float):
  """Patch time.time; returns the function that sets the clock forward by `by_s`."""
  real, offset = time.time, [0.0]
  time.time = lambda: real() + offset[0]
  return lambda: offset.append(offset.pop() + by_s)


def drift():
  """Let the curriculum of this process observe one correct completion more than the others', once."""
  real = curriculum.Curriculum.observe

  def observe(self, index_P, right_P, count_P, *more, **graded):
    first = not self._visits.any()
    real(self, index_P, right_P + (first and right_P < count_P), count_P, *more, **graded)

  curriculum.Curriculum.observe = observe


def inject(fault: dict, run: str) -> None:
  """Inject the fault into this process, which is about to run in the run directory `run`."""
  kind, at, remaining = fault['kind'], fault.get('at'), [fault.get('skip', 0)]
  if kind == 'drift':
    return drift()
  if kind == 'kill grader':
    return wrap(rewards.Pool, 'score', kill_grader)
  effects = {'kill': die, 'full': fill_disk, 'term': term, 'term twice': term_twice}
  effect = clock_jump(fault['by']) if kind == 'leap' else effects[kind]
  if at == 'device':
    effect = functools.partial(die_during_save, os.path.join(run, 'checkpoints'))

  def on_stage():
    remaining[0] -= 1
    if remaining[0] == -1:
      effect()

  return _stages(on_stage)[at]()


def _stages(on_stage) -> dict:
  """By stage, a function that lets `on_stage` run whenever the stage is reached."""
  c, store = checkpoint, object_store.Store
  return dict(
    begin=lambda: wrap(c, 'check_space', on_stage),
    device=lambda: wrap(c, 'check_space', on_stage),
    flushed=lambda: wrap(c, '_seal', on_stage),
    host=lambda: wrap(c, '_write', on_stage, name_ends_with('host.json')),
    manifest=lambda: wrap(c, '_write', on_stage, name_ends_with('manifest.json')),
    sealed=lambda: wrap(c, '_write', on_stage, name_ends_with('manifest.json'), after=True),
    read_back=lambda: wrap(c, '_read_back', on_stage),
    commit=lambda: wrap(os, 'replace', on_stage, is_commit),
    committed=lambda: wrap(c, '_retain', on_stage),
    retention=lambda: wrap(shutil, 'rmtree', on_stage, is_old),
    upload=lambda: wrap(store, 'write', on_stage, is_upload),
    marker=lambda: wrap(store, 'write', on_stage, is_marker),
    marked=lambda: wrap(store, 'write', on_stage, is_marker, after=True),
    unmarked=lambda: wrap(store, 'delete', on_stage, is_marker, after=True),
    propose=lambda: wrap(host_step, 'build_inputs', on_stage),
    land=lambda: wrap(host_step, 'finish', on_stage),
    rollouts=lambda: wrap(run_dir.RunDirectory, 'write_rollouts', on_stage),
    half_row=lambda: half_row(on_stage),
    row=lambda: wrap(metrics_log.Writer, 'write', on_stage, is_metrics, after=True),
    evaluation=lambda: wrap(run_dir.RunDirectory, 'write_eval', on_stage),
  )
