"""The formula that a completion gives as its answer, in the notation that math-verify reads."""

from __future__ import annotations

import itertools
import re
from fractions import Fraction
from typing import NamedTuple

from jaxrl_llm.rewards.parsing import answer_span, number_context, numeral, ratio

_MOST_CHARS = 200  # in a plain expression
_MAX_CANDIDATES = 40  # formulas that are tried before the text counts as one without an answer


class Segment(NamedTuple):
  """A formula between dollar signs, \\\\(…\\\\) or \\\\[…\\\\], at text[start:end]."""

  start: int
  end: int
  inside: str


_STRUCK = re.compile(r'~~[^~\n]{1,80}~~')
_TAGS = re.compile(r'<\|[^|<>\n]{1,40}\|>|</?(?:answer|think|choice|final)>')
_GROUP = re.compile(
  r'(?<=[0-9])(?:\\[,!;:]|\{,\}|\\!,(?:\\!)?|,\\! ?|[\u2009\u202f\u00a0])(?=[0-9]{3}(?![0-9]))'
)
_GROUPED = re.compile(r'(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])')
# '(12,102)' and '[1,200]' are a pair, not a number with a separator.
_PAIR = re.compile(r'(?:\((?!\()|\[|\\\{)\s?$')
_PAIR_END = re.compile(r'\s?(?:\)|\]|\\\})')
_SIGNS = str.maketrans(
  {
    '\N{MINUS SIGN}': '-', '\N{MULTIPLICATION SIGN}': '\\times ', '\N{DIVISION SIGN}': '/',
    '°': '^\\circ ', 'π': '\\pi ',
    '≤': '\\le ', '≥': '\\ge ', '≠': '\\ne ', '±': '\\pm ', '∞': '\\infty ', '∪': '\\cup ', '∈': '\\in ', '\u2009': ' ',
    '\u202f': ' ', '\u00a0': ' ', '·': '\\cdot ', '⋅': '\\cdot ', '∓': '\\mp ', '⁄': '/', 'θ': '\\theta ',
    '½': '\\frac{1}{2}', '¼': '\\frac{1}{4}', '¾': '\\frac{3}{4}', '⅓': '\\frac{1}{3}', '⅔': '\\frac{2}{3}',
    '\u200b': '', '\ufeff': '',
  }
)  # fmt: skip
_DASH = re.compile(
  r'(?<![\w\s)])\u2013\s?(?=[0-9\\])|(?<=[=:(\[{$]\s)\u2013(?=[0-9\\])|^\u2013(?=[0-9\\])|(?<=[a-z]\s)\u2013(?=[0-9])'
)
_SEGMENT = re.compile(
  r'(?<!\\)\$\$((?:[^$]|\\\$)+?)(?<!\\)\$\$|(?<!\\)\\\[((?:[^\\]|\\(?!\]))+)\\\]'
  r'|(?<!\\)\$((?:\\\$|[^$])+?)(?<!\\)\$|(?<!\\)\\\(((?:[^\\]|\\(?!\)))+)\\\)'
)
_JOINED = re.compile(
  r'(?:[\s$.]|\\[()\[\],;: ]|\\q?quad|\\text(?:rm)?\s?\{|\})*(?:[A-Za-z]+[\s}]+)?(?:\\text\s?\{\s*)?'
  r'(?:,?\s*(?:and|or|&)|[,;])(?:[\s$}]|\\[()\[\],;: ]|\\q?quad)*'
)
_STATEMENT = re.compile(
  r'####|\banswers?\b\s*(?:is\b|are\b|was\b|:|=)(?:\s*:)?|\b(?:no|correction)[,:]\s(?=[-+$\\]{0,3}[0-9])'
  r'|\b(?:no|wait|actually|correction|sorry)\b[,.:;!]?\s(?:it|that|this)(?:\'s'
  r'|\sis)\b',
  re.I,
)
_BRACKETED = re.compile(r'\(([1-9][0-9]{0,2}(?:, [0-9]{3})+)\)')  # (3, 400), which may be 3400
_INTERVAL = re.compile(r'([\][(])([^\][()]{1,60},[^\][()]{1,60})(\]|\)|(?<!sqrt)\[)')
# 'The range is [2, 5)', without dollar signs.
_STATED_INTERVAL = re.compile(
  r'(?:\bis|\bare|\bin|:|=|\\in)\s*((?:[\[(](?:[-+0-9./ ]|\\infty ?){1,30},(?:[-+0-9./ ]'
  r'|\\infty ?){1,30}[\])](?:\s?\\cup\s*(?=[\[(]))?)+)$'
)
_NAMES = re.compile(
  r'[\s(\[]*[A-Za-z](?:_\{?\w{1,9}\}?)?(?:\s?,\s?[A-Za-z](?:_\{?\w{1,9}\}?)?)*[\s)\]]*'
)
_VALUE = re.compile(r'[0-9$]|\\\(')
_VERB = re.compile(
  r'\b(?:is|are|equals|has|have|gives|was)\s(?:exactly\s|only\s)?(?=[-+]?(?:\$|\\\(|[0-9]))'
)
_ASIDE = re.compile(r'(?:,\s|\s\()(?:attained|achieved|reached|when|where|with|since|because|as)\b')
_FINAL = re.compile(r'(?i:final answer is)\s*(?=[^\n]{0,400}I hope)')
_SENTENCE_END = re.compile(r'[.;](?=\s|$)|\n')
_BEHIND_UNIT = re.compile(r'\s*(?:\\?%|[Pp]ercent(?:age)?\b|[Pp]ct\b)')
_BASE = re.compile(r'(?<![\w.}])([0-9]+)\s?_\s?(?:\{\s?([0-9]+)\s?\}|([0-9]))')
_PERCENT = re.compile(r'\s*\$?\s*(.*?)\s*\$?\s*(?:\\?%|percent|percentage|pct)\s*\$?\s*', re.S)
_PLAIN_WORDS = re.compile(
  r'(?<!\\)(?<![A-Za-z\\])(?!sqrt|sin|cos|tan|log|ln|exp|pi\b|frac|and\b)[A-Za-z]{2,}'
)
_ROOT = re.compile(r'(?<![\\A-Za-z])sqrt\s?\(([^()]*)\)|√\s?\(([^()]*)\)|√\s?([0-9]+|[a-z])')
_NAME = re.compile(r'(?<![\\A-Za-z])(pi|sin|cos|tan|ln|log|exp)(?![A-Za-z])')
_PROSE = re.compile(r'(?<![\\{A-Za-z])[A-Za-z]{2,}\s+[A-Za-z]{2,}\s')
_RIVAL = re.compile(r'[\s,(]*(?:or|and/or)\s(?:maybe|perhaps|possibly)?\s?[-$\\]?[$0-9\\]')
_BOUND = re.compile(
  r'(?i:\b(?:at least|at most|up to|(?:less|more|greater|fewer|larger|smaller) than|between|minus|negative|either)\s)$'
)
_EURO = re.compile(r'\\?[$€£¥₹]')
_SPACING = re.compile(r'\s|\\left(?![a-z])|\\right(?![a-z])|\\[,;:!]')
_ENDS = re.compile(r'(?<=[^\\.])\.\s*$')
_BOUNDED = re.compile(
  r'^\s*(?:\\(?:leq?|geq?|neq?|lt|gt)(?![a-z])|[<>])'
  r'|\b(?:at least|at most|up to|less than|more than|greater than|fewer than)\b'
  r'|\bor (?:more|less|fewer|greater|higher|lower)\b'
)
_SCALED = re.compile(r'[0-9][eE][-+]?[0-9]|\b(?:thousand|million|billion|trillion)\b')
_SPACED = re.compile(r'(?<![\w.,])[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?(?![\w.,]*[0-9])')
_DECIMAL_COMMA = re.compile(r'(?<![\w.,])-?[0-9]+,[0-9]+(?![\w.,]*[0-9])')


