"""Several processes that grade one batch: each its own rows, all hear all scores."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm import rewards
from jaxrl_llm.types import Row


class Pool:
  """A grade.Pool on each process, as one. All of them make the same calls."""

  def __init__(self, own: rewards.Pool):
    self._own = own

  def score(self, rows: Sequence[Row], texts: Sequence[str]) -> rewards.Scores:
    """As grade.Pool's, on every process; `message` is of a failure that this one saw, if it saw any. Source: none."""
    count, first = jax.process_count(), jax.process_index()
    if count == 1:
      return self._own.score(rows, texts)
    dealt = _dealt(rows, count, rewards.batched(self._own.spec))
    own = self._own.score([rows[b] for b in dealt[first]], [texts[b] for b in dealt[first]])
    most = max(map(len, dealt))
    padded = [_padded(x, most) for x in (own.parts_BxK, own.outcome_B)]
    counts = np.array(list(own.counts.values()), np.int32)
    parts_DxMxK, outcome_DxM, counts_DxC = multihost_utils.process_allgather((*padded, counts))
    parts_BxK = np.zeros((len(rows), parts_DxMxK.shape[-1]), parts_DxMxK.dtype)
    outcome_B = np.zeros(len(rows), outcome_DxM.dtype)
    for d, at in enumerate(dealt):
      parts_BxK[at], outcome_B[at] = parts_DxMxK[d, : len(at)], outcome_DxM[d, : len(at)]
    told = dict(zip(own.counts, counts_DxC.sum(0).tolist(), strict=True))
    message = own.message or ('another process tells' if any(told.values()) else '')
    return rewards.Scores(parts_BxK, outcome_B, told, message)


def _dealt(rows: Sequence[Row], count: int, batched: Sequence[str]) -> list[list[int]]:
  """The rows that each process grades: every Dth; whole groups, or the first all, where a grader sees those."""
  if 'step' in batched:
    return [list(range(len(rows))), *([] for _ in range(count - 1))]
  if 'group' not in batched:
    return [list(range(d, len(rows), count)) for d in range(count)]
  turn = {name: n % count for n, name in enumerate(dict.fromkeys(row.id for row in rows))}
  return [[b for b, row in enumerate(rows) if turn[row.id] == d] for d in range(count)]


def _padded(array: np.ndarray, rows: int) -> np.ndarray:
  return np.concatenate([array, np.zeros((rows - len(array), *array.shape[1:]), array.dtype)])
