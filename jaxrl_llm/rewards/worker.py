"""Code of a grading worker: a process that may be killed at any moment.

A worker writes each result into a shared file as soon as it exists. Whenever the process is killed, the file shows
which items are done and which one was running.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.rewards import format_rules
from jaxrl_llm.rewards import verifiers as shipped
from jaxrl_llm.rewards.gym import sandboxed
from jaxrl_llm.rewards.outcomes import CRASH, MESSAGE_BYTES, Result, attempt, attempt_batch, failure
from jaxrl_llm.rewards.resolve import Grader, resolve_parts
from jaxrl_llm.types import Settings

PENDING = -1
OUT_OF_MEMORY = 99  # exit code of a worker whose item exceeded the memory limit

_graders: tuple[Grader, ...] = ()
_PREPARE = shipped.PREPARE | format_rules.PREPARE


class Limits(NamedTuple):
  """Resources that one item may use."""

  deadline_s: float  # wall-clock time
  # processor time of the worker, all its threads together; child processes are not counted
  cpu_s: float
  memory_mb: int  # beyond the memory of a ready worker; each child process has the same limit


class ItemShape(NamedTuple):
  """The items of a job: single completions, or the completions of one batched call."""

  # '': (completion, row); 'group', 'step': (completions, rows), for the graders of that `batched`
  kind: str = ''
  size: int = 1  # the most completions in one item


def result_dtype(graders: int, size: int = 1) -> np.dtype:
  """A record of the result file: rewards by grader, for up to `size` completions, NaN for one to skip.

  `outcome` is written last: a record with an outcome is complete.
  """
  message, shape = f'S{MESSAGE_BYTES}', (graders,) if size == 1 else (size, graders)
  return np.dtype([('reward', 'f8', shape), ('message', message), ('outcome', 'i1')])


def start(spec: Settings, memory_mb: int, tasks: frozenset[str], started: ctypes.c_bool) -> None:
  """Prepare a new worker: import its graders, so that no item pays for the imports, and limit its memory.

  tasks: reasoning-gym tasks that are scored in a sandbox which this worker starts. started: set at the end.
  """
  global _graders
  # A Python handler would wait for C code that hangs; the default action ends the process at once.
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  # A user's grader may import jax. The accelerator belongs to the parent.
  os.environ['JAX_PLATFORMS'] = 'cpu'
  _graders = tuple(part.grader for part in resolve_parts(spec))
  import resource  # missing on Windows, where this module must still import

  for grader in _graders:
    _PREPARE.get(getattr(grader, 'func', None), lambda: None)()
  sandboxed.prepare(tasks)
  resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
  limit_memory(memory_mb * 2**20)
  started.value = True


def limit_memory(extra_bytes: int) -> None:
  """Limit the address space to its present size, with the reservations of imports and threads, plus `extra_bytes`.

  Only the soft limit changes: a sandbox that a grader starts may set its own. Without /proc (macOS) there is no limit;
  that kernel would not enforce it either.
  """
  import resource

  try:
    with open('/proc/self/statm') as file:
      present = int(file.read().split()[0]) * resource.getpagesize()
  except OSError:
    return
  hard = resource.getrlimit(resource.RLIMIT_AS)[1]
  soft = present + extra_bytes
  if hard != resource.RLIM_INFINITY:
    soft = min(soft, hard)
  resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def grade_chunk(
  path: str, first: int, items: list[bytes], limits: Limits, chunk_s: float, shape: ItemShape
) -> int:
  """Grade pickled items into records first, first + 1, ... of the file at `path`; return the first item not graded.

  No item starts later than chunk_s after the call. A chunk that has not returned after chunk_s + deadline_s therefore
  holds an item past its deadline. A worker that runs out of memory exits; its replacement starts clean.
  """
  table = np.memmap(path, result_dtype(len(_graders), shape.size), 'r+')
  begin = time.monotonic()
  for index, item in enumerate(items, first):
    if index > first and time.monotonic() - begin > chunk_s:
      return index
    if table['outcome'][index] == PENDING:
      result = _within(item, limits, shape)
      if result[-1] == CRASH:
        os._exit(OUT_OF_MEMORY)
      table[index] = result
  return first + len(items)


# Signals that end a worker past a time limit, and their timers.
TIMERS = (
  {signal.SIGALRM: signal.ITIMER_REAL, signal.SIGPROF: signal.ITIMER_PROF}
  if hasattr(signal, 'setitimer')
  else {}
)


def _within(item: bytes, limits: Limits, shape: ItemShape) -> Result:
  """Grade one pickled item under its time limits."""
  with time_limits(limits.deadline_s, limits.cpu_s):
    try:
      # These bytes were pickled by the pool's own process a moment ago; bytes of a file never get here.
      args, graders = pickle.loads(item), select_graders(_graders, shape.kind)
      return attempt_batch(graders, *args, shape.size) if shape.kind else attempt(graders, *args)
    except Exception as error:  # the item does not unpickle
      return failure(error)


@contextlib.contextmanager
def time_limits(deadline_s: float, cpu_s: float) -> Iterator[None]:
  """End this process by SIGALRM or SIGPROF where the block takes longer."""
  # The default action of these signals ends the process in the kernel. It needs neither the interpreter, which a
  # regular expression may block, nor a living parent.
  for (number, timer), seconds in zip(TIMERS.items(), (deadline_s, cpu_s), strict=True):
    signal.signal(number, signal.SIG_DFL)
    signal.setitimer(timer, seconds)
  try:
    yield
  finally:
    for timer in TIMERS.values():
      signal.setitimer(timer, 0)


def select_graders(graders: Sequence[Grader], kind: str) -> list[Grader | None]:
  """The graders whose `batched` equals `kind`, with None in place of the others."""
  return [grader if getattr(grader, 'batched', '') == kind else None for grader in graders]
