"""Where in a reply its answer stands: in a box, between tags, in a fenced block, at the end."""

from __future__ import annotations

import re

TAIL_CHARS = (
  20_000  # of a reply; an answer stands near its end, and what is not looked at costs no time
)

FENCE = re.compile(r'^[ \t]*```[ \t]*([\w+-]*)[^\n`]*\n(.*?)^[ \t]*```[ \t]*$', re.M | re.S)


def boxed(text: str) -> str | None:
  """What the last \\boxed{…} holds, braces in pairs; None where there is none, or it is not closed. Source: none."""
  start = text.rfind('\\boxed')
  inside = text[start + len('\\boxed') :].lstrip() if start >= 0 else ''
  if not inside.startswith('{'):
    return None
  depth = 0
  for at, char in enumerate(inside):
    # A brace behind a backslash is LaTeX for the sign itself.
    if char in '{}' and inside[at - 1] != '\\':
      depth += 1 if char == '{' else -1
      if not depth:
        return inside[1:at]
  return None


def in_tag(text: str, tag: str) -> str | None:
  """What stands in the last <tag>…</tag>; None where there is none. Source: none."""
  found = re.findall(f'<{re.escape(tag)}>(.*?)</{re.escape(tag)}>', text, re.DOTALL)
  return found[-1] if found else None


def end(text: str, tag: str = '') -> str | None:
  """The part to look for an answer in: the last <tag>…</tag>, all of it for '', of either the last TAIL_CHARS.

  None where there is no such tag. Source: none.
  """
  text = text[-TAIL_CHARS:]
  return in_tag(text, tag) if tag else text
