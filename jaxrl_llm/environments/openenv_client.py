"""Environments that an OpenEnv server runs, through its WebSocket. Each episode has a session of its own there.

A message is {"type": "reset" or "step", "data": …}, and the answer {"type": "observation", "data": {"observation": {…},
"reward": number or null, "done": bool}}. The server's package, openenv, is not needed here.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import time
from typing import NamedTuple

from jaxrl_llm.config.extras import install
from jaxrl_llm.environments import tool_format
from jaxrl_llm.environments.adapters import Foreign
from jaxrl_llm.environments.protocol import Result
from jaxrl_llm.environments.tool_format import ToolCall, ToolFormat
from jaxrl_llm.types import JsonObject, JsonValue, Row, UserError

_SCHEMES = dict(http='ws', https='wss', ws='ws', wss='wss')
_LIST_S = 60.0  # for a server to answer before a run


class Server(NamedTuple):
  """A server, and how texts become its actions and its observations texts."""

  address: str  # of its WebSocket
  action: str  # the field of an action that holds a turn; '' where a turn is the action as JSON
  observation: str  # the field of an observation that is shown; '' for all of them as JSON
  tools: bool  # whether actions are calls of the server's tools


class Refused(ValueError):
  """The server refused an action that is none of its own."""


class Session:
  """A connection, which has an environment of its own at the server."""

  def __init__(self, address: str, timeout_s: float):
    client: Foreign = importlib.import_module('websockets.sync.client')
    self._closed = importlib.import_module('websockets.exceptions').ConnectionClosed
    self._stack = contextlib.ExitStack()
    connection = client.connect(address, open_timeout=timeout_s, max_size=None)
    self._socket = self._stack.enter_context(connection)

  def send(self, kind: str, data: JsonValue, until: float) -> JsonObject:
    """The data of the answer, which arrives before the monotonic clock shows `until`.

    Raises Refused for an action that is malformed, RuntimeError for another error of the server, TimeoutError for an
    answer that is late, and websockets' exceptions for a connection that has ended.
    """
    with contextlib.suppress(self._closed):  # a server without a place for it answers so and closes
      self._socket.send(json.dumps(dict(type=kind, data=data)))
    answer = json.loads(self._socket.recv(timeout=max(until - time.monotonic(), 0.0)))
    if answer['type'] == 'error':
      error = answer['data']
      if error.get('code') == 'VALIDATION_ERROR':
        raise Refused('; '.join(map(_fault, error.get('errors', ()))) or error.get('message'))
      raise RuntimeError(f'the OpenEnv server answers {error.get("code")}: {error.get("message")}')
    return answer['data']

  def close(self) -> None:
    self._stack.close()


class OpenEnv:
  """One episode at a server: a turn is an action, or calls of the server's tools."""

  def __init__(self, server: Server, calls: ToolFormat | None, timeout_s: float, replayable: bool):
    self.server, self.calls, self.timeout_s = server, calls, timeout_s
    self.replayable = replayable
    self._session: Session | None = None

  def list_tools(self) -> list[JsonObject]:
    """The tools in OpenAI's form; [] without config.environment.tools. Raises UserError where no server answers."""
    try:
      session = Session(self.server.address, _LIST_S)
      try:
        return _tools(session) if self.server.tools else []
      finally:
        session.close()
    except Exception as error:  # of the socket, of websockets or of the server
      asked = 'lists no tools' if self.server.tools else 'does not answer'
      raise UserError(
        f'config.environment.url: the OpenEnv server at {self.server.address} {asked} ({error}); start it, or correct '
        'the address.'
      ) from error

  def reset(self, row: Row, seed: int) -> str | None:
    until = time.monotonic() + self.timeout_s
    self._session = Session(self.server.address, self.timeout_s)
    data = dict(row.extra.get('options') or {}) | dict(seed=seed)
    return self._shown(self._session.send('reset', data, until)) or None

  def step(self, text: str) -> Result:
    try:
      actions = self._actions(text)
    except ValueError as error:  # the policy's text causes it: it may try another
      return Result(f'error: {error}')
    if not actions:  # an answer without a call of a tool
      return Result(None, 0.0, True)
    session, until = self._session, time.monotonic() + self.timeout_s
    assert session is not None, 'step follows reset'
    reward, shown = 0.0, []
    for action in actions:
      try:
        data = session.send('step', action, until)
      except Refused as error:
        shown.append(f'error: {error}')
        continue
      reward += float(data['reward'] or 0.0)
      shown.append(self._shown(data))
      if data['done']:
        return Result(None, reward, True)
    return Result('\n'.join(shown), reward)

  def close(self) -> None:
    if self._session is not None:
      self._session.close()

  def _actions(self, text: str) -> list[JsonObject]:
    """The actions of a turn. Raises ValueError for a malformed one."""
    if self.server.tools:
      assert self.calls is not None, 'the form of calls is set where the run is built'
      return [_call(call) for call in self.calls.split(text)[1]]
    if self.server.action:
      return [{self.server.action: text}]
    try:
      action = json.loads(text)
    except (ValueError, RecursionError):
      action = None
    if not isinstance(action, dict):
      raise ValueError('an action is a JSON object')
    return [action]

  def _shown(self, data: JsonObject) -> str:
    """The text of an observation."""
    observation = dict(data['observation'])
    if self.server.observation:
      return _text(observation.get(self.server.observation))
    if self.server.tools:
      return _result(observation)
    observation.pop('metadata', None)
    return _text(observation)


