"""The option of a multiple-choice question that a completion chooses: text → letter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from jaxrl_llm.rewards.parsing import answer_span, number_context
from jaxrl_llm.types import Row

LETTERS = 'ABCDEFGHIJKLMNOPQRSTUVWXYZ'
_DEFAULT_LETTERS = 'ABCDEFGHIJ'  # the choice where the options are unknown


class Options(NamedTuple):
  """The options of a row; LETTERS[i] chooses `texts[i]`."""

  texts: tuple[str, ...] = ()
  labels: tuple[str, ...] = ()  # other names of the options in the row's answer

  @property
  def letters(self) -> str:
    """The letters that are options."""
    return LETTERS[: len(self.texts)] or _DEFAULT_LETTERS


# Wrappers of LaTeX, Markdown and quotes. A letter in bold, code, braces or quotes equals one in brackets.
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
# Statements of a choice: the letter follows in the first two forms, and leads in the others. The last one counts.
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
_LEADS = 2  # in this form and later ones the letter leads
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
_MAX_CANDIDATES = 40  # statements that are tried, from the last on
_AMBIGUOUS = ''  # a statement of no option, or of two


def read(text: str, options: Options | None = None) -> str | None:
  """The letter that a completion chooses, None where it chooses none, or more than one.

  In this order: the last box; the last of 'the answer is B', 'B is the answer', 'it must be B', 'I choose B',
  <answer>B</answer>; a last line that is a letter, or the only line with a label, B) or (B) or 'B, because';
  an option's complete text as the completion, as its last line, or after 'the answer is'. Negated, hypothetical and
  questioned statements do not count, and a letter that is no option is no choice.
  """
  options = options or Options()
  text = _TOKEN.sub(' ', text[-answer_span.TAIL_CHARS :])
  box = answer_span.last_box(text)
  if box is not None:
    if box.inside is None or number_context.is_negated(text[: box.start], ''):
      return None
    inside = _cleaned(box.inside)
    return _choice_alone(inside, options) or _stated(inside, options) or None
  text = _cleaned(text)
  letter = _stated(text, options)
  if letter is None:
    letter = _from_lines(text, options)
  if not letter and options.texts:
    last_line = text.rstrip().rpartition('\n')[2]
    sources = (*_ANSWER_IS.findall(text)[-1:], text, last_line)
    letter = next(filter(None, (by_text(source, options) for source in sources)), letter)
  return letter or None


def by_text(text: str, options: Options) -> str | None:
  """The letter of the only option with this text, ignoring case, spacing and a final period."""
  wanted = _normalized(text)
  matches = [i for i, option in enumerate(options.texts) if wanted in _forms(option)]
  return LETTERS[matches[0]] if wanted and len(matches) == 1 else None


def options_of(row: Row, name: str) -> Options:
  """The options in the row's field `name`; empty where it has no such field.

  The field is a list of texts, {letter: text}, or {label: [...], text: [...]}. Raises ValueError for anything else.
  """
  texts = row.extra.get(name)
  if texts is None:
    return Options()
  labels: Sequence = ()
  if isinstance(texts, dict):
    columns = {'label', 'text'} <= texts.keys()
    labels, texts = (texts['label'], texts['text']) if columns else (list(texts), [*texts.values()])
  valid = isinstance(texts, list | tuple) and 2 <= len(texts) <= len(LETTERS)
  if not valid or len(labels) not in (0, len(texts)):
    raise ValueError(
      f'{name!r} of row {row.id} must be a list of 2 to 26 texts, or letters with texts'
    )
  return Options(tuple(map(str, texts)), tuple(map(str, labels)))


def answer_of(row: Row, options: Options, first_index: int) -> str:
  """The letter of the row's answer: a letter, an option's text, a label, or with first_index ≥ 0 a number.

  Raises ValueError where it is none of these.
  """
  answer = row.answer.strip()
  letter = by_text(answer, options)
  if letter is None and answer in options.labels:
    letter = LETTERS[options.labels.index(answer)]
  if letter is None and first_index >= 0 and answer.isdecimal() and len(answer) < 3:
    index = int(answer) - first_index
    letter = options.letters[index:][:1] if index >= 0 else None
  letter = letter or _choice_alone(_cleaned(answer), options)
  if not letter:
    raise ValueError(f'the answer of row {row.id} is none of its options: {row.answer[:80]!r}')
  return letter


def _cleaned(text: str) -> str:
  """The text without wrappers; marked letters are in brackets."""
  text = _WRAPPED.sub(r'\1', _WRAPPED.sub(r'\1', text))
  text = _MARKED.sub(lambda match: f'({match[2] or match[3]})', _FORMULA.sub('', text))
  return text.translate({ord(mark): None for mark in '*`$'})


def _normalized(text: str) -> str:
  return ' '.join(text.casefold().split()).strip(' .,:;!?"\'()[]')


def _forms(option: str) -> set[str]:
  """An option's text with and without its own label: 'B) Paris' and 'Paris'."""
  label = _LABEL.match(option.strip())
  return {_normalized(option)} | ({_normalized(option.strip()[label.end() :])} if label else set())


def _choice_alone(text: str, options: Options) -> str | None:
  """The letter of a text that holds only a choice: B, (b), option B, B) text, B - text, or the option's text."""
  text = text.strip()
  lone = _LONE.fullmatch(text)
  letter = lone[1] if lone else _labeled(text)
  if letter and letter.upper() in options.letters:
    return letter.upper()
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


def _stated(text: str, options: Options) -> str | None:
  """The letter of the last statement; '' for two letters or none of the options; None without a statement."""
  statements = [(tag.end(), tag, -1) for tag in _TAG.finditer(text)]
  for kind, pattern in enumerate(_STATEMENT):
    statements += [(match.end('letter'), match, kind) for match in pattern.finditer(text)]
  statements.sort(key=lambda statement: statement[0], reverse=True)
  for _, match, kind in statements[:_MAX_CANDIDATES]:
    letter = _of_tag(match[1], options) if kind < 0 else _of_statement(text, match, kind, options)
    if letter is not None:
      return letter
  return None


def _of_tag(inside: str, options: Options) -> str:
  return _choice_alone(inside, options) or _stated(inside, options) or _AMBIGUOUS


def _of_statement(text: str, match: re.Match, kind: int, options: Options) -> str | None:
  """The letter of one statement, '' for none of the options, None where it asserts no choice."""
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
  return _AMBIGUOUS if two or letter.upper() not in options.letters else letter.upper()


def _second(match: re.Match | None, letter: str) -> bool:
  """Whether the match offers another letter."""
  return match is not None and match['second'] != letter.upper()


def _from_lines(text: str, options: Options) -> str | None:
  """The letter of a last line that is a letter, or of the only labeled line; '' for none of the options."""
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  if not lines:
    return None
  # 'Which one is it? B.'
  lone = _LONE.fullmatch(lines[-1]) or _LONE_AT_END.search(lines[-1][-30:])
  if lone:
    return lone[1].upper() if lone[1].upper() in options.letters else _AMBIGUOUS
  labels = [_labeled(line) for line in lines]
  chosen = {label.upper() for label in labels if label and label.upper() in options.letters}
  if len(chosen) == 1 and any(
    label and label.upper() in chosen for label in (labels[0], labels[-1])
  ):
    return chosen.pop()
  return None
