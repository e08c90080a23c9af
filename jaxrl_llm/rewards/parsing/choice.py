"""The option of a multiple-choice question that a completion chooses: text → letter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from jaxrl_llm.rewards.parsing import answer_span, assertion, choice_forms, number_context
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


# The forms in which a text states a choice are in `choice_forms`.
_MAX_CANDIDATES = 40  # statements that are tried, from the last on
_AMBIGUOUS = ''  # a statement of no option, or of two
_NOT_OTHER = re.compile(
  r'[)\]]?,?\s\(?(?i:and\s)?(?i:not|rather than|instead of)\s(?:option\s)?[(\[]?[A-Z]\b[)\]]?(?:(?:,'
  r'|,?\s(?:or|and|nor))\s[(\[]?[A-Z]\b[)\]]?){0,5}\)?[.!]?\s*$'
)
_LETTERED = re.compile(r'[(\[]?([A-Za-z])[)\]]?(?:,\s|\s(?=\())(.*)')
_COMPARED = re.compile(r'(?i:\b(?:between|of|among|out of)\b)')
_QUANTIFIER = re.compile(r'(?i:\b(?:nothing|none|no|all|every\w*|each|any\w*)\b)')
_ALSO_BEHIND = re.compile(
  r'[)\]]?\s(?:is|was|are|would be|works|fits)\s(?:\w+\s){0,2}?(?:also|too|as well|equally)\b'
)
_OTHER = re.compile(r'(?<![\w\'’])[A-Z](?![\w\'’])')


def read(text: str, options: Options | None = None) -> str | None:
  """The letter that a completion chooses, None where it chooses none, or more than one.

  In this order: the last box; the last of 'the answer is B', 'B is the answer', 'it must be B', 'I choose B',
  <answer>B</answer>; a last line that is a letter, or the only line with a label, B) or (B) or 'B, because';
  an option's complete text as the completion, as its last line, or after 'the answer is'. Negated, hypothetical and
  questioned statements do not count, and a letter that is no option is no choice.
  """
  options = options or Options()
  text = choice_forms.TOKEN.sub(' ', text[-answer_span.TAIL_CHARS :])
  box = answer_span.last_box(text)
  if box is not None:
    if box.inside is None or _is_withdrawn(text, box):
      return None
    inside = choice_forms.cleaned(box.inside)
    return _choice_alone(inside, options) or _stated(inside, options) or None
  text = choice_forms.cleaned(text)
  letter = _stated(text, options)
  if letter is None:
    letter = _from_lines(text, options)
  if not letter and options.texts:
    last_line = text.rstrip().rpartition('\n')[2]
    sources = (*choice_forms.ANSWER_IS.findall(text)[-1:], text, last_line)
    letter = next(filter(None, (by_text(source, options) for source in sources)), letter)
  return letter or None


def _is_withdrawn(text: str, box: answer_span.Box) -> bool:
  """Whether the box is denied, taken back, or offered beside another one."""
  right = text[box.end : box.end + number_context.WINDOW]
  return (
    number_context.is_negated(text[: box.start], right)
    or number_context.is_retracted(right)
    or answer_span.has_rival_box(text, box)
  )


def by_text(text: str, options: Options) -> str | None:
  """The letter of the only option with this text, ignoring case, spacing and a final period."""
  wanted = _normalized(text)
  matches = [i for i, option in enumerate(options.texts) if wanted in _forms(option)]
  if wanted and len(matches) == 1:
    return LETTERS[matches[0]]
  labeled = _LETTERED.fullmatch(text.strip())  # 'B, London'
  letter = labeled and labeled[1].upper()
  if labeled and letter in options.letters[: len(options.texts)]:
    return (
      letter if _normalized(labeled[2]) in _forms(options.texts[LETTERS.index(letter)]) else None
    )
  return None


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
  letter = letter or _choice_alone(choice_forms.cleaned(answer), options)
  if not letter:
    raise ValueError(f'the answer of row {row.id} is none of its options: {row.answer[:80]!r}')
  return letter


def _normalized(text: str) -> str:
  return ' '.join(text.casefold().split()).strip(' .,:;!?"\'()[]')


def _forms(option: str) -> set[str]:
  """An option's text with and without its own label: 'B) Paris' and 'Paris'."""
  label = choice_forms.LABEL.match(option.strip())
  return {_normalized(option)} | ({_normalized(option.strip()[label.end() :])} if label else set())


