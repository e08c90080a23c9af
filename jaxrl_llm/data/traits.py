"""Traits of rows, and the kinds they form: rows of a kind are expected to be equally difficult.

Rows of a generator have its settings as traits. Rows of files have what their publisher wrote: a column is a trait of
its source if it holds text, whole numbers or truth values, and few different ones. Free text and identifiers have many.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from jaxrl_llm.types import Row

# Different values of a column, so that it grades rows and does not name them.
_MAX_VALUES = 32
# Rows of each value, and of each kind, on average. Evidence of a kind is that of its last ten visits or so
# (config.curriculum.kind_decay=0.9), so that a smaller kind would share no more than its prompts have themselves.
_MIN_ROWS = 10
# Kinds of a source of files: a run of some hundred steps visits each of them about ten times.
_MAX_KINDS = 256
_LENGTH_QUANTILES = (0.25, 0.5, 0.75)
_LENGTH = 'prompt tokens'  # with a space, unlike names of columns
_STATED = ('difficulty', 'level')  # enter a kind first
_ROW_NUMBERS = ('index', 'source_index')  # never traits
_ANSWERS = ('answer', 'ground_truth', 'label', 'solution')  # no trait of a question, even if few
_NESTED = ('metadata', 'extra_info', 'info')  # columns of files whose fields count like columns


def kinds(rows: Sequence[Row], tokens_N: np.ndarray | None = None) -> np.ndarray:
  """Returns int32 [N], the number of each row's kind, for sharing evidence of difficulty.

  Rows of a kind have the same source and the same traits, see `levels`.
  """
  keys = levels(rows, tokens_N)
  codes = {key: i for i, key in enumerate(sorted(set(keys)))}
  return np.array([codes[key] for key in keys], np.int32)


def levels(rows: Sequence[Row], tokens_N: np.ndarray | None = None) -> list[tuple[str, ...]]:
  """Returns for each row its source, then 'trait=value' for the traits that `kinds` uses.

  Without `tokens_N`, rows are those of generators: traits are whole numbers (number of terms, length, level) of `extra`
  with at most 32 different values in the source. `tokens_N` are the prompt tokens of rows of files: there, traits are
  columns of at least half of the rows with at most 32 values and 10 rows for each on average, and the quarter of the
  source in which the prompt's length lies. They enter in the order: stated difficulty, fewest values, length; one that
  would leave fewer than 10 rows for each kind on average, or more than 256 kinds, does not enter.
  """
  if tokens_N is None:
    return _levels_of_generators(rows)
  by_source: dict[str, list[int]] = {}
  for i, row in enumerate(rows):
    by_source.setdefault(row.source, []).append(i)
  keys: list[tuple[str, ...]] = [()] * len(rows)
  for source, index in by_source.items():
    traits = _traits_of_files([rows[i] for i in index], np.asarray(tokens_N)[index])
    for j, i in enumerate(index):
      present = [(n, v[j]) for n, v in sorted(traits.items()) if v[j] is not None]
      keys[i] = (source, *(f'{name}={value}' for name, value in present))
  return keys


def _levels_of_generators(rows: Sequence[Row]) -> list[tuple[str, ...]]:
  traits = [(row.source, _whole_numbers(row)) for row in rows]
  values: dict[tuple[str, str], set[int]] = {}
  for source, row_traits in traits:
    for name, value in row_traits.items():
      values.setdefault((source, name), set()).add(value)
  return [
    (
      source,
      *(f'{n}={v}' for n, v in sorted(row_traits.items()) if len(values[source, n]) <= _MAX_VALUES),
    )
    for source, row_traits in traits
  ]


def _whole_numbers(row: Row) -> dict[str, int]:
  metadata = row.extra.get('metadata')
  fields = {**row.extra, **(metadata if isinstance(metadata, dict) else {})}
  return {k: v for k, v in fields.items() if type(v) is int and k not in _ROW_NUMBERS}


def _traits_of_files(rows: Sequence[Row], tokens_N: np.ndarray) -> Mapping[str, Sequence]:
  """The columns that form the kinds of one source: name → value of each row, None where it has none."""
  columns = _columns_of_few_values(rows)
  order = sorted(columns, key=lambda name: (name not in _STATED, len(set(columns[name])), name))
  edges = np.quantile(tokens_N, _LENGTH_QUANTILES)
  columns[_LENGTH] = np.searchsorted(edges, tokens_N).tolist()
  traits: dict[str, Sequence] = {}
  kind_N: Sequence[Hashable] = [0] * len(rows)
  for name in (*order, _LENGTH):
    joint_N = list(zip(kind_N, columns[name], strict=True))
    count = len(set(joint_N))
    if count <= min(_MAX_KINDS, len(rows) // _MIN_ROWS) and count > len(set(kind_N)):
      codes: dict[Hashable, int] = {}
      kind_N = [codes.setdefault(key, len(codes)) for key in joint_N]
      traits[name] = columns[name]
  return traits


def _columns_of_few_values(rows: Sequence[Row]) -> dict[str, Sequence]:
  """Columns of at least half of the rows, at most 32 different values and 10 rows for each on average.

  A missing value, None in the result, counts as one.
  """
  cells: dict[
    str, dict[int, str]
  ] = {}  # by column and row, because every row may have columns of its own
  for i, row in enumerate(rows):
    nested = [row.extra.get(name) for name in _NESTED]
    for part in (*(x for x in nested if isinstance(x, dict)), row.extra):
      for name, value in part.items():
        is_plain = type(value) in (str, int, bool) and value != ''
        if is_plain and name not in (*_ROW_NUMBERS, *_ANSWERS):
          cells.setdefault(name, {})[i] = str(value)
  most = min(_MAX_VALUES, len(rows) // _MIN_ROWS)
  return {
    name: [by_row.get(i) for i in range(len(rows))]
    for name, by_row in cells.items()
    if 2 * len(by_row) >= len(rows)
    and len(set(by_row.values())) + (len(by_row) < len(rows)) <= most
  }
