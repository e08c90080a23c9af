"""Functions mapped over records of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Record = TypeVar('Record', bound=tuple[Any, ...])


def each(f: Callable, *records: Record) -> Record:
  """f of each array of records of one type, nested records included; None stays None."""

  def mapped(*x: Any) -> Any:
    return None if x[0] is None else each(f, *x) if isinstance(x[0], tuple) else f(*x)

  return type(records[0])(*(mapped(*x) for x in zip(*records, strict=True)))