def normalized(text: str) -> str:
  """The text with LaTeX for Unicode signs, and without thousands separators; plain spaces and commas stay."""
  text = _GROUP.sub(',', _STRUCK.sub(' ', _TAGS.sub(' ', text)))
  text = numeral.powers(_DASH.sub('-', text)).translate(_SIGNS)
  return _GROUPED.sub(_ungrouped, text)


def _ungrouped(match: re.Match) -> str:
  """The digits of a number with thousands separators; the elements of a pair in brackets."""
  text, start, end = match.string, *match.span()
  front = text[max(0, start - 8) : start].replace('\\left', '')
  pair = _PAIR.search(front) and _PAIR_END.match(text[end : end + 9].replace('\\right', ''))
  return match[0].replace(',', ', ' if pair else '')


def of_row(answer: str) -> str:
  """The formula of a row's answer: its last box, or the complete answer."""
  text = normalized(answer)
  boxed = _boxed(text)
  return _prepared(text.strip() if boxed is None else boxed)


def of_text(text: str) -> str:
  """LaTeX of the answer of a completion, '' where it gives none, or several alternatives.

  Boxes joined by a comma or 'and' are one list; else the last box, the last statement, the last formula, the last
  number outside of formulas. Only the last `answer_span.TAIL_CHARS` are read.
  """
  formula = _answer(normalized(text[-answer_span.TAIL_CHARS :]))
  excludes = (
    '\\in' in formula and '\\ne' in formula
  )  # 'x \\in R, x \\ne 5', of which 5 would be read
  return '' if excludes else _prepared(formula)


