"""Parses scores from the answer of a judge."""

from __future__ import annotations

import json
import math
import re

from jaxrl_llm.rewards.parsing import answer_span
from jaxrl_llm.types import JsonValue

_MAX_STARTS = 200


def by_regex(text: str, regex: str) -> float:
  """Returns the number in the first group of the last match. Raises ValueError without one."""
  matches = list(re.finditer(regex, _without_thoughts(text)))
  if not matches:
    raise ValueError(f'the judge gives nothing that matches {regex!r}: {text[-80:]!r}')
  return _number(matches[-1][1])


def by_field(text: str, field: str) -> JsonValue:
  """Returns the value of a field of the last JSON object that has it. Raises ValueError without one."""
  text = _without_thoughts(text)
  blocks = [block for _, block in answer_span.fences(text)]
  for part in (*reversed(blocks), text):
    values = [entry[field] for entry in _objects(part) if field in entry]
    if values:
      return values[-1]
  raise ValueError(f'the judge gives no {field!r}: {text[-80:]!r}')


def score(value: JsonValue, worst: float, best: float) -> float:
  """Returns (x − worst) / (best − worst). Raises ValueError unless x is a number from worst to best."""
  number = _number(value)
  if not worst <= number <= best:
    raise ValueError(f'the judge gives {number}, which is not from {worst} to {best}')
  return (number - worst) / (best - worst)


def share(value: JsonValue) -> float:
  """Returns 1 for true, 0 for false, and a number from 0 to 1 unchanged. Raises ValueError for other values."""
  return float(value) if isinstance(value, bool) else score(value, 0.0, 1.0)


def _without_thoughts(text: str) -> str:
  """The text after the judge's reasoning."""
  return text.rpartition('</think>')[2]


def _objects(text: str) -> list[dict]:
  """The outermost JSON objects of a text."""
  objects, start, decoder = [], text.find('{'), json.JSONDecoder()
  for _ in range(_MAX_STARTS):
    if start < 0:
      break
    try:
      value, end = decoder.raw_decode(text, start)
      objects.append(value)
    except (ValueError, RecursionError):
      end = start + 1
    start = text.find('{', end)
  return objects


def _number(value: JsonValue) -> float:
  if isinstance(value, str) and re.fullmatch(r'\s*[-+]?[0-9]*\.?[0-9]+\s*', value):
    value = float(value)
  if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
    raise ValueError(f'the judge gives {str(value)[:40]!r}, which is no number')
  return float(value)
