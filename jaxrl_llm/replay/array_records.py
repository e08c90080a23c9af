"""Records of arrays, handled array by array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def each(f: Callable, *records: Any) -> Any:
  """f of each array of records of one type, those of records in them too; what is None stays. Source: none."""

  def one(*x):
    return None if x[0] is None else each(f, *x) if isinstance(x[0], tuple) else f(*x)

  return type(records[0])(*(one(*x) for x in zip(*records, strict=True)))
