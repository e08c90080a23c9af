"""Grading in worker processes that can be killed, with a deadline and a recorded outcome for every item.

Pebble manages the processes. This module adds three things: it finds the item of a chunk that hung, it keeps
workers from importing the user's main module (and jax with it), and it restarts a pool that an idle worker's death
broke. Calls from several threads share the workers, first come, first served.
"""

from __future__ import annotations

import ctypes
import math
import os
import pickle
import signal
import tempfile
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple, Protocol

import numpy as np
import pebble
from absl import logging

from jaxrl_llm.rewards import format_rules, outcomes, verifiers, worker
from jaxrl_llm.rewards.gym import sandboxed, scorers
from jaxrl_llm.rewards.outcomes import CRASH, ERROR, FAILURES, OK, OUTCOMES, SKIP, TIMEOUT
from jaxrl_llm.rewards.resolve import Spec, resolve_parts
from jaxrl_llm.rewards.shared_workers import CleanContext, SharedWorkers, Team
from jaxrl_llm.rewards.worker import PENDING, Limits
from jaxrl_llm.types import Row, UserError

# Their time is linear in the completion's length, or in that of its tail: they run without a deadline and a worker.
_INLINE = (
  *(verifiers.exact, verifiers.number, verifiers.first_number, verifiers.short_answer),
  *(verifiers.bare_number, verifiers.tagged, verifiers.numeric, verifiers.multiple_choice),
  format_rules.tags,
)

_METRICS = {TIMEOUT: 'grade/timeouts', CRASH: 'grade/crashes', ERROR: 'grade/errors'}
_CHUNK_ITEMS = 64
_CHUNK_BYTES = 2**20  # a worker holds all items of a chunk in memory
_CHUNK_S = 1.0  # a worker starts no item of a chunk later than this
_GRACE_S = 1.0  # between the worker's own alarm and the time-out of the pool
_STALL_S = 60.0  # of workers that have started: after it the pool has lost a chunk
_START_S = 600.0  # for the first worker to start, which imports the user's module
_MAX_RESTARTS = 3


class Scores(NamedTuple):
  """The results of grading. Rewards are 0 wherever the outcome is not OK, and do not mean a wrong completion."""

  parts_BxK: np.ndarray  # float32, from config.rewards.fn and each of config.rewards.parts
  outcome_B: np.ndarray  # int8, one of OK, TIMEOUT, CRASH, ERROR, SKIP
  counts: dict[str, int]  # metrics: grade/timeouts, grade/crashes, grade/errors
  message: str  # error message of the first failure, '' without one

  @property
  def reward_B(self) -> np.ndarray:
    """The rewards from config.rewards.fn, which decide correctness."""
    return self.parts_BxK[:, 0]


class ScorePool(Protocol):
  """A `Pool`, or several processes that grade as one."""

  def score(self, rows: Sequence[Row], completions: Sequence[str]) -> Scores: ...


