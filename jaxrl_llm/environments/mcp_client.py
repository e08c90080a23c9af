"""Connections to MCP servers through the official Python SDK, for code that is not async.

The SDK's event loop runs in a thread, which all connections of a process share. A server that is a command becomes a
child in the process group of this process: what kills the group of a worker kills its servers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import importlib
import json
import subprocess
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

from jaxrl_llm.environments.adapters import Foreign
from jaxrl_llm.types import JsonObject, JsonValue

MODULE = 'mcp'
_STOP_S = 1.0  # for a server to end once its input is closed, before it is killed
_CLOSE_S = 3.0  # for the end of a session
_LONGEST_LINE = 2**26  # bytes of one message
_POLL_S = 0.02


class Server(NamedTuple):
  """A server: a command, or the URL of its streamable HTTP endpoint."""

  name: str
  command: tuple[str, ...] = ()
  env: tuple[tuple[str, str], ...] = ()  # beside PATH, HOME and the like
  cwd: str = ''
  url: str = ''
  headers: tuple[tuple[str, str], ...] = ()
  tools: tuple[str, ...] = ()  # those that are offered; (): all

  @property
  def shown(self) -> str:
    """Its name and where it is, for messages."""
    return f'{self.name!r} ({self.url or " ".join(self.command)})'


class Tool(NamedTuple):
  """A tool of a server, as the server lists it."""

  server: Server
  name: str
  description: str
  schema: JsonObject  # of its arguments

  @property
  def offered(self) -> JsonObject:
    """The tool in OpenAI's form, which chat templates read."""
    function = dict(name=self.name, description=self.description, parameters=self.schema)
    return dict(type='function', function=function)


class ServerEnded(Exception):
  """The server cannot be started, does not answer while it starts, or closed the connection."""


class Connection:
  """A session with a server. Methods raise ServerEnded, or ValueError for what the server refuses."""

  def __init__(self, server: Server, limit_s: float, quiet: bool = True):
    """Start the server or connect to it, within `limit_s`. `quiet` drops its standard error."""
    self.server = server
    self._stack = contextlib.ExitStack()
    portal = self._stack.enter_context(_portals())
    self._portal = portal
    ready: concurrent.futures.Future = concurrent.futures.Future()
    self._running = portal.start_task_soon(_keep, server, quiet, ready)
    try:
      self._client, self._closing = ready.result(max(limit_s, 0.0))
    except concurrent.futures.TimeoutError as error:
      self._running.cancel()
      self._end()
      raise ServerEnded('it did not answer in time') from error
    except Exception as error:
      self._end()
      raise ServerEnded(describe(error)) from error

  def list_tools(self, until: float) -> list[Tool]:
    """All tools, in the order of the server."""
    page = self._run('list_tools', until)
    found = [*page.tools]
    while page.next_cursor:
      page = self._run('list_tools', until, cursor=page.next_cursor)
      found += page.tools
    return [Tool(self.server, t.name, t.description or '', t.input_schema) for t in found]

  def call(self, name: str, arguments: JsonObject, until: float) -> str:
    """The result of a tool as text. Raises ValueError where it is an error, and where it is late at `until`."""
    result = self._run('call_tool', until, name=name, arguments=arguments)
    if result.is_error:
      raise ValueError(_text(result))
    return _text(result)

  def close(self) -> None:
    """End the session, and the server where it is a command."""
    with contextlib.suppress(Exception):  # it may have ended by itself
      self._portal.call(self._closing.set)
    self._end()

  def _end(self) -> None:
    try:
      self._running.result(_CLOSE_S)
    except concurrent.futures.TimeoutError:
      self._running.cancel()
    except (Exception, concurrent.futures.CancelledError):
      pass
    self._stack.close()

  def _run(self, method: str, until: float, **arguments: JsonValue) -> Foreign:
    """The result of a method of the SDK's client, which must end before `until` of time.monotonic()."""
    sdk, anyio = importlib.import_module(MODULE), importlib.import_module('anyio')

    async def limited():
      with anyio.fail_after(max(until - time.monotonic(), 0.0)):
        return await getattr(self._client, method)(**arguments)

    try:
      return self._portal.call(limited)
    except TimeoutError as error:
      raise ValueError('the tool did not answer in time') from error
    except sdk.MCPError as error:
      if error.code == sdk.types.CONNECTION_CLOSED:
        raise ServerEnded(str(error)) from error
      raise ValueError(str(error)) from error
    except Exception as error:  # the answer does not fit the protocol, or the schema of its tool
      raise ValueError(describe(error)) from error


def describe(error: BaseException) -> str:
  """The first cause of an error, without the groups of anyio."""
  while isinstance(error, BaseExceptionGroup):
    error = error.exceptions[0]
  return f'{type(error).__name__}: {error}' if str(error) else type(error).__name__


