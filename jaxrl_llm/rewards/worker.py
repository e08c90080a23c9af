"""What runs inside a grading worker: a process that may be killed at any moment.

It writes each result into a shared file as soon as it has it. Whoever kills it, and whenever, the
file tells which items are done and which one was running.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.rewards import format_rules
from jaxrl_llm.rewards import verifiers as shipped
from jaxrl_llm.rewards.gym import sandboxed
from jaxrl_llm.rewards.resolve import Grader, resolve_parts

OK, TIMEOUT, CRASH, ERROR, SKIP = 0, 1, 2, 3, 4
OUTCOMES = ('ok', 'timeout', 'crash', 'error', 'skip')
FAILURES = (TIMEOUT, CRASH, ERROR)  # a grader that skips a reply has not failed
PENDING = -1
NO_MEMORY = 99  # how a worker ends that may not have what an item asks for

_MESSAGE_BYTES = 200
_graders: tuple[Grader, ...] = ()
_PREPARE = shipped.PREPARE | format_rules.PREPARE


class Limits(NamedTuple):
  """What an item may take."""

  deadline_s: float  # of the clock
  # of this process's processors, all threads together; children of its own not counted
  cpu_s: float
  memory_mb: int  # beyond what a worker has when it is ready; children of its own get no more each


class Batches(NamedTuple):
  """What the items of a job are."""

  kind: str = ''  # 'group', 'step': texts and rows, for the graders of that `batched`; '': a reply, for all others
  most: int = 1  # replies in one of them


def result(graders: int, most: int = 1) -> np.dtype:
  """A row of the file: rewards by each grader, of up to `most` replies, NaN for one to skip.

  `outcome` is written last: a row with one is whole. Source: none.
  """
  message, shape = f'S{_MESSAGE_BYTES}', (graders,) if most == 1 else (most, graders)
  return np.dtype([('reward', 'f8', shape), ('message', message), ('outcome', 'i1')])


def start(spec: dict[str, Any], memory_mb: int, tasks: frozenset[str] = frozenset()) -> None:
  """Prepares a new worker: imports its graders, so that no item pays for that, and bounds its memory.

  tasks: of reasoning-gym, which are scored in a sandbox of the worker's own.
  """
  global _graders
  # A handler in Python would wait for C code that hangs; the default action ends the process at
  # once.
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  # A user's grader may import jax. The accelerator belongs to the parent.
  os.environ['JAX_PLATFORMS'] = 'cpu'
  _graders = tuple(part.grader for part in resolve_parts(spec))
  import resource  # not on Windows, where the parts can be imported all the same

  for grader in _graders:
    _PREPARE.get(getattr(grader, 'func', None), lambda: None)()
  sandboxed.prepare(tasks)
  resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
  _bound_memory(memory_mb * 2**20)


def _bound_memory(more: int) -> None:
  """Address space, the one bound that the kernel keeps at once: what imports and threads reserved, and `more` bytes.

  The soft limit alone: a sandbox that the grader starts may set its own. Not where /proc is missing (macOS), whose
  kernel would not keep it either.
  """
  import resource

  try:
    with open('/proc/self/statm') as file:
      now = int(file.read().split()[0]) * resource.getpagesize()
  except OSError:
    return
  hard = resource.getrlimit(resource.RLIMIT_AS)[1]
  most = now + more if hard == resource.RLIM_INFINITY else min(now + more, hard)
  resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def grade_chunk(
  path: str, at: int, items: list[bytes], limits: Limits, slice_s: float, batches: Batches
) -> int:
  """Grades pickled (text, row) items, or (texts, rows), into rows at, at + 1, ... of the file; returns the first not
  graded.

  It starts no item later than slice_s after its own start. So the parent knows that a chunk which
  is not back after slice_s + deadline_s holds an item past its deadline. A worker that runs out of memory
  ends, with what the item left behind: its successor owes nothing to it. Source: none.
  """
  table = np.memmap(path, result(len(_graders), batches.most), 'r+')
  begin = time.monotonic()
  for index, item in enumerate(items, at):
    if index > at and time.monotonic() - begin > slice_s:
      return index
    if table['outcome'][index] == PENDING:
      graded = _within(item, limits, batches)
      if graded[-1] == CRASH:
        os._exit(NO_MEMORY)
      table[index] = graded
  return at + len(items)


# What ends a worker that takes too long, and what counts down to it.
TIMERS = (
  {signal.SIGALRM: signal.ITIMER_REAL, signal.SIGPROF: signal.ITIMER_PROF}
  if hasattr(signal, 'setitimer')
  else {}
)


def _within(item: bytes, limits: Limits, batches: Batches) -> tuple[Any, bytes, int]:
  # The default action of these signals kills this process from the kernel: it needs neither the interpreter,
  # which a regular expression may hold, nor a living parent.
  for (number, timer), seconds in zip(TIMERS.items(), limits[:2], strict=True):
    signal.signal(number, signal.SIG_DFL)
    signal.setitimer(timer, seconds)
  try:
    # Only what the pool's own process pickled a moment ago, as all that crosses to a worker is; never a file's bytes.
    given, graders = pickle.loads(item), of_kind(_graders, batches.kind)
    return (
      attempt_together(graders, *given, batches.most) if batches.kind else attempt(graders, *given)
    )
  except Exception as error:  # what does not unpickle
    return 0.0, describe(error), CRASH if isinstance(error, MemoryError) else ERROR
  finally:
    for timer in TIMERS.values():
      signal.setitimer(timer, 0)


def of_kind(graders: Sequence[Grader], kind: str) -> list[Grader | None]:
  """Those of one `batched`, None in the places of the others. Source: none."""
  return [grader if getattr(grader, 'batched', '') == kind else None for grader in graders]


def attempt_together(
  graders: Sequence[Grader | None], texts: Sequence[str], rows: Sequence[Any], most: int
) -> tuple[Any, bytes, int]:
  """As `attempt`, for several replies at once: rewards [most, K], NaN for replies to skip. Source: none."""
  rewards = np.zeros((most, len(graders)))
  try:
    for k, grader in enumerate(graders):
      for b, reward in enumerate(grader.together(texts, rows) if grader else ()):
        if reward is not None and not math.isfinite(reward):
          raise ValueError(f'the grader returned {reward}')
        rewards[b, k] = math.nan if reward is None else reward
    return rewards.reshape(-1) if most == 1 else rewards, b'', OK
  except Exception as error:
    return 0.0, describe(error), CRASH if isinstance(error, MemoryError) else ERROR


def attempt(graders: Sequence[Grader | None], text: str, row: Any) -> tuple[Any, bytes, int]:
  """(rewards, message, outcome) of one item; whatever a grader raises is an error of the item, and no reward counts.

  A MemoryError is a crash: it says nothing of the grader. Where the first grader gives None, which says what is right,
  the reply is skipped; None from another adds nothing, and so does none in its place. Source: none.
  """
  try:
    given = [0.0 if grader is None else grader(text, row) for grader in graders]
    if given[0] is None:
      return 0.0, b'', SKIP
    rewards = tuple(0.0 if reward is None else float(reward) for reward in given)
    for reward in rewards:
      if not math.isfinite(reward):
        raise ValueError(f'the grader returned {reward}')
    return rewards, b'', OK
  except Exception as error:
    return 0.0, describe(error), CRASH if isinstance(error, MemoryError) else ERROR


def describe(error: BaseException) -> bytes:
  """One line about an error, short enough for the file. Source: none."""
  try:
    told = str(error)[: 10 * _MESSAGE_BYTES]
  except Exception:  # an error of the user's, which may fail to say what it is
    told = 'an error without words'
  line = ' '.join(f'{type(error).__name__}: {told}'.split())
  return line.encode('utf-8', 'replace')[:_MESSAGE_BYTES]
