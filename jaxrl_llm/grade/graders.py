"""The graders a config may name in `config.grade.fn`: text in, number out.

Each is `f(text, row, *, settings) -> float`. One that cannot judge a row raises: the pool reports
an error, never a zero that looks like a wrong answer.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from jaxrl_llm.grade import extract
from jaxrl_llm.types import Row


def exact(text: str, row: Row) -> float:
  """1 where the text equals the answer, both stripped of surrounding space. Source: none."""
  return float(extract.exact(text) == extract.exact(_answer(row)))


def number(text: str, row: Row) -> float:
  """1 where the last number of the text equals the answer's: 1,000 = 1000.0 and -0 = 0.

  Source: none.
  """
  found = extract.number(text)
  return float(found is not None and found == _target(row))


def first_number(text: str, row: Row) -> float:
  """1 where the first number of the text equals the answer's. Source: none."""
  found = extract.first_number(text)
  return float(found is not None and found == _target(row))


def bare_number(text: str, row: Row) -> float:
  """1 where the text is one number and nothing else but space around it, right or wrong. Source: none."""
  del row
  plain = text.replace('\N{MINUS SIGN}', '-').strip()
  return float(extract.NUMBER.fullmatch(plain) is not None)


def tagged(text: str, row: Row, *, tag: str = 'answer') -> float:
  """1 where the text ends with <tag>…</tag>, not empty, and holds each of the two once. Source: none."""
  del row
  start, end = f'<{tag}>', f'</{tag}>'
  _, opened, rest = text.partition(start)
  inside, closed, after = rest.partition(end)
  once = text.count(start) == text.count(end) == 1
  return float(bool(once and opened and closed and inside.strip() and not after.strip()))


def gym(text: str, row: Row, *, tag: str = '') -> float:
  """The score that the row's own reasoning-gym task gives, in [0, 1], with its partial credit.

  tag: judge what stands in the last <tag>...</tag>, 0 where there is none; '' judges the whole
  text. Source: none.
  """
  if 'gym' not in row.extra:
    raise ValueError(f'row {row.id} does not come from reasoning-gym')
  if tag:
    found = re.findall(f'<{re.escape(tag)}>(.*?)</{re.escape(tag)}>', text, re.DOTALL)
    if not found:
      return 0.0
    text = found[-1]
  task = row.extra['gym']
  dataset = _gym_dataset(task['name'], json.dumps(task['settings'], sort_keys=True))
  entry = dict(question=row.question, answer=task['answer'], metadata=row.extra['metadata'])
  return float(dataset.score_answer(text.strip(), entry))


@functools.lru_cache(maxsize=256)
def _gym_dataset(name: str, settings: str) -> Any:
  import reasoning_gym

  return reasoning_gym.create_dataset(name, seed=0, **json.loads(settings))


def math_verify(text: str, row: Row) -> float:
  """1 where math-verify takes the text's last answer for the row's: 1/2 = 0.5 = \\frac{1}{2}, {1, 2} = {2, 1}, …

  The row's answer is LaTeX, or plain. A text without an answer, or with one that cannot be read, is wrong. Its own
  time limits are switched off: they use the alarm that is the worker's deadline, and take what was too slow for wrong.
  Where sympy catches an error of its own on the way, memory included, math-verify goes on without what that would
  have told. Source: none.
  """
  parse, verify = _math_verify()
  target = _math_target(_answer(row))
  if not target:
    raise ValueError(f'the answer of row {row.id} cannot be read: {row.answer[:80]!r}')
  try:
    found = parse(text, parsing_timeout=None, raise_on_error=True)
    return float(verify(list(target), found, timeout_seconds=None, raise_on_error=True))
  except MemoryError:
    raise
  except (
    Exception
  ):  # parsers meet all kinds of texts: digits beyond int's limit, nesting beyond Python's, …
    return 0.0


@functools.lru_cache(maxsize=1)
def _math_verify() -> tuple[Callable, Callable]:
  import math_verify as package

  # It warns that its time limits are off, and prints texts.
  logging.getLogger('math_verify').setLevel(logging.ERROR)
  return package.parse, package.verify


@functools.lru_cache(maxsize=4096)
def _math_target(answer: str) -> tuple[Any, ...]:
  boxed = answer if '\\boxed' in answer else f'\\boxed{{{answer}}}'
  return tuple(_math_verify()[0](boxed, parsing_timeout=None, raise_on_error=True))


# What a worker does before its first answer, whose time it would take.
PREPARE = {
  math_verify: lambda: _math_target('1'),  # also compiles its regular expressions
  gym: lambda: importlib.import_module('reasoning_gym'),
}


def _target(row: Row) -> Decimal:
  found = extract.number(_answer(row))
  if found is None:
    raise ValueError(f'the answer of row {row.id} holds no number: {row.answer!r}')
  return found


def _answer(row: Row) -> str:
  if not row.answer.strip():
    raise ValueError(f'row {row.id} has no answer to compare with')
  return row.answer