def _answer(text: str) -> str:
  final = [*_FINAL.finditer(text)]
  if final:
    return _sentence(text, final[-1].end(), _end(text, final[-1].end())) or ''
  boxed = _boxed(text)
  if boxed is not None:
    return boxed
  for statement in reversed([*_STATEMENT.finditer(text)][-_MAX_CANDIDATES:]):
    end = _end(text, statement.end())
    formula = _sentence(text, statement.end(), end)
    if formula is not None:
      return '' if number_context.is_retracted(text[end : end + number_context.WINDOW]) else formula
  return _last(text) or ''


def key(text: str) -> Fraction | str | None:
  """A value that is equal for completions with the same answer, for votes: a number, else LaTeX without white space.

  Other spellings of a formula, such as x + 1 and 1 + x, are different answers: nothing is evaluated. None: no answer.
  """
  formula = of_text(text)
  quantity = numeral.quantity(numeral.cleaned(formula)) if formula else None
  if quantity is not None and name(formula) is None:
    return quantity.numeral.scaled_value
  return _SPACING.sub('', formula.replace('\\dfrac', '\\frac').replace('\\tfrac', '\\frac')) or None


def name(formula: str) -> str | None:
  """A canonical form of a numeral with a base, 12_5, or of a ratio or time, 12:00; None for other formulas.

  math-verify would drop the base, and cannot read the colon. Such formulas are compared as texts.
  """
  plain = re.sub(r'\s|[$]|\\[,;:! ]|\\text\s?\{\s*\}', '', formula)
  if _BASE.search(plain):
    return _BASE.sub(lambda match: f'{match[1]}_{match[2] or match[3]}', plain.rpartition('=')[2])
  return ratio.canonical(formula)


def readings(target: str, formula: str) -> list[tuple[str, str]]:
  """Pairs of formulas, one of which must be equal: 75% is 75 or 0.75 where only one side has the sign."""
  grouped = _BRACKETED.fullmatch(formula)
  if grouped and ',' not in target:
    formula = grouped[1].replace(', ', '')
  (a, percent_a), (b, percent_b) = _without_percent(target), _without_percent(formula)
  if percent_a == percent_b:
    return [(a, b)]
  small = (f'\\frac{{{a}}}{{100}}', b) if percent_a else (a, f'\\frac{{{b}}}{{100}}')
  return [(a, b), small]


def _prepared(formula: str) -> str:
  """A formula that math-verify reads correctly; '' for a bound, which it would read as a number."""
  formula = _INTERVAL.sub(_interval, formula.replace('\\bigcup', '\\cup'))
  formula = _ENDS.sub('', formula.replace('~', ' ').replace('\\degree', '^\\circ '))
  if _BOUNDED.search(formula):
    return ''
  if _SCALED.search(formula):
    quantity = numeral.quantity(numeral.cleaned(formula))
    return quantity.latex if quantity else formula
  return formula


