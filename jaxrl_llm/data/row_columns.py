"""What rows say of themselves, as arrays of one entry a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.data.pipeline import levels
from jaxrl_llm.types import Row


class Columns(Mapping):
  """name → array [N]: 'source', 'traits', or a field of the rows' `extra`; made when it is asked for.

  'traits' is float32 [N, F], one-hot over sources and over the values of every small whole-number trait
  that `kinds` goes by. A row without a field gives None. Raises KeyError for a field that no row has.
  """

  def __init__(self, rows: Sequence[Row]):
    self._rows = rows

  def __getitem__(self, name: str) -> Any:
    if name == 'source':
      return [row.source for row in self._rows]
    if name == 'traits':
      return _one_hot(levels(self._rows))
    told = [row.extra.get(name) for row in self._rows]
    if all(value is None for value in told):
      raise KeyError(name)
    return told

  def __iter__(self) -> Iterator[str]:
    fields = {name for row in self._rows for name in row.extra}
    return iter(sorted({'source', 'traits'} | fields))

  def __len__(self) -> int:
    return len(list(iter(self)))


def _one_hot(keys: Sequence[tuple[str, ...]]) -> np.ndarray:
  names = sorted({part for key in keys for part in key})
  at = {name: i for i, name in enumerate(names)}
  hot_NxF = np.zeros((len(keys), len(names)), np.float32)
  for row, key in zip(hot_NxF, keys, strict=True):
    row[[at[part] for part in key]] = 1
  return hot_NxF
