"""Grading across processes: each process grades a share of the batch, and all receive all scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent import futures

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm import rewards
from jaxrl_llm.types import Row


class Pool:
  """The `rewards.Pool` of every process, used as one. All processes make the same calls."""

  def __init__(self, local: rewards.Pool, at_once: int = 1):
    """`at_once`: the most calls of `begin` that are graded at the same time."""
    self._local = local
    self._threads = futures.ThreadPoolExecutor(at_once, 'grading')

  def begin(
    self, rows: Sequence[Row], completions: Sequence[str]
  ) -> Callable[[], rewards.Scores]:  # fmt: skip
    """Begin to grade as `score` does, in a thread; the function that is returned waits for the scores."""
    shares, own = self._dealt(rows, completions)
    local = self._threads.submit(self._local.score, *own)
    return lambda: _gathered(local.result(), shares)

  def score(self, rows: Sequence[Row], completions: Sequence[str]) -> rewards.Scores:
    """Grade as `rewards.Pool.score`; every process returns the scores of all rows.

    `message` is that of a failure in this process, where there is one.
    """
    shares, own = self._dealt(rows, completions)
    return _gathered(self._local.score(*own), shares)

  def _dealt(self, rows: Sequence[Row], completions: Sequence[str]):
    """(rows of each process, the arguments of this one's `score`)."""
    shares = _shares(rows, jax.process_count(), rewards.batch_modes(self._local.spec))
    share = shares[jax.process_index()]
    return shares, ([rows[b] for b in share], [completions[b] for b in share])


def _gathered(local: rewards.Scores, shares: Sequence[Sequence[int]]) -> rewards.Scores:
  """The scores of all rows, from those of this process's share. All processes call it."""
  if len(shares) == 1:
    return local
  size, rows = max(map(len, shares)), sum(map(len, shares))
  padded = [_padded(x, size) for x in (local.parts_BxK, local.outcome_B)]
  counts_C = np.array(list(local.counts.values()), np.int32)
  gathered = multihost_utils.process_allgather((*padded, counts_C))
  parts_DxMxK, outcome_DxM, counts_DxC = gathered
  parts_BxK = np.zeros((rows, parts_DxMxK.shape[-1]), parts_DxMxK.dtype)
  outcome_B = np.zeros(rows, outcome_DxM.dtype)
  for d, at in enumerate(shares):
    parts_BxK[at], outcome_B[at] = parts_DxMxK[d, : len(at)], outcome_DxM[d, : len(at)]
  counts = dict(zip(local.counts, counts_DxC.sum(0).tolist(), strict=True))
  message = local.message or ('another process reports it' if any(counts.values()) else '')
  return rewards.Scores(parts_BxK, outcome_B, counts, message)


def _shares(rows: Sequence[Row], count: int, batched: Sequence[str]) -> list[list[int]]:
  """The rows of each process: every count-th row; whole groups or the whole step for batched reward functions."""
  if 'step' in batched:
    return [list(range(len(rows))), *([] for _ in range(count - 1))]
  if 'group' not in batched:
    return [list(range(d, len(rows), count)) for d in range(count)]
  process = {name: n % count for n, name in enumerate(dict.fromkeys(row.id for row in rows))}
  return [[b for b, row in enumerate(rows) if process[row.id] == d] for d in range(count)]


def _padded(array: np.ndarray, rows: int) -> np.ndarray:
  return np.concatenate([array, np.zeros((rows - len(array), *array.shape[1:]), array.dtype)])