def _choice_alone(text: str, options: Options) -> str | None:
  """The letter of a text that holds only a choice: B, (b), option B, B) text, B - text, or the option's text."""
  text = text.strip()
  lone = choice_forms.LONE.fullmatch(text)
  letter = lone[1] if lone else _labeled(text)
  if letter and letter.upper() in options.letters:
    return letter.upper()
  return by_text(text, options)


def _labeled(text: str) -> str | None:
  """The letter that labels a line: 'B) London', 'B - London', 'B, because'; None where other labels follow."""
  text = text.lstrip('✅✓✔☑→ ')
  label = choice_forms.LABEL.match(text)
  if label is None:
    return None
  rest = text[label.end() :]
  if rest[:1] == '?':
    return None
  letter, behind = label['letter'], text[label.end('letter') :][: number_context.WINDOW]
  if _NOT_OTHER.match(behind):
    return letter
  if _has_second('', behind, letter) or choice_forms.NEXT_LABEL.search(
    rest[: number_context.WINDOW]
  ):
    return None
  if number_context.is_negated('', behind) or number_context.is_conditional(behind):
    return None
  return None if number_context.is_retracted(behind) else letter


def _lettered(line: str) -> str | None:
  """The letter of a line that is one, or that has it as its label."""
  lone = choice_forms.LONE.fullmatch(line)
  return lone[1] if lone else _labeled(line)


class _Statement(NamedTuple):
  """A statement of `letter`, or of the content of a tag, at text[start:end]."""

  letter: str
  start: int
  end: int  # behind the letter
  stop: int  # behind the statement
  kind: int  # index in choice_forms.STATEMENTS; -1: a tag, whose content is `letter`
  opened: bool = False  # a bracket precedes the letter


def _statements(text: str) -> list[_Statement]:
  """The statements of a text, the last one first."""
  found = [
    _Statement(tag[2], *tag.span(2), tag.end(), -1) for tag in choice_forms.TAG.finditer(text)
  ]
  mentions = [*choice_forms.MENTION.finditer(text)]
  parts = choice_forms.regions(text, mentions)
  for kind, pattern in enumerate(choice_forms.STATEMENTS):
    for part in parts:
      found += [_statement(match, kind) for match in pattern.finditer(text, *part)]
  for mention in mentions:
    if match := choice_forms.judged(text, mention.start()):
      found.append(_statement(match, choice_forms.LEADS))
  return sorted(found, key=lambda statement: statement.end, reverse=True)[:_MAX_CANDIDATES]


def _statement(match: re.Match, kind: int) -> _Statement:
  groups = match.groupdict()
  name = next(name for name in ('letter', 'letter2', 'letter3') if groups.get(name))
  opened = any(groups.get(name) for name in ('open', 'open2', 'open3'))
  return _Statement(match[name], *match.span(name), match.end(), kind, opened)


def _stated(text: str, options: Options) -> str | None:
  """The letter of the last statement; '' for two letters or none of the options; None without a statement."""
  for statement in _statements(text):
    if statement.kind < 0:
      letter = _of_tag(statement.letter, options)
    else:
      letter = _of_statement(text, statement, options)
    if letter is not None:
      return letter
  return None


def _of_tag(inside: str, options: Options) -> str:
  return _choice_alone(inside, options) or _stated(inside, options) or _AMBIGUOUS


