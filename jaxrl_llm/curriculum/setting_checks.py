"""Checks of stage settings. A curriculum runs every stage once when it is built, so that they fail early."""

from __future__ import annotations

import math
from numbers import Real

from jaxrl_llm.config.section import Setting
from jaxrl_llm.types import UserError


def check_range(
  name: str, value: Setting, low: float, high: float = math.inf, *, open_low: bool = False
) -> None:
  """Raises UserError unless config.curriculum.<name> is a number in [low, high].

  open_low excludes `low`; infinity is never allowed.
  """
  number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
  if number and low <= value <= high and not (open_low and value == low):
    return
  bounds = f'above {low}' if open_low else f'of at least {low}'
  top = '' if high == math.inf else f' and at most {high}'
  raise UserError(f'config.curriculum.{name}={value!r} must be a number {bounds}{top}.')


def check_integer(name: str, value: Setting, low: int) -> None:
  """Raises UserError unless config.curriculum.<name> is a whole number from `low` up."""
  if type(value) is not int or value < low:
    raise UserError(f'config.curriculum.{name}={value!r} must be a whole number of at least {low}.')


def check_choice(name: str, value: Setting, valid: tuple[Setting, ...]) -> None:
  """Raises UserError unless config.curriculum.<name> is one of `valid`."""
  if value not in valid:
    choices = ', '.join(map(str, valid))
    raise UserError(f'config.curriculum.{name}={value!r} must be one of: {choices}.')


def check_encodes(prior: str, encodes: bool) -> None:
  """Raises UserError for candidates that a prior must encode, where prior_pooling.fn=`prior` encodes none."""
  if not encodes:
    raise UserError(
      "config.curriculum.candidates.fn='encoded' takes prompts that a prior encoded, and "
      f'prior_pooling.fn={prior!r} encodes none; set it to hidden_state.'
    )
