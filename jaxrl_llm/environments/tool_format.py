"""How a model writes tool calls, read from its own chat template: a call is rendered and found again.

Three forms are known: `<tag>{…}</tag>` (Hermes, Qwen), `[MARK] [{…}, …]` (Mistral), and a JSON object alone (Llama 3).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from jaxrl_llm.types import JsonObject, JsonValue, UserError

if TYPE_CHECKING:  # the module imports jax, which environment workers must not
  from jaxrl_llm.models.tokenizer import Tokenizer

_NAME, _ARGUMENT, _VALUE = 'jaxrl_call', 'jaxrl_argument', 'jaxrl_value'
_MARK = re.compile(r'(<[^<>\s]+>|\[[A-Z_]+\])\s*\[?\s*$')
# Mistral's template requires identifiers of nine letters and digits.
_CALL_ID = 'jaxrlcall'


class ToolCall(NamedTuple):
  """A call that a completion asks for."""

  name: str
  arguments: JsonObject


class ToolFormat(NamedTuple):
  """The text around the JSON object of a call, and the keys in it."""

  before: str  # '' where a completion is one JSON object
  after: str  # '' where one JSON list follows `before`
  name_key: str
  arguments_key: str

  @property
  def hold_from(self) -> str:
    """Text with which calls begin."""
    return self.before or '{'

  def parse(self, text: str, names: Collection[str]) -> tuple[str, list[ToolCall]]:
    """(content before the calls, calls). Without calls, or where one is malformed: (text, []).

    A call is malformed where `split` raises, and where it names a tool that is not in `names`.
    """
    try:
      content, calls = self.split(text)
    except ValueError:
      return text, []
    known = calls and all(call.name in names for call in calls)
    return (content, calls) if known else (text, [])

  def split(self, text: str) -> tuple[str, list[ToolCall]]:
    """(content before the calls, calls); (text, []) without a call.

    Raises ValueError where a call is no JSON, lacks its beginning, its end or its name, has arguments that are no
    object, or is followed by other text.
    """
    if not self.before:
      if not text.lstrip().startswith(('{', '[{')):
        return text, []
      content, rest = '', text
    else:
      content, mark, rest = text.partition(self.before)
      if self.after and self.after in content:
        raise ValueError(f'a call does not begin with {self.before}')
      if not mark:
        return text, []
    calls = [self._call(value) for value in self._values(rest)]
    if not calls:
      raise ValueError('the list of calls is empty')
    return content, calls

  def _values(self, rest: str) -> list[JsonValue]:
    """The JSON values behind the first mark."""
    if not self.after:
      value = _json(rest)
      return value if isinstance(value, list) else [value]
    values = []
    for part in rest.split(self.before):
      body, end, behind = part.partition(self.after)
      if not end:
        raise ValueError(f'a call does not end with {self.after}')
      if behind.strip():
        raise ValueError('text follows a call')
      values.append(_json(body))
    return values

  def _call(self, value: JsonValue) -> ToolCall:
    call = value if isinstance(value, dict) else {}
    name, arguments = call.get(self.name_key), call.get(self.arguments_key)
    if not isinstance(name, str) or not isinstance(arguments, dict):
      raise ValueError(f'a call is not {{"{self.name_key}": …, "{self.arguments_key}": {{…}}}}')
    return ToolCall(name, arguments)


def from_setting(calls: tuple[str, ...]) -> ToolFormat | None:
  """The form that config.environment.calls gives, None for (). Raises UserError where it gives none."""
  if calls and (len(calls) != 4 or not all(isinstance(x, str) for x in calls)):
    raise UserError(
      f'config.environment.calls={calls!r} must be the texts before and behind a call, and the keys of its name and '
      "arguments, such as ('<tool_call>', '</tool_call>', 'name', 'arguments')."
    )
  return ToolFormat(*calls) if calls else None


def find(tokenizer: Tokenizer) -> ToolFormat | str:
  """The form of the model's calls, or the reason for which tools cannot be offered to it."""
  tool = dict(name='jaxrl_tool', description='', parameters=dict(type='object', properties={}))
  tools = [dict(type='function', function=tool)]
  question = [dict(role='user', content='?')]
  function = dict(name=_NAME, arguments={_ARGUMENT: _VALUE})
  call = dict(id=_CALL_ID, type='function', function=function)
  answer = dict(role='assistant', content='', tool_calls=[call])
  try:
    plain, offered = tokenizer.chat(question), tokenizer.chat(question, tools=tools)
    text = tokenizer.chat([*question, answer], add_generation_prompt=False, tools=tools)
  except UserError as error:
    return f'the chat template of this model refuses tools ({error})'
  if plain == offered:
    return 'the chat template of this model renders no tools'
  found = _locate(text, offered)
  return (
    found or 'the chat template of this model writes tool calls in a form that is not known here'
  )


def _locate(text: str, prompt: str) -> ToolFormat | None:
  """The form of the call in a rendered chat, whose answer follows `prompt`."""
  at = text.find(_NAME)
  start = text.rfind('{', 0, max(at, 0))
  if at < 0 or start < 0:
    return None
  try:
    value, end = json.JSONDecoder().raw_decode(text, start)
  except ValueError:
    return None
  keys = {repr(v): k for k, v in value.items()}
  name_key, arguments_key = keys.get(repr(_NAME)), keys.get(repr({_ARGUMENT: _VALUE}))
  if name_key is None or arguments_key is None:
    return None
  before = text[len(prompt) : start] if text.startswith(prompt) else text[:start]
  mark = _MARK.search(before)
  if mark is None:
    bare = text.startswith(prompt) and not before.strip()
    return ToolFormat('', '', name_key, arguments_key) if bare else None
  tag = mark[1]
  close = f'</{tag[1:]}'
  after = close if tag[0] == '<' and text[end:].lstrip().startswith(close) else ''
  return ToolFormat(tag, after, name_key, arguments_key)


def _json(text: str) -> JsonValue:
  """The decoded text. Raises ValueError where it is no JSON."""
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError('a call is no JSON') from error
