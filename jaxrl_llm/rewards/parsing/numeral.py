"""The number that a text says, read exactly: 3/4, \\frac{3}{4}, 2 1/2, 75%, 1.2e3, 3 × 10^8, 1{,}200, $1.5 million."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import NamedTuple

from jaxrl_llm.rewards.parsing import answer_span, number_context

_MOST_DIGITS = 1000  # a number with more, or with a larger exponent, is not read
_MAX_CANDIDATES = 40  # numbers that are looked at before the text is taken to say none


class Numeral(NamedTuple):
  """A number as it is written."""

  value: Fraction  # of 75% it is 75
  percent: bool

  @property
  def scaled_value(self) -> Fraction:
    """75% is 3/4."""
    return self.value / 100 if self.percent else self.value


class Found(NamedTuple):
  """A numeral at text[start:end]."""

  numeral: Numeral
  start: int
  end: int
  plain: bool  # digits with sign, thousands and decimals, alone or with a percent sign

  @property
  def latex(self) -> str:
    """Of a plain number with its decimals, of any other as a fraction."""
    above, below = self.numeral.value.as_integer_ratio()
    # The digits of a decimal number are at most _MOST_DIGITS: the context rounds nothing.
    value = _decimal(above, below) if self.plain else f'\\frac{{{above}}}{{{below}}}'
    return value + ('\\%' if self.numeral.percent else '')


_VULGAR = '½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒'
_PLAIN = str.maketrans(
  {
    '\N{MINUS SIGN}': '-', '\N{EN DASH}': '-', '\N{MULTIPLICATION SIGN}': '*', '\N{MIDDLE DOT}': '*',
    '\N{DOT OPERATOR}': '*', '\N{FRACTION SLASH}': '/', '\N{DIVISION SLASH}': '/',
    **{sign: '$' for sign in '€£¥₹₩₽₺₫฿₪₱¢'},
    **{sign: ' ' for sign in '“”‘"`\u200b\ufeff'},
  }
)  # fmt: skip
_SUPERSCRIPTS = str.maketrans('⁰¹²³⁴⁵⁶⁷⁸⁹⁻', '0123456789-')
# Wrappers of LaTeX, Markdown, chat templates and money around and in a number, and their replacements.
_CLEAN = tuple(
  (re.compile(pattern), instead)
  for pattern, instead in (
    # <<48/2=24>>: what a calculator was given, and said.
    (r'<<[^<>\n]{1,80}>>', ''),
    (r'<\|[^|<>\n]{1,40}\|>|</?[A-Za-z_]{1,20}>', ' '),
    (r'(?<=[0-9a-z)])\*\*(?=[0-9(])', '^'),
    (r'\*\*|__', ' '),
    (rf'(?<=[0-9])(?=[{_VULGAR}])', ' '),
    (r'\\(?:times|cdot)(?![A-Za-z])\s?', '*'),
    (r'\\[dtc]frac', r'\\frac'),
    (r'\\(?:approx|simeq|cong|equiv)(?![a-z])', '≈'),
    (r'(\\[a-zA-Z]+)(?=[0-9])', r'\1 '),
    (r'\\left(?![a-z])|\\right(?![a-z])|\\displaystyle(?![a-z])', ''),
    (r'\\?%', '%'),
    (r'(?<=[0-9])(?:\\[,!;:]|\{,\}|[\u2009\u202f\u00a0_])(?=[0-9]{3}(?![0-9]))', ','),
    (r'(?<=[0-9])(?:\\!,(?:\\!)?|,\\!) ?(?=[0-9]{3}(?![0-9]))', ','),
    # Behind a digit and in front of the end of a formula an exclamation mark is a factorial.
    (r'(?<=[0-9])\s?!(?=\s?(?:\$|\\[)\]]|[-+*/=^]))', r'\\factorial '),
    (r'(?<=[-+])\\?\$', ''),
    (r'\\?\$|\\[()\[\],;:! ]|~', ' '),
    (r'\b(?:USD|EUR|GBP|INR|Rs\.?|US)(?=\s?[0-9])', ' '),
    (r'[ \t\u00a0\u2009\u202f]+', ' '),
  )
)
_EXPONENT = re.compile('[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+')
_VULGARS = re.compile(f'[{_VULGAR}]')

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
      (?:\{{[ ]?(?P<above>[-+]?{_DECIMAL})[ ]?\}}|(?P<over>[0-9]))
      [ ]?(?:\{{[ ]?(?P<below>[-+]?{_DECIMAL})[ ]?\}}|(?P<under>[0-9]))
    )
    |(?:(?P<ones>[0-9]++)[ ])?(?P<top>{_DECIMAL})[ ]?/[ ]?(?P<bottom>{_DECIMAL})
    |(?:(?P<times>{_DECIMAL})[ ]?[*x][ ]?)?{_POWER}
    |(?P<plain>{_DECIMAL})(?:[eE](?P<exponent>[-+]?[0-9]++)(?![\w.]))?
  )
  (?:[ ]?(?P<percent>%|percent(?:age)?\b|pct\b|per[ ]cent\b)|[ ](?P<scale>thousand|million|billion|trillion)\b)?""",
  re.X | re.I,
)
_SCALES = dict(thousand=10**3, million=10**6, billion=10**9, trillion=10**12)
_STATEMENT = re.compile(
  r"""\#\#\#\#
  |\banswers?\s*(?:is\b|are\b|was\b|:|=)(?:\s*:)?
  |\b(?:no|wait|actually|correction|sorry)\b[,.:;!]?\s(?:it|that|this)(?:'s|\sis|\smust\sbe|\sshould\sbe)\b""",
  re.I | re.X,
)
_SENTENCE_END = re.compile(r'[.;](?=\s|$)|\n')
_CONCLUDES = re.compile(r'\b(?:so|thus|hence|therefore|altogether|in total)\b', re.I)
_TWO_WORDS = re.compile(r'[A-Za-z]+\s[A-Za-z]{2,}')
_MOST_CHARS = 600  # of a sentence

