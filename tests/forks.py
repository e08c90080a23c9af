"""`start(…)`: the real command in a process forked off one that has imported what is slow; it costs no import."""

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
  """The process that forks: it ends with this one, whose end closes its standard input."""

  def __init__(self):
    self._process = subprocess.Popen(
      [sys.executable, str(HERE / 'fork_server.py')],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env=os.environ | dict(JAX_PLATFORMS='cpu', PYTHONPATH=f'{HERE.parent}:{HERE}'),
    )

  def ask(self, **order) -> int | None:
    self._process.stdin.write(json.dumps(order) + '\n')
    self._process.stdin.flush()
    return json.loads(self._process.stdout.readline())


_server = functools.cache(_Server)


class Started:
  """A run, with what is needed of subprocess.Popen; what it prints is kept in a file."""

  def __init__(self, pid: int, log: pathlib.Path):
    self.pid, self.log, self.returncode = pid, log, None

  def poll(self) -> int | None:
    if self.returncode is None:
      self.returncode = _server().ask(pid=self.pid)
    return self.returncode

  def send_signal(self, number: int) -> None:
    if self.poll() is None:
      os.kill(self.pid, number)

  def kill(self) -> None:
    self.send_signal(signal.SIGKILL)

  def text(self) -> str:
    return self.log.read_text(errors='replace') if self.log.exists() else ''

  def communicate(self, timeout: float = 600.0) -> tuple[str, None]:
    end = time.monotonic() + timeout
    while self.poll() is None:
      if time.monotonic() > end:
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
) -> Started:
  """`python -m jaxrl_llm.main` with `argv`, on so many virtual devices; its log is beside `workdir`."""
  workdir = pathlib.Path(workdir)
  log = workdir.parent / f'{workdir.name}.{next(_logs)}.log'
  log.parent.mkdir(parents=True, exist_ok=True)
  env |= dict(XLA_FLAGS=quick.flags(devices))
  pid = _server().ask(argv=argv, workdir=str(workdir), log=str(log), env=env, fault=fault)
  return Started(pid, log)
