"""The option that a reply chooses: text → letter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxrl_llm.rewards.parsing import answer_span, number_context
from jaxrl_llm.types import Row

LETTERS = 'ABCDEFGHIJKLMNOPQRSTUVWXYZ'
_UNTOLD = 'ABCDEFGHIJ'  # what may be chosen where the options are not known


class Options(NamedTuple):
  """The options of a row: the one at `texts[i]` is chosen as LETTERS[i]."""

  texts: tuple[str, ...] = ()
  labels: tuple[str, ...] = ()  # by which the row's answer may name them

  @property
  def letters(self) -> str:
    """That may be chosen."""
    return LETTERS[: len(self.texts)] or _UNTOLD


# Wrappers of LaTeX, Markdown and quotes. A letter in bold, code, braces or quotes counts as one in brackets.
_WRAPPED = re.compile(
  r'\\(?:text|textbf|textit|textrm|mathrm|mathbf|bf|rm|boldsymbol)\s?\{([^{}]*)\}'
)
_MARKED = re.compile(
  r'(?<![\w*_`])(\*{1,3}|_{1,3}|`)[(\[]?([A-Za-z])[).:\]]*\1(?![\w*`])|(?<!\w)["\'“‘{]([A-Za-z])[.]?["\'”’}](?!\w)'
)
_FORMULA = re.compile(r'(?<!\\)\\[()\[\]]')
_TOKEN = re.compile(r'<\|[^|<>\n]{1,40}\|>')
_TAG = re.compile(r'<answer>((?:(?!</?answer>).){0,2000})</answer>', re.S | re.I)
_NOUN = r'(?:(?:the|my|our|your)\s)?(?:(?:correct|right|best|final)\s)?(?:(?:option|choice|answer|letter)\b\s?:?\s?)?'
_ADVERB = (
  r'(?:(?:therefore|thus|clearly|simply|definitely|probably|most likely|indeed|hence|certainly|obviously|surely|just'
  r'|only|likely|actually|still|then|now),?\s)?'
)
_LETTER = r'(?P<open>[(\[]?)\s?(?P<letter>[A-Za-z])(?![\w\'’+^=°])'
_IS = (
  r'(?:is|was|are|must\sbe|has\sto\sbe|have\sto\sbe|should\sbe|would\sbe|will\sbe|can\sonly\sbe)'
)
_REASON = r'because\b|since\b|as\b|for\b|due\b|given\b'
# Statements of a choice: B follows (the first two groups), or leads. The last of the text counts, whatever its form.
_STATEMENT = (
  # 'the answer is B', 'Answer: B', 'Answer - B', 'my choice is B', 'the best option: B'
  re.compile(
    rf'(?i:\b(?:answers?|option|choice|letter|selection|pick)(?:\s(?:to|for)\s[^.\n]{{0,60}}?)?(?:\s(?:choice|option|letter))?\s?'
    rf'(?::|=|\s[-–]\s|\b{_IS}\b)\s?:?\s*{_ADVERB}{_NOUN}){_LETTER}'
  ),
  # 'it must be B', 'I choose B', 'that leaves B'
  re.compile(
    rf"(?i:\b(?:(?:it|this|that)(?:['’]s|\s{_IS})|(?:I|we)(?:['’]d|['’]ll|\swould|\swill)?\s(?:choose|chose|pick|picked|select|selected"
    rf"|go\swith|opt\sfor|vote\sfor|say)|(?:going|left)\swith|let(?:['’]s|\sus)\s(?:choose|pick|select|go\swith)|(?:^|(?<=[.!?:,\n]\s)|(?<=\n)|(?<=so\s))(?:choose|pick|select|go\swith)"
    rf'|(?:leaves?|leaving)(?:\sus)?(?:\swith)?|not\s(?:option\s)?[(\[]?[A-Z][)\]]?,?\s(?:but|so))\s{_ADVERB}{_NOUN}){_LETTER}'
    rf'(?=[)\].,;:!?]|\s*$|\s*\n|\s(?:{_REASON}|and\b|or\b|\(|-|–|&|if\b))'
  ),
  # 'B is the answer', 'option B must be correct', 'B) London is right'
  re.compile(
    rf'(?:^|(?<=[.!?:;,(\n>])|(?<=[.!?:;,]\s)|(?i:\b(?P<noun>option|choice|answer|letter|statement)\s'
    r'|\b(?:so|thus|hence|therefore|that|think|believe|is|only|clearly|then|conclude|and|or|nor|because|but|say|guess)\s))'
    rf'\s?{_LETTER}(?P<text>[)\]:.]\s?[^.\n]{{0,40}}?|\s?\([^()\n]{{0,40}}\)|(?(noun)[^.\n]{{0,30}}?))\s?\b'
    rf'(?i:(?:{_IS}|seems(?:\sto\sbe)?)\s(?:\w+ly\s|indeed\s|therefore\s)?(?:(?:the|my|our)\s)?(?:\w+ly\s)?(?:only\s|most\s|single\s|final\s)?'
    r'(?:correct\b|right\b|best\b|true\b|answer\b|choice\b|one\b|appropriate\b))',
    re.M,
  ),
  # 'only B fits'
  re.compile(
    rf'(?i:\bonly\s(?:option\s)?){_LETTER}[)\]]?\s(?:fits|works|remains|holds|is\sleft|is\spossible)\b'
  ),
)
_LEADS = 2  # from this form on the letter comes first
_MORE = (
  r'(?:[\s(\[]|maybe|possibly|perhaps|probably|also|both|even|then|or|and|but|else|option|choice)*+'
)
_TWO = re.compile(
  rf'[)\]]?\s?(?:[,;/|&+\-–]|and/or\b|\(?or\b|and\b|to\b|but\b|versus\b|vs\b|(?<=\s))\s?{_MORE}(?P<second>[A-Z])(?![\w\'’])'
  r'(?!\)?\s(?!or\b|and\b)[a-z])'
)
_TWO_IN_FRONT = re.compile(
  r'(?<![\w\'’])(?P<second>[A-Z])[)\]]?\s?(?:,|/|&|\bor\b|\band\b)\s?(?:or\s|and\s)?(?:option\s)?[(\[]?$'
)
_GOES_ON = re.compile(
  rf'\s(?!{_REASON}|and\b|or\b|which\b|by\b|if\b|but\b|is\b|was\b|to\b|with\b)[a-z]'
)
_LONE = re.compile(
  r'(?i:(?:so|thus|hence|therefore|i say|i think),?\s)?'
  rf'[:\s]*(?i:{_NOUN})[(\[{{]?\s?([A-Za-z])\s?[)\]}}]?[.:!,]{{0,2}}'
)
_LONE_AT_END = re.compile(r'[a-z]{2}[.?!:]\s[(\[]?([A-Z])[)\]]?[.!]?$')
_LABEL = re.compile(
  rf'[(\[]?(?P<letter>[A-Za-z])(?:[)\]][.:]?|[.:](?!\w)|\s?[-–](?=\s)|(?=,?\s(?:{_REASON})))\s*'
)
_NEXT_LABEL = re.compile(r'(?:^|\s)[(\[]?[A-Z][)\]:.](?:\s|$)')
_ANSWER_IS = re.compile(r'\banswer\s?(?::|is)\s?:?\s*([^\n]+)', re.I)
_MOST_STATEMENTS = 40  # that are looked at, from the last on
_NOTHING = ''  # a statement of no option, or of two


def read(text: str, options: Options | None = None) -> str | None:
  """The letter that a reply chooses, None where it chooses none, or more than one.

  In this order: the last box; the last of 'the answer is B', 'B is the answer', 'it must be B', 'I choose B',
  <answer>B</answer>; a last line that is a letter, or the one line that begins with a label, B) or (B) or 'B, because';
  an option's whole text as the reply, as its last line, or after 'the answer is'. What is denied, supposed or asked is
  not said, and a letter that is no option is no choice.
  """
  options = options or Options()
  text = _TOKEN.sub(' ', text[-answer_span.TAIL_CHARS :])
  box = answer_span.last_box(text)
  if box is not None:
    if box.inside is None or number_context.is_negated(text[: box.start], ''):
      return None
    inside = _cleaned(box.inside)
    return _whole(inside, options) or _said(inside, options) or None
  text = _cleaned(text)
  found = _said(text, options)
  if found is None:
    found = _laid_out(text, options)
  if not found and options.texts:
    last = text.rstrip().rpartition('\n')[2]
    said = _ANSWER_IS.findall(text)[-1:]
    found = next(filter(None, (by_text(t, options) for t in (*said, text, last))), found)
  return found or None


def by_text(text: str, options: Options) -> str | None:
  """The letter of the one option of this text, whatever its case, spacing and last point."""
  wanted = _same(text)
  found = [i for i, option in enumerate(options.texts) if wanted in _forms(option)]
  return LETTERS[found[0]] if wanted and len(found) == 1 else None


def options_of(row: Row, name: str) -> Options:
  """Of the row's `name`: a list of texts, {letter: text}, or {label: [...], text: [...]}; () where it has none.

  Raises ValueError for anything else.
  """
  told: Any = row.extra.get(name)
  if told is None:
    return Options()
  labels: Sequence[Any] = ()
  if isinstance(told, dict):
    labels, told = (
      (told['label'], told['text'])
      if {'label', 'text'} <= told.keys()
      else (list(told), [*told.values()])
    )
  good = isinstance(told, list | tuple) and 2 <= len(told) <= len(LETTERS)
  if not good or len(labels) not in (0, len(told)):
    raise ValueError(
      f'{name!r} of row {row.id} must be a list of 2 to 26 texts, or letters with texts'
    )
  return Options(tuple(map(str, told)), tuple(map(str, labels)))


def answer_of(row: Row, options: Options, first_index: int) -> str:
  """The letter of the row's answer: a letter, an option's text, a label, or with first_index a number.

  Raises ValueError where it is none of them.
  """
  told = row.answer.strip()
  found = by_text(told, options)
  if found is None and told in options.labels:
    found = LETTERS[options.labels.index(told)]
  if found is None and first_index >= 0 and told.isdecimal() and len(told) < 3:
    found = options.letters[int(told) - first_index :][:1] if int(told) >= first_index else None
  found = found or _whole(_cleaned(told), options)
  if not found:
    raise ValueError(f'the answer of row {row.id} is none of its options: {row.answer[:80]!r}')
  return found


def _cleaned(text: str) -> str:
  text = _WRAPPED.sub(r'\1', _WRAPPED.sub(r'\1', text))
  text = _MARKED.sub(lambda found: f'({found[2] or found[3]})', _FORMULA.sub('', text))
  return text.translate({ord(mark): None for mark in '*`$'})


def _same(text: str) -> str:
  return ' '.join(text.casefold().split()).strip(' .,:;!?"\'()[]')


def _forms(option: str) -> set[str]:
  """An option's text, and that without a label of its own: 'B) Paris' and 'Paris'."""
  label = _LABEL.match(option.strip())
  return {_same(option)} | ({_same(option.strip()[label.end() :])} if label else set())