def _interval(match: re.Match) -> str:
  """An interval with reversed brackets, ]a, b[, in round ones."""
  opening, inside, closing = match.groups()
  return f'{opening.replace("]", "(")}{inside}{closing.replace("[", ")")}'


def _without_percent(formula: str) -> tuple[str, bool]:
  plain = _PERCENT.fullmatch(formula)
  return (plain[1], True) if plain else (formula, False)


def _boxed(text: str) -> str | None:
  """The contents of the last joined boxes; None without a box, '' where the last is not closed or negated."""
  boxes = answer_span.boxes(text)
  if not boxes:
    return None
  last = boxes[-1]
  right = text[last.end : last.end + number_context.WINDOW]
  if last.inside is None or number_context.is_negated(text[: last.start], right):
    return ''
  if number_context.is_retracted(right):
    return ''
  insides = [last.inside]
  for before, after in zip(reversed(boxes[:-1]), reversed(boxes[1:]), strict=True):
    if before.inside is None or not _JOINED.fullmatch(text, before.end, after.start):
      break
    insides.append(before.inside)
  behind = _BEHIND_UNIT.match(text, last.end)
  return ', '.join(reversed(insides)) + ('\\%' if behind and len(insides) == 1 else '')


def _end(text: str, start: int) -> int:
  """The end of the sentence that starts at `start`; a formula in it may contain periods and line ends."""
  at = start + len(text[start : start + 2000]) - len(text[start : start + 2000].lstrip())
  while True:
    stop = _SENTENCE_END.search(text, at)
    segment = _SEGMENT.search(text, at, at + 4000)
    if segment is None or stop is None or segment.start() > stop.start():
      return stop.start() if stop else len(text)
    at = segment.end()


def _segments(text: str, start: int, end: int) -> list[Segment]:
  """The formulas in text[start:end], in order."""
  segments = (
    Segment(*match.span(), next(filter(None, match.groups())))
    for match in _SEGMENT.finditer(text, start, end)
  )
  # In 'costs $5 a piece and $6 by mail' the signs are dollars, and there is no formula.
  return [segment for segment in segments if not _PROSE.search(segment.inside)]


def _sentence(text: str, start: int, end: int) -> str | None:
  """The first formula or number of a statement, '' for several alternatives, None where it asserts none."""
  start = _predicate(text, start, end)
  segments = _segments(text, start, end)
  if not segments or re.search('[0-9]', text[start : segments[0].start]):
    return _plain(text, start, segments[0].start if segments else end)
  for at, segment in enumerate(segments):
    if not _is_unasserted(text, segment):
      return _joined(text, segments, at, at)
  return None


def _predicate(text: str, start: int, end: int) -> int:
  """The start of the part of a statement that gives the answer: in 'the largest $n$ is 34' behind the verb.

  A statement that begins with a formula or a number gives it there.
  """
  first = _VALUE.search(text, start, end)
  if first is None or not re.search('[A-Za-z]{2}', text[start : first.start()]):
    return start
  stop = _ASIDE.search(text, first.end(), end)
  verbs = [*_VERB.finditer(text, first.start(), stop.start() if stop else end)]
  return verbs[-1].end() if verbs else start


def _last(text: str) -> str | None:
  """The last formula or number of a text, '' for several alternatives, None where it asserts none."""
  text = text[: numeral.without_aside(text)]
  segments = _segments(text, 0, len(text))
  if not segments:
    return _plain(text, 0, len(text))
  later = _plain(text, segments[-1].end, len(text), complete=False)
  if later is not None:
    return later
  last = segments[-1]
  if number_context.is_retracted(text[last.end : last.end + number_context.WINDOW]):
    return ''
  if _NAMES.fullmatch(last.inside):  # 'there are 12 such pairs $(a, b)$'
    start = max(text.rfind('. ', 0, last.start), text.rfind('\n', 0, last.start)) + 1
    for at in reversed(range(max(0, len(segments) - _MAX_CANDIDATES), len(segments) - 1)):
      segment = segments[at]
      if segment.start < start or not _VERB.search(text, start, segment.start + 3):
        break
      if re.search('[0-9]', segment.inside) and not _is_unasserted(text, segment):
        return _joined(text, segments, at, at)
    before = max(start, segments[-2].end if len(segments) > 1 else 0)
    counted = _plain(text, before, last.start, complete=False)
    if counted:
      return counted
  for at in reversed(range(max(0, len(segments) - _MAX_CANDIDATES), len(segments))):
    if not _is_unasserted(text, segments[at]):
      return _joined(text, segments, at, at)
  return None


