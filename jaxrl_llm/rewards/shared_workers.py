"""Worker processes that calls in several threads share. They start when they are needed, and again after they broke."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.context
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import pebble

_MAX_RESTARTS = 3

_main_lock = threading.Lock()


class Team(NamedTuple):
  """Processes that were started together."""

  processes: pebble.ProcessPool
  started: ctypes.c_bool  # whether one of them has
  futures: set[futures.Future]  # of what they were given, until `SharedWorkers.drop` or `discard`


class SharedWorkers:
  """The newest team. Tasks of a team that is dropped end with BrokenProcessPool."""

  def __init__(
    self, start: Callable[[CleanContext, ctypes.c_bool], pebble.ProcessPool]
  ):  # fmt: skip
    """`start` returns new processes, of which each sets the flag once it runs."""
    self._start = start
    self._lock = threading.Lock()  # of all fields below
    self.newest: Team | None = None  # None: no worker was needed
    self._ended = False

  def schedule(
    self, function: Callable, args: tuple, timeout_s: float
  ) -> tuple[futures.Future, Team]:
    """Give a task to the newest team. Raises RuntimeError where none can be started, or after `end`."""
    for _ in range(_MAX_RESTARTS):
      with self._lock:
        team = self._team()
        try:
          future = team.processes.schedule(function, args=args, timeout=timeout_s)
          team.futures.add(future)
          return future, team
        except RuntimeError:  # the team broke since the last task: an idle worker died
          pass
      self.drop(team)
    raise RuntimeError(
      'the grading workers cannot be started; what they wrote above to standard error says why'
    )

  def drop(self, team: Team | None) -> None:
    """Kill this team, unless another thread did."""
    with self._lock:
      if team is None or team is not self.newest:
        return
      self.newest = None
      team.processes.stop()
    team.processes.join()
    for future in team.futures:  # pebble leaves them as they are
      if not future.done():
        future.set_exception(BrokenProcessPool('the workers were killed'))

  def close(self) -> None:
    """Kill the newest team. A later task starts another."""
    self.drop(self.newest)

  def end(self) -> None:
    """Kill the newest team for good: threads that go on start no other."""
    with self._lock:
      self._ended = True
    self.close()

  def _team(self) -> Team:
    if self._ended:
      raise RuntimeError('the grading workers were ended')
    if self.newest is None:
      context = CleanContext()
      # Without a lock, which a worker that is killed could hold.
      started = context.RawValue(ctypes.c_bool, False)
      self.newest = Team(self._start(context, started), started, set())
    return self.newest


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
  """Hide the origin of __main__, which a spawned process would import again, and jax with it."""
  main = sys.modules['__main__']
  with _main_lock:
    hidden = {name: vars(main)[name] for name in ('__spec__', '__file__') if name in vars(main)}
    main.__spec__ = None
    vars(main).pop('__file__', None)
    try:
      yield
    finally:
      vars(main).update(hidden)


class _CleanProcess(multiprocessing.context.SpawnProcess):
  def start(self) -> None:
    with _hidden_main():
      super().start()


class CleanContext(multiprocessing.context.SpawnContext):
  """A start method whose workers do not import the user's main module."""

  Process = _CleanProcess
