"""Tools of real MCP servers, written with the official SDK, give through a worker what the official client gets."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from jaxrl_llm import environments, rewards
from jaxrl_llm.config import loading as configs
from jaxrl_llm.environments import mcp_client, mcp_tools
from jaxrl_llm.types import Row, UserError

SERVER = str(pathlib.Path(__file__).with_name('mcp_server.py'))
ROW = Row('a', '?', (), '', 'test', {})
CALLS = ('<tool_call>', '</tool_call>', 'name', 'arguments')
LIMIT_S = 60.0  # enough on a busy machine


@pytest.fixture
def sdk():
  """The official SDK of a version that the adapter takes."""
  pytest.importorskip('mcp.server.mcpserver', reason='the tests need mcp>=2')
  return pytest.importorskip('mcp')


def command(*arguments, **others):
  """A server's settings. Its Python finds the SDK where this one does."""
  env = dict(PYTHONPATH=os.pathsep.join(sys.path), TOKEN='${MCP_TOKEN}')
  return dict(command=sys.executable, args=(SERVER, *arguments), env=env) | others


def call(name, **arguments):
  return '<tool_call>' + json.dumps(dict(name=name, arguments=arguments)) + '</tool_call>'


@pytest.fixture
def pool(sdk, monkeypatch):
  """A function that makes a pool with one worker."""
  monkeypatch.setenv('MCP_TOKEN', 'token')
  monkeypatch.setenv('SECRET', 'secret')
  pools = []

  def make(servers, timeout_s=LIMIT_S, deadline_s=2 * LIMIT_S, **changes):
    settings = configs.default().environment.to_dict() | dict(fn='mcp', workers=1, calls=CALLS)
    settings |= dict(servers=servers, timeout_s=timeout_s, deadline_s=deadline_s) | changes
    pools.append(environments.WorkerPool(settings))
    return pools[-1]

  yield make
  for one in pools:
    one.close()


def request(number=0, *texts):
  return environments.TurnRequest((number, 0, 0, 0), ROW, 0, list(texts))


def alive(pid):
  """Whether a process runs; one that has ended and is not waited for does not."""
  try:
    return pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
  except OSError:
    return False


def ends(pid):
  until = time.monotonic() + 20
  while alive(pid) and time.monotonic() < until:
    time.sleep(0.05)
  return not alive(pid)


def official(sdk, calls):
  """What the SDK's own client gets from the server: its tools, and the results of calls."""

  async def run():
    settings = command()
    env = settings['env'] | dict(TOKEN='token')
    server = sdk.StdioServerParameters(command=sys.executable, args=[SERVER], env=env)
    async with sdk.Client(server) as client:
      results = [await client.call_tool(name, arguments) for name, arguments in calls]
      return (await client.list_tools()).tools, results

  return asyncio.run(run())


def test_observations_and_tools_are_those_of_the_official_client(sdk, pool):
  calls = [('add', dict(a=2)), ('add', dict(a=2, b=3)), ('fail', {}), ('add', dict(a='x'))]
  tools, results = official(sdk, calls)
  workers = pool(dict(sums=command()))
  assert workers.run([request()])[0] == environments.TurnResult(rewards.OK)
  texts = []
  for (name, arguments), result in zip(calls, results, strict=True):
    texts.append(f'I call it. {call(name, **arguments)}')
    (answer,) = workers.run([request(0, *texts)])
    want = '\n'.join(block.text for block in result.content)
    assert result.is_error == (name == 'fail' or arguments['a'] == 'x')
    assert answer.result == (f'error: {want}' if result.is_error else want, 0.0, False)
  # Texts of several calls are lines; an image is left out; a turn without a call ends the episode.
  both = call('count') + '\n' + call('draw')
  (answer,) = workers.run([request(0, *texts, both)])
  first, dot, image = answer.result.observation.split('\n')
  assert (first.split()[0], dot) == ('1', 'a dot') and 'image/png left out' in image
  assert workers.run([request(0, *texts, both, '42')])[0].result == (None, 0.0, True)
  # Of the trainer's environment variables a server gets those that are named.
  assert first.split()[2:4] == ['token', 'None']
  listed = environments.list_tools(workers.settings)
  assert [x['function'] for x in listed] == [
    dict(name=x.name, description=x.description, parameters=x.input_schema) for x in tools
  ]