_WRAPPED = re.compile(
  r'\\(?:text|textbf|textit|textrm|textsf|mathrm|mathbf|mathsf|mathit|mbox|operatorname|boldsymbol|emph|underline)\*?\s?\{([^{}]*)\}'
)
_EQUALS = re.compile('[=≈≃≅]')
_NO_NAME = re.compile(
  r'[,;<>≤≥≠±]|[!/]$|\\(?:ne|neq|le|leq|ge|geq|lt|gt|pm|in)(?![a-z])|\b(?:or|and|not|if)\b'
)
_ARGUMENTS = re.compile(r'\([^()]*\)')
# Possessive: there is one way to read what surrounds a number.
_IN_FRONT = re.compile(
  r'(?:[\s({\[:"\'’]|[A-Za-z]{2,}+[.,:]?(?=[\s:({])|\\(?:quad|qquad|sim|therefore)(?![a-z]))*+'
)
_BEHIND = re.compile(
  r"""(?:[\s)}\].:"'’°/*]|\^\{?\s?(?:\\circ|°)\s?\}?|\\(?:circ|degree|quad|qquad)(?![a-z])|[A-Za-zΩμµ]++(?:\^\{?-?[1-9]\}?|[²³])?|(?<=[})])\^\{?-?[1-9]\}?|\((?=\s?[A-Za-z]{2}))*+"""
  , re.X)  # fmt: skip
_LETTERS = re.compile(r'[A-Za-zΩμµ]+')
_WORDS = re.compile(
  r'(?i:or|nor|not|wrong|if|unless|squared|cubed|factorial|pi|sqrt|more|less|fewer|than|between|either|least|most|infinity|plus|minus|negative|never|under|over|above|below)'
)


def read(text: str) -> Numeral | None:
  """The number that a text gives as its answer, None where it gives none, or more than one.

  The number of the last box; else of the last statement, 'the answer is' or ####, that is not denied, supposed or
  asked; else the last number of the text that is not. A box must be one quantity: a number, with at most a name and =,
  and a unit. A number that is a part of an expression, a bound, or one of several offers is no answer. Only the last
  `span.TAIL_CHARS` are read.
  """
  text = cleaned(text[-answer_span.TAIL_CHARS :])
  box = answer_span.last_box(text)
  if box:
    # cleaned has already dropped the signs of a formula, so the sentence in front is read as it is.
    denied = number_context.is_negated(text[: box.start], '')
    found = None if denied else quantity(box.inside or '')
    return found.numeral if found else None
  for said in reversed([*_STATEMENT.finditer(text)][-_MAX_CANDIDATES:]):
    start = said.end() + len(text[said.end() :]) - len(text[said.end() :].lstrip())
    end = _SENTENCE_END.search(text, start, start + _MOST_CHARS)
    end = end.start() if end else min(start + _MOST_CHARS, len(text))
    found, silent = _stated(text, *_last_side(text, start, end), said[0] == '####')
    if not silent:
      return found and found.numeral
  found, _ = _last(text)
  return found and found.numeral


def in_prose(before: str, text: str, stated: bool) -> str | None:
  """LaTeX of the number that a text without formulas gives, '' where it gives several, None where it gives none.

  before: what stands in front of it, and is not read. stated: the text goes on from 'the answer is'.
  """
  before = cleaned(before)
  text = before + ' ' + cleaned(text)
  start, end = len(before), len(text)
  found, silent = _stated(text, *_last_side(text, start, end)) if stated else _last(text, start)
  if found is None:
    return None if silent else ''
  return found.latex


def cleaned(text: str) -> str:
  """The text with one sign for each of minus, times, thousands and currency, and without Markdown."""
  text = text.translate(_PLAIN)
  text = powers(text)
  for pattern, instead in _CLEAN:
    text = pattern.sub(instead, text)
  return _VULGARS.sub(
    lambda sign: unicodedata.normalize('NFKC', sign[0]).replace('\u2044', '/'), text
  )


