"""Tools of MCP servers. A turn without a call is the answer: it ends the episode and is graded."""

from __future__ import annotations

import functools
import importlib
import math
import os
import re
import time
from collections.abc import Mapping

from jaxrl_llm.config.extras import install
from jaxrl_llm.environments import mcp_client, tool_format
from jaxrl_llm.environments.mcp_client import Connection, Server, ServerEnded, Tool
from jaxrl_llm.environments.protocol import Result
from jaxrl_llm.environments.tool_format import ToolCall, ToolFormat
from jaxrl_llm.types import JsonObject, JsonValue, Row, Settings, UserError

_FIELD = 'config.environment.servers'
_KEYS = ('command', 'args', 'env', 'cwd', 'url', 'headers', 'tools')
_VARIABLE = re.compile(r'\$\{(\w+)\}')
_LIST_S = 60.0  # for a server to start and list its tools, before a run


class McpTools:
  """Sessions of one episode with MCP servers, each started by the first call of one of its tools."""

  def __init__(
    self,
    servers: tuple[Server, ...],
    calls: ToolFormat | None,
    timeout_s: float,
    replayable: bool,
  ):
    self.servers, self.calls, self.timeout_s = servers, calls, timeout_s
    self.replayable = replayable
    self._tools: dict[str, Tool] = {}
    self._connections: dict[str, Connection] = {}  # by the name of the server

  def list_tools(self) -> list[JsonObject]:
    """The tools in OpenAI's form. Raises UserError for a server that does not list them, and for a name twice."""
    return [tool.offered for tool in _listed(self.servers, _LIST_S, False).values()]

  def reset(self, row: Row, seed: int) -> None:
    del row, seed
    self._tools = _listed(self.servers, self.timeout_s, True)

  def step(self, text: str) -> Result:
    assert self.calls is not None, 'the form of calls is set where the run is built'
    try:
      calls = self.calls.split(text)[1]
    except ValueError as error:
      return Result(f'error: {error}')
    if not calls:
      return Result(None, 0.0, True)
    until = time.monotonic() + self.timeout_s
    return Result('\n'.join(self._call(call, until) for call in calls))

  def close(self) -> None:
    connections, self._connections = self._connections, {}
    for connection in connections.values():
      connection.close()

  def _call(self, call: ToolCall, until: float) -> str:
    """The result of a tool, or its error. Raises RuntimeError where the server has ended."""
    tool = self._tools.get(call.name)
    if tool is None:
      return f'error: there is no tool {call.name!r}; the tools are: {", ".join(self._tools)}'
    server = tool.server
    try:
      if server.name not in self._connections:
        self._connections[server.name] = Connection(server, until - time.monotonic())
      return self._connections[server.name].call(call.name, call.arguments, until)
    except ValueError as error:  # the policy's call causes it: it may try another
      return f'error: {error}'
    except ServerEnded as error:
      raise RuntimeError(f'the MCP server {server.shown} has ended ({error})') from error


def mcp(
  *,
  servers: Settings,
  calls: tuple[str, ...] = (),
  timeout_s: float = 5.0,
  replayable: bool = True,
) -> McpTools:
  """Tools of MCP servers: {name: {'command': …, 'args': (…)}} or {name: {'url': …}}, as clients configure them.

  `calls` are the texts around a call, and the keys of its name and arguments; () = as the chat template writes calls.
  The calls of a turn, and the starts of their servers, share `timeout_s`. Give replayable=False where the same calls
  may give other results.

  Raises UserError without the SDK, and for settings that are not those of servers.
  """
  try:
    importlib.import_module(mcp_client.MODULE).Client  # noqa: B018  (earlier versions have none)
  except (ImportError, AttributeError) as error:
    raise UserError(
      f"config.environment.fn='mcp' needs version 2 of the official SDK; {install('mcp')}."
    ) from error
  if not 0 < timeout_s < math.inf:
    raise UserError(f'config.environment.timeout_s={timeout_s!r} must be a positive number.')
  form = tool_format.from_setting(calls)
  if not isinstance(servers, Mapping) or not servers:
    raise UserError(f"{_FIELD}={servers!r} must name servers: {{'name': {{'command': …}}}}.")
  parsed = tuple(_server(name, settings) for name, settings in servers.items())
  return McpTools(parsed, form, timeout_s, replayable)


