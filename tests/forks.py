"""`start(…)`: the command line in a process forked from one that has imported the slow modules already."""

from __future__ import annotations

import functools
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import quick

HERE = pathlib.Path(__file__).parent


class _Server:
  """The process that forks. It ends with this one, because its standard input is closed then."""

  def __init__(self):
    self._process = subprocess.Popen(
      [sys.executable, str(HERE / 'fork_server.py')],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env=os.environ | dict(JAX_PLATFORMS='cpu', PYTHONPATH=f'{HERE.parent}:{HERE}'),
    )

  def call(self, **request) -> int | None:
    self._process.stdin.write(json.dumps(request) + '\n')
    self._process.stdin.flush()
    return json.loads(self._process.stdout.readline())


_server = functools.cache(_Server)


class Process:
  """A forked run with the interface of subprocess.Popen that tests use. Its output goes to a file."""

  def __init__(self, pid: int, log: pathlib.Path):
    self.pid, self.log, self.returncode = pid, log, None

  def poll(self) -> int | None:
    if self.returncode is None:
      self.returncode = _server().call(pid=self.pid)
    return self.returncode

  def send_signal(self, number: int) -> None:
    if self.poll() is None:
      os.kill(self.pid, number)

  def kill(self) -> None:
    self.send_signal(signal.SIGKILL)

  def text(self) -> str:
    return self.log.read_text(errors='replace') if self.log.exists() else ''

  def communicate(self, timeout: float = 600.0) -> tuple[str, None]:
    deadline = time.monotonic() + timeout
    while self.poll() is None:
      if time.monotonic() > deadline:
        self.kill()
        raise TimeoutError(f'no end after {timeout} s: {self.text()}')
      time.sleep(0.02)
    return self.text(), None


_logs = itertools.count()


def start(
  argv: list[str],
  workdir: os.PathLike | str,
  *,
  devices: int = 1,
  fault: dict | None = None,
  **env: str,
) -> Process:
  """`python -m jaxrl_llm.main` with `argv` on `devices` virtual devices; its log lies beside `workdir`."""
  workdir = pathlib.Path(workdir)
  log = workdir.parent / f'{workdir.name}.{next(_logs)}.log'
  log.parent.mkdir(parents=True, exist_ok=True)
  env |= dict(XLA_FLAGS=quick.flags(devices))
  pid = _server().call(argv=argv, workdir=str(workdir), log=str(log), env=env, fault=fault)
  return Process(pid, log)
