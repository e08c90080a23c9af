"""Environment steps for a batch of episodes: shipped environments in this process, a user's in a worker pool.

A worker past its deadline is killed. A failure is an outcome of its episode; no call raises for it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple, cast

import pebble
from absl import logging

from jaxrl_llm.environments.protocol import Environment, Result, first_observation, replay
from jaxrl_llm.environments.resolve import EnvironmentSettings, resolve
from jaxrl_llm.rewards import CRASH, ERROR, OK, TIMEOUT
from jaxrl_llm.rewards.outcomes import describe
from jaxrl_llm.rewards.pool import CleanContext
from jaxrl_llm.types import JsonObject, Row

_TRIES = 2  # of an episode whose worker broke, possibly through another process


class TurnRequest(NamedTuple):
  """One episode: its turns so far, the newest last. Without turns, the first observation is requested."""

  row: Row
  seed: int
  texts: list[str]


class TurnResult(NamedTuple):
  """The result of a TurnRequest. Without the outcome OK there are no results."""

  outcome: int  # one of OK, TIMEOUT, CRASH, ERROR of rewards
  message: str
  results: list[Result]  # of the last turns, at least one
  first_observation: str | None = None


class WorkerPool:
  """Environments of one `config.environment`. Workers start when first needed; `close` ends them."""

  def __init__(self, settings: EnvironmentSettings):
    """Raises UserError as `resolve` does. With fn='none', `run` must not be called."""
    self.settings, self.factory = dict(settings), resolve(settings)
    self._processes: pebble.ProcessPool | None = None

  def close(self) -> None:
    """Kills every worker. A later `run` starts new ones."""
    processes, self._processes = self._processes, None
    if processes is not None:
      processes.stop()
      processes.join()

  def run(self, requests: Sequence[TurnRequest]) -> list[TurnResult]:
    """The environments' results, in the order of the requests."""
    if self.factory is None:
      raise ValueError("config.environment.fn='none' has no environments to run")
    if self.factory.inline:
      return [run_episode(self.factory.make, request) for request in requests]
    try:
      return self._run_in_workers(list(requests))
    except BaseException:  # Ctrl-C too: workers must not go on with an abandoned call
      self.close()
      raise

  def _run_in_workers(self, requests: list[TurnRequest]) -> list[TurnResult]:
    results: dict[int, TurnResult] = {}
    for tries in range(1, _TRIES + 1):
      pending = {n: self._submit(r) for n, r in enumerate(requests) if n not in results}
      for n, future in pending.items():
        result = _result(future, last=tries == _TRIES)
        if result is not None:
          results[n] = result
      if len(results) < len(requests):
        logging.warning('Workers of config.environment broke; starting new ones.')
        self.close()
    return [results[n] for n in range(len(requests))]

  def _submit(self, request: TurnRequest) -> futures.Future:
    if self._processes is None:
      self._processes = pebble.ProcessPool(
        max_workers=self.settings['workers'],
        initializer=start_worker,
        initargs=(self.settings,),
        context=cast(Any, CleanContext()),
      )
    try:
      return self._processes.schedule(
        run_in_worker, args=(request,), timeout=self.settings['deadline_s']
      )
    except RuntimeError as error:  # the pool is broken
      future: futures.Future = futures.Future()
      future.set_exception(BrokenProcessPool(str(error)))
      return future


def _result(future: futures.Future, last: bool) -> TurnResult | None:
  """The result of a worker; None where the episode is to be tried again, which `last` excludes."""
  error = future.exception()
  if error is None:
    return future.result()
  killed = isinstance(error, pebble.ProcessExpired) and error.exitcode == -signal.SIGKILL
  if (killed or isinstance(error, BrokenProcessPool)) and not last:
    return None
  if isinstance(error, futures.TimeoutError):
    return TurnResult(TIMEOUT, 'TimeoutError: past config.environment.deadline_s', [])
  if isinstance(error, pebble.ProcessExpired | BrokenProcessPool):
    return TurnResult(CRASH, f'{type(error).__name__}: the worker ended', [])
  return TurnResult(ERROR, describe(error).decode('utf-8', 'replace'), [])


_make: Callable[[], Environment] | None = None


def start_worker(settings: JsonObject) -> None:
  """Prepares a new worker process."""
  global _make
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  # A user's environment may import jax. The accelerator belongs to the parent process.
  os.environ['JAX_PLATFORMS'] = 'cpu'
  factory = resolve(settings)
  assert factory is not None
  _make = factory.make


def run_in_worker(request: TurnRequest) -> TurnResult:
  """`run_episode` with the worker's environment."""
  assert _make is not None, 'start_worker has not run'
  return run_episode(_make, request)


def run_episode(make: Callable[[], Environment], request: TurnRequest) -> TurnResult:
  """Creates an environment and replays the episode; an exception becomes the outcome ERROR or CRASH."""
  try:
    if not request.texts:
      return TurnResult(OK, '', [], first_observation(make(), request.row, request.seed))
    return TurnResult(OK, '', replay(make(), request.row, request.seed, request.texts))
  except Exception as error:
    outcome = CRASH if isinstance(error, MemoryError) else ERROR
    return TurnResult(outcome, describe(error).decode('utf-8', 'replace'), [])