def _server(name: str, settings: JsonValue) -> Server:
  """The server of an entry of `servers`. Raises UserError for bad settings."""
  where = f'{_FIELD}.{name}'
  if not isinstance(settings, Mapping) or bool(settings.get('command')) == bool(
    settings.get('url')
  ):
    raise UserError(f"{where}={settings!r} must have either a 'command' or a 'url'.")
  for key in settings:
    if key not in _KEYS:
      raise UserError(f'{where}.{key} is unknown; choose among: {", ".join(_KEYS)}.')
  for key in ('command', 'url', 'cwd'):
    if not isinstance(settings.get(key, ''), str):
      raise UserError(f'{where}.{key}={settings[key]!r} must be text; arguments go into args.')
  texts = {}
  for key in ('args', 'tools'):
    value = settings.get(key, ())
    if isinstance(value, str) or not all(isinstance(x, str) for x in value):
      raise UserError(f'{where}.{key}={value!r} must be a list of texts.')
    texts[key] = tuple(value)
  pairs = {key: _pairs(f'{where}.{key}', settings.get(key, {})) for key in ('env', 'headers')}
  command = (settings['command'], *texts['args']) if settings.get('command') else ()
  url, cwd = settings.get('url', ''), settings.get('cwd', '')
  return Server(name, command, pairs['env'], cwd, url, pairs['headers'], texts['tools'])


def _pairs(where: str, value: JsonValue) -> tuple[tuple[str, str], ...]:
  """Names with texts, in which ${NAME} is replaced by the trainer's environment variable."""
  if not isinstance(value, Mapping) or not all(isinstance(x, str) for x in value.values()):
    raise UserError(f'{where}={value!r} must be names with texts.')

  def variable(match: re.Match) -> str:
    if match[1] not in os.environ:
      raise UserError(f'{where} reads ${{{match[1]}}}, which is not set; export it.')
    return os.environ[match[1]]

  return tuple((key, _VARIABLE.sub(variable, text)) for key, text in value.items())


@functools.lru_cache(maxsize=4)
def _listed(servers: tuple[Server, ...], limit_s: float, quiet: bool) -> dict[str, Tool]:
  """The tools of all servers by name; each server is started once. Raises UserError as `list_tools` does."""
  found: dict[str, Tool] = {}
  until = time.monotonic() + limit_s
  for server in servers:
    for tool in _list(server, until, quiet):
      if tool.name in found:
        raise UserError(
          f'{_FIELD}: the tool {tool.name!r} is offered by {found[tool.name].server.name!r} and by {server.name!r}; '
          f'name in {_FIELD}.{server.name}.tools those to offer.'
        )
      found[tool.name] = tool
  return found


def _list(server: Server, until: float, quiet: bool) -> list[Tool]:
  try:
    connection = Connection(server, until - time.monotonic(), quiet)
    try:
      tools = connection.list_tools(until)
    finally:
      connection.close()
  except (ServerEnded, ValueError) as error:
    raise UserError(
      f'{_FIELD}: the server {server.shown} lists no tools ({error}); correct its command or URL, and start it by hand '
      'to see what it writes.'
    ) from error
  names = [tool.name for tool in tools]
  missing = [name for name in server.tools if name not in names]
  if missing or not names:
    raise UserError(
      f'{_FIELD}.{server.name}.tools={server.tools!r}: the server offers {", ".join(names) or "no tools"}; choose '
      'among these, or another server.'
    )
  return [tool for tool in tools if not server.tools or tool.name in server.tools]
