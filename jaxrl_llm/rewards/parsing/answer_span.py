"""Where in a reply its answer stands: in a box, between tags, in a fenced block, at the end."""

from __future__ import annotations

import re
from typing import NamedTuple

TAIL_CHARS = (
  20_000  # of a reply; an answer stands near its end, and what is not looked at costs no time
)

# Possessive, so that a line that is none costs no more than its length.
_OPENS = re.compile(r'[ \t]*+```[ \t]*+([\w+-]*+)[^\n`]*+')
_CLOSES = re.compile(r'[ \t]*+```[ \t]*+')


def fences(text: str) -> list[tuple[str, str]]:
  """(language, content) of each fenced block that is closed, in time linear in the text."""
  found: list[tuple[str, str]] = []
  language, block = '', None
  # Only '\n' ends a line here: a block keeps every other separator.
  for line in text.split('\n'):
    if block is None:
      if opens := _OPENS.fullmatch(line):
        language, block = opens[1], []
    elif _CLOSES.fullmatch(line):
      found.append((language, ''.join(f'{part}\n' for part in block)))
      block = None
    else:
      block.append(line)
  return found


_BOX = re.compile(r'\\(?:f?boxed|fbox)(?![A-Za-z])')
_TOKEN = re.compile(r'\s*([^\s${}]+(?:\{[^{}\s]*\})*)')


class Box(NamedTuple):
  """A \\boxed{…} of a text: text[start:end], with its inside."""

  start: int
  end: int
  inside: str | None  # None: never closed


def boxes(text: str) -> list[Box]:
  """All \\boxed{…}, \\fbox{…} and \\boxed 5, in order; of one box in another the inner alone."""
  marks = [*_BOX.finditer(text)]
  ends = [mark.start() for mark in marks[1:]] + [len(text)]
  # The search for a closing brace ends at the next box: all of them together read the text once.
  return [_box(text, mark, end) for mark, end in zip(marks, ends, strict=True)] if marks else []


def last_box(text: str) -> Box | None:
  """The last box of the text, None where there is none."""
  start = max(text.rfind('\\boxed'), text.rfind('\\fbox'), text.rfind('\\fboxed'))
  mark = _BOX.match(text, start) if start >= 0 else None
  return _box(text, mark, len(text)) if mark else None


def boxed(text: str) -> str | None:
  """The inside of the last box, braces in pairs; None where there is none, or it is not closed. Source: none."""
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
    # A brace behind a backslash is LaTeX for the sign itself.
    if text[at] in '{}' and text[at - 1] != '\\':
      depth += 1 if text[at] == '{' else -1
      if not depth:
        return Box(mark.start(), at + 1, text[start:at])
  return Box(mark.start(), stop, None)


def in_tag(text: str, tag: str) -> str | None:
  """What stands in the last <tag>…</tag>; None where there is none. Source: none."""
  opening, closing = f'<{tag}>', f'</{tag}>'
  found, at = None, text.find(opening)
  while at >= 0:
    start = at + len(opening)
    stop = text.find(closing, start)
    if (
      stop < 0
    ):  # nor is any later one closed: searching for that again and again would take quadratic time
      break
    found = text[start:stop]
    at = text.find(opening, stop + len(closing))
  return found


def end(text: str, tag: str = '') -> str | None:
  """The part to look for an answer in: the last <tag>…</tag>, all of it for '', of either the last TAIL_CHARS.

  None where there is no such tag. Source: none.
  """
  text = text[-TAIL_CHARS:]
  return in_tag(text, tag) if tag else text
