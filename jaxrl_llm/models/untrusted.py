"""Trials of what comes with a model and may be anybody's: in a process that can be killed, within limits.

The file that is tried has a function trial(request), which returns '' or what is wrong. Neither that file nor this one
imports anything of the package: they run in an interpreter of their own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

# A Rust library's threads, and the heaps of each, reserve address space by the number of cores.
_FEW_THREADS = dict(TOKENIZERS_PARALLELISM='false', RAYON_NUM_THREADS='1', MALLOC_ARENA_MAX='2')


def find_problem(program: str, request: Any, *, cpu_s: int, wall_s: int, memory_bytes: int) -> str:
  """'' where trial(request) of the Python file `program` finds nothing wrong within these limits, else what is."""
  path = [folder for folder in sys.path if os.path.isabs(folder)]
  told = json.dumps(dict(program=program, request=request, path=path, limits=[cpu_s, memory_bytes]))
  limits = f'{cpu_s} s or {memory_bytes / 2**30:.0f} GiB'
  try:
    done = subprocess.run(
      [sys.executable, '-I', __file__], input=told, capture_output=True, text=True, errors='replace',
      timeout=wall_s, env=os.environ | _FEW_THREADS,
    )  # fmt: skip
  except subprocess.TimeoutExpired:
    return f'it takes longer than {wall_s} s'
  if done.returncode == 0:
    return done.stdout.strip()
  of_memory = 'MemoryError' in done.stderr or 'memory allocation' in done.stderr
  if done.returncode in (-signal.SIGKILL, -signal.SIGXCPU) or of_memory:
    return f'it takes more than {limits}'
  last = (done.stderr.strip().splitlines() or [f'status {done.returncode}'])[-1]
  return f'it ends the library that reads it ({last[:200]})'


def _run() -> None:
  """Runs what standard input names, within limits."""
  import resource
  import runpy

  told = json.load(sys.stdin)
  for kind, most in zip((resource.RLIMIT_CPU, resource.RLIMIT_AS), told['limits'], strict=True):
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  sys.path[:] = told['path']
  print(runpy.run_path(told['program'])['probe'](told['request']))


if __name__ == '__main__':
  _run()
