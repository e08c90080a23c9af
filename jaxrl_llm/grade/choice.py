"""The option that a reply chooses: text → letter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxrl_llm.grade import span
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


# Wrappers of LaTeX and Markdown. A letter in bold or code counts as one in brackets.
_WRAPPED = re.compile(
  r'\\(?:text|textbf|textit|textrm|mathrm|mathbf|bf|rm|boldsymbol)\s?\{([^{}]*)\}'
)
_MARKED = re.compile(r'(\*{1,3}|_{1,3}|`)[(\[]?([A-Za-z])[).:\]]*\1(?!\w)')
_LABEL = re.compile(r'[(\[]?([A-Za-z])(?:[)\].:]|(?=\s*$))')
_LONE = re.compile(r'(?i:(?:so|thus|hence|therefore|i say),?\s)?[(\[]?([A-Za-z])[)\].:]{0,2}')
_LETTER = r'(?P<open>[(\[]?)\s?(?P<letter>[A-Za-z])(?![\w\'’+^=])(?=(?P<rest>[^\n]{0,60}))'
_NOUN = r'(?:the\s)?(?:correct\s)?(?:option|choice|answer|letter)\s?:?\s?'
_ADVERB = r'(?:(?:therefore|thus|clearly|simply|definitely|probably|most likely|indeed|hence),?\s)?'
# The most telling first; of one kind the last counts.
_SAYS = tuple(
  re.compile(told)
  for told in (
    rf'(?i:\banswer(?:\s(?:to|for)\s[^.\n]{{0,60}}?)?(?:\s(?:choice|option|letter))?\s?'
    rf'(?::|=|\bis\b|\bwould be\b|\bshould be\b|\bmust be\b)\s?:?\s*{_ADVERB}(?:{_NOUN})?){_LETTER}',
    rf'(?i:\b(?:correct|right|best)\s(?:option|choice|letter)\s?(?::|\bis\b)\s?:?\s*){_LETTER}',
    rf'(?i:\b(?:option|choice)\s){_LETTER}',
    rf'(?i:\bI\s(?:would\s)?(?:choose|pick|select|go\swith)\s(?:{_NOUN})?){_LETTER}',
  )
)
_MENTION = 2  # 'option B' alone says nothing: it must go on as here
_RIGHT = re.compile(
  r'[)\]]?[^.\n]{0,30}?\bis\s(?:the\s|therefore\s|clearly\s)?(?:correct|right|best|true)', re.I
)
_TWO = re.compile(r'[)\]]?\s?(?:,|/|\bor\b|\band\b|&)\s?(?:option\s)?[(\[]?[A-Za-z](?![\w\'’])')
_GOES_ON = re.compile(r'\s(?!because\b|since\b|as\b|and\b|or\b|due\b|given\b|which\b|by\b)[a-z]')
_ANSWER_IS = re.compile(r'\banswer\s?(?::|is)\s?:?\s*([^\n]+)', re.I)


def read(text: str, options: Options | None = None) -> str | None:
  """The letter that a reply chooses, None where it chooses none, or more than one. Source: none.

  In this order: the last \\boxed{…}; 'the answer is B' and its like; a last line that is a letter; the one line that
  begins with a label, B) or (B); the one letter that is in brackets or bold; an option's whole text as the reply, as
  its last line, or after 'the answer is'.
  """
  options = options or Options()
  text = text[-span.TAIL_CHARS :]
  box = span.boxed(text)
  if box is not None:
    return _whole(_cleaned(box), options)
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
  """The letter of the one option of this text, whatever its case, spacing and last point. Source: none."""
  wanted = _same(text)
  found = [i for i, option in enumerate(options.texts) if wanted in _forms(option)]
  return LETTERS[found[0]] if wanted and len(found) == 1 else None


def options_of(row: Row, name: str) -> Options:
  """Of the row's `name`: a list of texts, {letter: text}, or {label: [...], text: [...]}; () where it has none.

  Raises ValueError for anything else. Source: none.
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

  Raises ValueError where it is none of them. Source: none.
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
  return _MARKED.sub(r'(\2)', text).translate({ord(mark): None for mark in '*`$'})


def _same(text: str) -> str:
  return ' '.join(text.casefold().split()).strip(' .,:;!?"\'()[]')


def _forms(option: str) -> set[str]:
  """An option's text, and that without a label of its own: 'B) Paris' and 'Paris'."""
  label = _LABEL.match(option.strip())
  return {_same(option)} | ({_same(option.strip()[label.end() :])} if label else set())


def _whole(text: str, options: Options) -> str | None:
  """Where nothing but the choice is said: B, (b), B) text, or the option's text."""
  text = text.strip()
  label = _LABEL.match(text)
  if label and (label.end() >= len(text) - 1 or text[label.end() - 1] in ')].:'):
    found = label[1].upper()
    rest = text[label.end() :].strip()
    if found in options.letters and not _TWO.match(' ' + rest):
      return found
  return by_text(text, options)


def _said(text: str, options: Options) -> str | None:
  """What a sentence says; '' for two letters at once, or one that is no option; None for no such sentence."""
  for kind, pattern in enumerate(_SAYS):
    for match in reversed([*pattern.finditer(text)]):
      letter, rest = match['letter'], match['rest']
      closed = match['open'] and rest[:1] in (')', ']')
      if kind == _MENTION and not _RIGHT.match(rest):
        continue
      if letter.islower() and not closed and rest.strip(' .)]'):
        continue  # 'the answer is a mammal'
      if letter in 'AI' and not closed and _GOES_ON.match(rest):
        continue
      return '' if _TWO.match(rest) or letter.upper() not in options.letters else letter.upper()
  return None


def _laid_out(text: str, options: Options) -> str | None:
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  if not lines:
    return None
  lone = _LONE.fullmatch(lines[-1])
  if lone:
    return lone[1].upper() if lone[1].upper() in options.letters else ''
  labels = [_LABEL.match(line) for line in lines]
  labels = [m if m and not _TWO.match(m.string, m.end()) else None for m in labels]
  told = {label[1] for label in labels if label and label[1] in options.letters}
  if len(told) == 1 and any(labels[at] and labels[at][1] in told for at in (0, -1)):
    return told.pop()
  told = set(re.findall(r'[(\[]([A-Z])[)\]]', text)) & set(options.letters)
  return told.pop() if len(told) == 1 else None
