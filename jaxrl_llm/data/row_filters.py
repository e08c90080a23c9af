"""Which training rows a stage of training uses: rows → rows.

`config.data.keep.fn` (prompts of RL) and `config.sft.keep.fn` (demonstrations of the supervised start) may name every
public function of this module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxrl_llm.data.row_formats import column_value
from jaxrl_llm.types import COLUMNS, JsonValue, Row, UserError


def none() -> None:
  """All rows."""


def in_range(
  rows: Sequence[Row],
  where: str,
  *,
  column: str,
  above: float = -math.inf,
  at_most: float = math.inf,
) -> list[Row]:
  """The rows with above < column ≤ at_most, so that two stages with one threshold share no row.

  `column` is a name, or 'a.b' for b inside a; `where` is the field in messages, such as 'config.data.keep'.
  arXiv:2603.11193 (DeReason: difficulty ≤ τ is demonstrated, > τ is left to RL; reconstructed from the abstract and a
  third party's summary). Raises UserError for a row without the column or whose value is no number, and where no row
  is left.
  """
  numbers = [_number(row, where, column) for row in rows]
  chosen = [row for row, x in zip(rows, numbers, strict=True) if above < x <= at_most]
  if not chosen:
    span = f'from {min(numbers):g} to {max(numbers):g}' if numbers else 'of no row'
    raise UserError(
      f'{where} keeps no row with {above:g} < {column} <= {at_most:g}; change above or at_most: the values of the '
      f'{len(rows)} rows are {span}.'
    )
  return chosen


def _number(row: Row, where: str, column: str) -> float:
  value = column_value(row.extra, column)
  if value is None:
    raise UserError(
      f'{where}.column={column!r} is missing in row {row.id} of {row.source!r}; add it, or choose of: '
      f'{", ".join(_numeric(row)) or "no column is a number"}.'
    )
  if not _is_number(value):
    raise UserError(
      f'{where}.column={column!r} of row {row.id} is {value!r}, which is no number; convert the column, or choose '
      'another.'
    )
  return float(value)


def _is_number(value: JsonValue) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _numeric(row: Row) -> list[str]:
  """The columns of a row that are numbers, and fields inside of its columns."""
  parts = [('', row.extra)]
  parts += [(f'{k}.', v) for k, v in row.extra.items() if isinstance(v, dict) and k != COLUMNS]
  return sorted(f'{prefix}{k}' for prefix, part in parts for k, v in part.items() if _is_number(v))