def _whole(text: str, options: Options) -> str | None:
  """Where nothing but the choice is said: B, (b), option B, B) text, B - text, or the option's text."""
  text = text.strip()
  lone = _LONE.fullmatch(text)
  found = lone[1] if lone else _labeled(text)
  if found and found.upper() in options.letters:
    return found.upper()
  return by_text(text, options)


def _labeled(text: str) -> str | None:
  """The letter that labels a line: 'B) London', 'B - London', 'B, because'; None where other labels follow."""
  label = _LABEL.match(text)
  if label is None:
    return None
  rest = text[label.end() :]
  letter, behind = label['letter'], text[label.end('letter') :][: number_context.WINDOW]
  if _second(_TWO.match(behind), letter) or _NEXT_LABEL.search(rest[: number_context.WINDOW]):
    return None
  return (
    None
    if number_context.is_negated('', behind) or number_context.is_conditional(behind)
    else letter
  )


def _said(text: str, options: Options) -> str | None:
  """The letter of the last statement; '' for two letters, or one that is no option; None for no statement."""
  found = [(tag.end(), tag, -1) for tag in _TAG.finditer(text)]
  for kind, pattern in enumerate(_STATEMENT):
    found += [(match.end('letter'), match, kind) for match in pattern.finditer(text)]
  for _, match, kind in sorted(found, key=lambda one: one[0], reverse=True)[:_MOST_STATEMENTS]:
    said = _of_tag(match[1], options) if kind < 0 else _of_statement(text, match, kind, options)
    if said is not None:
      return said
  return None


