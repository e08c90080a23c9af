"""The graders a config may name in `config.rewards.fn`: text in, number out.

Each is `f(text, row, *, settings) -> float`. One that cannot judge a row raises: the pool reports
an error, never a zero that looks like a wrong answer.
"""

from __future__ import annotations

import collections
import functools
import importlib
import logging
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from jaxrl_llm.rewards import adapters
from jaxrl_llm.rewards.gym import sandboxed, scorers
from jaxrl_llm.rewards.parsing import answer_span, choice, expression, extract, formula, numeral
from jaxrl_llm.types import Row, UserError


def exact(text: str, row: Row) -> float:
  """1 where the text equals the answer, both stripped of surrounding space. Source: none."""
  return float(extract.exact(text) == extract.exact(_answer(row)))


def number(text: str, row: Row) -> float:
  """1 where the last number of the text equals the answer's: 1,000 = 1000.0 and -0 = 0.

  A number that is denied, supposed or asked is passed over; one of several offers ('5 or 6') and a part of what stands
  in a box are none. It calculates nothing: fractions and powers are for `numeric`. Source: none.
  """
  found = extract.number(text)
  return float(found is not None and found == _target(row))


def first_number(text: str, row: Row) -> float:
  """1 where the first number of the text that is not denied, and has no rival, equals the answer's. Source: none."""
  found = extract.first_number(text)
  return float(found is not None and found == _target(row))


def marked_number(text: str, row: Row) -> float:
  """1 where the number right behind the text's last #### equals the answer's, as GSM8K's own answers end; else 0.

  verl's strict rule for GSM8K, but that 72.0 = 72, a currency may stand in front, and a part of an expression, as 3 of
  3/4, is none; its flexible rule is `number`. Only the
  last `span.TAIL_CHARS` are looked at. Source: none.
  """
  found = extract.marked_number(text)
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


def numeric(
  text: str,
  row: Row,
  *,
  abs_tol: float = 0.0,
  rel_tol: float = 0.0,
  percent_as_unit: bool = True,
  tag: str = '',
) -> float:
  """1 where |x − a| ≤ max(abs_tol, rel_tol · |a|), x and a the numbers that the text and the answer give.

  Read exactly, see `numeral.read`: 3/4, \\frac{3}{4}, 2 1/2, 75%, 1.2e3, 3 × 10^8, 1{,}200, 1.5 million; currencies and
  units are not compared. A part of an expression, a bound and one of several offers are none. 75% = 0.75.
  percent_as_unit: where only one of the two has the sign, it may also be a unit that the other leaves away, 75% = 75
  (and 0.75% = 0.75, which is the price); False: it never is. tag: judge what stands in the last <tag>…</tag>.
  """
  target = _numeral_of(row)
  part = answer_span.tail(text, tag)
  found = numeral.read(part) if part is not None else None
  if found is None:
    return 0.0
  pairs = [(found.scaled_value, target.scaled_value)]
  if percent_as_unit and found.percent != target.percent:
    pairs.append((found.value, target.value))
  absolute, relative = _exactly(abs_tol), _exactly(rel_tol)
  return float(any(abs(x - a) <= max(absolute, relative * abs(a)) for x, a in pairs))


def multiple_choice(
  text: str, row: Row, *, options: str = 'options', first_index: int = -1, tag: str = ''
) -> float:
  """1 where the text chooses the option that the row's answer names: 'Answer: (B).', **B**, \\boxed{B}, B) text, …

  See `choice.read`; two letters are no choice. options: the row's field with the options, a list of texts,
  {letter: text} or {label: [...], text: [...]}; where the row has it, letters beyond are no choice, and the reply and
  the answer may say an option's text instead of its letter. first_index: answers may be numbers, and this is the
  first option's; −1: they are not. tag: judge what stands in the last <tag>…</tag>. Source: none.
  """
  known, target = _choice_of(row, options, first_index)
  part = answer_span.tail(text, tag)
  return float(part is not None and choice.read(part, known) == target)


def countdown(text: str, row: Row, *, all_numbers: bool = True, tag: str = '') -> float:
  """1 where the last line is an expression that makes the row's `target` of its `numbers`, each used once.

  Signs are + - * /, also × ÷ − and \\times, with brackets; what stands behind the last = must be the target. Every
  number counts as often as the row has it; all_numbers=False: some may be left over. Division is exact, and nothing is
  run as Python. tag: judge what stands in the last <tag>…</tag>. Source: none.
  """
  numbers, target = _countdown_of(row)
  part = answer_span.tail(text, tag)
  found = expression.read(part) if part is not None else None
  if found is None or found.value != target:
    return 0.0
  left = collections.Counter(numbers)
  left.subtract(found.numbers)
  spare = left.total() == 0 if all_numbers else True
  return float(spare and min(left.values()) >= 0)


def gym(text: str, row: Row, *, tag: str = '') -> float:
  """The score of the row's own reasoning-gym task, in [0, 1], with its partial credit.

  tag: judge what stands in the last <tag>...</tag>, 0 where there is none; '' judges the whole text. Tasks whose scorer
  evaluates the answer are scored by gym_sandbox.py.
  """
  task = _gym_of(row)
  found = answer_span.in_tag(text, tag) if tag else text
  if found is None:
    return 0.0
  entry = dict(question=row.question, answer=task['answer'], metadata=row.extra['metadata'])
  if task['name'] in scorers.PLAIN:
    return float(scorers.package_scorer(task['name'], task['settings'])(found.strip(), entry))
  return sandboxed.score(task['name'], task['settings'], found.strip(), entry)


