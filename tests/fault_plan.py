"""A fault planted into the process of a run: dict(kind=, at=, skip=), see faults.py."""

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
from jaxrl_llm.checkpointing import checkpoint, metrics_log, run_dir
from jaxrl_llm.runner import host_step


def die():
  os.kill(os.getpid(), signal.SIGKILL)


def full():
  raise OSError(errno.ENOSPC, 'No space left on device')


def term():
  os.kill(os.getpid(), signal.SIGTERM)


def term_twice():
  term()
  time.sleep(0.05)
  term()
  np.linalg.svd(np.ones((4000, 4000)))  # in C for seconds: no handler of Python's can run


def kill_grader():
  """The worker that says it has begun: see judges.py."""
  told = pathlib.Path(os.environ['JUDGES'])
  told.unlink(missing_ok=True)

  def strike():
    while not told.exists() or not told.read_text():
      time.sleep(0.005)
    os.kill(int(told.read_text()), signal.SIGKILL)
    print('killed a grader', flush=True)

  threading.Thread(target=strike, daemon=True).start()


def wrap(owner, name, happen, wanted=lambda *_: True, after=False):
  """owner.name is called as before, but something happens at wanted calls."""
  real = getattr(owner, name)

  def wrapped(*args, **kw):
    if not wanted(*args):
      return real(*args, **kw)
    if not after:
      happen()
    found = real(*args, **kw)
    if after:
      happen()
    return found

  setattr(owner, name, wrapped)


def seen(folder: str) -> bool:
  """Has a save begun to write arrays there?"""
  try:
    return any(f.is_file() for f in pathlib.Path(folder).glob('*.part/device*/**/*'))
  except FileNotFoundError:
    return False  # renamed while it was walked


def half_written(folder: str):
  def watch():
    while not seen(folder):
      time.sleep(0.001)
    die()

  watcher = threading.Thread(target=watch, daemon=True)
  watcher.start()
  # Else the save may be over before the turn of this thread comes.
  wrap(checkpoint, '_seal', watcher.join)


def of_metrics(writer, *_) -> bool:
  return writer._file.name.endswith('metrics.jsonl')


def half_row(happen):
  real = metrics_log.Writer.write

  def write(self, row):
    if not of_metrics(self):
      return real(self, row)
    text = metrics_log._line(row)
    self._file.write(text[: len(text) // 2])
    self._file.flush()
    happen()
    self._file.seek(0, 2)

  metrics_log.Writer.write = write


def name_is(end):
  return lambda path, *_: str(path).endswith(end)


def commits(source, target) -> bool:
  return 'checkpoints' in source and source.endswith('.part')


def old(path, **_) -> bool:
  return str(path).endswith('.old')


def leaping(by: float):
  """The clock, and what sets it forward."""
  real, ahead = time.time, [0.0]
  time.time = lambda: real() + ahead[0]
  return lambda: ahead.append(ahead.pop() + by)


def drift():
  """What this process has seen of a prompt's answers is one right one more, once."""
  real = curriculum.Curriculum.observe

  def observe(self, index_P, right_P, count_P, *more):
    first = not self._visits.any()
    real(self, index_P, right_P + (first and right_P < count_P), count_P, *more)

  curriculum.Curriculum.observe = observe


def plan(fault: dict, run: str) -> None:
  """Lets the fault happen in this process, in the run of that folder."""
  kind, at, left, c = fault['kind'], fault.get('at'), [fault.get('skip', 0)], checkpoint
  if kind == 'drift':
    return drift()
  if kind == 'kill grader':
    return wrap(rewards.Pool, 'score', kill_grader)
  do = {'kill': die, 'full': full, 'term': term, 'term twice': term_twice}
  do = leaping(fault['by']) if kind == 'leap' else do[kind]
  if at == 'device':
    do = functools.partial(half_written, os.path.join(run, 'checkpoints'))

  def happen():
    left[0] -= 1
    if left[0] == -1:
      do()

  stages = dict(
    begin=lambda: wrap(c, 'check_space', happen),
    device=lambda: wrap(c, 'check_space', happen),
    flushed=lambda: wrap(c, '_seal', happen),
    host=lambda: wrap(c, '_write', happen, name_is('host.json')),
    manifest=lambda: wrap(c, '_write', happen, name_is('manifest.json')),
    sealed=lambda: wrap(c, '_write', happen, name_is('manifest.json'), after=True),
    read_back=lambda: wrap(c, '_read_back', happen),
    commit=lambda: wrap(os, 'replace', happen, commits),
    committed=lambda: wrap(c, '_retain', happen),
    retention=lambda: wrap(shutil, 'rmtree', happen, old),
    propose=lambda: wrap(host_step, 'propose', happen),
    land=lambda: wrap(host_step, 'land', happen),
    rollouts=lambda: wrap(run_dir.RunDirectory, 'write_rollouts', happen),
    half_row=lambda: half_row(happen),
    row=lambda: wrap(metrics_log.Writer, 'write', happen, of_metrics, after=True),
    evaluation=lambda: wrap(run_dir.RunDirectory, 'write_eval', happen),
  )
  return stages[at]()
