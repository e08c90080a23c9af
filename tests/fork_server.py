"""A process that has imported what is slow, and forks a child for every start of a run; forks.py talks to it.

It has started no thread and no backend: how many devices there are, and where programs are kept, each child decides.
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

from jaxrl_llm import main, train  # noqa: F401  what a run imports


def run(order: dict) -> None:
  """Is the child: what `python -m jaxrl_llm.main` would do, with what the order plants into it."""
  log = os.open(order['log'], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
  for stream in (1, 2):
    os.dup2(log, stream)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.environ.update(order['env'])
  status = 70
  try:
    if order['fault']:
      fault_plan.plan(order['fault'], order['workdir'])
    status = main.main(order['argv'])
    threading._shutdown()  # as Python ends
    atexit._run_exitfuncs()
  except BaseException:
    traceback.print_exc()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)


def start(order: dict) -> int:
  pid = os.fork()
  if not pid:
    run(order)
  return pid


def poll(pid: int) -> int | None:
  done, status = os.waitpid(pid, os.WNOHANG)
  return os.waitstatus_to_exitcode(status) if done else None


if __name__ == '__main__':
  gc.collect()
  gc.freeze()  # children share what is never looked at
  quick.collect_seldom()
  for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps(start(asked) if 'argv' in asked else poll(asked['pid'])), flush=True)