def _is_unasserted(text: str, segment: Segment) -> bool:
  left = text[max(0, segment.start - number_context.WINDOW) : segment.start]
  return number_context.is_unasserted(left, text[segment.end :][: number_context.WINDOW])


def _joined(text: str, segments: list[Segment], first: int, last: int) -> str:
  """These formulas and those joined to them by a comma or 'and' as one list; '' for 'or' and for bounds."""
  while first and _JOINED.fullmatch(text, segments[first - 1].end, segments[first].start):
    first -= 1
  while last + 1 < len(segments) and _JOINED.fullmatch(
    text, segments[last].end, segments[last + 1].start
  ):
    last += 1
  group = segments[first : last + 1]
  between = ' '.join(text[a.end : b.start] for a, b in itertools.pairwise(group))
  left, right = (
    text[max(0, group[0].start - number_context.WINDOW) : group[0].start],
    text[group[-1].end :],
  )
  if (
    re.search(r'\bor\b', between)
    or _RIVAL.match(right[: number_context.WINDOW])
    or _BOUND.search(left)
  ):
    return ''
  percent = '\\%' if len(group) == 1 and _BEHIND_UNIT.match(right[:20]) else ''
  return ', '.join(segment.inside for segment in group) + percent


def _plain(text: str, start: int, end: int, complete: bool = True) -> str | None:
  """The answer of a text without formulas: the complete text if it is an expression, or its number."""
  before = text[max(0, start - number_context.WINDOW) : start]
  part = text[start:end].strip()
  if number_context.is_negated(before, '') or number_context.is_hypothetical(
    before, part[: number_context.WINDOW]
  ):
    return None
  part = part.rstrip('.').strip(' *`"')
  if complete and len(part) < _MOST_CHARS and re.search('[0-9a-zA-Z]', part):
    if not _PLAIN_WORDS.search(re.sub(r'\\[a-zA-Z]+|_\{\w+\}', '', part)):
      return _expression(part)
  interval = _STATED_INTERVAL.search(part)
  if interval and not number_context.is_unasserted(before + part[: interval.start(1)], ''):
    return interval[1]
  found = ratio.in_prose(part)
  if found:
    left = (before + part[: found.start()])[-number_context.WINDOW :]
    return (
      None if number_context.is_unasserted(left, part[found.end() :]) else ratio.of_match(found)
    )
  part = _DECIMAL_COMMA.sub(lambda match: match[0].replace(',', '.'), part)
  part = _SPACED.sub(lambda match: match[0].replace(' ', ''), part)
  return numeral.in_prose(before, part, stated=start > 0 and complete)


def _expression(part: str) -> str:
  part = _EURO.sub('', part)
  quantity = None if '=' in part else numeral.quantity(numeral.cleaned(part))
  if quantity:
    return quantity.latex
  if _SPACED.fullmatch(part):
    part = part.replace(' ', '')
  if _DECIMAL_COMMA.fullmatch(part):
    part = part.replace(',', '.')
  mixed = re.fullmatch(r'(-?)([0-9]+) ([0-9]+)\s?/\s?([0-9]+)', part)
  if mixed:
    return f'{mixed[1]}{mixed[2]}\\frac{{{mixed[3]}}}{{{mixed[4]}}}'
  part = _ROOT.sub(lambda root: f'\\sqrt{{{root[1] or root[2] or root[3]}}}', part)
  return _NAME.sub(r'\\\1 ', part).replace('*', ' \\cdot ')