@functools.cache
def _portals() -> Foreign:
  """The thread with the event loop, which lives while a connection uses it."""
  return importlib.import_module('anyio.from_thread').BlockingPortalProvider()


async def _keep(server: Server, quiet: bool, ready: concurrent.futures.Future) -> None:
  """Hold a session until it is closed. Its scopes must end in the task that began them."""
  closing = asyncio.Event()
  try:
    async with importlib.import_module(MODULE).Client(_transport(server, quiet)) as client:
      ready.set_result((client, closing))
      await closing.wait()
  except BaseException as error:
    if not ready.done():
      ready.set_exception(error)
    raise


def _transport(server: Server, quiet: bool) -> Foreign:
  if server.command:
    return _stdio(server, subprocess.DEVNULL if quiet else None)
  return _http(server)


@contextlib.asynccontextmanager
async def _http(server: Server) -> AsyncIterator[Foreign]:
  http = importlib.import_module('mcp.client.streamable_http')
  httpx2 = importlib.import_module('httpx2')
  async with httpx2.AsyncClient(headers=dict(server.headers), timeout=None) as client:
    async with http.streamable_http_client(server.url, http_client=client) as streams:
      yield streams


@contextlib.asynccontextmanager
async def _stdio(server: Server, stderr: int | None) -> AsyncIterator[Foreign]:
  """The streams of a server that is started as a child process.

  The SDK's own transport starts it in another session, which a kill of the worker's group does not reach.
  """
  anyio = importlib.import_module('anyio')
  inherited = importlib.import_module('mcp.client.stdio').get_default_environment()
  process = await asyncio.create_subprocess_exec(
    *server.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
    env=inherited | dict(server.env), cwd=server.cwd or None, limit=_LONGEST_LINE,
  )  # fmt: skip
  to_session, received = anyio.create_memory_object_stream(0)
  sent, to_server = anyio.create_memory_object_stream(0)
  async with anyio.create_task_group() as tasks:
    tasks.start_soon(_receive, process, to_session)
    tasks.start_soon(_send, process, to_server, to_session)
    try:
      yield received, sent
    finally:
      with anyio.CancelScope(shield=True):
        await _stop(process)
      tasks.cancel_scope.cancel()


async def _receive(process: asyncio.subprocess.Process, to_session: Foreign) -> None:
  """Pass on the lines of a server. The stream is closed when the server ends or writes no messages."""
  message = importlib.import_module('mcp.shared.message')
  parse = importlib.import_module('mcp_types').jsonrpc_message_adapter.validate_json
  anyio = importlib.import_module('anyio')
  assert process.stdout is not None
  async with to_session:
    with contextlib.suppress(
      OSError, ValueError, anyio.ClosedResourceError, anyio.BrokenResourceError
    ):
      while line := await process.stdout.readline():
        try:
          received = message.SessionMessage(parse(line, by_name=False))
        except ValueError as error:  # a line that is no message, such as one that was printed
          received = error
        await to_session.send(received)


async def _send(
  process: asyncio.subprocess.Process, to_server: Foreign, to_session: Foreign
) -> None:
  """Write the messages of the session. The session ends where the server no longer reads."""
  assert process.stdin is not None
  async with to_server:
    try:
      async for item in to_server:
        text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
        process.stdin.write(text.encode() + b'\n')
        await process.stdin.drain()
    except OSError:
      await to_session.aclose()


async def _stop(process: asyncio.subprocess.Process) -> None:
  """Close the input of a server, upon which it should end, and kill it where it does not."""
  assert process.stdin is not None
  process.stdin.close()
  until = time.monotonic() + _STOP_S
  # process.wait() would also wait for the pipes, which a child of the server may hold.
  while process.returncode is None and time.monotonic() < until:
    await asyncio.sleep(_POLL_S)
  if process.returncode is None:
    process.kill()
    while process.returncode is None:
      await asyncio.sleep(_POLL_S)


def _text(result: Foreign) -> str:
  """The text of a result; a sentence for each part that is no text."""
  parts = [_part(block) for block in result.content]
  if not parts and result.structured_content is not None:
    parts = [json.dumps(result.structured_content, ensure_ascii=False)]
  return '\n'.join(parts)


def _part(block: Foreign) -> str:
  if block.type == 'text':
    return block.text
  if block.type == 'resource' and hasattr(block.resource, 'text'):
    return block.resource.text
  if block.type == 'resource_link':
    return str(block.uri)
  source = block.resource if block.type == 'resource' else block
  return f'[{block.type} of type {source.mime_type} left out: texts alone are supported]'
