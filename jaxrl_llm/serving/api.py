"""Requests of OpenAI's API: records, and the validation that makes them from decoded JSON."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from jaxrl_llm.serving.engine import Sampling
from jaxrl_llm.serving.programs import ALTERNATIVES
from jaxrl_llm.types import JsonObject, JsonValue

CHAT, TEXT = 'chat', 'text'
_MOST_COMPLETIONS = 128  # n
_MOST_PROMPTS = 128
_MOST_STOPS = 16
_TEXT_TOP = 5  # alternatives of text completions
_TEXT_MAX_TOKENS = 16  # OpenAI's default
_ROLES = ('system', 'developer', 'user', 'assistant', 'tool')
# Accepted with these values alone, since anything else would change the completion, or what is stored of it.
_NEUTRAL: dict[str, tuple[JsonValue, ...]] = dict(
  frequency_penalty=(None, 0),
  presence_penalty=(None, 0),
  logit_bias=(None, {}),
  response_format=(None, {'type': 'text'}),
  parallel_tool_calls=(None, True),
  store=(None, False),
  suffix=(None, ''),
)
_IGNORED = ('user', 'metadata', 'safety_identifier')  # they describe the caller


class ApiError(Exception):
  """A refused request, in the shape of OpenAI's errors."""

  def __init__(
    self, message: str, param: str | None = None, status: int = 400, code: str | None = None
  ):
    super().__init__(message)
    self.message, self.param, self.status, self.code = message, param, status, code

  def body(self) -> JsonObject:
    """The JSON of the response."""
    kinds = {401: 'authentication_error', 429: 'rate_limit_error'}
    kind = kinds.get(self.status, 'server_error' if self.status >= 500 else 'invalid_request_error')
    return dict(error=dict(message=self.message, type=kind, param=self.param, code=self.code))


class ApiRequest(NamedTuple):
  """A valid request."""

  kind: str  # CHAT or TEXT
  model: str
  prompts: tuple[str | tuple[int, ...], ...]  # text or token ids; () for a chat
  messages: tuple[JsonObject, ...]  # of a chat
  tools: tuple[JsonObject, ...]
  n: int  # completions of each prompt
  max_tokens: int | None  # None: as many as fit
  sampling: Sampling  # with max_tokens of 0
  stops: tuple[str, ...]
  top: int | None  # alternatives with the log-probs of each token; None: no log-probs
  stream: bool
  include_usage: bool  # in a last event of the stream
  echo: bool  # the prompt comes before the completion
  return_token_ids: bool


def parse(body: bytes, kind: str) -> ApiRequest:
  """The request in an HTTP body. Raises ApiError."""
  try:
    value = json.loads(body)
  except (ValueError, RecursionError) as error:
    raise ApiError(f'the body is no JSON ({error}).') from error
  if not isinstance(value, dict):
    raise ApiError(f'the body must be a JSON object, not {_kind(value)}.')
  fields = _Fields(value)
  request = _chat(fields) if kind == CHAT else _text(fields)
  fields.check_rest()
  return request