def test_a_call_that_cannot_be_made_is_answered_by_an_error(sdk):
  servers = dict(sums=command(env=dict(PYTHONPATH=os.pathsep.join(sys.path))))
  environment = mcp_tools.mcp(servers=servers, calls=CALLS, timeout_s=LIMIT_S)
  environment.reset(ROW, 0)
  for text, error in (
    (call('remove'), "there is no tool 'remove'; the tools are: add, count, fail"),
    ('<tool_call>{"name": "add"}</tool_call>', 'a call is not'),
    ('<tool_call>{"name": "add", "arguments": {}}', 'a call does not end with </tool_call>'),
    ('{"name": "add", "arguments": {}}</tool_call>', 'a call does not begin with <tool_call>'),
    (call('add', a=1) + ' and so on', 'text follows a call'),
  ):
    observation, reward, done = environment.step(text)
    assert observation.startswith(f'error: {error}') and (reward, done) == (0.0, False)
  assert environment.step(call('add', a=1)).observation == '41'
  environment.timeout_s = 0.5
  begin = time.monotonic()
  late = environment.step(call('wait', seconds=30.0) + call('add', a=1))
  assert late.observation == '\n'.join(['error: the tool did not answer in time'] * 2)
  assert time.monotonic() - begin < 20
  environment.close()


def test_a_server_that_ends_costs_its_episode_alone(pool):
  workers = pool(dict(sums=command()))
  keys = [0, 1]
  workers.run([request(key) for key in keys])
  counted = workers.run([request(key, call('count')) for key in keys])
  pids = [int(answer.result.observation.split()[1]) for answer in counted]
  assert len(set(pids)) == 2 and all(map(alive, pids))
  left, other = workers.run(
    [request(0, call('count'), call('leave')), request(1, '', call('count'))]
  )
  assert left.outcome == rewards.ERROR and "the MCP server 'sums'" in left.message
  # The same session went on, in the same worker.
  assert other.result.observation.split()[:2] == ['2', str(pids[1])]
  assert workers.take_counts()['worker_deaths'] == 0
  workers.end([request(1).key])
  assert ends(pids[1])


@pytest.mark.parametrize('how', ['closed', 'killed', 'late'])
def test_servers_end_with_their_worker(pool, how):
  workers = pool(dict(sums=command()), timeout_s=20.0, deadline_s=30.0)
  (answer,) = workers.run([request(0, call('count'))])
  pid = int(answer.result.observation.split()[1])
  # A server that is stopped does not see that its input was closed.
  os.kill(pid, signal.SIGSTOP)
  if how == 'closed':
    workers.close()
  else:
    (worker,) = workers._workers
    if how == 'late':
      worker.deadline = worker._deadline_s = 0.0
      os.kill(worker.process.pid, signal.SIGSTOP)
    else:
      worker.process.kill()
    workers.run([request(1)])
  assert ends(pid)


def test_a_server_at_a_url_has_a_session_for_each_episode(sdk, pool):
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  env = os.environ | dict(PYTHONPATH=os.pathsep.join(sys.path))
  process = subprocess.Popen([sys.executable, SERVER, str(port)], env=env)
  try:
    until = time.monotonic() + LIMIT_S
    while socket.socket().connect_ex(('127.0.0.1', port)) and time.monotonic() < until:
      time.sleep(0.1)
    url = f'http://127.0.0.1:{port}/mcp'
    remote = dict(url=url, headers={'x-key': 'a ${MCP_TOKEN}'}, tools=('count', 'fail'))
    workers = pool(dict(remote=remote, sums=command(tools=('add',))))
    names = [x['function']['name'] for x in environments.list_tools(workers.settings)]
    assert names == ['count', 'fail', 'add']
    workers.run([request(0)])
    both = call('count', by=7) + call('add', a=1)
    (answer,) = workers.run([request(0, both)])
    count, added = answer.result.observation.split('\n')
    assert (count.split()[1], added) == (str(process.pid), '41')
    assert count.endswith(' a token')
    process.kill()
    process.wait()
    (answer,) = workers.run([request(0, both, call('count'))])
    assert answer.outcome == rewards.ERROR and url in answer.message
  finally:
    process.kill()
    process.wait()


