"""Tool calls in the text of a turn: '<calc>2+3</calc>', or with the arguments as JSON, as chat models are taught."""

from __future__ import annotations

import json


def find(text: str, tag: str, argument: str) -> str | None:
  """What the last <tag>…</tag> of a text holds; None where there is none.

  Of {"arguments": {argument: …}}, or of those arguments alone, the one named; of a JSON object without it a ValueError
  tells, as of text that only looks like JSON. Any other content is taken as it is. Source: none (the form of
  <tool_call> is that of Hermes' and Qwen's templates).
  """
  before, mark, rest = text.rpartition(f'</{tag}>')
  if not mark:
    return None
  _, opened, inside = before.rpartition(f'<{tag}>')
  if not opened:
    return None
  inside = inside.strip()
  if not inside.startswith('{'):
    return inside
  try:
    told = json.loads(inside)
  except (ValueError, RecursionError) as error:
    raise ValueError('the call is no JSON') from error
  told = told.get('arguments', told)
  if not isinstance(told, dict) or argument not in told:
    raise ValueError(f'the call has no argument {argument!r}')
  return str(told[argument])
