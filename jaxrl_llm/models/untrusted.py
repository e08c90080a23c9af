"""Probes of untrusted files that come with a model, in a separate process with limits on time and memory.

The probed program is a Python file with a function probe(request), which returns '' or a description of the problem.
Neither that file nor this one imports anything of the package: they run in an isolated interpreter.
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
  """'' if probe(request) of the Python file `program` succeeds within the limits, else the problem."""
  path = [folder for folder in sys.path if os.path.isabs(folder)]
  job = json.dumps(dict(program=program, request=request, path=path, limits=[cpu_s, memory_bytes]))
  try:
    process = subprocess.run(
      [sys.executable, '-I', __file__], input=job, capture_output=True, text=True, errors='replace',
      timeout=wall_s, env=os.environ | _FEW_THREADS,
    )  # fmt: skip
  except subprocess.TimeoutExpired:
    return f'it takes longer than {wall_s} s'
  if process.returncode == 0:
    return process.stdout.strip()
  out_of_memory = 'MemoryError' in process.stderr or 'memory allocation' in process.stderr
  if process.returncode in (-signal.SIGKILL, -signal.SIGXCPU) or out_of_memory:
    return f'it takes more than {cpu_s} s or {memory_bytes / 2**30:.0f} GiB'
  last_line = (process.stderr.strip().splitlines() or [f'status {process.returncode}'])[-1]
  return f'it crashes the library that reads it ({last_line[:200]})'


def _run() -> None:
  """Run the job on standard input within its limits, and print the result."""
  import resource
  import runpy

  job = json.load(sys.stdin)
  for kind, limit in zip((resource.RLIMIT_CPU, resource.RLIMIT_AS), job['limits'], strict=True):
    hard = resource.getrlimit(kind)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (limit, limit))
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  sys.path[:] = job['path']
  print(runpy.run_path(job['program'])['probe'](job['request']))


if __name__ == '__main__':
  _run()