class Pool:
  """Workers for one `config.rewards`, used as a context manager. They start at the first call that needs them."""

  def __init__(self, spec: Spec):
    """Raises UserError for a grader that does not resolve and for worker settings out of range."""
    self.spec = dict(spec)
    self._workers = self.spec.get('workers', 2)
    self._limits = Limits(
      self.spec.get('deadline_s', 10.0),
      self.spec.get('cpu_s', 10.0),
      self.spec.get('memory_mb', 2048),
    )
    _check_settings(self._workers, self._limits)
    self._graders = [part.grader for part in resolve_parts(self.spec)]
    self._inline = all(getattr(grader, 'func', None) in _INLINE for grader in self._graders)
    self._dtype = worker.result_dtype(len(self._graders))
    self._chunk_s = min(_CHUNK_S, self._limits.deadline_s)
    self._gym = any(getattr(grader, 'func', None) is verifiers.gym for grader in self._graders)
    self._sandboxed: frozenset[str] = frozenset()  # tasks for which workers start a sandbox
    self._processes = SharedWorkers(self._start)
    self._ended = 0  # chunks of all calls

  def __enter__(self) -> Pool:
    return self

  def __exit__(self, *_: object) -> None:
    self._processes.end()

  def close(self) -> None:
    """Kill every worker. Calls that go on, and later ones, start new ones."""
    self._processes.close()

  def score(self, rows: Sequence[Row], completions: Sequence[str]) -> Scores:
    """Grade completions[b] against rows[b]; results in that order."""
    if len(rows) != len(completions):
      raise ValueError(f'{len(rows)} rows but {len(completions)} completions')
    if self._inline:
      items = zip(completions, rows, strict=True)
      results = [outcomes.attempt(self._graders, *item) for item in items]
      return _scores(np.array(results, self._dtype))
    self._add_sandboxes(rows)
    table = np.zeros(len(rows), self._dtype)
    kinds = {getattr(grader, 'batched', '') for grader in self._graders}
    if '' in kinds:
      table[:] = self._grade(list(zip(completions, rows, strict=True)), worker.ItemShape())
    for kind in sorted(kinds - {''}):
      groups = _groups(rows, kind)
      items = [([completions[b] for b in group], [rows[b] for b in group]) for group in groups]
      shape = worker.ItemShape(kind, max(map(len, groups), default=1))
      _add_batched(table, groups, self._grade(items, shape))
    return _scores(table)

  def _add_sandboxes(self, rows: Sequence[Row]) -> None:
    """Restart the workers where a task of `rows` needs a sandbox that they were started without."""
    tasks = frozenset(map(sandboxed.task_of, rows)) if self._gym else frozenset()
    if new := tasks & scorers.EVALUATING.keys() - self._sandboxed:
      self._sandboxed |= new
      self.close()

  def _grade(self, items: list[tuple], shape: worker.ItemShape) -> np.ndarray:
    """The results of all items, from workers."""
    with tempfile.TemporaryDirectory(prefix='grade-') as folder:
      dtype = worker.result_dtype(len(self._graders), shape.size)
      job = _Job(os.path.join(folder, 'results'), dtype, items, shape)
      try:
        self._run(job)
      except BaseException:  # Ctrl-C too: work in progress belongs to a call that has ended
        self.close()
        raise
      return np.array(job.table)

  def _run(self, job: _Job) -> None:
    chunks = job.chunks(max(1, min(_CHUNK_ITEMS, math.ceil(len(job.items) / (4 * self._workers)))))
    pending = dict(self._submit(job, *chunk) for chunk in chunks)
    restarts = 0
    while pending:
      done = self._wait(pending)
      if not done or any(isinstance(f.exception(), BrokenProcessPool) for f in done):
        restarts += 1
        if restarts > _MAX_RESTARTS:
          raise RuntimeError(
            f'the grading workers broke {restarts} times in a row; what they wrote above to standard error says why'
          )
        logging.warning('The grading workers broke; starting new ones.')
        for chunk in pending.values():
          self._processes.drop(chunk.team)
        chunks = [(job.first_pending(c.first, c.stop), c.stop) for c in pending.values()]
        pending = dict(self._submit(job, *c) for c in chunks if c[0] < c[1])
        continue
      restarts = 0
      for future in done:
        chunk = pending.pop(future)
        chunk.team.futures.discard(future)
        self._ended += 1
        first = job.record_end(future.exception(), chunk.first, chunk.stop)
        if first < chunk.stop:
          pending.update([self._submit(job, first, chunk.stop)])

  def _wait(self, pending: Mapping[futures.Future, _Chunk]) -> set[futures.Future]:
    """The chunks that ended; none where started workers have lost them. Raises UserError where no worker starts."""
    wait_s = self._chunk_s + self._limits.deadline_s + _STALL_S
    waited_s, team = 0.0, next(iter(pending.values())).team
    while True:
      started, ended = team.started.value, self._ended
      done, _ = futures.wait(pending, wait_s, return_when=futures.FIRST_COMPLETED)
      if done:
        return done
      if self._ended > ended:  # the workers are at the chunks of other calls
        continue
      if started:
        return done
      waited_s += wait_s
      if waited_s > _START_S:
        raise UserError(
          f'config.rewards.fn={self.spec["fn"]!r}: no grading worker has started within {waited_s:.0f} s; import less '
          'in its module, or lower --config.rewards.workers.'
        )
      logging.warning('The grading workers have been starting for %.0f s.', waited_s)

  def _submit(self, job: _Job, first: int, stop: int) -> tuple[futures.Future, _Chunk]:
    items = job.items[first:stop]
    args = (job.path, first, items, self._limits, self._chunk_s, job.shape)
    timeout_s = self._chunk_s + self._limits.deadline_s + _GRACE_S
    future, team = self._processes.schedule(worker.grade_chunk, args, timeout_s)
    return future, _Chunk(first, stop, team)

  def _start(self, context: CleanContext, started: ctypes.c_bool) -> pebble.ProcessPool:
    initargs = (self.spec, self._limits.memory_mb, self._sandboxed, started)
    return pebble.ProcessPool(
      max_workers=self._workers, initializer=worker.start, initargs=initargs, context=context
    )


class _Chunk(NamedTuple):
  """Items [first, stop) of a call, and the processes that grade them."""

  first: int
  stop: int
  team: Team


