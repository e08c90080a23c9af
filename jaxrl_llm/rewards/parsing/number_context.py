"""The text around a number: whether the number is part of an expression, a bound, an alternative, or negated.

`left` and `right` are the text in front of a number and behind it. Only the last or first `WINDOW` characters are read,
so that a check has the same cost at any length of the text.
"""

from __future__ import annotations

import re

from jaxrl_llm.rewards.parsing import assertion

WINDOW = 240

# Symbols of units that may follow a number without a space; after other letters the number is a coefficient.
UNITS = frozenset(
  (
    'm s g l L h A V W J N K C F B b T Hz kHz MHz GHz kW MW kWh Wh mA mV kV Pa kPa MPa bar atm mol M mM '
    'cm mm km nm um μm µm dm ft in yd mi mph kph kmh kg mg ug μg µg lb lbs oz t ms ns us μs µs min hr hrs '
    'sec kJ eV keV MeV kN ml mL cL cl dL dl cc kcal cal KB MB GB TB kB rad deg am pm AM PM px pt pts pct '
    'th st nd rd bps dB ha rpm USD EUR GBP Rs'
  ).split()
)
_SHAPES = (
  r'text|textbf|textit|textrm|textsf|mathrm|mathbf|mathsf|mathit|mbox|operatorname|bf|rm|boldsymbol'
)
# LaTeX that may follow a number that is not part of an expression.
_LATEX_BEHIND = (
  rf'(?:{_SHAPES}|circ|degree|quad|qquad|approx|simeq|implies|Rightarrow|rightarrow|to|left|right|end|begin|newline'
  r'|hspace|blacksquare|square|Box)(?![A-Za-z])'
)
_FUNCTION = (
  r'(?:sqrt|cbrt|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|exp|pi|mod|choose|infty|infinity|tau'
  r'|theta)'
)
_OPERAND = r'(?:[0-9(√π]|\\(?!text|mathrm)[a-z]|sqrt|[a-zA-HJ-Z](?![\w\'’]))'

_PART_BEHIND = re.compile(
  rf"""\s?(?:
    _(?=[\w({{\\])
    |\^(?!\s?\{{?\s?(?:\\circ|°))|[²³⁴⁵⁶⁷⁸⁹⁰¹ⁿ]
    |\\factorial|\s?\\pm|\s?\\mp|\s?[±∓]|\s?\+/-
    |\s?[-+*/÷]\s?{_OPERAND}
    |\s?:\s?[0-9](?<!:\s[0-9])|\s:\s[0-9]
    |\.[0-9]
    |\s?(?:\\?(?:leq?|geq?|lt|gt|neq?)(?![A-Za-z])|[<>≤≥≠])
    |\\(?!{_LATEX_BEHIND})[a-zA-Z]
    |[√π∞∛]
    |\((?![0-9.,]+\s[a-z])(?:[0-9]|[a-zA-Z](?![A-Za-z]))
    |\{{?,?\\overline
    |{_FUNCTION}(?![A-Za-rt-z])
    |plus\sor\sminus\b|give\sor\stake\b|squared\b|cubed\b|factorial\b|(?:raised\s)?to\sthe\s(?:\w+\s)?power|plus\s{_OPERAND}|minus\s{_OPERAND}
    |(?:times|multiplied\sby|divided\sby)\s{_OPERAND}
    |or\s(?:more|less|fewer|greater|higher|lower|above|below|over|under|larger|smaller|up|later|earlier)\b
    |and\s(?:above|below|up)\b
  )""",
  re.X,
)
_GLUED = re.compile(r'([A-Za-zμµ]+)')
_LONE_LETTER = re.compile(r'\s([a-zA-Z])(?![\w\'’.:])')
_WRAPPED_LETTER = re.compile(rf'\s?\\(?:{_SHAPES})\s?\{{\s?([ieπxyzn])\s?\}}')

