"""A process that has imported the slow modules and forks a child for every run; forks.py sends it requests.

It has started no thread and no backend: each child chooses its devices and compilation cache.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import threading
import traceback

import fault_plan
import quick

from jaxrl_llm import main, train  # noqa: F401  imported by every run


def run(request: dict) -> None:
  """In the child: run `python -m jaxrl_llm.main` with the fault of the request, and exit."""
  log = os.open(request['log'], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
  for stream in (1, 2):
    os.dup2(log, stream)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.environ.update(request['env'])
  status = 70
  try:
    if request['fault']:
      fault_plan.inject(request['fault'], request['workdir'])
    status = main.main(request['argv'])
    threading._shutdown()  # as at the end of a Python program
    atexit._run_exitfuncs()
  except BaseException:
    traceback.print_exc()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)


def start(request: dict) -> int:
  pid = os.fork()
  if not pid:
    run(request)
  return pid


def poll(pid: int) -> int | None:
  finished, status = os.waitpid(pid, os.WNOHANG)
  return os.waitstatus_to_exitcode(status) if finished else None


if __name__ == '__main__':
  gc.collect()
  gc.freeze()  # children share the memory of objects that the collector never visits
  quick.collect_seldom()
  for line in sys.stdin:
    message = json.loads(line)
    result = start(message) if 'argv' in message else poll(message['pid'])
    print(json.dumps(result), flush=True)