def _gym_of(row: Row) -> dict[str, Any]:
  """name, settings and answer of the row's task. Raises ValueError where it is none that can be scored."""
  name = sandboxed.task_of(row)
  if not name:
    raise ValueError(f'row {row.id} does not come from reasoning-gym')
  if name not in scorers.TASKS:
    raise ValueError(
      f'row {row.id} is of {name!r}, which is no reasoning-gym task with a known scorer'
    )
  return row.extra['gym']


def math_verify(text: str, row: Row) -> float:
  """1 where math-verify takes the text's last answer for the row's: 1/2 = 0.5 = \\frac{1}{2}, {1, 2} = {2, 1}, …

  The answer is the last box, boxes that a comma or 'and' joins as one list; else the last 'the answer is', formula or
  number; see `formula.of_text`. What is denied, one of several offers, or a bound is none, and 75% equals 75 and 0.75.
  The row's answer is LaTeX, or plain. A text without an answer, or with one that cannot be read, is wrong. Its own
  time limits are switched off: they use the alarm that is the worker's deadline, and take what was too slow for wrong.
  Where sympy catches an error of its own on the way, memory included, math-verify goes on without what that would
  have told. Source: none.
  """
  target = formula.of_row(_answer(row))
  if not _math_parsed(target):
    raise ValueError(f'the answer of row {row.id} cannot be read: {row.answer[:80]!r}')
  found = formula.of_text(text)
  names = formula.name(target), formula.name(found)
  if not found or any(names):
    return float(bool(found) and names[0] == names[1])
  try:
    return float(any(_math_equal(a, b) for a, b in formula.readings(target, found)))
  except MemoryError:
    raise
  except (
    Exception
  ):  # parsers meet all kinds of texts: digits beyond int's limit, nesting beyond Python's, …
    return 0.0


def _math_equal(target: str, found: str) -> bool:
  parsed = _math_verify()[0](f'\\boxed{{{found}}}', parsing_timeout=None, raise_on_error=True)
  return _math_verify()[1](
    list(_math_parsed(target)), parsed, timeout_seconds=None, raise_on_error=True
  )


@functools.lru_cache(maxsize=1)
def _math_verify() -> tuple[Callable, Callable]:
  import math_verify as package

  # It warns that its time limits are off, and prints texts.
  logging.getLogger('math_verify').setLevel(logging.ERROR)
  return package.parse, package.verify


@functools.lru_cache(maxsize=4096)
def _math_parsed(target: str) -> tuple[Any, ...]:
  return tuple(_math_verify()[0](f'\\boxed{{{target}}}', parsing_timeout=None, raise_on_error=True))


# What a worker does before its first answer, whose time it would take.
PREPARE = {
  math_verify: lambda: _math_parsed('1'),  # also compiles its regular expressions
  gym: lambda: importlib.import_module('reasoning_gym'),
}


def _check_numeric(told: dict[str, Any], where: str) -> None:
  for name in ('abs_tol', 'rel_tol'):
    if not 0 <= told[name] < math.inf:
      raise UserError(f'{where}.{name}={told[name]!r} must be a finite number from 0 up.')


def _check_choice(told: dict[str, Any], where: str) -> None:
  if told['first_index'] not in (-1, 0, 1):
    raise UserError(f'{where}.first_index={told["first_index"]!r} must be one of: -1, 0, 1.')


# Grader → what its settings must be, beyond their types: raises UserError of (settings, 'config.rewards').
CHECKS = {numeric: _check_numeric, multiple_choice: _check_choice}

# Grader → what it does with a row before it looks at a reply: raises ValueError of (row, settings) for one that it
# cannot judge by.
ROWS = {
  numeric: lambda row, told: _numeral_of(row),
  multiple_choice: lambda row, told: _choice_of(row, told['options'], told['first_index']),
  countdown: lambda row, told: _countdown_of(row),
  gym: lambda row, told: _gym_of(row),
}

_numeral = functools.lru_cache(maxsize=4096)(numeral.read)


def _numeral_of(row: Row) -> numeral.Numeral:
  found = _numeral(_answer(row))
  if found is None:
    raise ValueError(f'the answer of row {row.id} holds no number: {row.answer[:80]!r}')
  return found


def _choice_of(row: Row, options: str, first_index: int) -> tuple[choice.Options, str]:
  known = choice.options_of(row, options)
  return known, choice.answer_of(row._replace(answer=_answer(row)), known, first_index)


def _countdown_of(row: Row) -> tuple[list[int], int]:
  """(numbers, target) of the row, of its ground truth, or of its metadata, whichever has them."""
  for held in (row.extra, adapters.ground_truth(row), row.extra.get('metadata')):
    told = (held.get('numbers'), held.get('target')) if isinstance(held, dict) else (None, None)
    if isinstance(told[0], list | tuple) and all(type(n) is int for n in (*told[0], told[1])):
      return told
  raise ValueError(f"row {row.id} has no 'numbers', a list, with a 'target', whole numbers all")


@functools.lru_cache(maxsize=16)
def _exactly(tolerance: float) -> Fraction:
  return Fraction(repr(tolerance))  # 0.1 is a tenth, and not the float next to it


def _target(row: Row) -> Decimal:
  found = extract.number(_answer(row))
  if found is None:
    raise ValueError(f'the answer of row {row.id} holds no number: {row.answer!r}')
  return found


def _answer(row: Row) -> str:
  if not row.answer.strip():
    raise ValueError(f'row {row.id} has no answer to compare with')
  return row.answer
