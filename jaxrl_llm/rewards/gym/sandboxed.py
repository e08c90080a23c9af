"""Scores of reasoning-gym's evaluating tasks, from a server process in the sandbox: see server.py.

A process starts at most two such servers, one with sympy and one without, and requests one score at a time.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import pathlib
import secrets
import subprocess
import threading
from collections.abc import Iterable

from jaxrl_llm.rewards.code_execution import sandbox
from jaxrl_llm.rewards.gym import scorers
from jaxrl_llm.types import Row, UserError

_MODULES = ('gym/scorers', 'gym/server', 'parsing/arithmetic', 'parsing/safe_eval')
_MEMORY_MB = 2048  # address space; the server itself uses 300
_NO_LIMIT_S = 10**8  # the server's processor time grows with every completion
_REPLY_BYTES = 10_000


def score(task: str, settings: scorers.Settings, text: str, entry: scorers.Entry) -> float:
  """The score of a completion for a task of scorers.EVALUATING; computed in this process where there is no sandbox.

  Raises SandboxError where the task requires a sandbox and there is none, and where the server ends; ValueError where
  the scorer raises.
  """
  if (reason := sandbox.unavailable_reason()) == '':
    return _server(task).score(task, settings, text, entry)
  if task in scorers.SANDBOX_ONLY:
    raise sandbox.SandboxError(f'{task!r} is scored in a sandbox only, and {reason}')
  return float(scorers.safe_scorer(task, settings)(text, entry))


def task_of(row: Row) -> str:
  """The name of the row's reasoning-gym task, '' where it has none."""
  task = row.extra.get('gym')
  return str(task.get('name')) if isinstance(task, dict) else ''


def require(tasks: Iterable[str], where: str) -> None:
  """Raise UserError, with the remedy, for reasoning-gym tasks that this machine cannot score."""
  named = set(tasks)
  if unknown := sorted(named - scorers.TASKS):
    raise UserError(
      f"{where}: config.rewards.fn='gym' cannot score {', '.join(unknown)}, whose scorer may evaluate the answer as a "
      'program; choose other tasks, or a reasoning-gym that pyproject.toml allows.'
    )
  needing = sorted(named & scorers.SANDBOX_ONLY)
  if needing and (reason := sandbox.unavailable_reason()):
    raise UserError(
      f"{where}: config.rewards.fn='gym' scores {', '.join(needing)} in a sandbox only, because their scorers pass the "
      f'answer to sympy, and {reason}; or choose other tasks.'
    )


def prepare(tasks: Iterable[str]) -> None:
  """Start the servers of these tasks where there is a sandbox, so that no completion pays for the start."""
  for task in sorted(tasks):
    if sandbox.unavailable_reason() == '':
      # The scorer may refuse an empty entry. A failure of the sandbox is reported with the first completion.
      with contextlib.suppress(ValueError, sandbox.SandboxError):
        _server(task).score(task, {}, '', dict(question='', answer='', metadata={}))


class _Server:
  """A server process in the sandbox. Thread-safe."""

  def __init__(self, kind: str):
    self._stack, self._lock, self._owner = contextlib.ExitStack(), threading.Lock(), os.getpid()
    limits = sandbox.Limits(
      wall_s=_NO_LIMIT_S, memory_mb=_MEMORY_MB, processes=2, disk_mb=1, packages=True
    )
    files = _sources() | {'/box/main.py': _MAIN}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    self._box = self._stack.enter_context(
      sandbox.start(['/box/main.py', kind], files=files, limits=limits, **pipes)
    )

  @property
  def alive(self) -> bool:
    """Whether the server runs; False in a fork of the process that started it."""
    return self._owner == os.getpid() and self._box.process.poll() is None

  def close(self) -> None:
    if self._owner == os.getpid():
      with contextlib.suppress(OSError):  # from a request that the server has not read
        self._stack.close()

  def score(self, task: str, settings: scorers.Settings, text: str, entry: scorers.Entry) -> float:
    """The score of one completion. Raises SandboxError and ValueError as `score` of this module."""
    token = secrets.token_hex(16)
    request = json.dumps([token, task, settings, text, entry], default=str, skipkeys=True)
    with self._lock:
      reply = self._exchange(request.encode() + b'\n')
    try:
      echo, score, error = json.loads(reply)
    except ValueError:
      echo = score = error = None
    if echo != token:
      self.close()
      raise sandbox.SandboxError(
        f'the sandbox that scores {task!r} ended, or sent an invalid score'
      )
    if error:
      raise ValueError(f'the scorer of {task!r} raised {error}')
    return float(score)

  def _exchange(self, request: bytes) -> bytes:
    process = self._box.process
    try:
      process.stdin.write(request)
      process.stdin.flush()
    except OSError:
      return b''
    return process.stdout.readline(_REPLY_BYTES)


# The program of the sandbox.
_MAIN = b'from jaxrl_llm.rewards.gym import server\nserver.main()\n'
_starting = threading.Lock()
_servers: dict[str, _Server] = {}  # of this process


def _server(task: str) -> _Server:
  kind = 'sympy' if task in scorers.SANDBOX_ONLY else ''
  with _starting:
    if kind not in _servers or not _servers[kind].alive:
      if kind in _servers:
        _servers.pop(kind).close()
      _servers[kind] = _Server(kind)
    return _servers[kind]


@atexit.register
def close() -> None:
  """End the servers; a later score starts new ones."""
  while _servers:
    _servers.popitem()[1].close()


@functools.cache
def _sources() -> dict[str, bytes]:
  """The modules that the server imports, path in the sandbox → content."""
  rewards, box = pathlib.Path(__file__).parents[1], '/box/jaxrl_llm'
  packages = (box, f'{box}/rewards', f'{box}/rewards/gym', f'{box}/rewards/parsing')
  return {f'{package}/__init__.py': b'' for package in packages} | {
    f'{box}/rewards/{name}.py': (rewards / f'{name}.py').read_bytes() for name in _MODULES
  }
