"""The exact number that a completion gives: 3/4, \\frac{3}{4}, 2 1/2, 75%, 1.2e3, 3 × 10^8, 1{,}200, $1.5 million."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import NamedTuple

from jaxrl_llm.rewards.parsing import answer_span, number_context

_MOST_DIGITS = 1000  # a number with more, or with a larger exponent, is not read
_MAX_CANDIDATES = 40  # numbers that are tried before the text counts as one without an answer


class Numeral(NamedTuple):
  """A number as written."""

  value: Fraction  # 75 for 75%
  percent: bool

  @property
  def scaled_value(self) -> Fraction:
    """The value with the percent sign applied: 3/4 for 75%."""
    return self.value / 100 if self.percent else self.value


class NumeralSpan(NamedTuple):
  """A numeral at text[start:end]."""

  numeral: Numeral
  start: int
  end: int
  plain: bool  # only digits with sign, thousands, decimals and percent sign

  @property
  def latex(self) -> str:
    """LaTeX of the number: decimals for a plain number, else a fraction."""
    above, below = self.numeral.value.as_integer_ratio()
    # The digits of a decimal number are at most _MOST_DIGITS: the context does not round.
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
    # <<48/2=24>>: the input and output of a calculator.
    (r'<<[^<>\n]{1,80}>>', ''),
    (r'~~[^~\n]{1,80}~~', ' '),
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
    # An exclamation mark between a digit and the end of a formula is a factorial.
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
# Not directly behind a letter, no exponent and no index, unlike the 2 of m^2, m^{-2}, x_2 and H2O.
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
  |\b(?:no|correction)[,:]\s(?=[-+$\\]{0,3}[0-9])
  |\b(?:no|wait|actually|correction|sorry)\b[,.:;!]?\s(?:it|that|this)(?:'s|\sis|\smust\sbe|\sshould\sbe)\b""",
  re.I | re.X,
)
_SENTENCE_END = re.compile(r'[.;](?=\s|$)|\n')
_CONCLUDES = re.compile(r'\b(?:so|thus|hence|therefore|altogether|in total)\b', re.I)
# 'The probability that x > 2 is 3/8': the predicate gives the number, the subject does not.
_PREDICATE = re.compile(r'\b(?:is|are|equals|gives|has|was)\s(?=[-+$.]{0,3}(?:[0-9]|\\frac))')
# 'attained at x = 1' behind a number states where it is attained.
_ASIDE = re.compile(
  r'(?:,\s|\s?\(|\s)(?:attained|achieved|reached|realized|occurring|with equality)\b'
  r'|(?:,\s|\()(?:when|where|at|for|with|as|since|because)\b',
  re.I,
)
_ATTAINED = re.compile(
  r'(?:,\s|\s?\(|\s)(?:attained|achieved|reached|with equality|when (?:divided|multiplied|rounded))\b',
  re.I,
)
_TWO_WORDS = re.compile(r'[A-Za-z]+\s[A-Za-z]{2,}')
_MOST_CHARS = 600  # in a sentence

_WRAPPED = re.compile(
  r'\\(?:text|textnormal|textup|textbf|textit|textrm|textsf|mathrm|mathbf|mathsf'
  r'|mathit|mbox|operatorname|boldsymbol|emph|underline)\*?\s?\{([^{}]*)\}'
)
_EQUALS = re.compile('[=≈≃≅]')
_NO_NAME = re.compile(
  r'[,;<>≤≥≠±]|[!/]$|\\(?:ne|neq|le|leq|ge|geq|lt|gt|pm|in)(?![a-z])|\b(?:or|and|not|if)\b'
)
_ARGUMENTS = re.compile(r'\([^()]*\)')
# Atomic, so that there is one way to match the text around a number. Python before 3.11.5 mismatches possessive groups.
_IN_FRONT = re.compile(
  r'(?>(?:[\s({\[:"\'’]|[A-Za-z]{2,}+[.,:]?(?=[\s:({])|\\(?:quad|qquad|sim|therefore)(?![a-z]))*)'
)
_BEHIND = re.compile(
  r"""(?>(?:[\s)}\].:"'’°/*]|\^\{?\s?(?:\\circ|°)\s?\}?|\\(?:circ|degree|quad|qquad)(?![a-z])|[A-Za-zΩμµ]++(?:\^\{?-?[1-9]\}?|[²³])?|(?<=[})])\^\{?-?[1-9]\}?|\((?=\s?[A-Za-z]{2}))*)"""
  , re.X)  # fmt: skip
_LETTERS = re.compile(r'[A-Za-zΩμµ]+')
_WORDS = re.compile(
  r'(?i:or|nor|not|wrong|if|unless|squared|cubed|factorial|pi|sqrt|more|less|fewer'
  r'|than|between|either|least|most|infinity|plus|minus|negative|never|under|over'
  r'|above|below)'
)


