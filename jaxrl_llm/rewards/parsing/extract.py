"""The value that a grader compares: text → a value that equals others of the same meaning, None for no value.

Each public function has the name of the verifier in verifiers.py that compares by it.
"""

from __future__ import annotations

import collections
import itertools
import re
from decimal import Decimal
from fractions import Fraction

from jaxrl_llm.rewards.parsing import answer_span, choice, number_context, numeral

# A sign counts only where it cannot be a minus between two terms, a comma only between groups of three digits.
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
_SIGNS = str.maketrans(
  {'×': '*', '·': '*', '⋅': '*', '<': '\n'}
)  # the text in front of a tag ends like a line
_RUN_END = re.compile('[0-9.,+-]*')
_MAX_CANDIDATES = 40  # numbers that are tried before the text counts as one without a number


def exact(text: str) -> str | None:
  """The text without surrounding space, which a majority vote counts; None for an empty text."""
  return text.strip() or None


def number(text: str) -> Decimal | None:
  """The last number of the text that is asserted and neither an exponent nor an index: 1,000 = 1000.0, -0 = 0.

  None where it is one of several alternatives, the base of a power, or a part of the content of a box.
  """
  # A number consists of digits and marks. Of the text in front of the last run of these only a window of constant
  # length is read, which keeps long texts cheap.
  end = 1 + max(text.rfind(digit) for digit in _DIGITS)
  start = max(0, len(_plain(text[:end]).rstrip(_RUN)) - 2 * number_context.WINDOW)
  part = _grouped(text[start : end + 2 * number_context.WINDOW])
  matches = [*collections.deque(NUMBER.finditer(part), maxlen=_MAX_CANDIDATES)]
  for at in reversed(range(len(matches))):
    match, (left, right) = matches[at], _around(part, matches[at])
    if _INDEX.search(left) or number_context.is_unasserted(left, right):
      continue
    if _BASE.match(right) or _has_unequal_alternative(matches, at, left, right):
      return None
    if number_context.is_retracted(right):
      return None
    return _value(match[0]) if _fills_box(part, match) else None
  return None


def first_number(text: str) -> Decimal | None:
  """The first number of the text that is not negated, None where it has an alternative."""
  starts = [at for digit in _DIGITS if (at := text.find(digit)) >= 0]
  if not starts:
    return None
  start, end = min(starts), min(starts)
  end = _RUN_END.match(text, end).end()
  part = _grouped(text[max(0, start - number_context.WINDOW) : end + 2 * number_context.WINDOW])
  matches = [*itertools.islice(NUMBER.finditer(part), _MAX_CANDIDATES)]
  for at, match in enumerate(matches):
    left, right = _around(part, match)
    if not _INDEX.search(left) and not number_context.is_negated(left, right):
      ambiguous = _BASE.match(right) or _has_unequal_alternative(matches, at, left, right)
      return None if ambiguous else _value(match[0])
  return None


def short_answer(text: str) -> Decimal | str | None:
  """The last number as for `number`; of a text without one, its words without announcement and marks."""
  value = number(text)
  return value if value is not None else answer_span.words(text) or None


def marked_number(text: str) -> Decimal | None:
  """The number directly behind the last #### with a number; None where it is part of an expression or a list.

  A currency may precede it, and a unit or % may follow.
  """
  part = _grouped(text[-answer_span.TAIL_CHARS :])
  marks = [*_MARKED.finditer(part)]
  if not marks:
    return None
  line = part[marks[-1].end() :].partition('\n')[0]
  sign = -1 if '-' in marks[-1][0] else 1
  match = NUMBER.match(line)
  if match is None:
    return None
  right = line[match.end() :].translate(_SIGNS)[: number_context.WINDOW]
  if (
    right.startswith('!')
    or number_context.is_part('', right)
    or number_context.is_listed('', right)
    or number_context.has_alternative('', right)
  ):
    return None
  return sign * _value(match[0])


def numeric(text: str) -> Fraction | None:
  """The number that the text gives as its answer, 75% as 3/4."""
  number_read = numeral.read(text)
  return None if number_read is None else number_read.scaled_value


def multiple_choice(text: str) -> str | None:
  """The letter that the text chooses."""
  return choice.read(text)


def _plain(text: str) -> str:
  return text.replace('\N{MINUS SIGN}', '-')


def _grouped(text: str) -> str:
  """The text with - for every minus sign, and commas for all separators of thousands."""
  return _DASH.sub(r'\1-', _GROUP.sub(',', _plain(text)))


def _around(text: str, match: re.Match) -> tuple[str, str]:
  left = text[max(0, match.start() - number_context.WINDOW) : match.start()]
  return left, text[match.end() : match.end() + number_context.WINDOW]


def _has_unequal_alternative(matches: list[re.Match], at: int, left: str, right: str) -> bool:
  """Whether the text offers an alternative to a number that is not equal to it."""
  if not number_context.has_alternative(left, right):
    return False
  beside = [_value(matches[i][0]) for i in (at - 1, at + 1) if 0 <= i < len(matches)]
  value = _value(matches[at][0])
  return number_context.is_between(left) or any(other != value for other in beside)


def _fills_box(part: str, match: re.Match) -> bool:
  """Whether the number is the complete content of a box, or outside of boxes."""
  box = answer_span.last_box(part)
  if box is None or box.inside is None or not box.start < match.start() < box.end:
    return True
  quantity = numeral.quantity(numeral.cleaned(box.inside))
  return quantity is not None and quantity.plain


def _value(digits: str) -> Decimal:
  # Decimal compares exactly at any length, where floats would call 2**53 and 2**53 + 1 equal. It reads a million
  # digits in a millisecond, which int refuses.
  return Decimal(digits.replace(',', ''))
