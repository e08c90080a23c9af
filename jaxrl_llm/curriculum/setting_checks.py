"""Checks of the stages' settings; a curriculum runs every stage when made, so they come early."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from jaxrl_llm.types import UserError


def within(
  name: str, value: Any, low: float, high: float = math.inf, *, open_low: bool = False
) -> None:
  """Raises UserError unless config.curriculum.<name> is a number in [low, high].

  open_low shuts `low` out; infinity is never allowed. Source: none.
  """
  number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
  if number and low <= value <= high and not (open_low and value == low):
    return
  bounds = f'above {low}' if open_low else f'of at least {low}'
  top = '' if high == math.inf else f' and at most {high}'
  raise UserError(f'config.curriculum.{name}={value!r} must be a number {bounds}{top}.')


def whole(name: str, value: Any, low: int) -> None:
  """Raises UserError unless config.curriculum.<name> is a whole number from `low` up. Source: none."""
  if type(value) is not int or value < low:
    raise UserError(f'config.curriculum.{name}={value!r} must be a whole number of at least {low}.')


def one_of(name: str, value: Any, valid: tuple) -> None:
  """Raises UserError unless config.curriculum.<name> is one of `valid`. Source: none."""
  if value not in valid:
    told = ', '.join(map(str, valid))
    raise UserError(f'config.curriculum.{name}={value!r} must be one of: {told}.')