_BOUND = (
  r'at\sleast|at\smost|up\sto|(?:less|more|fewer|greater|larger|smaller|bigger|higher|lower|other)\sthan|under|over|above|below|beneath'
  r'|beyond|exceed(?:s|ing)?|within|bounded\sby|not\s(?:above|below|over|under)|minimum|maximum|between|strictly\spositive'
)
_PART_BEFORE = re.compile(
  rf"""(?:
    (?<![-=|])[<>]=?|[≤≥≠±∓≮≯]|\\(?:not|neq?|leq?(?:slant)?|geq?(?:slant)?|lt|gt|pm|mp|ll|gg)\s?|!=|/=|\+/-|=/=
    |(?i:\b(?:{_BOUND})(?:\sor\sequal\sto)?|\bor\sequal\sto|\bminus|\bnegative|\bplus|\bplus\sor\sminus|\btwice|\bdouble|\bhalf(?:\sof)?
      |\b(?:root|square|cube|factorial|power|log|logarithm|sine|cosine|multiple|multiples|divisor|factor)s?\sof)
    |(?:\\?\b{_FUNCTION}|√|∛)\s?[(\[{{]*|\\sqrt\s?(?:\[[^\]]*\])?\s?\{{?|\\[a-z]+\s?\{{(?<!text\{{)(?<!textbf\{{)(?<!textit\{{)(?<!mathrm\{{)(?<!mathbf\{{)(?<!boxed\{{)(?<!textrm\{{)
    |[\^_]\s?[{{(]?\s?[-+]?
    |(?:[0-9)\]}}%²³πi!]|(?<![A-Za-z])[a-zA-Z])\s?[-+*/×÷]\s?\(?|[0-9)]\s(?=[-+]$)
    |\\(?:frac|binom|over|div|times|cdot)\s?|[0-9]\s?x\s|[0-9]:|[0-9]\.(?!\s)|[0-9]!?\s?\(
  )\s?[-+]?\s?$""",
  re.X,
)

_QUESTION = re.compile(r'[^.!?\n]*\?')
_CONDITION_BEFORE = re.compile(
  r'(?i:\bunless\b[^;:]*,|(?<!only )\bif\b|\bwhether\b|\bunless\b|\bsuppos(?:e|ing)\b|\bassum(?:e|ing)\b|\bimagine\b'
  r'|\bhad\sit\sbeen\b|\bpretend\b|\blet(?:.s|\sus)\ssay\b)(?!.*\bthen\b)[^,;:]*$'
)
# 'If you doubled the mass, it would be 6': a past tense states what is not so.
_COUNTERFACTUAL = re.compile(
  r'(?i:(?:^\W*(?:were|had)\s[^,\n]{0,80}|\bif\s[^.!?;\n]{0,80}\b(?:were|was|had|did|\w{2,}ed)\b[^.!?;\n,]{0,80}),[^,;:]{0,60}\bwould\s(?:\w+\s)?(?:be|have\sbeen)\b)[^,;:]{0,40}$'
)
_HEDGE_BEFORE = re.compile(
  r'(?i:\b(?:maybe|perhaps|possibly)\b[^,;:]{0,60}$|\b(?:might|may|could)\s(?:(?!only\b)\w+ly\s|(?:also|well|even|then)\s){0,2}be)(?:\s(?:about|around))?[\s$*"\'(]*$'
)
_CONDITION_BEHIND = re.compile(
  r'[\s$*"”’\')\]}`]*(?:\s?[a-z]{1,12})?,?\s(?i:only\s)?(?i:if|unless|provided|were\sit\snot|had\s(?:it|we|the)|in\s(?:some|certain|most|many)\scases|for\s(?:some|certain))\b'
)

_GAP = (
  r"(?>(?:[\s,(]|maybe|perhaps|possibly|even|else|is|it|it's|also|the|answer|[a-zA-Z]\s?=|[$\"'*{}]|\\text|\\\("
  r'|about|approximately|equivalently|option)*)'
)
_OR_BEHIND = re.compile(
  rf'(?P<unit>[^.;:\d\n]{{0,20}}?)(?:\bor\b|\band/or\b|\balternatively\b){_GAP}(?P<next>[-+]?(?=\\?[.0-9½⅓¼¾]|\\[dt]?frac|√|\\sqrt|\\pi|π))'
)
_OR_BEFORE = re.compile(
  rf'[0-9½⅓¼¾}}][^.;:\d\n]{{0,20}}?(?:\bor\b|\band/or\b|\balternatively\b){_GAP}[-+]?$'
)
_LIST_BEHIND = re.compile(
  r'\s?(?:[,;&]|,?\s?\\?\band\b|to\b|through\b|\|)[\s$]*(?:and\s)?[-+]?[0-9][0-9.,/]*\s?[$*]*(?=[.,;)\]!$]|$|\s(?:and|or|,)|\s[a-z]+[.]?$)'
)
_DASH_BEHIND, _DASH_BEFORE = re.compile(r'\s?\u2013\s?[0-9]'), re.compile(r'[0-9]\s?\u2013\s?$')
_EITHER = re.compile(r'(?i:\beither\b)[^.;:,\n]{0,40}$')
_BETWEEN = re.compile(r'(?i:\bbetween\b[^.;:\n]{0,40}$)')
_BARE_LIST = re.compile(
  r'^\W*(?:[a-z]\s?=\s?)?[-+]?[0-9][0-9.,/\s]*(?:\s?[,;&]\s?|(?<=,)|\s(?:to|through|and)\s)[-+]?$'
)


