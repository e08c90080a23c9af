"""Sides of a comparison: worker processes that run one command at a time, so that two of them can alternate."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

ROOT = pathlib.Path(__file__).parents[3]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
  """Environment of a worker: the CPU, this checkout, no network."""
  # Without XLA_FLAGS: the virtual devices of the test suite would shard the work.
  inherited = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
  fixed = {'JAX_PLATFORMS': 'cpu', 'HF_HUB_OFFLINE': '1', 'PYTHONPATH': str(ROOT)}
  return inherited | fixed | dict(more or {})


def compilation_cache(folder: pathlib.Path) -> dict[str, str]:
  """Variables with which jax keeps compiled programs in `folder`, under the rule of `python -m jaxrl_llm.main`."""
  return {
    'JAX_COMPILATION_CACHE_DIR': str(folder),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.1',
  }


def prepare_smoke() -> None:
  """Workers that start later compile without most optimizations, and torch has one thread.

  Threads of torch wait for each other actively: on a busy machine a tiny model takes many times longer with two.
  """
  os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
  os.environ.setdefault('OMP_NUM_THREADS', '1')


def python(script: pathlib.Path, *arguments: object) -> None:
  """Runs a script to its end, in the environment of workers."""
  command = [sys.executable, str(script), *map(str, arguments)]
  subprocess.run(command, check=True, env=environment())


class Side:
  """A worker process: a command per line in, a JSON object per line out."""

  def __init__(
    self,
    script: pathlib.Path,
    arguments: Sequence[object],
    more: Mapping[str, str] | None = None,
    interpreter: str = sys.executable,
  ):
    """Starts the worker and waits until it is ready; `more` are additional variables of its environment."""
    command = [interpreter, str(script), *map(str, arguments)]
    start = time.perf_counter()
    self._process = subprocess.Popen(
      command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(more)
    )
    self.ready = self._read()
    self.load_s = time.perf_counter() - start

  def call(self, command: str) -> dict:
    """The worker's result of a command. Raises SystemExit where the worker has ended."""
    assert self._process.stdin is not None
    print(command, file=self._process.stdin, flush=True)
    return self._read()

  def stop(self) -> None:
    """Ends the worker."""
    assert self._process.stdin is not None
    self._process.stdin.close()
    self._process.wait(60)

  def kill(self) -> None:
    """Ends the worker at once, if it runs."""
    self._process.kill()
    self._process.wait()

  def _read(self) -> dict:
    assert self._process.stdout is not None
    line = self._process.stdout.readline()
    if not line:
      status = self._process.wait()
      raise SystemExit(f'a worker ended with status {status}; see its output above.')
    return json.loads(line)