def _check_settings(workers: Any, limits: Limits) -> None:
  """Raise UserError for a number of workers or limits out of range."""
  for name, value, least in (('workers', workers, 1), ('memory_mb', limits.memory_mb, 64)):
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
      raise UserError(
        f'config.rewards.{name}={value!r} must be a whole number of at least {least}.'
      )
  for name, value in (('deadline_s', limits.deadline_s), ('cpu_s', limits.cpu_s)):
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
      raise UserError(f'config.rewards.{name}={value!r} must be a positive number of seconds.')


class _Job:
  """The items of one call, and the file with their results."""

  def __init__(self, path: str, dtype: np.dtype, items: Sequence[tuple], shape: worker.ItemShape):
    self.path, self.shape = path, shape
    self.items: list[bytes] = []
    self.retried: set[int] = set()
    self.table = np.memmap(path, dtype, 'w+', shape=max(len(items), 1))[: len(items)]
    self.table['outcome'] = PENDING
    for index, item in enumerate(items):
      try:
        self.items.append(pickle.dumps(item))
      except Exception as error:
        self.items.append(b'')  # a placeholder: the item has its result, and no worker reads it
        self.table[index] = (0.0, outcomes.describe(error), ERROR)

  def chunks(self, most_items: int) -> list[tuple[int, int]]:
    """Ranges [first, stop) of at most `most_items` items, fewer where items are large."""
    ranges, first, size_bytes = [], 0, 0
    for index, item in enumerate(self.items):
      full = index - first == most_items or size_bytes + len(item) > _CHUNK_BYTES
      if index > first and full:
        ranges.append((first, index))
        first, size_bytes = index, 0
      size_bytes += len(item)
    return ranges + ([(first, len(self.items))] if self.items else [])

  def first_pending(self, first: int, stop: int) -> int:
    """The first item of [first, stop) without a result, or stop."""
    waiting = np.flatnonzero(self.table['outcome'][first:stop] == PENDING)
    return first + int(waiting[0]) if len(waiting) else stop

  def record_end(self, error: BaseException | None, first: int, stop: int) -> int:
    """Record how a chunk ended; return the item to continue from, or stop.

    After an error, the first item without a result is the one that was running. SIGKILL may come from outside (an
    operator, or the kernel out of memory) and not be the item's fault: such an item is graded once more.
    """
    running = self.first_pending(first, stop)
    if error is None or running == stop:
      return running
    if _killed(error) and running not in self.retried:
      self.retried.add(running)
      return running
    if isinstance(error, futures.TimeoutError):
      outcome, message = TIMEOUT, b'TimeoutError: past the deadline'
    elif isinstance(error, pebble.ProcessExpired):
      outcome, message = _outcome_of_exit(error.exitcode)
    else:
      outcome, message = ERROR, outcomes.describe(error)
    self.table[running] = (0.0, message, outcome)
    return self.first_pending(running, stop)


def _killed(error: BaseException | None) -> bool:
  return isinstance(error, pebble.ProcessExpired) and error.exitcode == -signal.SIGKILL


def _outcome_of_exit(code: int) -> tuple[int, bytes]:
  """(outcome, message) of the item that was running when its worker exited with `code`."""
  if code == -signal.SIGALRM:
    return TIMEOUT, b'TimeoutError: past the deadline'
  if code == -signal.SIGPROF:
    return TIMEOUT, b'TimeoutError: past config.rewards.cpu_s'
  if code == worker.OUT_OF_MEMORY:
    return CRASH, b'MemoryError: beyond config.rewards.memory_mb'
  return CRASH, f'ProcessExpired: the worker ended with code {code}'.encode()


def _groups(rows: Sequence[Row], kind: str) -> list[list[int]]:
  """Indices of the completions of each call: those of one prompt for 'group', all of them for 'step'."""
  groups: dict[str, list[int]] = {}
  for b, row in enumerate(rows):
    groups.setdefault(row.id if kind == 'group' else '', []).append(b)
  return list(groups.values())


def _add_batched(table: np.ndarray, groups: list[list[int]], results: np.ndarray) -> None:
  """Add the rewards of batched graders to `table`; a failed call fails all completions of its group."""
  for group, result in zip(groups, results, strict=True):
    if result['outcome'] != OK:
      failed = np.isin(table['outcome'][group], FAILURES)  # these keep their first failure
      table[np.array(group)[~failed]] = (0.0, result['message'], result['outcome'])
      continue
    reward_NxK = result['reward'].reshape(-1, table['reward'].shape[1])[: len(group)]
    for b, reward_K in zip(group, reward_NxK, strict=True):
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
      'Grading failed on %d of %d items (%s); the first failure: %s',
      len(failed), len(table), kinds, message,
    )  # fmt: skip
  return Scores(table['reward'].astype(np.float32), outcome_B, counts, message)
