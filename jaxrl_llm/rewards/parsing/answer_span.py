"""The span of the answer in a completion: in a box, between tags, in a fenced block, at the end."""

from __future__ import annotations

import re
from typing import NamedTuple

# Length of the end of a completion that is searched: it holds the answer, and its parsing time is bounded.
TAIL_CHARS = 20_000

# Possessive, so that a line without a fence costs no more than its length.
_OPENS = re.compile(r'[ \t]*+```[ \t]*+([\w+-]*+)[^\n`]*+')
_CLOSES = re.compile(r'[ \t]*+```[ \t]*+')


def fences(text: str) -> list[tuple[str, str]]:
  """(language, content) of each fenced block that is closed, in time linear in the text."""
  blocks: list[tuple[str, str]] = []
  language, block = '', None
  # Only '\n' ends a line; other separators stay in the block.
  for line in text.split('\n'):
    if block is None:
      if opens := _OPENS.fullmatch(line):
        language, block = opens[1], []
    elif _CLOSES.fullmatch(line):
      blocks.append((language, ''.join(f'{part}\n' for part in block)))
      block = None
    else:
      block.append(line)
  return blocks


_BOX = re.compile(r'\\(?:f?boxed|fbox)(?![A-Za-z])')
_TOKEN = re.compile(r'\s*([^\s${}]+(?:\{[^{}\s]*\})*)')

# Text between two boxes that offers both; a correction, 'no:' or 'or rather', does not.
_OFFERED = re.compile(
  r'(?>(?:[\s$*.]|\\[()\[\],;: ]|\\q?quad)*)(?:,?\s?(?:and|or|and/or|&|alternatively)\b|[,;/&])'
  r'(?>(?:[\s$*(]|\\[()\[\],;: ]|\\q?quad|(?:maybe|perhaps|possibly|also|even|option)\b)*)'
)


class Box(NamedTuple):
  """A \\boxed{…} at text[start:end], with its content."""

  start: int
  end: int
  inside: str | None  # None: not closed


def boxes(text: str) -> list[Box]:
  """All \\boxed{…}, \\fbox{…} and \\boxed 5, in order; of nested boxes only the inner one."""
  marks = [*_BOX.finditer(text)]
  ends = [mark.start() for mark in marks[1:]] + [len(text)]
  # The search for a closing brace ends at the next box, so that all boxes together read the text once.
  return [_box(text, mark, end) for mark, end in zip(marks, ends, strict=True)] if marks else []


def has_rival_box(text: str, last: Box) -> bool:
  """Whether the last box is offered beside an unequal one: '\\boxed{5} or \\boxed{6}', '\\boxed{B}, \\boxed{C}'."""
  start = max(text.rfind(mark, 0, last.start) for mark in ('\\boxed', '\\fbox', '\\fboxed'))
  mark = _BOX.match(text, start) if start >= 0 else None
  before = _box(text, mark, last.start) if mark else None
  if (
    before is None or before.inside is None or before.inside.strip() == (last.inside or '').strip()
  ):
    return False
  return _OFFERED.fullmatch(text, before.end, last.start) is not None


def last_box(text: str) -> Box | None:
  """The last box of the text, or None."""
  start = max(text.rfind('\\boxed'), text.rfind('\\fbox'), text.rfind('\\fboxed'))
  mark = _BOX.match(text, start) if start >= 0 else None
  return _box(text, mark, len(text)) if mark else None


def boxed(text: str) -> str | None:
  """The content of the last box, with balanced braces; None without a box, or where it is not closed."""
  box = last_box(text)
  return box.inside if box else None


def _box(text: str, mark: re.Match, stop: int) -> Box:
  at = mark.end()
  while at < stop and text[at].isspace():
    at += 1
  if text[at : at + 1] != '{':
    token = _TOKEN.match(text, mark.end(), stop)
    return (
      Box(mark.start(), token.end(), token[1].rstrip('.,;'))
      if token
      else Box(mark.start(), at, None)
    )
  start, depth = at + 1, 0
  for at in range(start - 1, stop):
    # An escaped brace is the character itself.
    if text[at] in '{}' and text[at - 1] != '\\':
      depth += 1 if text[at] == '{' else -1
      if not depth:
        return Box(mark.start(), at + 1, text[start:at])
  return Box(mark.start(), stop, None)


def in_tag(text: str, tag: str) -> str | None:
  """The content of the last <tag>…</tag>, or None."""
  opening, closing = f'<{tag}>', f'</{tag}>'
  inside, at = None, text.find(opening)
  while at >= 0:
    start = at + len(opening)
    stop = text.find(closing, start)
    # No later tag is closed either, and searching again for each would take quadratic time.
    if stop < 0:
      break
    inside = text[start:stop]
    at = text.find(opening, stop + len(closing))
  return inside


def tail(text: str, tag: str = '') -> str | None:
  """The part of a completion that may hold the answer: the last TAIL_CHARS, or the last <tag>…</tag> in these.

  None where there is no such tag.
  """
  text = text[-TAIL_CHARS:]
  return in_tag(text, tag) if tag else text


# Marks around an answer that are no part of it, and what announces one.
_MARKS = ' \t\r\n"\'`*_.:\u201c\u201d\u2018\u2019'
_ANNOUNCED = re.compile(r'\banswer(?:\sis\b|[*_]*:)', re.IGNORECASE)


def words(text: str) -> str:
  """What follows the last 'answer is' or 'answer:' of the text, else all of it, in lower case without marks around it.

  White space within is one space.
  """
  starts = [announced.end() for announced in _ANNOUNCED.finditer(text[-TAIL_CHARS:])]
  part = text[-TAIL_CHARS:][starts[-1] if starts else 0 :]
  return ' '.join(part.strip(_MARKS).lower().split())
