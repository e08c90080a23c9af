"""Answers as an OpenEnv server with the environments of openenv_server.py does, without the package."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager

from websockets.sync import server

SESSIONS = 3
_SCHEMA = dict(
  type='object',
  properties=dict(a=dict(type='integer'), b=dict(type='integer', default=40)),
  required=['a'],
)
_ADD = dict(name='add', description='Adds two numbers.', input_schema=_SCHEMA)


class Refusal(Exception):
  """An error that the server sends."""

  def __init__(self, code, message, errors=None):
    super().__init__(code)
    self.data = dict(code=code, message=message) | (dict(errors=errors) if errors else {})


def echo(state, kind, data):
  if kind == 'reset':
    state['start'] = data.get('start', '')
    shown = dict(echo=f'{state["start"]}{data.get("seed")}', length=0, metadata=dict(id=None))
    return dict(observation=shown, reward=None, done=False)
  if 'message' not in data:
    raise Refusal(
      'VALIDATION_ERROR', 'Invalid message', [dict(loc=['message'], msg='Field required')]
    )
  message = data['message']
  if message == 'fail':
    raise Refusal('EXECUTION_ERROR', 'no such room')
  text = state['start'] + (message.upper() if data.get('loud') else message)
  shown = dict(echo=text, length=len(text), metadata={})
  return dict(observation=shown, reward=len(text), done=message == 'stop')


def sums(state, kind, data):
  if kind == 'reset':
    return dict(observation=dict(metadata=dict(message='ready')), reward=None, done=False)
  if data['type'] == 'list_tools':
    return dict(observation=dict(tools=[_ADD], metadata={}), reward=0.5, done=False)
  arguments, error, result = data['arguments'], None, None
  if data['tool_name'] != 'add':
    error = dict(error_type='tool_not_found', message=f'Unknown tool: {data["tool_name"]!r}')
  elif arguments['a'] < 0:
    error = dict(error_type='execution_error', message='a negative number')
  else:
    total = arguments['a'] + arguments.get('b', 40)
    content = [dict(type='text', text=str(total))]
    result = dict(content=content, data=total, is_error=False)
  shown = dict(tool_name=data['tool_name'], result=result, error=error, metadata={})
  return dict(observation=shown, reward=0.5, done=False)


@contextmanager
def serving(name):
  """The port of a server on loopback, with the environment of that name."""
  environment, open_sessions = dict(echo=echo, sums=sums)[name], []

  def serve(socket):
    state = {}
    if len(open_sessions) >= SESSIONS:
      data = dict(code='CAPACITY_REACHED', message='Server at capacity')
      socket.send(json.dumps(dict(type='error', data=data)))
      return
    open_sessions.append(state)
    try:
      for text in socket:
        message = json.loads(text)
        try:
          answer = dict(
            type='observation', data=environment(state, message['type'], message['data'])
          )
        except Refusal as refusal:
          answer = dict(type='error', data=refusal.data)
        socket.send(json.dumps(answer))
    finally:
      open_sessions.remove(state)

  with server.serve(serve, '127.0.0.1', 0) as listening:
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    yield listening.socket.getsockname()[1]
    listening.shutdown()
    thread.join()
