"""Columns of the data: one value per row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.data.traits import levels
from jaxrl_llm.types import Row


class Columns(Mapping):
  """A lazy mapping of 'source', 'traits' and the fields of the rows' `extra` to lists or arrays of length N.

  'traits' is float32 [N, F], one-hot over sources and over the values of the traits that `kinds` uses. A row without a
  field has None. Raises KeyError for a field that no row has.
  """

  def __init__(self, rows: Sequence[Row], tokens_N: np.ndarray | None = None):
    """`tokens_N`: as for `kinds`."""
    self._rows, self._tokens_N = rows, tokens_N

  def __getitem__(self, name: str) -> Any:
    if name == 'source':
      return [row.source for row in self._rows]
    if name == 'traits':
      return _one_hot(levels(self._rows, self._tokens_N))
    values = [row.extra.get(name) for row in self._rows]
    if all(value is None for value in values):
      raise KeyError(name)
    return values

  def __iter__(self) -> Iterator[str]:
    fields = {name for row in self._rows for name in row.extra}
    return iter(sorted({'source', 'traits'} | fields))

  def __len__(self) -> int:
    return len(list(iter(self)))


def _one_hot(keys: Sequence[tuple[str, ...]]) -> np.ndarray:
  names = sorted({part for key in keys for part in key})
  column = {name: i for i, name in enumerate(names)}
  hot_NxF = np.zeros((len(keys), len(names)), np.float32)
  for row, key in zip(hot_NxF, keys, strict=True):
    row[[column[part] for part in key]] = 1
  return hot_NxF
