"""What a grader compares with the answer: text → a value that equals another of the same meaning, None for none.

A function here has the name of the grader in graders.py that compares by it.
"""

from __future__ import annotations

import collections
import itertools
import re
from decimal import Decimal
from fractions import Fraction

from jaxrl_llm.rewards.parsing import answer_span, choice, number_context, numeral

# A sign counts only where it cannot be a minus between two terms. Commas count only between groups
# of three.
NUMBER = re.compile(
  r'(?:(?<![\w)\].])[-+])?'
  r'(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)'
)
_MARKED = re.compile(r'####[ \t]*[-+]?\\?[$€£¥₹]?(?=[-+]?\.?[0-9])')
_DIGITS = '0123456789'
_RUN = _DIGITS + '.,+-'
_GROUP = re.compile(
  r'(?<=[0-9])(?:\\[,!;:]|\{,\}|\\!,(?:\\!)?|,\\! ?|[\u2009\u202f\u00a0])(?=[0-9]{3}(?![0-9]))'
)
_DASH = re.compile(r'(?<![\w\s])\u2013(?=[0-9])|(?<![0-9])(\s)\u2013(?=[0-9])|^\u2013(?=[0-9])')
_INDEX = re.compile(r'[\^_]\s?[({]?[-+]?$')
_BASE = re.compile(r'_[\w{(\\]|\s?\^(?!\s?\{?\s?(?:\\circ|°))|\*\*[0-9(]')
_SIGNS = str.maketrans({'×': '*', '·': '*', '⋅': '*', '<': '\n'})  # what a tag follows is a line
_RUN_END = re.compile('[0-9.,+-]*')
_MOST_TRIED = 40  # numbers that are looked at before the text is taken to say none


def exact(text: str) -> str | None:
  """The text without surrounding space; None where nothing is left. Source: none."""
  return text.strip() or None


def number(text: str) -> Decimal | None:
  """The last number of the text that is neither denied, supposed, an exponent nor an index: 1,000 = 1000.0, -0 = 0.

  None where it is one of several offers, the base of a power, or a part of what stands in a box. Source: none.
  """
  # A number is of digits and marks alone: what stands in front of the last run of them is not read, but for a
  # window of constant length, which makes long texts cheap.
  end = 1 + max(text.rfind(digit) for digit in _DIGITS)
  start = max(0, len(_plain(text[:end]).rstrip(_RUN)) - 2 * number_context.WINDOW)
  part = _grouped(text[start : end + 2 * number_context.WINDOW])
  matches = [*collections.deque(NUMBER.finditer(part), maxlen=_MOST_TRIED)]
  for at in reversed(range(len(matches))):
    found, (left, right) = matches[at], _around(part, matches[at])
    if _INDEX.search(left) or number_context.is_silent(left, right):
      continue
    if _BASE.match(right) or _rivaled(matches, at, left, right):
      return None
    return _value(found[0]) if _fills_box(part, found) else None
  return None


def first_number(text: str) -> Decimal | None:
  """The first number of the text that is not denied, None where another is offered beside it. Source: none."""
  starts = [at for digit in _DIGITS if (at := text.find(digit)) >= 0]
  if not starts:
    return None
  start, end = min(starts), min(starts)
  end = _RUN_END.match(text, end).end()
  part = _grouped(text[max(0, start - number_context.WINDOW) : end + 2 * number_context.WINDOW])
  matches = [*itertools.islice(NUMBER.finditer(part), _MOST_TRIED)]
  for at, found in enumerate(matches):
    left, right = _around(part, found)
    if not _INDEX.search(left) and not number_context.is_denied(left, right):
      rivaled = _BASE.match(right) or _rivaled(matches, at, left, right)
      return None if rivaled else _value(found[0])
  return None


def marked_number(text: str) -> Decimal | None:
  """The number behind the last #### that has one right behind it; None where it is a part of more.

  A currency may stand in front, a unit or % behind. Source: none.
  """
  part = _grouped(text[-answer_span.TAIL_CHARS :])
  marks = [*_MARKED.finditer(part)]
  if not marks:
    return None
  line = part[marks[-1].end() :].partition('\n')[0]
  sign = -1 if '-' in marks[-1][0] else 1
  found = NUMBER.match(line)
  if found is None:
    return None
  right = line[found.end() :].translate(_SIGNS)[: number_context.WINDOW]
  if (
    right.startswith('!')
    or number_context.is_part('', right)
    or number_context.is_listed('', right)
    or number_context.has_rival('', right)
  ):
    return None
  return sign * _value(found[0])


def numeric(text: str) -> Fraction | None:
  """The number that the text ends up with, 75% as 3/4. Source: none."""
  found = numeral.read(text)
  return None if found is None else found.worth


def multiple_choice(text: str) -> str | None:
  """The letter that the text chooses. Source: none."""
  return choice.read(text)


def _plain(text: str) -> str:
  return text.replace('\N{MINUS SIGN}', '-')


def _grouped(text: str) -> str:
  """With - for every sign of minus, and commas for all that stands between groups of three."""
  return _DASH.sub(r'\1-', _GROUP.sub(',', _plain(text)))


def _around(text: str, found: re.Match) -> tuple[str, str]:
  left = text[max(0, found.start() - number_context.WINDOW) : found.start()]
  return left, text[found.end() : found.end() + number_context.WINDOW]


def _rivaled(found: list[re.Match], at: int, left: str, right: str) -> bool:
  """Whether another number is offered beside the one, and is not equal to it."""
  if not number_context.has_rival(left, right):
    return False
  beside = [_value(found[i][0]) for i in (at - 1, at + 1) if 0 <= i < len(found)]
  return number_context.is_between(left) or any(value != _value(found[at][0]) for value in beside)


def _fills_box(part: str, found: re.Match) -> bool:
  """Whether the number is what a box holds, or is in none."""
  box = answer_span.last_box(part)
  if box is None or box.inside is None or not box.start < found.start() < box.end:
    return True
  whole = numeral.quantity(numeral.cleaned(box.inside))
  return whole is not None and whole.plain


def _value(found: str) -> Decimal:
  # Decimal compares exactly at any length, where floats would call 2**53 and 2**53 + 1 equal; and it reads a million
  # digits in a millisecond, which int refuses.
  return Decimal(found.replace(',', ''))
