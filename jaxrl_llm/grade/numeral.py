"""The number that a text says, read exactly: 3/4, \\frac{3}{4}, 2 1/2, 75%, 1.2e3, 3 × 10^8, 1{,}200, $1.5 million."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

from jaxrl_llm.grade import span

_MOST_DIGITS = 1000  # a number with more, or with a larger exponent, is not read


class Numeral(NamedTuple):
  """A number as it is written."""

  value: Fraction  # of 75% it is 75
  percent: bool

  @property
  def worth(self) -> Fraction:
    """75% is 3/4."""
    return self.value / 100 if self.percent else self.value


_PLAIN = str.maketrans(
  {
    '\N{MINUS SIGN}': '-', '\N{EN DASH}': '-', '\N{MULTIPLICATION SIGN}': '*', '\N{MIDDLE DOT}': '*',
    '\N{DOT OPERATOR}': '*', '½': ' 1/2', '¼': ' 1/4', '¾': ' 3/4', '⅓': ' 1/3', '⅔': ' 2/3',
    '\N{FRACTION SLASH}': '/', '\N{DIVISION SLASH}': '/', '€': '$', '£': '$', '¥': '$', '₹': '$',
  }
)  # fmt: skip
# What LaTeX, Markdown and money put around and into a number, and what stands for it here.
_CLEAN = tuple(
  (re.compile(told), instead)
  for told, instead in (
    (r'\*\*|__', ' '),
    (r'\\(?:times|cdot)(?![A-Za-z])', '*'),
    (r'\\[dtc]frac', r'\\frac'),
    (r'\\left|\\right|\\displaystyle', ''),
    (r'\\?%', '%'),
    (r'(?<=[0-9])(?:\\[,!;:]|\{,\}|[\u2009\u202f\u00a0_])(?=[0-9]{3}(?![0-9]))', ','),
    (r'(?<=[0-9])\\!,\\!?|(?<=[0-9]),\\!', ','),
    (r'(?<=[-+])\\?\$', ''),
    (r'\\?\$|\\[()\[\],;:!]', ' '),
    (r'\b(?:USD|EUR|GBP|INR|Rs\.?|US)(?=\s?[0-9])', ' '),
  )
)

_DECIMAL = (
  r'(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]++)?|[0-9]++(?:\.[0-9]++)?|(?<![0-9])\.[0-9]++)'
)
_SIGN = r'(?:(?<![\w)\].^}])(?<!\^\{)[-+])'
# Not glued to a letter, no exponent and no index: the 2 of m^2, m^{-2}, x_2 and H2O.
_ALONE = r'(?<![A-Za-z_^])(?<![\^_]\{)(?<!\^[-+])(?<!\^\{[-+])'
_POWER = r'10\s?\^\s?(?:\{\s?(?P<braced>[-+]?[0-9]++)\s?\}|\(?(?P<open>[-+]?[0-9]++)\)?)'
_NUMBER = re.compile(
  rf"""(?P<sign>{_SIGN}?){_ALONE}(?:
    (?:(?P<whole>[0-9]++)[ ]?)?\\frac[ ]?(?:
      \{{[ ]?(?P<above>[-+]?{_DECIMAL})[ ]?\}}[ ]?\{{[ ]?(?P<below>[-+]?{_DECIMAL})[ ]?\}}
      |(?P<over>[0-9])[ ]?(?P<under>[0-9])
    )
    |(?:(?P<ones>[0-9]++)[ ])?(?P<top>{_DECIMAL})[ ]?/[ ]?(?P<bottom>{_DECIMAL})
    |(?:(?P<times>{_DECIMAL})[ ]?[*x][ ]?)?{_POWER}
    |(?P<plain>{_DECIMAL})(?:[eE](?P<exponent>[-+]?[0-9]++)(?![\w.]))?
  )
  (?:[ ]?(?P<percent>%|percent\b|per[ ]cent\b)|[ ](?P<scale>thousand|million|billion|trillion)\b)?""",
  re.X | re.I,
)
_SCALES = dict(thousand=10**3, million=10**6, billion=10**9, trillion=10**12)
_SAYS = re.compile(r'####|\banswer\s*(?:is|was|:|=)(?:\s*:)?', re.I)
_SENTENCE = re.compile(r'\s*([^\n]*?)(?:[.;](?:\s|$)|\n|$)')


def read(text: str) -> Numeral | None:
  """The number of the last \\boxed{…}; else the one that 'the answer is' or #### tells; else the last one there is.

  A box with two numbers holds none. A sentence with '=' tells what stands after the last. Only the last
  `span.TAIL_CHARS` are looked at. Source: none.
  """
  text = _cleaned(text[-span.TAIL_CHARS :])
  if '\\boxed' in text:
    found = _all(span.boxed(text) or '')
    return found[0] if len(found) == 1 else None
  said = [*_SAYS.finditer(text)]
  if said:
    sentence = _SENTENCE.match(text, said[-1].end())[1]
    found = _all(sentence.rpartition('=')[2]) or _all(sentence)
    if found:
      return found[0]
  found = _all(text)
  return found[-1] if found else None


def _cleaned(text: str) -> str:
  text = text.translate(_PLAIN)
  for told, instead in _CLEAN:
    text = told.sub(instead, text)
  return text


def _all(text: str) -> list[Numeral]:
  found = (_numeral(match) for match in _NUMBER.finditer(text))
  return [numeral for numeral in found if numeral is not None]


def _numeral(match: re.Match) -> Numeral | None:
  told = match.groupdict()
  value = _fraction(told)
  if value is None:
    return None
  value *= _SCALES.get((told['scale'] or '').lower(), 1)
  return Numeral(-value if told['sign'].startswith('-') else value, told['percent'] is not None)


def _fraction(told: dict[str, str | None]) -> Fraction | None:
  whole = _exact(told['whole'] or told['ones'] or '0')
  over = told['above'] or told['over'] or told['top']
  if over:
    above, below = _exact(over), _exact(told['below'] or told['under'] or told['bottom'])
    return whole + above / below if None not in (whole, above, below) and below else None
  power = told['braced'] or told['open'] or told['exponent'] or '0'
  times = _exact(told['plain'] or told['times'] or '1')
  if times is None or len(power) > 5 or abs(int(power)) > _MOST_DIGITS:
    return None
  return times * Fraction(10) ** int(power)


def _exact(text: str) -> Fraction | None:
  # By way of Decimal: int refuses to read what has more than some thousand digits.
  return Fraction(Decimal(text.replace(',', ''))) if len(text) <= _MOST_DIGITS else None