def is_part(left: str, right: str, signed: bool = False) -> bool:
  """Whether the number is a term, factor, exponent, index, bound or one side of a ratio."""
  left, right = left[-WINDOW:], right[:WINDOW]
  if _PART_BEHIND.match(right) or _PART_BEFORE.search(left[-60:]):
    return True
  if signed and re.search(r'[0-9)\]}]\s?$', left):
    return True
  return has_coefficient(right)


def has_coefficient(right: str) -> bool:
  """Whether letters behind the number multiply it: 5x, 5 x, 5i; 5m and 5km have units, and 5 a day is prose."""
  glued = _GLUED.match(right)
  if glued:
    word = glued[1]
    return (
      word in 'MB'
      or word not in UNITS
      and (len(word) < 3 or bool(re.match(_FUNCTION + r'(?![a-rt-z])', word)))
    )
  lone = _LONE_LETTER.match(right)
  if lone:
    return lone[1] not in UNITS and lone[1] not in 'aAI'
  return _WRAPPED_LETTER.match(right) is not None


def is_negated(left: str, right: str) -> bool:
  """Whether the sentence negates the number: 'not 5', 'cannot be 5', '5 is wrong'."""
  return assertion.is_denied(_sentence_before(left), right[:WINDOW])


def is_retracted(right: str) -> bool:
  """Whether the text behind takes the number back: '. Wait, that is wrong', ', but that is wrong'."""
  return assertion.is_retracted(right[:WINDOW])


def is_hypothetical(left: str, right: str, hedges: bool = True) -> bool:
  """Whether the sentence is a question, a condition, or a guess: 'is it 5?', 'if it is 5', 'it might be 5'."""
  left = _sentence_before(left)
  if _QUESTION.match(right[:WINDOW]) or _CONDITION_BEFORE.search(left):
    return True
  if _COUNTERFACTUAL.search(left):
    return True
  return hedges and _HEDGE_BEFORE.search(left) is not None


def is_unasserted(left: str, right: str) -> bool:
  """Whether the sentence does not assert the number: it is negated, hypothetical or conditional."""
  return is_negated(left, right) or is_hypothetical(left, right) or is_conditional(right)


def is_conditional(right: str) -> bool:
  """Whether a condition follows: '5 if x is even'."""
  return _CONDITION_BEHIND.match(right[:80]) is not None


def has_alternative(left: str, right: str) -> bool:
  """Whether the sentence offers an alternative: '5 or 6', 'between 5 and 6', 'either 5'."""
  left = _sentence_before(left)
  if _DASH_BEHIND.match(right) or _DASH_BEFORE.search(left):
    return True
  return bool(
    _OR_BEHIND.match(right[:80])
    or _OR_BEFORE.search(left[-80:])
    or _EITHER.search(left[-80:])
    or is_between(left)
  )


def is_between(left: str) -> bool:
  """Whether the number is an end of a range: 'between 5 and 6'."""
  return _BETWEEN.search(_sentence_before(left)[-80:]) is not None


def is_bare_list(left: str) -> bool:
  """Whether the sentence so far is only a list of numbers: '5, 6', '1000,99', 'x = 5 and 6'."""
  return _BARE_LIST.search(_sentence_before(left)[-80:]) is not None


def is_listed(left: str, right: str) -> bool:
  """Whether the number is one of a list or a range: '5, 6', '5 and 6', '(5, 6)', '5 to 6'."""
  return bool(_LIST_BEHIND.match(right[:80])) or is_element(left, right)


def is_element(left: str, right: str) -> bool:
  """Whether the number is an element of a tuple, an interval or a set in brackets."""
  left, right = left[-80:], right[:80]
  return bool(
    re.search(r'[(\[{][^()\[\]{}\n]{0,60}?[0-9a-z}][\s$]*[,;][^()\[\]{}\n]{0,60}$', left)
    and re.match(r'[^()\[\]{}\n]{0,60}[)\]}]', right)
    or re.search(r'[(\[{][^()\[\]{}\n\d]{0,10}$', left)
    and re.match(r'\s?[,;]\s?[-+\\0-9a-z][^()\[\]{}\n]{0,60}[)\]}]', right)
  )


def _sentence_before(left: str) -> str:
  left = left[-WINDOW:]
  ends = [match.end() for match in re.finditer(r'[.!?](?=[\s<])|\n|</think>', left)]
  return left[ends[-1] :] if ends else left
