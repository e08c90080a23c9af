"""Grading in worker processes that can be killed: every item has a deadline, every failure a name.

Pebble owns the processes. What it leaves open is closed here: which item of a chunk hung, workers
that would import the user's main module (and jax with it), and a pool that breaks when an idle
worker dies.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import multiprocessing.context
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np
import pebble
from absl import logging

from jaxrl_llm.rewards import format_rules, verifiers, worker
from jaxrl_llm.rewards.gym import sandboxed, scorers
from jaxrl_llm.rewards.resolve import resolve_parts
from jaxrl_llm.rewards.worker import (
  CRASH,
  ERROR,
  FAILURES,
  OK,
  OUTCOMES,
  PENDING,
  SKIP,
  TIMEOUT,
  Limits,
)
from jaxrl_llm.types import Row, UserError

# Linear in the text, whatever it holds, or in its end: they need no deadline, so no worker.
_INLINE = (
  *(verifiers.exact, verifiers.number, verifiers.first_number),
  *(verifiers.bare_number, verifiers.tagged, verifiers.numeric, verifiers.multiple_choice),
  format_rules.tags,
)

_METRICS = {TIMEOUT: 'grade/timeouts', CRASH: 'grade/crashes', ERROR: 'grade/errors'}
_CHUNK_ITEMS = 64
_CHUNK_BYTES = 2**20  # a worker holds a chunk whole
_SLICE_S = 1.0  # the longest a worker keeps starting items of one chunk
_GRACE_S = 1.0  # what the worker's own alarm gets before the pool steps in
_STALL_S = 60.0  # beyond any deadline and any start of a worker: the pool has lost a chunk
_MAX_RESTARTS = 3


class Scores(NamedTuple):
  """What grading gives. Where the outcome is not OK all rewards are 0, and no judgement."""

  parts_BxK: np.ndarray  # float32, by config.rewards.fn and by each of config.rewards.parts
  outcome_B: np.ndarray  # int8, one of OK, TIMEOUT, CRASH, ERROR, SKIP
  counts: dict[str, int]  # metrics: grade/timeouts, grade/crashes, grade/errors
  message: str  # the first failure in words, '' where there is none

  @property
  def reward_B(self) -> np.ndarray:
    """By config.rewards.fn: whether the answer is right."""
    return self.parts_BxK[:, 0]


class Pool:
  """Workers for one `config.rewards`, to be used in `with`. They start when first needed."""

  def __init__(self, spec: Any):
    """Raises UserError for a grader that does not resolve or a bad setting of the workers."""
    self.spec = dict(spec)
    self._workers = self.spec.get('workers', 2)
    self._limits = Limits(
      self.spec.get('deadline_s', 10.0),
      self.spec.get('cpu_s', 10.0),
      self.spec.get('memory_mb', 2048),
    )
    for name, least in (('workers', 1), ('memory_mb', 64)):
      told = self._workers if name == 'workers' else self._limits.memory_mb
      if not isinstance(told, int) or isinstance(told, bool) or told < least:
        raise UserError(f'config.rewards.{name}={told!r} must be a whole number from {least} up.')
    for name in ('deadline_s', 'cpu_s'):
      told = getattr(self._limits, name)
      number = isinstance(told, int | float) and not isinstance(told, bool)
      if not number or not 0 < told < math.inf:
        raise UserError(f'config.rewards.{name}={told!r} must be a positive number of seconds.')
    self._graders = [part.grader for part in resolve_parts(self.spec)]
    self._inline = all(getattr(grader, 'func', None) in _INLINE for grader in self._graders)
    self._result = worker.result(len(self._graders))
    self._slice_s = min(_SLICE_S, self._limits.deadline_s)
    self._gym = any(getattr(grader, 'func', None) is verifiers.gym for grader in self._graders)
    self._sandboxed: frozenset[str] = frozenset()  # tasks that a worker starts a sandbox for
    self._processes: pebble.ProcessPool | None = None

  def __enter__(self) -> Pool:
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def close(self) -> None:
    """Kills every worker. A later call to `score` starts new ones."""
    processes, self._processes = self._processes, None
    if processes is not None:
      processes.stop()
      processes.join()

  def score(self, rows: Sequence[Row], texts: Sequence[str]) -> Scores:
    """Grades texts[b] against rows[b]; results in that order. One call at a time."""
    if len(rows) != len(texts):
      raise ValueError(f'{len(rows)} rows but {len(texts)} texts')
    if self._inline:
      results = [worker.attempt(self._graders, *item) for item in zip(texts, rows, strict=True)]
      return _scores(np.array(results, self._result))
    self._sandbox(rows)
    table = np.zeros(len(rows), self._result)
    kinds = {getattr(grader, 'batched', '') for grader in self._graders}
    if '' in kinds:
      table[:] = self._done(list(zip(texts, rows, strict=True)), worker.Batches())
    for kind in sorted(kinds - {''}):
      groups = _groups(rows, kind)
      items = [([texts[b] for b in at], [rows[b] for b in at]) for at in groups]
      batches = worker.Batches(kind, max(map(len, groups), default=1))
      _lay(table, groups, self._done(items, batches))
    return _scores(table)

  def _sandbox(self, rows: Sequence[Row]) -> None:
    """Has workers start with a sandbox for the tasks in `rows` that need one; those that run without it end."""
    tasks = frozenset(map(sandboxed.task_of, rows)) if self._gym else frozenset()
    if new := tasks & scorers.EVALUATING.keys() - self._sandboxed:
      self._sandboxed |= new
      self.close()

  def _done(self, items: list[tuple], batches: worker.Batches) -> np.ndarray:
    """The results of all items, graded by workers."""
    with tempfile.TemporaryDirectory(prefix='grade-') as folder:
      result = worker.result(len(self._graders), batches.most)
      job = _Job(os.path.join(folder, 'results'), result, items, batches)
      try:
        self._finish(job)
      except BaseException:  # Ctrl-C too: what still runs belongs to a call that is over
        self.close()
        raise
      return np.array(job.table)

  def _finish(self, job: _Job) -> None:
    todo = job.chunks(max(1, min(_CHUNK_ITEMS, math.ceil(len(job.items) / (4 * self._workers)))))
    pending = {self._submit(job, *chunk): chunk for chunk in todo}
    restarts = 0
    while pending:
      wait_s = self._slice_s + self._limits.deadline_s + _STALL_S
      done, _ = futures.wait(pending, wait_s, return_when=futures.FIRST_COMPLETED)
      if not done or any(isinstance(f.exception(), BrokenProcessPool) for f in done):
        restarts += 1
        if restarts > _MAX_RESTARTS:
          raise RuntimeError(f'grading workers broke {restarts} times in a row; their log says why')
        logging.warning('The grading workers broke; starting new ones.')
        self.close()
        chunks = [(job.first_pending(*chunk), chunk[1]) for chunk in pending.values()]
        pending = {self._submit(job, *c): c for c in chunks if c[0] < c[1]}
        continue
      restarts = 0
      for future in done:
        _, stop = chunk = pending.pop(future)
        at = job.settle(future.exception(), *chunk)
        if at < stop:
          pending[self._submit(job, at, stop)] = (at, stop)

  def _submit(self, job: _Job, at: int, stop: int) -> futures.Future:
    items = job.items[at:stop]
    args = (job.path, at, items, self._limits, self._slice_s, job.batches)
    timeout_s = self._slice_s + self._limits.deadline_s + _GRACE_S
    for _ in range(_MAX_RESTARTS):
      if self._processes is None:
        self._processes = pebble.ProcessPool(
          max_workers=self._workers,
          initializer=worker.start,
          initargs=(self.spec, self._limits.memory_mb, self._sandboxed),
          context=CleanContext(),
        )
      try:
        return self._processes.schedule(worker.grade_chunk, args=args, timeout=timeout_s)
      except RuntimeError:  # broken since the last call: an idle worker died
        self.close()
    raise RuntimeError('grading workers cannot be started; their log says why')


class _Job:
  """The items of one call, and the file their results are written to."""

  def __init__(self, path: str, result: np.dtype, items: Sequence[tuple], batches: worker.Batches):
    self.path, self.batches = path, batches
    self.items: list[bytes] = []
    self.again: set[int] = set()
    self.table = np.memmap(path, result, 'w+', shape=max(len(items), 1))[: len(items)]
    self.table['outcome'] = PENDING
    for index, item in enumerate(items):
      try:
        self.items.append(pickle.dumps(item))
      except Exception as error:
        self.items.append(b'')  # fails to unpickle; what counts is why it did not pickle
        self.table[index] = (0.0, worker.describe(error), ERROR)

  def chunks(self, most: int) -> list[tuple[int, int]]:
    """[at, stop) of up to `most` items, and no more of large ones than a worker should hold at once."""
    found, at, held = [], 0, 0
    for index, item in enumerate(self.items):
      if index > at and (index - at == most or held + len(item) > _CHUNK_BYTES):
        found.append((at, index))
        at, held = index, 0
      held += len(item)
    return found + ([(at, len(self.items))] if self.items else [])

  def first_pending(self, at: int, stop: int) -> int:
    """The first item of [at, stop) without a result, or stop."""
    waiting = np.flatnonzero(self.table['outcome'][at:stop] == PENDING)
    return at + int(waiting[0]) if len(waiting) else stop

  def settle(self, error: BaseException | None, at: int, stop: int) -> int:
    """Books the end of a chunk and returns where to go on.

    After an error, the first item without a result is the one that was running. Where its worker was killed
    from outside (an operator, a kernel without memory), that need not be its doing: it is graded once more.
    """
    at = self.first_pending(at, stop)
    if error is None or at == stop:
      return at
    if _killed(error) and at not in self.again:
      self.again.add(at)
      return at
    if isinstance(error, futures.TimeoutError):
      found = TIMEOUT, b'TimeoutError: past the deadline'
    elif isinstance(error, pebble.ProcessExpired):
      found = _ended(error.exitcode)
    else:
      found = ERROR, worker.describe(error)
    self.table[at] = (0.0, found[1], found[0])
    return self.first_pending(at, stop)


def _killed(error: BaseException | None) -> bool:
  return isinstance(error, pebble.ProcessExpired) and error.exitcode == -signal.SIGKILL


def _ended(code: int) -> tuple[int, bytes]:
  """The outcome of the item that a worker was at when it ended with `code`."""
  if code == -signal.SIGALRM:
    return TIMEOUT, b'TimeoutError: past the deadline'
  if code == -signal.SIGPROF:
    return TIMEOUT, b'TimeoutError: past config.rewards.cpu_s'
  if code == worker.NO_MEMORY:
    return CRASH, b'MemoryError: beyond config.rewards.memory_mb'
  return CRASH, f'ProcessExpired: the worker ended with code {code}'.encode()


def _groups(rows: Sequence[Row], kind: str) -> list[list[int]]:
  """Which replies a batched grader sees at once: those to one prompt, or all."""
  found: dict[str, list[int]] = {}
  for b, row in enumerate(rows):
    found.setdefault(row.id if kind == 'group' else '', []).append(b)
  return list(found.values())


def _lay(table: np.ndarray, groups: list[list[int]], done: np.ndarray) -> None:
  """Adds what batched graders said of the replies at[0], at[1], … of each group; what failed, failed for all of it."""
  for at, given in zip(groups, done, strict=True):
    if given['outcome'] != OK:
      held = np.isin(table['outcome'][at], FAILURES)
      table[np.array(at)[~held]] = (0.0, given['message'], given['outcome'])
      continue
    reward_NxK = given['reward'].reshape(-1, table['reward'].shape[1])[: len(at)]
    for b, reward_K in zip(at, reward_NxK, strict=True):
      if table['outcome'][b] == OK and math.isnan(reward_K[0]):
        table[b] = (0.0, b'', SKIP)
      elif table['outcome'][b] == OK:
        table['reward'][b] += np.nan_to_num(reward_K)


def _scores(table: np.ndarray) -> Scores:
  outcome_B = table['outcome'].astype(np.int8)
  counts = {name: int(np.sum(outcome_B == code)) for code, name in _METRICS.items()}
  failed = np.flatnonzero(np.isin(outcome_B, FAILURES))
  message = ''
  if len(failed):
    message = bytes(table['message'][failed[0]]).decode('utf-8', 'replace')
    kinds = ', '.join(f'{np.sum(outcome_B == code)} {OUTCOMES[code]}' for code in FAILURES)
    logging.warning(
      'Grading failed on %d of %d items (%s); the first: %s',
      len(failed), len(table), kinds, message,
    )  # fmt: skip
  return Scores(table['reward'].astype(np.float32), outcome_B, counts, message)


_main_lock = threading.Lock()


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
  """Hides where __main__ came from: a spawned process would import it again, whole, and jax with
  it."""
  main = sys.modules['__main__']
  with _main_lock:
    kept = {name: vars(main)[name] for name in ('__spec__', '__file__') if name in vars(main)}
    main.__spec__ = None
    vars(main).pop('__file__', None)
    try:
      yield
    finally:
      vars(main).update(kept)


class _CleanProcess(multiprocessing.context.SpawnProcess):
  def start(self) -> None:
    with _hidden_main():
      super().start()


class CleanContext(multiprocessing.context.SpawnContext):
  """Workers that do not import the user's main module."""

  Process = _CleanProcess