def _of_statement(text: str, statement: _Statement, options: Options) -> str | None:
  """The letter of one statement, '' for none of the options, None where it asserts no choice."""
  letter, kind = statement.letter, statement.kind
  left = text[max(0, statement.start - number_context.WINDOW) : statement.start]
  right = text[statement.end : statement.end + number_context.WINDOW]
  closed = statement.opened and right[:1] in (')', ']')
  if not closed and not _is_letter(letter, kind, right):
    return None
  if kind == choice_forms.EXCEPTED:
    negative = text[max(0, statement.start - 80) : statement.start]
    excluded = _excludes_others(negative, right)
    return _option(letter, options) if excluded else None
  confirmed = text[statement.end : statement.stop].lstrip(')]')[:1] == '?'  # 'Is it B? Yes.'
  if number_context.is_negated(left, right):
    return None
  if not confirmed and number_context.is_hypothetical(left, right):
    return None
  behind = text[statement.stop :] if kind >= choice_forms.LEADS else right
  if number_context.is_conditional(behind):
    return None
  if _has_second(left, right, letter) or _has_also(left, right, letter):
    return _AMBIGUOUS
  return _AMBIGUOUS if number_context.is_retracted(right) else _option(letter, options)


def _is_letter(letter: str, kind: int, right: str) -> bool:
  """Whether a letter without brackets is one, and no article or pronoun: 'the answer is a mammal'."""
  if letter.islower():
    return kind < choice_forms.LEADS and not right.split('\n')[0].strip(' .)]!')
  leads = kind >= choice_forms.LEADS
  return letter not in 'AI' or leads or not choice_forms.GOES_ON.match(right)


def _option(letter: str, options: Options) -> str:
  return letter.upper() if letter.upper() in options.letters else _AMBIGUOUS


def _excludes_others(left: str, right: str) -> bool:
  """Whether 'all but B are wrong' or 'none but B fits' is complete: the verdict is about the others."""
  words = _QUANTIFIER.findall(left)
  if not words:
    return False
  negative = assertion.is_denied_behind(right)
  return negative != words[-1].casefold().startswith(('no', 'none'))


def _has_second(left: str, right: str, letter: str) -> bool:
  """Whether the statement offers another letter: 'B or C', 'B and C', '(B)(C)'."""
  match = choice_forms.TWO.match(right)
  if match and match['second'] != letter.upper():
    behind = right[match.end() :]
    if not choice_forms.OWN_CLAUSE.match(behind) and not assertion.is_denied_behind(behind):
      return True
  match = choice_forms.TWO_LABELS.match(right)
  if match and match['second'] != letter.upper():
    return True
  match = choice_forms.TWO_IN_FRONT.search(left[-50:])
  if match is None or match['second'] == letter.upper():
    return False
  before = left[: len(left) - len(match[0])]
  return not (_COMPARED.search(before[-20:]) or number_context.is_negated(before, ''))


def _has_also(left: str, right: str, letter: str) -> bool:
  """Whether another letter is asserted beside this one: 'C is also correct', 'B is correct, and so is C'."""
  match = choice_forms.ALSO.search(right)
  if match and not number_context.is_negated(right[: match.start()], right[match.end() :]):
    return (match['other'] or match['second']) != letter.upper()
  return _ALSO_BEHIND.match(right) is not None and _OTHER.search(left) is not None


def _from_lines(text: str, options: Options) -> str | None:
  """The letter of a last line that is a letter, or of the only labeled line; '' for none of the options."""
  lines = [line.strip() for line in text.splitlines() if line.strip(' \t|-:')]
  if not lines:
    return None
  # 'Which one is it? B.'
  lone = choice_forms.LONE.fullmatch(lines[-1]) or choice_forms.LONE_AT_END.search(lines[-1][-30:])
  if lone is None and lines[-1].startswith('|'):
    cells = choice_forms.CELL.findall(lines[-1])
    return _option(cells[0], options) if len(cells) == 1 else _AMBIGUOUS if cells else None
  if lone:
    before = choice_forms.LONE.fullmatch(lines[-2]) if len(lines) > 1 else None
    two = before and before[1].upper() != lone[1].upper()
    return _AMBIGUOUS if two else _option(lone[1], options)
  labels = [_lettered(line) for line in lines]
  chosen = {label.upper() for label in labels if label and label.upper() in options.letters}
  if len(chosen) == 1 and any(
    label and label.upper() in chosen for label in (labels[0], labels[-1])
  ):
    return chosen.pop()
  return None
