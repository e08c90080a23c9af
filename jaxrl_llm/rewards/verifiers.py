"""Verifiers: reward functions that compare a completion with the row's answer.

`config.rewards.fn` may name every public function: f(text, row, *, settings) -> float. A verifier raises for a row that
it cannot use, so that the pool reports an error instead of a wrong answer.
"""

from __future__ import annotations

import collections
import functools
import importlib
import itertools
import logging
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from jaxrl_llm.rewards import adapters
from jaxrl_llm.rewards.gym import sandboxed, scorers
from jaxrl_llm.rewards.outcomes import Settings
from jaxrl_llm.rewards.parsing import (
  answer_span,
  choice,
  expression,
  extract,
  formula,
  numeral,
  ratio,
)
from jaxrl_llm.types import JsonObject, Row, UserError


def exact(text: str, row: Row) -> float:
  """1 if the text equals the answer up to surrounding white space, else 0."""
  return float(text.strip() == _answer(row).strip())


def matching_start(text: str, row: Row) -> float:
  """The share of the text before its first character that differs from the answer; 1 without one.

  For `config.curriculum.hint.fn=corrected` a judge of steps that needs no model, where one answer alone is right.
  """
  answer = _answer(row)
  count = sum(
    1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, answer, strict=False))
  )
  return count / len(text) if text else 0.0


def number(text: str, row: Row) -> float:
  """1 if the last number of the text equals that of the answer, else 0: 1,000 = 1000.0 and -0 = 0.

  Numbers that are denied, supposed or questioned are ignored. One of several alternatives ('5 or 6') and a part of a
  boxed expression do not count. Fractions and powers are not evaluated; see `numeric`.
  """
  value = extract.number(text)
  return float(value is not None and value == _target(row))


def first_number(text: str, row: Row) -> float:
  """1 if the first number that is neither denied nor one of several alternatives equals that of the answer, else 0."""
  value = extract.first_number(text)
  return float(value is not None and value == _target(row))


def marked_number(text: str, row: Row) -> float:
  """1 if the number directly after the last #### equals that of the answer, as in GSM8K, else 0.

  verl's strict rule for GSM8K, except that 72.0 = 72, a currency sign may precede, and a part of an expression (3 of
  3/4) does not count; its flexible rule is `number`. Only the last `answer_span.TAIL_CHARS` characters are read.
  """
  value = extract.marked_number(text)
  return float(value is not None and value == _target(row))


def short_answer(text: str, row: Row) -> float:
  """1 if the text gives the row's answer, else 0: a number by the rule of `number`, other answers word for word.

  For files whose rows have answers of several types. Words are compared without regard to case, spacing and the quotes,
  asterisks or period around them; text before the last 'answer is' or 'answer:' is ignored. See `answer_span.words`.
  """
  answer = _answer(row)
  if extract.NUMBER.fullmatch(answer.strip()):
    return number(text, row)
  if not answer_span.words(answer):
    raise ValueError(f'the answer of row {row.id} holds no word: {row.answer!r}')
  return float(answer_span.words(text) == answer_span.words(answer))


def bare_number(text: str, row: Row) -> float:
  """1 if the text is one number up to surrounding white space, right or wrong, else 0."""
  del row
  plain = text.replace('\N{MINUS SIGN}', '-').strip()
  return float(extract.NUMBER.fullmatch(plain) is not None)


def tagged(text: str, row: Row, *, tag: str = 'answer') -> float:
  """1 if the text ends with a nonempty <tag>…</tag> and contains each mark once, else 0."""
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
  """1 if |x − a| ≤ max(abs_tol, rel_tol · |a|) for the numbers x of the text and a of the answer, else 0.

  Numbers are read exactly, see `numeral.read`: 3/4, \\frac{3}{4}, 2 1/2, 75%, 1.2e3, 3 × 10^8, 1{,}200, 1.5 million.
  Currencies and units are ignored. A part of an expression, a bound and one of several alternatives do not count.
  75% = 0.75. With percent_as_unit, a % sign of only one side may also be a unit: 75% = 75 (and therefore 0.75% = 0.75).
  tag: only the content of the last <tag>…</tag> is read.
  """
  target = _numeral_of(row)
  part = answer_span.tail(text, tag)
  value = numeral.read(part) if part is not None else None
  if value is None:
    return 0.0
  pairs = [(value.scaled_value, target.scaled_value)]
  if percent_as_unit and value.percent != target.percent:
    pairs.append((value.value, target.value))
  absolute, relative = _exact_fraction(abs_tol), _exact_fraction(rel_tol)
  return float(any(abs(x - a) <= max(absolute, relative * abs(a)) for x, a in pairs))


