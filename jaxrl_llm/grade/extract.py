"""What a grader compares with the answer: text → a value that equals another of the same meaning, None for none.

A function here has the name of the grader in graders.py that compares by it.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

from jaxrl_llm.grade import choice, numeral, span

# A sign counts only where it cannot be a minus between two terms. Commas count only between groups
# of three.
NUMBER = re.compile(
  r'(?:(?<![\w)\].])[-+])?'
  r'(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)'
)
_MARKED = re.compile(r'####[ \t]*\$?(?=(' + NUMBER.pattern + '))')
_DIGITS = '0123456789'


def exact(text: str) -> str | None:
  """The text without surrounding space; None where nothing is left. Source: none."""
  return text.strip() or None


def number(text: str) -> Decimal | None:
  """The last number of the text: 1,000 = 1000.0 and -0 = 0. Source: none."""
  # A number is of digits and marks alone: what stands in front of the last run of them is not looked at, which makes
  # long texts cheap.
  plain = _plain(text)
  end = 1 + max(plain.rfind(digit) for digit in _DIGITS)
  start = len(plain[:end].rstrip(_DIGITS + '.,+-'))
  found = NUMBER.findall(plain, start, end)
  return _value(found[-1]) if found else None


def first_number(text: str) -> Decimal | None:
  """The first number of the text. Source: none."""
  plain = _plain(text)
  starts = [at for digit in _DIGITS if (at := plain.find(digit)) >= 0]
  # In front of its first digit a number has at most a sign and a point.
  return _value(NUMBER.search(plain, max(min(starts) - 2, 0))[0]) if starts else None


def marked_number(text: str) -> Decimal | None:
  """The number behind the last #### that has one right behind it. Source: none."""
  found = _MARKED.findall(_plain(text[-span.TAIL_CHARS :]))
  return _value(found[-1]) if found else None


def numeric(text: str) -> Fraction | None:
  """The number that the text ends up with, 75% as 3/4. Source: none."""
  found = numeral.read(text)
  return None if found is None else found.worth


def multiple_choice(text: str) -> str | None:
  """The letter that the text chooses. Source: none."""
  return choice.read(text)


def _plain(text: str) -> str:
  return text.replace('\N{MINUS SIGN}', '-')


def _value(found: str) -> Decimal:
  # Decimal compares exactly at any length, where floats would call 2**53 and 2**53 + 1 equal; and it reads a million
  # digits in a millisecond, which int refuses.
  return Decimal(found.replace(',', ''))
