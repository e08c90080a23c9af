"""Difficulty levels of held-out rows, as the rows themselves state them."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.data import traits as row_traits
from jaxrl_llm.types import Row

_MIN_ROWS_PER_VALUE = 4  # on average; a trait with fewer identifies rows instead of grading them
_MAX_LEVELS = 32  # of a source


def levels(rows: Sequence[Row]) -> list[str]:
  """The level of each row, '' where it states none.

  A `level` or `difficulty` of its own, a word or a number, also inside metadata or extra_info; else 'trait=value' of
  the integer traits that rows of its source share (number of terms, length).
  """
  levels_of_rows = [
    _stated_level(row) or ' '.join(traits)
    for row, traits in zip(rows, _shared_traits(rows), strict=True)
  ]
  by_source = collections.defaultdict(set)
  for row, level in zip(rows, levels_of_rows, strict=True):
    by_source[row.source].add(level)
  return [
    level if len(by_source[row.source]) <= _MAX_LEVELS else ''
    for row, level in zip(rows, levels_of_rows, strict=True)
  ]


def _stated_level(row: Row) -> str:
  places = [row.extra, *(row.extra.get(name) for name in ('metadata', 'extra_info'))]
  values = [
    place.get(key) for place in places if isinstance(place, dict) for key in ('level', 'difficulty')
  ]
  return next((str(value) for value in values if isinstance(value, str | int | float)), '')


def _shared_traits(rows: Sequence[Row]) -> list[list[str]]:
  """The traits of each row that mark a level: several values in its source, each in several rows."""
  traits = row_traits.levels(rows)
  count = collections.Counter((source, trait) for source, *names in traits for trait in names)
  rows_by_value = collections.defaultdict(list)
  for (source, trait), rows_with in count.items():
    rows_by_value[source, trait.partition('=')[0]].append(rows_with)
  marks = {
    name
    for name, counts in rows_by_value.items()
    if len(counts) > 1 and np.mean(counts) >= _MIN_ROWS_PER_VALUE
  }
  return [[t for t in names if (source, t.partition('=')[0]) in marks] for source, *names in traits]