def multiple_choice(
  text: str, row: Row, *, options: str = 'options', first_index: int = -1, tag: str = ''
) -> float:
  """1 if the text chooses the option of the row's answer, else 0: 'Answer: (B).', **B**, \\boxed{B}, B) text, …

  See `choice.read`; two letters are no choice. options: the row's field with the options, a list of texts,
  {letter: text} or {label: [...], text: [...]}. If the row has it, other letters are no choice, and the completion and
  the answer may give the text of an option instead of its letter. first_index: number of the first option where answers
  are numbers; −1 = they are not. tag: only the content of the last <tag>…</tag> is read.
  """
  choices, target = _choice_of(row, options, first_index)
  part = answer_span.tail(text, tag)
  return float(part is not None and choice.read(part, choices) == target)


def countdown(text: str, row: Row, *, all_numbers: bool = True, tag: str = '') -> float:
  """1 if the last line is an expression of the row's `numbers`, each used once, that equals its `target`, else 0.

  Operators are + - * /, also × ÷ − and \\times, with brackets; the value after the last = must be the target. A number
  may be used as often as the row lists it. all_numbers=False: some may remain unused. Division is exact, and no Python
  code is executed. tag: only the content of the last <tag>…</tag> is read.
  """
  numbers, target = _countdown_of(row)
  part = answer_span.tail(text, tag)
  parsed = expression.read(part) if part is not None else None
  if parsed is None or parsed.value != target:
    return 0.0
  unused = collections.Counter(numbers)
  unused.subtract(parsed.numbers)
  complete = unused.total() == 0 if all_numbers else True
  return float(complete and min(unused.values()) >= 0)


def gym(text: str, row: Row, *, tag: str = '') -> float:
  """The score of the row's reasoning-gym task, in [0, 1], with partial credit.

  tag: only the content of the last <tag>...</tag> is scored, 0 without it; '' scores the whole text. Tasks whose scorer
  evaluates the answer are scored in a sandbox, see gym/sandboxed.py.
  """
  task = _gym_of(row)
  answer = answer_span.in_tag(text, tag) if tag else text
  if answer is None:
    return 0.0
  entry = dict(question=row.question, answer=task['answer'], metadata=row.extra['metadata'])
  if task['name'] in scorers.PLAIN:
    return float(scorers.package_scorer(task['name'], task['settings'])(answer.strip(), entry))
  return sandboxed.score(task['name'], task['settings'], answer.strip(), entry)


def _gym_of(row: Row) -> JsonObject:
  """name, settings and answer of the row's task. Raises ValueError where it cannot be scored."""
  name = sandboxed.task_of(row)
  if not name:
    raise ValueError(f'row {row.id} does not come from reasoning-gym')
  if name not in scorers.TASKS:
    raise ValueError(
      f'row {row.id} is of {name!r}, which is no reasoning-gym task with a known scorer'
    )
  return row.extra['gym']


def math_verify(text: str, row: Row) -> float:
  """1 if math-verify finds the text's last answer equal to the row's, else 0: 1/2 = 0.5 = \\frac{1}{2}, {1, 2} = {2,
  1}, …

  The answer is the last box (boxes joined by a comma or 'and' are one list), else the last 'the answer is', formula or
  number; see `formula.of_text`. Denied answers, one of several alternatives and bounds do not count; 75% equals 75 and
  0.75. The row's answer is LaTeX or plain text. A text without a readable answer is wrong. The time limits of
  math-verify are disabled, because they use the alarm of the worker's deadline and would grade slow items as wrong.
  Errors that sympy catches itself, such as a lack of memory, are not visible here.
  """
  target = formula.of_row(_answer(row))
  if not _math_parsed(target):
    raise ValueError(f'the answer of row {row.id} cannot be read: {row.answer[:80]!r}')
  answer = formula.of_text(text)
  target, answer = ratio.aligned(target, answer)
  names = formula.name(target), formula.name(answer)
  if not answer or any(names):
    return float(bool(answer) and names[0] == names[1])
  try:
    return float(any(_math_equal(a, b) for a, b in formula.readings(target, answer)))
  except MemoryError:
    raise
  except (
    Exception
  ):  # arbitrary text makes parsers fail in many ways: huge integers, deep nesting, …
    return 0.0