def powers(text: str) -> str:
  """10⁸ as 10^{8}."""
  return _EXPONENT.sub(lambda found: f'^{{{found[0].translate(_SUPERSCRIPTS)}}}', text)


def quantity(text: str) -> Found | None:
  """The one number that a cleaned text consists of, with at most a name and =, a unit and brackets; else None."""
  if len(text) > 4 * _MOST_DIGITS:
    return None
  text = ' '.join(_WRAPPED.sub(r' \1', _WRAPPED.sub(r' \1', text)).split())
  signs = [*_EQUALS.finditer(text)]
  if signs:
    name, text = _ARGUMENTS.sub('', text[: signs[-1].start()]), text[signs[-1].end() :]
    if _NO_NAME.search(name):
      return None
  found = numbers(text, 0, len(text))
  if len(found) != 1:
    return None
  left, right = text[: found[0].start], text[found[0].end :]
  if not _IN_FRONT.fullmatch(left) or not _BEHIND.fullmatch(right):
    return None
  words = _LETTERS.findall(left) + _LETTERS.findall(right)
  if any(_WORDS.fullmatch(word) for word in words) or number_context.is_part(left, right):
    return None
  lone = [
    word for word in words if len(word) == 1 and word not in number_context.UNITS and word != 'a'
  ]
  return None if lone else found[0]


def numbers(text: str, start: int, end: int) -> list[Found]:
  """The numbers in text[start:end], in order."""
  found = ((_numeral(match), match) for match in _NUMBER.finditer(text, start, end))
  return [
    Found(
      numeral, *match.span(), bool(match['plain'] and not match['exponent'] and not match['scale'])
    )
    for numeral, match in found
    if numeral is not None
  ]


def _decimal(above: int, below: int) -> str:
  with localcontext(prec=2 * _MOST_DIGITS):
    return f'{Decimal(above) / below:f}'


def _last_side(text: str, start: int, end: int) -> tuple[int, int]:
  """The part of a statement that gives the number: of 2 + 3 = 5 the side behind the last =, of '3 boxes of 6, so the
  number is 18' the conclusion.
  """
  equals = max(text.rfind(sign, start, end) for sign in '=≈') + 1
  if equals and _NUMBER.search(text, equals, end):
    return equals, end
  first = _NUMBER.search(text, start, end)
  if first and _TWO_WORDS.search(text, start, first.start()):
    for found in reversed([*_CONCLUDES.finditer(text, start, end)]):
      if _NUMBER.search(text, found.end(), end):
        return found.end(), end
  return start, end


def _stated(text: str, start: int, end: int, marked: bool = False) -> tuple[Found | None, bool]:
  """(number, whether the sentence says nothing): what is denied, supposed or asked is not said."""
  found = numbers(text, start, end)
  for at, one in enumerate(found):
    left, right = (
      text[max(0, one.start - number_context.WINDOW) : one.start],
      text[one.end :][: number_context.WINDOW],
    )
    if number_context.is_negated(left, right):
      continue
    if number_context.is_hypothetical(left, right) or number_context.is_conditional(right):
      return None, True
    factorial = marked and right.startswith('!')
    whole = not factorial and not _is_part(one, text) and not number_context.is_listed(left, right)
    return (one if whole and not _has_unequal_alternative(found, at, left, right) else None), False
  return None, True


def _last(text: str, start: int = 0) -> tuple[Found | None, bool]:
  """(the last number, whether nothing is said)."""
  found = numbers(text, start, len(text))
  for at in reversed(range(max(0, len(found) - _MAX_CANDIDATES), len(found))):
    one = found[at]
    left, right = (
      text[max(0, one.start - number_context.WINDOW) : one.start],
      text[one.end :][: number_context.WINDOW],
    )
    if number_context.is_unasserted(left, right):
      continue
    part = _is_part(one, text) or number_context.is_element(left, right)
    part = part or number_context.is_bare_list(left)
    return (None if part or _has_unequal_alternative(found, at, left, right) else one), False
  return None, True


def _is_part(one: Found, text: str) -> bool:
  left, right = (
    text[max(0, one.start - number_context.WINDOW) : one.start],
    text[one.end :][: number_context.WINDOW],
  )
  return number_context.is_part(left, right, text[one.start] in '-+')


def _has_unequal_alternative(found: Sequence[Found], at: int, left: str, right: str) -> bool:
  """Whether another number is offered that is not equal: '5 or 6', and not '1/2 or 0.5'."""
  if not number_context.has_alternative(left, right):
    return False
  beside = [found[i] for i in (at - 1, at + 1) if 0 <= i < len(found)]
  near = [
    other
    for other in beside
    if other.end > found[at].start - 60 and other.start < found[at].end + 60
  ]
  return (
    not near
    or number_context.is_between(left)
    or any(other.numeral.scaled_value != found[at].numeral.scaled_value for other in near)
  )


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
