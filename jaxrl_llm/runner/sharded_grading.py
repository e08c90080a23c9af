"""Grading across processes: each process grades a share of the batch, and all receive all scores."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm import rewards
from jaxrl_llm.types import Row


class Pool:
  """The `rewards.Pool` of every process, used as one. All processes make the same calls."""

  def __init__(self, local: rewards.Pool):
    self._local = local

  def score(self, rows: Sequence[Row], completions: Sequence[str]) -> rewards.Scores:
    """Grade as `rewards.Pool.score`; every process returns the scores of all rows.

    `message` is that of a failure in this process, where there is one.
    """
    count, process = jax.process_count(), jax.process_index()
    if count == 1:
      return self._local.score(rows, completions)
    shares = _shares(rows, count, rewards.batch_modes(self._local.spec))
    share = shares[process]
    local = self._local.score([rows[b] for b in share], [completions[b] for b in share])
    size = max(map(len, shares))
    padded = [_padded(x, size) for x in (local.parts_BxK, local.outcome_B)]
    counts_C = np.array(list(local.counts.values()), np.int32)
    gathered = multihost_utils.process_allgather((*padded, counts_C))
    parts_DxMxK, outcome_DxM, counts_DxC = gathered
    parts_BxK = np.zeros((len(rows), parts_DxMxK.shape[-1]), parts_DxMxK.dtype)
    outcome_B = np.zeros(len(rows), outcome_DxM.dtype)
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