def _math_equal(target: str, answer: str) -> bool:
  parsed = _math_verify()[0](f'\\boxed{{{answer}}}', parsing_timeout=None, raise_on_error=True)
  return _math_verify()[1](
    list(_math_parsed(target)), parsed, timeout_seconds=None, raise_on_error=True
  )


@functools.lru_cache(maxsize=1)
def _math_verify() -> tuple[Callable, Callable]:
  import math_verify as package

  # Its warnings repeat that the time limits are off, and contain whole texts.
  logging.getLogger('math_verify').setLevel(logging.ERROR)
  return package.parse, package.verify


@functools.lru_cache(maxsize=4096)
def _math_parsed(target: str) -> tuple[Any, ...]:
  return tuple(_math_verify()[0](f'\\boxed{{{target}}}', parsing_timeout=None, raise_on_error=True))


# Reward function → slow preparation that a worker does before its first item, outside of the item's deadline.
PREPARE = {
  math_verify: lambda: _math_parsed('1'),  # also compiles its regular expressions
  gym: lambda: importlib.import_module('reasoning_gym'),
}


def _check_numeric(settings: Settings, where: str) -> None:
  for name in ('abs_tol', 'rel_tol'):
    if not 0 <= settings[name] < math.inf:
      raise UserError(f'{where}.{name}={settings[name]!r} must be a finite number from 0 up.')


def _check_choice(settings: Settings, where: str) -> None:
  if settings['first_index'] not in (-1, 0, 1):
    raise UserError(f'{where}.first_index={settings["first_index"]!r} must be one of: -1, 0, 1.')


# Reward function → check(settings, where) that raises UserError for settings out of range.
CHECKS = {numeric: _check_numeric, multiple_choice: _check_choice}

# Reward function → check(row, settings) that raises ValueError for a row that it cannot use.
ROWS = {
  numeric: lambda row, settings: _numeral_of(row),
  multiple_choice: lambda row, settings: _choice_of(
    row, settings['options'], settings['first_index']
  ),
  countdown: lambda row, settings: _countdown_of(row),
  gym: lambda row, settings: _gym_of(row),
}

_numeral = functools.lru_cache(maxsize=4096)(numeral.read)


def _numeral_of(row: Row) -> numeral.Numeral:
  value = _numeral(_answer(row))
  if value is None:
    raise ValueError(f'the answer of row {row.id} holds no number: {row.answer[:80]!r}')
  return value


def _choice_of(row: Row, options: str, first_index: int) -> tuple[choice.Options, str]:
  choices = choice.options_of(row, options)
  return choices, choice.answer_of(row._replace(answer=_answer(row)), choices, first_index)


def _countdown_of(row: Row) -> tuple[list[int], int]:
  """(numbers, target) of the row, its ground truth or its metadata, the first that has them."""
  for fields in (row.extra, adapters.ground_truth(row), row.extra.get('metadata')):
    if not isinstance(fields, dict):
      continue
    numbers, target = fields.get('numbers'), fields.get('target')
    if isinstance(numbers, list | tuple) and all(type(n) is int for n in (*numbers, target)):
      return numbers, target
  raise ValueError(f"row {row.id} has no list 'numbers' with a 'target', all of them whole numbers")


@functools.lru_cache(maxsize=16)
def _exact_fraction(tolerance: float) -> Fraction:
  return Fraction(repr(tolerance))  # 0.1 is a tenth, not the nearest float


def _target(row: Row) -> Decimal:
  value = extract.number(_answer(row))
  if value is None:
    raise ValueError(f'the answer of row {row.id} holds no number: {row.answer!r}')
  return value


def _answer(row: Row) -> str:
  if not row.answer.strip():
    raise ValueError(f'row {row.id} has no answer to compare with')
  return row.answer
