"""Tool calls in the text of a turn: '<calc>2+3</calc>', or with JSON arguments as in chat templates."""

from __future__ import annotations

import json
import re

from jaxrl_llm.types import JsonObject


def find(text: str, tag: str, argument: str) -> str | None:
  """The argument of the last <tag>…</tag> of a text; None for a text without either of the two.

  The content may be JSON, {"arguments": {argument: …}} or the arguments alone (the <tool_call> format of Hermes' and
  Qwen's templates); any other content is the argument. Raises ValueError for a call without its beginning or end, for
  invalid JSON, and for a missing argument.
  """
  before, mark, _ = text.rpartition(f'</{tag}>')
  if not mark:
    if f'<{tag}>' in text:
      raise ValueError(f'the call does not end with </{tag}>')
    return None
  _, start, content = before.rpartition(f'<{tag}>')
  if not start:
    raise ValueError(f'the call does not begin with <{tag}>')
  content = content.strip()
  if not content.startswith('{'):
    return content
  call = _parsed(content)
  arguments = call.get('arguments', call)
  if not isinstance(arguments, dict) or argument not in arguments:
    raise ValueError(f'the call has no argument {argument!r}')
  return str(arguments[argument])


def named(text: str, tag: str) -> list[tuple[str, JsonObject]]:
  """(name, arguments) of every <tag>{"name": …, "arguments": {…}}</tag> of a text, in order.

  Raises ValueError for a call that has no beginning, no end, no name, or other arguments than an object.
  """
  contents = re.findall(rf'<{tag}>(.*?)</{tag}>', text, re.DOTALL)
  if not len(contents) == text.count(f'<{tag}>') == text.count(f'</{tag}>'):
    raise ValueError(f'a call does not begin with <{tag}>, or does not end with </{tag}>')
  calls = []
  for content in contents:
    call = _parsed(content)
    name, arguments = call.get('name'), call.get('arguments')
    if not isinstance(name, str) or not isinstance(arguments, dict):
      raise ValueError('the call is not {"name": …, "arguments": {…}}')
    calls.append((name, arguments))
  return calls


def _parsed(content: str) -> JsonObject:
  """The JSON object of a call; one without entries for another value."""
  try:
    call = json.loads(content)
  except (ValueError, RecursionError) as error:
    raise ValueError('the call is no JSON') from error
  return call if isinstance(call, dict) else {}