def read(text: str) -> Numeral | None:
  """The number that a completion gives as its answer, None for no number or for more than one.

  It is the number of the last box; else of the last asserted statement, 'the answer is' or ####; else the last asserted
  number. A box must hold one quantity: a number, with at most a name and =, and a unit. A part of an expression, a
  bound and one of several alternatives are no answer. Only the last `answer_span.TAIL_CHARS` are read.
  """
  text = cleaned(text[-answer_span.TAIL_CHARS :])
  box = answer_span.last_box(text)
  if box:
    # `cleaned` has dropped the delimiters of formulas, so the sentence in front needs no further change.
    span = None if _is_withdrawn(text, box) else quantity(box.inside or '')
    return span.numeral if span else None
  for statement in reversed([*_STATEMENT.finditer(text)][-_MAX_CANDIDATES:]):
    rest = text[statement.end() :]
    start = statement.end() + len(rest) - len(rest.lstrip())
    end = _SENTENCE_END.search(text, start, start + _MOST_CHARS)
    end = end.start() if end else min(start + _MOST_CHARS, len(text))
    marked = statement[0] == '####'
    span, empty = _stated(text, *_last_side(text, start, end), marked)
    if not empty:
      return span and span.numeral
  span, _ = _last(text, stop=without_aside(text))
  return span and span.numeral


def _is_withdrawn(text: str, box: answer_span.Box) -> bool:
  """Whether the box is denied, retracted, or offered beside another one with 'or'."""
  right = text[box.end : box.end + number_context.WINDOW]
  return (
    number_context.is_negated(text[: box.start], right)
    or number_context.is_retracted(right)
    or answer_span.has_rival_box(text, box)
  )


def in_prose(before: str, text: str, stated: bool) -> str | None:
  """LaTeX of the number that a text without formulas gives, '' where it gives several, None where it gives none.

  before: the context in front, whose numbers do not count. stated: the text continues 'the answer is'.
  """
  before = cleaned(before)
  text = before + ' ' + cleaned(text)
  start, end = len(before), len(text)
  span, empty = (
    _stated(text, *_last_side(text, start, end))
    if stated
    else _last(text, start, without_aside(text))
  )
  if span is None:
    return None if empty else ''
  return span.latex


def without_aside(text: str) -> int:
  """The end of the text without an aside of its last sentence that follows a number: ', attained at x = 1'."""
  end = len(text.rstrip(' .\n$'))
  start = max(text.rfind('. ', 0, end), text.rfind('\n', 0, end), end - _MOST_CHARS, 0)
  first = _NUMBER.search(text, start, end)
  aside = _ATTAINED.search(text, first.end(), end) if first else None
  return aside.start() if aside else len(text)


def cleaned(text: str) -> str:
  """The text without Markdown, and with one character for each of minus, times, thousands separator and currency."""
  text = text.translate(_PLAIN)
  text = powers(text)
  for pattern, instead in _CLEAN:
    text = pattern.sub(instead, text)
  return _VULGARS.sub(
    lambda sign: unicodedata.normalize('NFKC', sign[0]).replace('\u2044', '/'), text
  )


def powers(text: str) -> str:
  """10⁸ as 10^{8}."""
  return _EXPONENT.sub(lambda match: f'^{{{match[0].translate(_SUPERSCRIPTS)}}}', text)


def quantity(text: str) -> NumeralSpan | None:
  """The number of a cleaned text that otherwise holds only a name and =, a unit and brackets; else None."""
  if len(text) > 4 * _MOST_DIGITS:
    return None
  text = ' '.join(_WRAPPED.sub(r' \1', _WRAPPED.sub(r' \1', text)).split())
  signs = [*_EQUALS.finditer(text)]
  if signs:
    name, text = _ARGUMENTS.sub('', text[: signs[-1].start()]), text[signs[-1].end() :]
    if _NO_NAME.search(name):
      return None
  spans = numbers(text, 0, len(text))
  if len(spans) != 1:
    return None
  left, right = text[: spans[0].start], text[spans[0].end :]
  if not _IN_FRONT.fullmatch(left) or not _BEHIND.fullmatch(right):
    return None
  words = _LETTERS.findall(left) + _LETTERS.findall(right)
  if any(_WORDS.fullmatch(word) for word in words) or number_context.is_part(left, right):
    return None
  lone = [
    word for word in words if len(word) == 1 and word not in number_context.UNITS and word != 'a'
  ]
  return None if lone else spans[0]


def numbers(text: str, start: int, end: int) -> list[NumeralSpan]:
  """The numbers in text[start:end], in order."""
  spans = []
  for match in _NUMBER.finditer(text, start, end):
    numeral = _numeral(match)
    if numeral is not None:
      plain = bool(match['plain'] and not match['exponent'] and not match['scale'])
      spans.append(NumeralSpan(numeral, *match.span(), plain))
  return spans


