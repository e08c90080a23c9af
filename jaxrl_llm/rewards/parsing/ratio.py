"""Ratios and times: 2:3, a:b:c = 1 : 2 : 3, '2 to 3', 12:30. math-verify cannot read the colon."""

from __future__ import annotations

import math
import re
from fractions import Fraction

_COLON = re.compile(
  r'\\colon(?![a-z])|\{:\}|(?<=[0-9}])\s*(?:\\text\s?\{\s*to\s*\}|\bto\b)\s*(?=[0-9])'
)
_WRAPPED = re.compile(r'\\(?:text|mathrm|textbf|mathbf)\s?\{([^{}]*)\}')
_NOISE = re.compile(r'\s|[$]|\\[,;:! ]|(?i:[ap]\.?m\.?)$')
_TERMS = re.compile(r'[0-9]{1,9}(?:\.[0-9]{1,9})?(?::[0-9]{1,9}(?:\.[0-9]{1,9})?)+')
_TIME = re.compile(r'(?:[01]?[0-9]|2[0-4]):[0-5][0-9](?::[0-5][0-9])?')
_FRACTION = re.compile(r'\\[dtc]?frac|[0-9]\s?/\s?[0-9]')
_IN_PROSE = re.compile(r'(?<![\w.,:])[0-9]{1,9}(?:\s?:\s?[0-9]{1,9})+(?![\w:])(?!\.[0-9])')
_WORDED = re.compile(
  r'\b(?i:ratio)\b[^.\n]{0,120}?(?<![\w.,])([0-9]{1,9}) to ([0-9]{1,9})(?![\w])(?!\.[0-9])'
)


def canonical(formula: str) -> str | None:
  """One spelling of a ratio, in lowest terms; of a time, which 12:30 may be, as it is. None for other formulas."""
  terms = _terms(formula)
  if terms is None or _TIME.fullmatch(terms):
    return terms
  values = [Fraction(term) for term in terms.split(':')]
  scale = math.lcm(*(value.denominator for value in values))
  whole = [int(value * scale) for value in values]
  divisor = math.gcd(*whole) or 1
  return ':'.join(str(value // divisor) for value in whole)


def aligned(a: str, b: str) -> tuple[str, str]:
  """The formulas, a ratio of two terms as a fraction where the other formula is a fraction."""
  return _aligned(a, b), _aligned(b, a)


def in_prose(text: str) -> re.Match | None:
  """The ratio that a text states in words behind its last number, '2:3' or 'the ratio is 2 to 3'."""
  found = [*_IN_PROSE.finditer(text)]
  last = found[-1] if found else _WORDED.search(text)
  return last if last and not re.search('[0-9]', text[last.end() :]) else None


def of_match(match: re.Match) -> str:
  """The ratio of a match of `in_prose`."""
  return ':'.join(
    re.findall('[0-9]+', match[0] if match.re is _IN_PROSE else f'{match[1]} {match[2]}')
  )


def _terms(formula: str) -> str | None:
  plain = _COLON.sub(':', formula)
  plain = _NOISE.sub('', _WRAPPED.sub(r'\1', plain).strip())
  plain = _NOISE.sub('', plain).rpartition('=')[2]
  return plain if _TERMS.fullmatch(plain) else None


def _aligned(formula: str, other: str) -> str:
  terms = _terms(formula)
  if terms is None or terms.count(':') != 1 or not _FRACTION.search(other) or _terms(other):
    return formula
  above, below = terms.split(':')
  return f'\\frac{{{above}}}{{{below}}}'