def openenv(
  *,
  url: str,
  action: str = '',
  observation: str = '',
  tools: bool = False,
  calls: tuple[str, ...] = (),
  timeout_s: float = 5.0,
  replayable: bool = True,
) -> OpenEnv:
  """An environment of the OpenEnv server at `url`: a turn is its action, rewards of steps are added up.

  `action` names the field of an action that holds the turn; without it, a turn is the action as a JSON object, or with
  `tools` calls of the server's tools, written as `calls` says. `observation` names the field that is shown. The seed of
  a group is that of reset, with the row's column `options`. The actions of a turn share `timeout_s`.

  Raises UserError without websockets, and for settings that do not go together.
  """
  try:
    importlib.import_module('websockets.sync.client')
  except ImportError as error:
    raise UserError(
      f"config.environment.fn='openenv' needs websockets; {install('openenv')}."
    ) from error
  scheme, separator, rest = url.partition('://')
  if not separator or scheme not in _SCHEMES:
    raise UserError(
      f"config.environment.url={url!r} must be the address of a server, such as 'http://127.0.0.1:8000'."
    )
  if not 0 < timeout_s < math.inf:
    raise UserError(f'config.environment.timeout_s={timeout_s!r} must be a positive number.')
  if tools and action:
    raise UserError(
      f'config.environment.action={action!r} does not go with config.environment.tools=True, whose actions are calls; '
      'set one of them.'
    )
  server = Server(f'{_SCHEMES[scheme]}://{rest.rstrip("/")}/ws', action, observation, tools)
  return OpenEnv(server, tool_format.from_setting(calls), timeout_s, replayable)


def _tools(session: Session) -> list[JsonObject]:
  listed = session.send('step', dict(type='list_tools'), time.monotonic() + _LIST_S)
  tools = listed['observation'].get('tools')
  if not tools:
    raise ValueError('its environment has none')
  return [
    dict(
      type='function',
      function=dict(
        name=tool['name'], description=tool['description'], parameters=tool['input_schema']
      ),
    )
    for tool in tools
  ]


def _call(call: ToolCall) -> JsonObject:
  return dict(type='call_tool', tool_name=call.name, arguments=call.arguments)


def _result(observation: JsonObject) -> str:
  """The text of a tool's result, or its error; '' for the observation of a reset."""
  error, result = observation.get('error'), observation.get('result')
  if error:
    return f'error: {error["message"]}'
  if not isinstance(result, dict) or 'content' not in result:
    return _text(result)
  text = '\n'.join(part.get('text') or f'[{part.get("type")}]' for part in result['content'])
  return f'error: {text}' if result.get('is_error') else text


def _text(value: JsonValue) -> str:
  """Texts as they are, '' for None, other values as JSON."""
  if value is None:
    return ''
  return value if isinstance(value, str) else json.dumps(value)


def _fault(error: JsonObject) -> str:
  """'message: Field required', of pydantic's description of an error."""
  return f'{".".join(map(str, error.get("loc", ())))}: {error.get("msg")}'
