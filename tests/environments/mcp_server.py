"""A server as its author would write it with the official SDK; its argument: a port, silent, or one more tool."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import Context, Image, MCPServer

server = MCPServer('sums', log_level='WARNING')
total = 0


@server.tool()
def add(a: int, b: int = 40) -> int:
  """Adds two numbers."""
  return a + b


@server.tool()
def count(ctx: Context, by: int = 1) -> str:
  """Adds to a total, and shows the process, two environment variables and a header of the request."""
  global total
  total += by
  key = (ctx.headers or {}).get('x-key')
  return f'{total} {os.getpid()} {os.environ.get("TOKEN")} {os.environ.get("SECRET")} {key}'


@server.tool()
def fail() -> str:
  """Raises."""
  raise ValueError('no luck')


@server.tool()
def wait(seconds: float) -> str:
  """Blocks the whole server."""
  time.sleep(seconds)
  return 'awake'


@server.tool()
def leave() -> str:
  """Ends the server."""
  os._exit(3)


@server.tool()
def draw() -> list:
  """A text and an image."""
  return ['a dot', Image(data=b'dot', format='png')]


if __name__ == '__main__':
  argument = sys.argv[1] if len(sys.argv) > 1 else ''
  if argument == 'silent':
    time.sleep(600)
  elif argument.isdecimal():
    server.run('streamable-http', host='127.0.0.1', port=int(argument))
  else:
    if argument:
      server.add_tool(add, name=argument)
    print('a line that is no message', flush=True)
    server.run('stdio')
