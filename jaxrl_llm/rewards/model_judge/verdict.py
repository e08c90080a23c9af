"""What a judge's answer says: its scores."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from jaxrl_llm.rewards.parsing import answer_span

_MOST_STARTS = 200


def by_regex(text: str, regex: str) -> float:
  """The number in the first group of the last match. Raises ValueError for none. Source: none."""
  found = list(re.finditer(regex, _spoken(text)))
  if not found:
    raise ValueError(f'the judge says nothing that {regex!r} matches: {text[-80:]!r}')
  return _number(found[-1][1])


def by_field(text: str, field: str) -> Any:
  """The value of a field of the last JSON object that has it. Raises ValueError for none. Source: none."""
  text = _spoken(text)
  blocks = [block for _, block in answer_span.fences(text)]
  for part in (*reversed(blocks), text):
    found = [told[field] for told in _objects(part) if field in told]
    if found:
      return found[-1]
  raise ValueError(f'the judge says no {field!r}: {text[-80:]!r}')


def score(value: Any, worst: float, best: float) -> float:
  """(x − worst) / (best − worst). Raises ValueError for what is no number from worst to best. Source: none."""
  found = _number(value)
  if not worst <= found <= best:
    raise ValueError(f'the judge gives {found}, which is not from {worst} to {best}')
  return (found - worst) / (best - worst)


def share(value: Any) -> float:
  """true as 1, false as 0, a number from 0 to 1 as itself. Raises ValueError for others. Source: none."""
  return float(value) if isinstance(value, bool) else score(value, 0.0, 1.0)


def _spoken(text: str) -> str:
  """Less what a judge thought before."""
  return text.rpartition('</think>')[2]


def _objects(text: str) -> list[dict]:
  """The outermost JSON objects of a text."""
  found, at, decoder = [], text.find('{'), json.JSONDecoder()
  for _ in range(_MOST_STARTS):
    if at < 0:
      break
    try:
      told, end = decoder.raw_decode(text, at)
      found.append(told)
    except (ValueError, RecursionError):
      end = at + 1
    at = text.find('{', end)
  return found


def _number(value: Any) -> float:
  if isinstance(value, str) and re.fullmatch(r'\s*[-+]?[0-9]*\.?[0-9]+\s*', value):
    value = float(value)
  if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
    raise ValueError(f'the judge gives {str(value)[:40]!r}, which is no number')
  return float(value)
