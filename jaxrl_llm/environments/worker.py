"""A worker process that holds live episodes: the code that runs in it, and its handle in the trainer's process."""

from __future__ import annotations

import collections
import contextlib
import math
import os
import signal
import sys
import time
from multiprocessing.connection import Connection, Pipe
from typing import NamedTuple

from jaxrl_llm.environments.live import EpisodeKey, LiveEpisodes, TurnRequest, TurnResult
from jaxrl_llm.environments.resolve import resolve
from jaxrl_llm.rewards.shared_workers import CleanContext
from jaxrl_llm.rewards.worker import limit_memory, time_limits
from jaxrl_llm.types import JsonObject

TERMINATED = 128 + signal.SIGTERM  # exit code of a worker that got SIGTERM
_START_S = 300.0  # longer than the imports of any environment
_GRACE_S = 1.0  # between the worker's own alarm and the parent's kill


class Command(NamedTuple):
  """A call of `LiveEpisodes`."""

  method: str  # open, step or end
  arguments: tuple
  calls: int = 1  # of the environment, each with a deadline of its own

  def run(self, live: LiveEpisodes) -> TurnResult:
    return getattr(live, self.method)(*self.arguments)


class Job:
  """What a caller waits for: a turn of an episode, or with `request` None its end."""

  def __init__(self, key: EpisodeKey, request: TurnRequest | None):
    self.key, self.request = key, request
    self.tries = 0
    self.result: TurnResult | None = None


class Worker:
  """The handle of a worker process. It runs one command at a time."""

  def __init__(self, settings: JsonObject):
    """Start a process with the environment of `settings`, which is config.environment."""
    self._deadline_s = settings['deadline_s']
    self.connection, theirs = Pipe()
    self.process = CleanContext().Process(target=serve, args=(theirs, settings), daemon=True)
    self.process.start()
    theirs.close()  # the worker's end: its death then closes the pipe
    self.ready = False
    self.job: Job | None = None  # the running one
    self.queue: collections.deque[Job] = collections.deque()
    # A start or a command that takes longer is given up; infinite while nothing runs.
    self.deadline = time.monotonic() + _START_S

  def receive(self) -> None:
    """Take the result of the running job, or the news that the process has started."""
    result = self.connection.recv()
    if self.job is not None:
      self.job.result, self.job = result, None
    self.ready, self.deadline = True, math.inf

  def send(self, job: Job, command: Command) -> None:
    """Start a command. Raises OSError where the worker has ended, other exceptions where it does not pickle."""
    self.connection.send(command)
    self.job = job
    self.deadline = time.monotonic() + command.calls * self._deadline_s + _GRACE_S

  def kill(self, wait_s: float = 0.0) -> int | None:
    """Wait for the process to end, then kill it with the processes it started; return its exit code."""
    pid = self.process.pid
    assert pid is not None, 'the process has not been started'
    self.process.join(wait_s)
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(pid, signal.SIGKILL)  # the group that `serve` made
    self.process.kill()
    self.process.join()
    self.connection.close()
    return self.process.exitcode

  def hang_up(self) -> None:
    """Close the pipe, upon which the worker closes its environments and ends."""
    self.connection.close()

  def wait(self, episodes: int) -> None:
    """Wait after `hang_up` for the end of a worker with so many live episodes."""
    running_s = max(0.0, self.deadline - time.monotonic()) if self.job else 0.0
    self.kill(running_s + (1 + episodes) * self._deadline_s + _GRACE_S if self.ready else 0.0)


def serve(connection: Connection, settings: JsonObject) -> None:
  """Run commands until the other end of the pipe is closed, by the trainer or by its death."""
  os.setsid()  # a group of its own: Ctrl-C does not reach it, and a kill reaches what environments started
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
  # A user's environment may import jax. The accelerator belongs to the parent process.
  os.environ['JAX_PLATFORMS'] = 'cpu'
  factory = resolve(settings)
  assert factory is not None
  if settings['worker_memory_mb']:
    limit_memory(settings['worker_memory_mb'] * 2**20)
  limits = settings['deadline_s'], settings['cpu_s']
  live = LiveEpisodes(factory.make)
  try:
    connection.send(None)  # ready
    while True:
      command = connection.recv()
      with time_limits(*(command.calls * seconds for seconds in limits)):
        result = command.run(live)
      connection.send(result)
  except (EOFError, OSError):
    pass
  finally:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for key in live.keys():
      with time_limits(*limits):
        live.end(key)
