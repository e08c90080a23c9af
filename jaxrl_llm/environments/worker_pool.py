"""Where environments are asked: the shipped ones here, a user's in processes that can be killed. No call raises."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import pebble
from absl import logging

from jaxrl_llm.environments.protocol import Result, opening, replayed
from jaxrl_llm.environments.resolve import resolve
from jaxrl_llm.rewards import CRASH, ERROR, OK, TIMEOUT
from jaxrl_llm.rewards.pool import CleanContext
from jaxrl_llm.rewards.worker import describe
from jaxrl_llm.types import Row

_TRIES = 2  # of an item whose workers broke under it, which need not be its doing


class TurnRequest(NamedTuple):
  """One episode: the turns so far, the newest last; without any, its beginning is asked for."""

  row: Row
  seed: int
  texts: list[str]


class TurnResult(NamedTuple):
  """What came of it. Where the outcome is not OK, there are no results."""

  outcome: int  # one of OK, TIMEOUT, CRASH, ERROR of grade
  message: str
  results: list[Result]  # of the last turns, one at least
  opening: str | None = None  # what was shown before the first turn


class WorkerPool:
  """Environments of one `config.environment`. Workers start when first needed; `close` ends them."""

  def __init__(self, spec: Any):
    """Raises UserError as `resolve` does. fn='none' answers nothing and must not be asked."""
    self.spec, self.factory = dict(spec), resolve(spec)
    self._processes: pebble.ProcessPool | None = None

  def close(self) -> None:
    """Kills every worker. A later question starts new ones."""
    processes, self._processes = self._processes, None
    if processes is not None:
      processes.stop()
      processes.join()

  def run(self, asked: Sequence[TurnRequest]) -> list[TurnResult]:
    """What the environments say, in that order. One that raises, ends or takes too long is an outcome of its own."""
    if self.factory.inline:
      return [attempt(self.factory.make, one) for one in asked]
    try:
      return self._worked(list(asked))
    except BaseException:  # Ctrl-C too: what still runs belongs to a call that is over
      self.close()
      raise

  def _worked(self, asked: list[TurnRequest]) -> list[TurnResult]:
    heard: list[TurnResult | None] = [None] * len(asked)
    for last in range(_TRIES):
      todo = [n for n, one in enumerate(heard) if one is None]
      pending = {n: self._submit(asked[n]) for n in todo}
      for n, future in pending.items():
        heard[n] = _settled(future, last + 1 == _TRIES)
      if any(one is None for one in heard):
        logging.warning('Workers of config.environment broke; starting new ones.')
        self.close()
    return heard

  def _submit(self, one: TurnRequest) -> futures.Future:
    if self._processes is None:
      self._processes = pebble.ProcessPool(
        max_workers=self.spec['workers'],
        initializer=start,
        initargs=(self.spec,),
        context=CleanContext(),
      )
    try:
      return self._processes.schedule(work, args=(one,), timeout=self.spec['deadline_s'])
    except RuntimeError as error:  # broken
      future = futures.Future()
      future.set_exception(BrokenProcessPool(str(error)))
      return future


def _settled(future: futures.Future, last: bool) -> TurnResult | None:
  """What a worker said; None where it is to be asked again."""
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


_make: Callable | None = None


def start(spec: dict[str, Any]) -> None:
  """Prepares a new worker. Source: none."""
  global _make
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  # A user's environment may import jax. The accelerator belongs to the parent.
  os.environ['JAX_PLATFORMS'] = 'cpu'
  _make = resolve(spec).make


def work(one: TurnRequest) -> TurnResult:
  """`attempt` in a worker. Source: none."""
  return attempt(_make, one)


def attempt(make: Callable, one: TurnRequest) -> TurnResult:
  """Makes an environment and tells it the turns; whatever it raises is an error of this episode. Source: none."""
  try:
    if not one.texts:
      return TurnResult(OK, '', [], opening(make(), one.row, one.seed))
    return TurnResult(OK, '', replayed(make(), one.row, one.seed, one.texts))
  except Exception as error:
    outcome = CRASH if isinstance(error, MemoryError) else ERROR
    return TurnResult(outcome, describe(error).decode('utf-8', 'replace'), [])