def test_without_the_sdk_the_error_names_the_extra(monkeypatch):
  monkeypatch.setitem(sys.modules, 'mcp', None)
  with pytest.raises(UserError, match=r"fn='mcp' needs version 2 .*; pip install .*mcp"):
    mcp_tools.mcp(servers=dict(a=dict(url='http://127.0.0.1:1/mcp')))


@pytest.mark.parametrize(
  'settings, message',
  [
    (dict(servers={}), 'servers={} must name servers'),
    (dict(servers=dict(a={})), "servers.a={} must have either a 'command' or a 'url'"),
    (
      dict(servers=dict(a=dict(url='x', command='y'))),
      "servers.a=.* either a 'command' or a 'url'",
    ),
    (
      dict(servers=dict(a=dict(url='x', arg=()))),
      'servers.a.arg is unknown; choose among: command',
    ),
    (dict(servers=dict(a=dict(command=('x', 'y')))), 'servers.a.command=.* arguments go into args'),
    (
      dict(servers=dict(a=dict(command='x', args='y'))),
      "servers.a.args='y' must be a list of texts",
    ),
    (dict(servers=dict(a=dict(command='x', env=dict(A=1)))), 'servers.a.env=.* must be names'),
    (
      dict(servers=dict(a=dict(command='x', env=dict(A='${NOT_SET}')))),
      'servers.a.env reads .*NOT_SET.*; export it',
    ),
    (dict(servers=dict(a=dict(url='x')), timeout_s=0), 'timeout_s=0 must be a positive number'),
    (dict(servers=dict(a=dict(url='x')), calls=('a',)), 'calls=.* must be the texts before'),
  ],
)
def test_bad_settings_of_servers_are_one_sentence(sdk, settings, message):
  with pytest.raises(UserError, match=f'config.environment.{message}'):
    mcp_tools.mcp(**settings)


def test_servers_that_cannot_be_used_are_one_sentence(sdk, monkeypatch):
  monkeypatch.setenv('MCP_TOKEN', 'token')
  monkeypatch.setattr(mcp_tools, '_LIST_S', LIMIT_S)
  for servers, message in (
    (
      dict(a=dict(command='no-such-command')),
      "server 'a' .no-such-command. lists no tools .FileNot",
    ),
    (dict(a=dict(command=sys.executable, args=('-c', ''))), "server 'a' .* lists no tools"),
    (
      dict(a=dict(url='http://127.0.0.1:9/mcp')),
      "server 'a' .http://127.0.0.1:9/mcp. lists no tools",
    ),
    (dict(a=command(tools=('x',))), r"servers.a.tools=\('x',\): the server offers add, count"),
    (dict(a=command(), b=command('more')), "'add' is offered by 'a' and by 'b'; name in .*b.tools"),
  ):
    with pytest.raises(UserError, match=message):
      mcp_tools.mcp(servers=servers).list_tools()
  monkeypatch.setattr(mcp_tools, '_LIST_S', 0.5)
  with pytest.raises(UserError, match='did not answer in time'):
    mcp_tools.mcp(servers=dict(a=command('silent'))).list_tools()
  both = dict(a=command(tools=('add',)), b=command('more', tools=('more',)))
  monkeypatch.setattr(mcp_tools, '_LIST_S', LIMIT_S)
  listed = mcp_tools.mcp(servers=both).list_tools()
  assert [x['function']['name'] for x in listed] == ['add', 'more']


def test_the_deadline_of_a_worker_must_be_above_the_time_limit_of_a_turn(sdk):
  settings = configs.default().environment.to_dict() | dict(fn='mcp', timeout_s=10.0)
  settings |= dict(servers=dict(a=dict(url='x')))
  with pytest.raises(UserError, match='deadline_s=10.0 must be above config.environment.timeout_s'):
    environments.resolve(settings)


def test_the_first_cause_of_an_error_is_shown():
  group = ExceptionGroup('several', [ExceptionGroup('inner', [OSError('no route')]), KeyError(1)])
  assert mcp_client.describe(group) == 'OSError: no route'
  assert mcp_client.describe(TimeoutError()) == 'TimeoutError'
