"""Environments of an OpenEnv server, stepped by texts, at a stand-in and at a server of the package openenv."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

from jaxrl_llm import environments, rewards
from jaxrl_llm.config import loading as configs
from jaxrl_llm.environments import openenv_client
from jaxrl_llm.environments.protocol import Result
from jaxrl_llm.types import Row, UserError

pytest.importorskip('websockets.sync.server')
SERVER = pathlib.Path(__file__).with_name('openenv_server.py')
ROW = Row('a', '?', (), '', 'test', {})
CALLS = ('<tool_call>', '</tool_call>', 'name', 'arguments')
LIMIT_S = 60.0  # enough on a busy machine


@contextlib.contextmanager
def package(name):
  """The port of a server process with the package's own classes."""
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
  process = subprocess.Popen([sys.executable, str(SERVER), name, str(port)], env=environment)
  try:
    while True:
      assert process.poll() is None, 'the server ended'
      with contextlib.suppress(OSError), socket.create_connection(('127.0.0.1', port)):
        break
      time.sleep(0.1)
    yield port
  finally:
    process.terminate()
    process.wait()


@pytest.fixture(scope='module', params=['stand-in', 'openenv'])
def url(request):
  """A function of an environment's name: the address of its server, which runs until the tests of the module end."""
  if request.param == 'openenv' and not importlib.util.find_spec('openenv'):
    pytest.skip('needs openenv')
  from tests.environments import openenv_stand_in

  serving = package if request.param == 'openenv' else openenv_stand_in.serving
  with contextlib.ExitStack() as stack:
    ports = {}

    def address(name):
      if name not in ports:
        ports[name] = stack.enter_context(serving(name))
      return f'http://127.0.0.1:{ports[name]}'

    yield address


def call(name, **arguments):
  return '<tool_call>' + json.dumps(dict(name=name, arguments=arguments)) + '</tool_call>'


def made(url, **settings):
  return openenv_client.openenv(url=url, timeout_s=LIMIT_S, **settings)


def test_a_turn_is_a_field_of_the_action(url):
  environment = made(url('echo'), action='message', observation='echo')
  row = ROW._replace(extra=dict(options=dict(start='>')))
  assert environment.list_tools() == []
  assert environment.reset(row, 7) == '>7'
  assert environment.step('ab') == Result('>ab', 3.0)
  assert environment.step('stop') == Result(None, 5.0, True)
  environment.close()


def test_a_turn_is_an_action_as_json(url):
  environment = made(url('echo'))
  assert json.loads(environment.reset(ROW, 7)) == dict(echo='7', length=0)
  result = environment.step('{"message": "ab", "loud": true}')
  assert json.loads(result.observation) == dict(echo='AB', length=2) and result.reward == 2.0
  for text, message in (
    ('ab', 'error: an action is a JSON object'),
    ('[' * 100_000, 'error: an action is a JSON object'),
    ('[1]', 'error: an action is a JSON object'),
    ('{"text": "ab"}', 'error: message: Field required'),
  ):
    result = environment.step(text)
    assert result.observation.startswith(message) and result[1:] == (0.0, False)
  assert environment.step('{"message": "a"}').reward == 1.0
  environment.close()


def test_a_turn_calls_tools_of_the_server(url):
  environment = made(url('sums'), tools=True, calls=CALLS)
  (tool,) = environment.list_tools()
  assert tool['type'] == 'function' and tool['function']['name'] == 'add'
  assert tool['function']['description'] == 'Adds two numbers.'
  assert tool['function']['parameters']['required'] == ['a']
  assert environment.reset(ROW, 0) is None
  assert environment.step(call('add', a=2)) == Result('42', 0.5)
  two = environment.step(call('add', a=2) + call('add', a=1, b=1))
  assert two == Result('42\n2', 1.0)
  assert 'a negative number' in environment.step(call('add', a=-1)).observation
  missing = environment.step(call('nothing')).observation
  assert missing.startswith('error: ') and 'nothing' in missing
  assert environment.step('<tool_call>{').observation.startswith('error: ')
  assert environment.step('42') == Result(None, 0.0, True)
  environment.close()


def test_the_package_of_the_server_gives_the_same(url, request):
  """The client of openenv and the adapter, step by step."""
  if 'openenv' not in request.node.callspec.params['url']:
    pytest.skip('the stand-in has no client')
  from openenv.core import GenericEnvClient

  environment = made(url('echo'))
  with GenericEnvClient(base_url=url('echo')).sync() as client:
    first = client.reset(seed=3)
    shown = json.loads(environment.reset(ROW, 3))
    assert {k: v for k, v in first.observation.items() if k != 'metadata'} == shown
    for action in (dict(message='ab'), dict(message='c', loud=True), dict(message='stop')):
      theirs, ours = client.step(action), environment.step(json.dumps(action))
      assert (ours.reward, ours.done) == (theirs.reward, theirs.done)
      if not theirs.done:
        assert json.loads(ours.observation)['echo'] == theirs.observation['echo']
  environment.close()


def test_a_failure_costs_its_episode_alone(url):
  """An exception of the server, and a session that it has no place for; both are named, and others go on."""
  settings = configs.default().environment.to_dict() | dict(fn='openenv', workers=1)
  settings |= dict(url=url('echo'), action='message', observation='echo')
  pool = environments.WorkerPool(settings | dict(timeout_s=LIMIT_S, deadline_s=2 * LIMIT_S))
  requests = [environments.TurnRequest((n, 0, 0, 0), ROW, 0, []) for n in range(4)]
  *begun, late = pool.run(requests)
  assert [x.outcome for x in begun] == [rewards.OK] * 3 and late.outcome == rewards.ERROR
  assert 'CAPACITY_REACHED' in late.message
  turns = [r._replace(texts=[text]) for r, text in zip(requests, ('ab', 'fail', 'c'), strict=False)]
  first, failed, last = pool.run(turns)
  assert first.result == Result('ab', 2.0) and last.result == Result('c', 1.0)
  assert failed.outcome == rewards.ERROR and 'EXECUTION_ERROR: no such room' in failed.message
  pool.end([r.key for r in requests])
  (again,) = pool.run([requests[3]])  # the server has places again
  assert again.outcome == rewards.OK
  pool.close()


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    (dict(url='127.0.0.1:80'), "url='127.0.0.1:80' must be the address"),
    (dict(url='http://x', tools=True, calls=('a',)), 'calls=.* must be the texts before'),
    (dict(url='http://x', timeout_s=0.0), 'timeout_s=0.0 must be a positive number'),
    (dict(url='http://x', tools=True, action='message'), "action='message' does not go with"),
  ],
)
def test_bad_settings_are_one_sentence(settings, message):
  with pytest.raises(UserError, match=message):
    openenv_client.openenv(**settings)


def test_a_server_that_does_not_answer_is_one_sentence():
  with socket.socket() as closed:
    closed.bind(('127.0.0.1', 0))
    environment = made(f'http://127.0.0.1:{closed.getsockname()[1]}')
    with pytest.raises(
      UserError, match=r'OpenEnv server at ws://127\S+/ws does not answer .*refused'
    ):
      environment.list_tools()


def test_without_websockets_the_error_names_the_extra(monkeypatch):
  monkeypatch.setitem(sys.modules, 'websockets.sync.client', None)
  with pytest.raises(UserError, match=r"fn='openenv' needs websockets; pip install .*\[openenv\]"):
    made('http://x')
