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
from typing import Any

import numpy as np

from jaxrl_llm.grade.resolve import Grader, resolve

OK, TIMEOUT, CRASH, ERROR = 0, 1, 2, 3
OUTCOMES = ('ok', 'timeout', 'crash', 'error')
PENDING = -1

# `outcome` is written last: a row with one is whole.
RESULT = np.dtype([('reward', 'f8'), ('message', 'S200'), ('outcome', 'i1')])

_grader: Grader | None = None


def start(spec: dict[str, Any]) -> None:
  """Prepares a new worker: imports its grader, so that no item pays for that. Source: none."""
  global _grader
  # A handler in Python would wait for C code that hangs; the default action ends the process at
  # once.
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  # A user's grader may import jax. The accelerator belongs to the parent.
  os.environ['JAX_PLATFORMS'] = 'cpu'
  _grader = resolve(spec)


def grade_chunk(path: str, at: int, items: list[bytes], deadline_s: float, slice_s: float) -> int:
  """Grades pickled (text, row) items into rows at, at + 1, ... of the file; returns the first not
  graded.

  It starts no item later than slice_s after its own start. So the parent knows that a chunk which
  is not back after slice_s + deadline_s holds an item past its deadline. Source: none.
  """
  table = np.memmap(path, RESULT, 'r+')
  begin = time.monotonic()
  for index, item in enumerate(items, at):
    if index > at and time.monotonic() - begin > slice_s:
      return index
    if table['outcome'][index] == PENDING:
      table[index] = _with_deadline(item, deadline_s)
  return at + len(items)


def _with_deadline(item: bytes, deadline_s: float) -> tuple[float, bytes, int]:
  # SIGALRM's default action kills this process from the kernel: it needs neither the interpreter,
  # which a regular expression may hold, nor a living parent.
  signal.signal(signal.SIGALRM, signal.SIG_DFL)
  signal.setitimer(signal.ITIMER_REAL, deadline_s)
  try:
    return attempt(_grader, *pickle.loads(item))
  except Exception as error:  # what does not unpickle
    return 0.0, describe(error), ERROR
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)


def attempt(grader: Grader, text: str, row: Any) -> tuple[float, bytes, int]:
  """(reward, message, outcome) of one item; whatever the grader raises is an error.

  Source: none.
  """
  try:
    reward = float(grader(text, row))
    if not math.isfinite(reward):
      raise ValueError(f'the grader returned {reward}')
    return reward, b'', OK
  except Exception as error:
    return 0.0, describe(error), ERROR


def describe(error: BaseException) -> bytes:
  """One line about an error, short enough for the file. Source: none."""
  line = ' '.join(f'{type(error).__name__}: {error}'.split())
  return line.encode('utf-8', 'replace')[: RESULT['message'].itemsize]