class _Fields:
  """The fields of a body; each is read once, and those that nothing reads are unsupported."""

  def __init__(self, body: JsonObject):
    self._body = {name: value for name, value in body.items() if value is not None}

  def take(self, name: str, default: JsonValue = None) -> JsonValue:
    return self._body.pop(name, default)

  def text(self, name: str) -> str:
    value = self.take(name, '')
    if not isinstance(value, str) or not value:
      raise ApiError(f'{name!r} is required and must be text, not {_kind(value)}.', name)
    return value

  def flag(self, name: str) -> bool:
    value = self.take(name, False)
    if not isinstance(value, bool):
      raise ApiError(f'{name!r} must be true or false, not {_kind(value)}.', name)
    return value

  def number(self, name: str, low: float, high: float, default: float) -> float:
    value = self.take(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
      raise ApiError(f'{name!r} must be a number from {low} to {high}, not {_short(value)}.', name)
    return float(value)

  def integer(self, name: str, low: int, high: int) -> int | None:
    value = self.take(name)
    if value is None:
      return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
      raise ApiError(
        f'{name!r} must be a whole number from {low} to {high}, not {_short(value)}.', name
      )
    return value

  def check_rest(self) -> None:
    for name, value in self._body.items():
      if name in _NEUTRAL:
        if value not in _NEUTRAL[name]:
          raise ApiError(
            f'unsupported value of {name!r}: {_short(value)}; leave it out.', name,
            code='unsupported_parameter',
          )  # fmt: skip
      elif name not in _IGNORED:
        raise ApiError(f'unsupported parameter: {name!r}.', name, code='unsupported_parameter')


def _chat(fields: _Fields) -> ApiRequest:
  messages = _messages(fields.take('messages'))
  # The newer name, and the older one.
  tokens = fields.integer('max_completion_tokens', 1, 2**31 - 1)
  older = fields.integer('max_tokens', 1, 2**31 - 1)
  top, wanted = fields.integer('top_logprobs', 0, ALTERNATIVES), fields.flag('logprobs')
  if top is not None and not wanted:
    raise ApiError("'top_logprobs' needs 'logprobs': true.", 'top_logprobs')
  return _common(fields)._replace(
    kind=CHAT,
    messages=messages,
    tools=_tools(fields),
    max_tokens=older if tokens is None else tokens,
    top=(top or 0) if wanted else None,
  )


def _text(fields: _Fields) -> ApiRequest:
  prompts = _prompts(fields.take('prompt'))
  echo = fields.flag('echo')
  tokens = fields.integer('max_tokens', 0 if echo else 1, 2**31 - 1)
  top = fields.integer('logprobs', 0, _TEXT_TOP)
  request = _common(fields)._replace(
    kind=TEXT,
    prompts=prompts,
    echo=echo,
    max_tokens=_TEXT_MAX_TOKENS if tokens is None else tokens,
    top=top,
  )
  best_of = fields.integer('best_of', 1, _MOST_COMPLETIONS)
  if best_of not in (None, request.n):
    raise ApiError(f"'best_of' is not supported beyond 'n'={request.n}.", 'best_of')
  return request


def _common(fields: _Fields) -> ApiRequest:
  """A request with the fields that both kinds have."""
  n = fields.integer('n', 1, _MOST_COMPLETIONS)
  seed = fields.integer('seed', 0, 2**32 - 1)
  stream = fields.flag('stream')
  temperature = fields.number('temperature', 0, 2, 1)
  top_p = fields.number('top_p', 0, 1, 1)
  if top_p == 0:
    raise ApiError("'top_p' must be greater than 0.", 'top_p')
  return ApiRequest(
    kind='',
    model=fields.text('model'),
    prompts=(),
    messages=(),
    tools=(),
    n=1 if n is None else n,
    max_tokens=None,
    sampling=Sampling(
      0,
      temperature,
      top_p if temperature else 1.0,
      secrets.randbits(31) if seed is None else seed,
    ),
    stops=_stops(fields.take('stop')),
    top=None,
    stream=stream,
    include_usage=_include_usage(fields.take('stream_options'), stream),
    echo=False,
    return_token_ids=fields.flag('return_token_ids'),
  )


def _include_usage(value: JsonValue, stream: bool) -> bool:
  if value is None:
    return False
  if (
    not isinstance(value, dict)
    or not set(value) <= {'include_usage'}
    or not isinstance(value.get('include_usage', False), bool)
  ):
    raise ApiError(
      f'\'stream_options\' must be {{"include_usage": true or false}}, not {_short(value)}.',
      'stream_options',
    )
  if not stream:
    raise ApiError("'stream_options' needs 'stream': true.", 'stream_options')
  return bool(value.get('include_usage', False))


def _stops(value: JsonValue) -> tuple[str, ...]:
  listed = value if isinstance(value, list) else [] if value is None else [value]
  stops = tuple(stop for stop in listed if isinstance(stop, str) and stop)
  if len(stops) < len(listed) or len(stops) > _MOST_STOPS:
    raise ApiError(
      f"'stop' must be text or a list of at most {_MOST_STOPS} texts that are not empty.", 'stop'
    )
  return stops


def _prompts(value: JsonValue) -> tuple[str | tuple[int, ...], ...]:
  """Prompts as text or token ids: one, or a list."""
  listed = [value] if not isinstance(value, list) or _token_ids(value) else value
  prompts: list[str | tuple[int, ...]] = []
  for item in listed:
    prompt = item if isinstance(item, str) else _token_ids(item)
    if not prompt:
      raise ApiError(
        "'prompt' must be text, a list of token ids, or a list of either, and not empty; it holds "
        f'{_short(item)}.',
        'prompt',
      )
    prompts.append(prompt)
  if not 0 < len(prompts) <= _MOST_PROMPTS:
    raise ApiError(f"'prompt' must hold from 1 to {_MOST_PROMPTS} prompts.", 'prompt')
  return tuple(prompts)


def _token_ids(value: JsonValue) -> tuple[int, ...]:
  """The value where it is a list of whole numbers, else ()."""
  listed = value if isinstance(value, list) else []
  ids = tuple(x for x in listed if isinstance(x, int) and not isinstance(x, bool))
  return ids if len(ids) == len(listed) else ()


def _messages(value: JsonValue) -> tuple[JsonObject, ...]:
  if not isinstance(value, list) or not value:
    raise ApiError("'messages' must be a list of at least one message.", 'messages')
  return tuple(_message(item, f'messages[{i}]') for i, item in enumerate(value))


def _message(value: JsonValue, where: str) -> JsonObject:
  """A message as chat templates read it: text content, and calls whose arguments are decoded."""
  if not isinstance(value, dict) or value.get('role') not in _ROLES:
    raise ApiError(f'{where} must be an object with a role of {", ".join(_ROLES)}.', where)
  # Clients send empty fields of earlier answers back.
  fields = {name: x for name, x in value.items() if x not in (None, [], {})}
  role = fields.pop('role')
  calls = _calls(fields.pop('tool_calls', []), where) if role == 'assistant' else []
  message = dict(role='system' if role == 'developer' else role)
  message['content'] = _content(fields.pop('content', '' if calls else None), where)
  if calls:
    message['tool_calls'] = calls
  for name in ('name', 'tool_call_id'):
    text = fields.pop(name, '')
    if not isinstance(text, str):
      raise ApiError(f'{where}.{name} must be text.', f'{where}.{name}')
    message |= {name: text} if text else {}
  if fields:
    name = sorted(fields)[0]
    raise ApiError(f'unsupported parameter: {where}.{name}.', f'{where}.{name}')
  return message


def _content(value: JsonValue, where: str) -> str:
  """Text, or the parts of a message joined, which must be text."""
  if isinstance(value, str):
    return value
  parts = value if isinstance(value, list) else [value]
  texts = [
    part.get('text') if isinstance(part, dict) and part.get('type') == 'text' else None
    for part in parts
  ]
  if not all(isinstance(text, str) for text in texts):
    raise ApiError(
      f'{where}.content must be text, or a list of parts of type "text".', f'{where}.content'
    )
  return ''.join(str(text) for text in texts)


def _calls(value: JsonValue, where: str) -> list[JsonObject]:
  """The calls of an assistant's message, with arguments decoded: templates render them as JSON."""
  calls = []
  for i, item in enumerate(value if isinstance(value, list) else [value]):
    at = f'{where}.tool_calls[{i}]'
    function = item.get('function') if isinstance(item, dict) else None
    name = function.get('name') if isinstance(function, dict) else None
    arguments = function.get('arguments') if isinstance(function, dict) else None
    try:
      arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
      arguments = None
    if not isinstance(name, str) or not isinstance(arguments, dict) or not isinstance(item, dict):
      raise ApiError(
        f'{at} must be {{"id", "type": "function", "function": {{"name", "arguments"}}}}, with arguments as the JSON '
        'of an object.',
        at,
      )
    call = dict(type='function', function=dict(name=name, arguments=arguments))
    calls.append(call | ({'id': item['id']} if isinstance(item.get('id'), str) else {}))
  return calls


def _tools(fields: _Fields) -> tuple[JsonObject, ...]:
  """The tools that are offered; with tool_choice "none", no tools."""
  tools, choice = fields.take('tools', []), fields.take('tool_choice', 'auto')
  if choice not in ('auto', 'none'):
    raise ApiError(
      f'unsupported value of \'tool_choice\': {_short(choice)}; it must be "auto" or "none".',
      'tool_choice',
      code='unsupported_parameter',
    )
  if not isinstance(tools, list):
    raise ApiError(f"'tools' must be a list, not {_kind(tools)}.", 'tools')
  found: list[JsonObject] = []
  for i, tool in enumerate(tools):
    function = tool.get('function') if isinstance(tool, dict) else None
    named = isinstance(function, dict) and isinstance(function.get('name'), str)
    if not named or not isinstance(tool, dict) or tool.get('type') != 'function':
      raise ApiError(
        f'tools[{i}] must be {{"type": "function", "function": {{"name": …}}}}.', f'tools[{i}]'
      )
    found.append(tool)
  return () if choice == 'none' else tuple(found)


def _kind(value: JsonValue | Sequence[JsonValue]) -> str:
  """The JSON type of a value."""
  kinds = {bool: 'a boolean', str: 'text', int: 'a number', float: 'a number', list: 'a list'}
  return kinds.get(type(value), 'an object' if isinstance(value, dict) else 'null')


def _short(value: JsonValue) -> str:
  text = json.dumps(value, ensure_ascii=False)
  return text if len(text) <= 60 else f'{text[:60]}…'
