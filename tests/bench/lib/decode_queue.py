"""A queue of completions in decode slots, iteration by iteration and without a model: what runs, and what it reads."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

# (first iteration of a row, its age in each iteration) → columns that are read for it
Columns = Callable[[int, np.ndarray], np.ndarray]


class Schedule(NamedTuple):
  """Of each row: the iterations from `begin_B` to before `end_B` decode it."""

  begin_B: np.ndarray
  end_B: np.ndarray

  @property
  def iterations(self) -> int:
    """Of the whole loop."""
    return int(self.end_B.max())


def first_in_first_out(length_B: np.ndarray, slots: int) -> Schedule:
  """The next row gets the first free slot, for its length minus one iterations: prefill samples its first token."""
  free, begin_B = [0] * slots, np.zeros(len(length_B), int)
  for row, length in enumerate(length_B):
    begin_B[row] = heapq.heappop(free)
    heapq.heappush(free, begin_B[row] + int(length) - 1)
  return Schedule(begin_B, begin_B + np.asarray(length_B, int) - 1)


def busy(schedule: Schedule, iterations: int) -> np.ndarray:
  """The number of busy slots in each of the `iterations`."""
  return columns_read(schedule, iterations, lambda begin, age_N: np.ones(len(age_N)))


def columns_read(schedule: Schedule, iterations: int, columns: Columns) -> np.ndarray:
  """The columns that are read for all rows together, in each of the `iterations`."""
  read_I = np.zeros(iterations)
  for begin, end in zip(schedule.begin_B, schedule.end_B, strict=True):
    read_I[begin:end] += columns(begin, np.arange(end - begin))
  return read_I


def live_blocks(width: int, block: int) -> Columns:
  """Blocks of a ring of `width` columns that hold a token of the row, which is at iteration mod width."""
  blocks = -(-width // block)

  def columns(begin: int, age_N: np.ndarray) -> np.ndarray:
    # The ring may end inside a row: the blocks before and after that are different ones.
    count_N = (begin + age_N) // block - begin // block + 1
    return np.minimum(count_N, blocks) * block

  return columns


def pages(size: int) -> Columns:
  """Pages of `size` tokens that begin with the row's first token."""
  return lambda begin, age_N: -(-(age_N + 1) // size) * size


def most_slots(length_SxB: np.ndarray, columns: Columns, memory_columns: float, page: int) -> int:
  """The largest number of slots of a shard whose rows never hold more than `memory_columns`, with lengths known.

  Every slot may begin one more page.
  """
  slots = length_SxB.shape[1]
  while slots > 1:
    schedules = [first_in_first_out(length_B, slots) for length_B in length_SxB]
    held = max(columns_read(s, s.iterations, columns).max() for s in schedules)
    if held + slots * page <= memory_columns:
      return slots
    slots -= 1
  return 1
