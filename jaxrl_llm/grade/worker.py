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
from typing import Any

import numpy as np

from jaxrl_llm.grade.resolve import Grader, resolve_parts

OK, TIMEOUT, CRASH, ERROR = 0, 1, 2, 3
OUTCOMES = ('ok', 'timeout', 'crash', 'error')
PENDING = -1

_MESSAGE_BYTES = 200
_graders: tuple[Grader, ...] = ()


def result(graders: int) -> np.dtype:
  """A row of the file: a reward by each grader. `outcome` is written last: a row with one is whole. Source: none."""
  message = f'S{_MESSAGE_BYTES}'
  return np.dtype([('reward', 'f8', (graders,)), ('message', message), ('outcome', 'i1')])


def start(spec: dict[str, Any]) -> None:
  """Prepares a new worker: imports its graders, so that no item pays for that. Source: none."""
  global _graders
  # A handler in Python would wait for C code that hangs; the default action ends the process at
  # once.
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  # A user's grader may import jax. The accelerator belongs to the parent.
  os.environ['JAX_PLATFORMS'] = 'cpu'
  _graders = tuple(part.grader for part in resolve_parts(spec))


def grade_chunk(path: str, at: int, items: list[bytes], deadline_s: float, slice_s: float) -> int:
  """Grades pickled (text, row) items into rows at, at + 1, ... of the file; returns the first not
  graded.

  It starts no item later than slice_s after its own start. So the parent knows that a chunk which
  is not back after slice_s + deadline_s holds an item past its deadline. Source: none.
  """
  table = np.memmap(path, result(len(_graders)), 'r+')
  begin = time.monotonic()
  for index, item in enumerate(items, at):
    if index > at and time.monotonic() - begin > slice_s:
      return index
    if table['outcome'][index] == PENDING:
      table[index] = _with_deadline(item, deadline_s)
  return at + len(items)


def _with_deadline(item: bytes, deadline_s: float) -> tuple[Any, bytes, int]:
  # SIGALRM's default action kills this process from the kernel: it needs neither the interpreter,
  # which a regular expression may hold, nor a living parent.
  signal.signal(signal.SIGALRM, signal.SIG_DFL)
  signal.setitimer(signal.ITIMER_REAL, deadline_s)
  try:
    # Only what the pool's own process pickled a moment ago, as all that crosses to a worker is; never a file's bytes.
    return attempt(_graders, *pickle.loads(item))
  except Exception as error:  # what does not unpickle
    return 0.0, describe(error), ERROR
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)


def attempt(graders: Sequence[Grader], text: str, row: Any) -> tuple[Any, bytes, int]:
  """(rewards, message, outcome) of one item; whatever a grader raises is an error of the item, and no reward counts.

  Source: none.
  """
  try:
    rewards = tuple(float(grader(text, row)) for grader in graders)
    for reward in rewards:
      if not math.isfinite(reward):
        raise ValueError(f'the grader returned {reward}')
    return rewards, b'', OK
  except Exception as error:
    return 0.0, describe(error), ERROR


def describe(error: BaseException) -> bytes:
  """One line about an error, short enough for the file. Source: none."""
  line = ' '.join(f'{type(error).__name__}: {error}'.split())
  return line.encode('utf-8', 'replace')[:_MESSAGE_BYTES]