def _of_tag(inside: str, options: Options) -> str:
  return _whole(inside, options) or _said(inside, options) or _NOTHING


def _of_statement(text: str, match: re.Match, kind: int, options: Options) -> str | None:
  """The letter of one statement, '' for none of the options, None where it says nothing."""
  letter, start, end = match['letter'], match.start('letter'), match.end('letter')
  left, right = (
    text[max(0, start - number_context.WINDOW) : start],
    text[end : end + number_context.WINDOW],
  )
  closed = match['open'] and right[:1] in (')', ']')
  if letter.islower() and not closed and (kind >= _LEADS or right.split('\n')[0].strip(' .)]!')):
    return None  # 'the answer is a mammal'
  if letter in 'AI' and not closed and kind < _LEADS and _GOES_ON.match(right):
    return None
  if number_context.is_negated(left, right) or number_context.is_hypothetical(left, right):
    return None
  if number_context.is_conditional(text[match.end() :] if kind >= _LEADS else right):
    return None
  two = _second(_TWO.match(right), letter) or _second(_TWO_IN_FRONT.search(left[-20:]), letter)
  return _NOTHING if two or letter.upper() not in options.letters else letter.upper()


def _second(match: re.Match | None, letter: str) -> bool:
  """Whether another letter than this one is offered."""
  return match is not None and match['second'] != letter.upper()


def _laid_out(text: str, options: Options) -> str | None:
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  if not lines:
    return None
  # 'Which one is it? B.'
  lone = _LONE.fullmatch(lines[-1]) or _LONE_AT_END.search(lines[-1][-30:])
  if lone:
    return lone[1].upper() if lone[1].upper() in options.letters else _NOTHING
  labels = [_labeled(line) for line in lines]
  chosen = {label.upper() for label in labels if label and label.upper() in options.letters}
  if len(chosen) == 1 and any(
    label and label.upper() in chosen for label in (labels[0], labels[-1])
  ):
    return chosen.pop()
  return None