def _decimal(above: int, below: int) -> str:
  with localcontext(prec=2 * _MOST_DIGITS):
    return f'{Decimal(above) / below:f}'


def _last_side(text: str, start: int, end: int) -> tuple[int, int]:
  """(start, end) of the part of a statement that gives the number.

  For 2 + 3 = 5 it is the side behind the last =, for '3 boxes of 6, so the number is 18' the conclusion.
  """
  first = _NUMBER.search(text, start, end)
  aside = _ASIDE.search(text, first.end(), end) if first else None
  end = aside.start() if aside else end
  equals = max(text.rfind(sign, start, end) for sign in '=≈') + 1
  if equals and _NUMBER.search(text, equals, end):
    return equals, end
  if first and _TWO_WORDS.search(text, start, first.start()):
    for pattern in (_CONCLUDES, _PREDICATE):
      for match in reversed([*pattern.finditer(text, start, end)]):
        if _NUMBER.search(text, match.end(), end):
          return match.end(), end
  return start, end


def _context(span: NumeralSpan, text: str) -> tuple[str, str]:
  """The text in front of a number and behind it."""
  left = text[max(0, span.start - number_context.WINDOW) : span.start]
  return left, text[span.end :][: number_context.WINDOW]


def _stated(
  text: str, start: int, end: int, marked: bool = False
) -> tuple[NumeralSpan | None, bool]:
  """(number, whether the sentence asserts none); negated numbers are skipped."""
  candidates = numbers(text, start, end)
  for at, span in enumerate(candidates):
    left, right = _context(span, text)
    if number_context.is_negated(left, right):
      continue
    if number_context.is_hypothetical(left, right) or number_context.is_conditional(right):
      return None, True
    factorial = marked and right.startswith('!')
    partial = factorial or _is_part(span, text) or number_context.is_listed(left, right)
    if partial or _has_unequal_alternative(candidates, at, left, right):
      return None, False
    return (None if number_context.is_retracted(right) else span), False
  return None, True


def _last(text: str, start: int = 0, stop: int | None = None) -> tuple[NumeralSpan | None, bool]:
  """(the last asserted number, whether there is none)."""
  candidates = numbers(text, start, len(text) if stop is None else stop)
  for at in reversed(range(max(0, len(candidates) - _MAX_CANDIDATES), len(candidates))):
    span = candidates[at]
    left, right = _context(span, text)
    if number_context.is_unasserted(left, right):
      continue
    partial = _is_part(span, text) or number_context.is_element(left, right)
    partial = partial or number_context.is_bare_list(left)
    if partial or _has_unequal_alternative(candidates, at, left, right):
      return None, False
    return (None if number_context.is_retracted(right) else span), False
  return None, True


def _is_part(span: NumeralSpan, text: str) -> bool:
  return number_context.is_part(*_context(span, text), text[span.start] in '-+')


def _has_unequal_alternative(
  candidates: Sequence[NumeralSpan], at: int, left: str, right: str
) -> bool:
  """Whether the text offers an unequal alternative: '5 or 6', and not '1/2 or 0.5'."""
  if not number_context.has_alternative(left, right):
    return False
  span = candidates[at]
  beside = [candidates[i] for i in (at - 1, at + 1) if 0 <= i < len(candidates)]
  near = [other for other in beside if other.end > span.start - 60 and other.start < span.end + 60]
  value = span.numeral.scaled_value
  return (
    not near
    or number_context.is_between(left)
    or any(other.numeral.scaled_value != value for other in near)
  )


def _numeral(match: re.Match) -> Numeral | None:
  groups = match.groupdict()
  value = _fraction(groups)
  if value is None:
    return None
  value *= _SCALES.get((groups['scale'] or '').lower(), 1)
  return Numeral(-value if groups['sign'].startswith('-') else value, groups['percent'] is not None)


def _fraction(groups: dict[str, str | None]) -> Fraction | None:
  integer = _exact(groups['whole'] or groups['ones'] or '0')
  over = groups['above'] or groups['over'] or groups['top']
  if over:
    above, below = _exact(over), _exact(groups['below'] or groups['under'] or groups['bottom'])
    return integer + above / below if None not in (integer, above, below) and below else None
  power = groups['braced'] or groups['open'] or groups['exponent'] or '0'
  times = _exact(groups['plain'] or groups['times'] or '1')
  if times is None or len(power) > 5 or abs(int(power)) > _MOST_DIGITS:
    return None
  return times * Fraction(10) ** int(power)


def _exact(text: str) -> Fraction | None:
  # By way of Decimal, because int refuses texts of several thousand digits.
  return Fraction(Decimal(text.replace(',', ''))) if len(text) <= _MOST_DIGITS else None
