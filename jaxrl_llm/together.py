"""Several processes that grade one batch: each its own rows, all hear all scores."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm import grade
from jaxrl_llm.types import Row


class Pool:
  """A grade.Pool on each process, as one. All of them make the same calls."""

  def __init__(self, own: grade.Pool):
    self._own = own

  def score(self, rows: Sequence[Row], texts: Sequence[str]) -> grade.Scores:
    """As grade.Pool's, on every process; `message` is of a failure that this one saw, if it saw any. Source: none."""
    count, first = jax.process_count(), jax.process_index()
    if count == 1:
      return self._own.score(rows, texts)
    own = self._own.score(rows[first::count], texts[first::count])
    most = -(-len(rows) // count)
    padded = [_padded(x, most) for x in (own.parts_BxK, own.outcome_B)]
    counts = np.array(list(own.counts.values()), np.int32)
    parts_DxMxK, outcome_DxM, counts_DxC = multihost_utils.process_allgather((*padded, counts))
    # Row b is the b // D th of process b % D.
    parts_BxK = np.moveaxis(parts_DxMxK, 0, 1).reshape(most * count, -1)[: len(rows)]
    outcome_B = outcome_DxM.T.reshape(-1)[: len(rows)]
    told = dict(zip(own.counts, counts_DxC.sum(0).tolist(), strict=True))
    message = own.message or ('another process tells' if any(told.values()) else '')
    return grade.Scores(parts_BxK, outcome_B, told, message)


def _padded(array: np.ndarray, rows: int) -> np.ndarray:
  return np.concatenate([array, np.zeros((rows - len(array), *array.shape[1:]), array.dtype)])
