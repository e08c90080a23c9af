"""Environments of other packages give what they give without the adapter."""

from __future__ import annotations

import json
import random

import pytest

from jaxrl_llm import environments, rewards
from jaxrl_llm.config import loading as configs
from jaxrl_llm.environments import adapters, tool_calls
from jaxrl_llm.types import Row, UserError

ROW = Row('a', '?', (), '', 'test', {})
LAKE = dict(name='FrozenLake-v1', options=dict(render_mode='ansi'))


def test_without_gymnasium_the_error_names_the_extra(monkeypatch):
  monkeypatch.setitem(__import__('sys').modules, 'gymnasium', None)
  with pytest.raises(UserError, match=r"name='x-v0' needs gymnasium; pip install .*gymnasium"):
    adapters.gymnasium(name='x-v0')


@pytest.mark.parametrize('actions', [(), ('left', 'down', 'right', 'up')])
def test_a_slippery_lake_is_the_same_by_text_and_by_number(actions):
  gymnasium = pytest.importorskip('gymnasium')
  own = gymnasium.make('FrozenLake-v1', render_mode='ansi')
  ended, rng = set(), random.Random(0)
  for seed in range(20):
    environment = adapters.gymnasium(**LAKE, actions=actions)
    own.reset(seed=seed)
    assert environment.reset(ROW, seed) == own.render()
    over = False
    while not over:
      action = rng.randrange(4)
      said = f'not up: {actions[action].upper()}!' if actions else f'1 or 7, no: {action}'
      result = environment.step(said)
      _, reward, terminated, truncated, _ = own.step(action)
      over = terminated or truncated
      assert result == (None if over else own.render(), reward, over)
    ended.add(reward)
    environment.close()
  assert ended == {0.0} or ended == {0.0, 1.0}


def test_a_turn_without_an_action_changes_nothing():
  pytest.importorskip('gymnasium')
  environment = adapters.gymnasium(
    name='FrozenLake-v1', options=dict(is_slippery=False), illegal='which?', illegal_reward=-0.5
  )
  assert environment.reset(ROW, 0) == '0'
  for text in ('', 'none', '4', '-1', '1.5', 'v2', '9' * 30):
    assert environment.step(text) == ('which?', -0.5, False)
  assert environment.step('I go 2.') == ('1', 0.0, False)
  environment.close()


def test_a_text_space_takes_the_turn_itself():
  gymnasium = pytest.importorskip('gymnasium')

  class Echo(gymnasium.Env):
    observation_space = gymnasium.spaces.Text(9, charset='abc ')
    action_space = gymnasium.spaces.Text(3, charset='abc')

    def reset(self, seed=None, options=None):
      super().reset(seed=seed)
      return f'say {options["word"]}', {}

    def step(self, action):
      return action, 2.0, action == 'c', False, {}

  gymnasium.register('Echo-v0', Echo, disable_env_checker=True)
  environment = adapters.gymnasium(name='Echo-v0')
  assert environment.reset(ROW._replace(extra=dict(options=dict(word='ab'))), 0) == 'say ab'
  assert environment.step(' ab\n') == ('ab', 2.0, False)
  assert environment.step('abcd').observation == 'illegal action'
  assert environment.step('c') == (None, 2.0, True)
  environment.close()


def test_it_runs_in_a_worker_and_an_unknown_name_is_one_sentence():
  pytest.importorskip('gymnasium')
  settings = configs.default().environment.to_dict() | dict(fn='gymnasium', workers=1, **LAKE)
  with pytest.raises(UserError, match="name='Nothing-v0' is unknown to gymnasium"):
    environments.WorkerPool(settings | dict(name='Nothing-v0'))
  pool = environments.WorkerPool(settings)
  request = environments.TurnRequest((0, 0, 0, 0), ROW, 3, [])
  assert '[41mS' in pool.run([request])[0].first_observation
  (result,) = pool.run([request._replace(texts=['1'])])
  assert result.outcome == rewards.OK and not pool.factory.inline
  pool.close()


class Counter:
  """An environment in TRL's form."""

  def __init__(self):
    self.closed = 0

  def reset(self, start=0, **columns):
    self.count, self.columns = start, columns
    return f'from {start}'

  def add(self, number: int) -> int:
    """Adds a number."""
    self.count += number
    return self.count

  async def double(self):
    self.count *= 2
    return self.count

  def get_reward(self):
    return float(self.count)

  def close(self):
    self.closed += 1

  def _hidden(self):
    return 'hidden'


def call(name, **arguments):
  return '<tool_call>' + json.dumps(dict(name=name, arguments=arguments)) + '</tool_call>'


def test_the_methods_of_an_environment_in_trls_form_are_its_tools():
  environment = adapters.trl(factory=f'{__name__}:Counter')
  assert environment.reset(ROW._replace(question='Count.', extra=dict(start=3)), 0) == 'from 3'
  assert environment.environment.columns['prompt'] == [dict(role='user', content='Count.')]
  assert sorted(environment.tools) == ['add', 'double']
  assert environment.step(f'so {call("add", number=2)}') == ('5', 5.0, False)
  both = environment.step(call('double') + ' then ' + call('add', number=-1))
  assert both == ('10\n9', 4.0, False)
  for name in ('_hidden', 'reset', 'close', 'other'):
    assert environment.step(call(name)).observation.startswith('error: there is no tool')
  assert environment.step(call('add', other=1)).observation.startswith('error: ')
  assert environment.step('nine') == (None, 0.0, True)
  environment.close()
  assert environment.environment.closed == 1


@pytest.mark.parametrize(
  'text',
  [
    '<tool_call>{"name": "add"', '{}</tool_call>', '<tool_call>{"name": "add"}</tool_call>',
    '<tool_call>[]</tool_call>', '<tool_call>add 1</tool_call>',
    '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
    '<tool_call><tool_call>{"name": "add", "arguments": {}}</tool_call>',
  ],
)  # fmt: skip
def test_malformed_calls_by_name_are_answered_with_an_error(text):
  with pytest.raises(ValueError):
    tool_calls.named(text, 'tool_call')
  environment = adapters.trl(factory=f'{__name__}:Counter')
  environment.reset(ROW, 0)
  result = environment.step(text)
  assert result.observation.startswith('error: ') and not result.done


@pytest.mark.parametrize('factory', ['Counter', f'{__name__}:Row', 'json:nothing'])
def test_a_factory_without_an_environment_is_one_sentence(factory):
  with pytest.raises(UserError, match=f"config.environment.factory='{factory}'"):
    adapters.trl(factory=factory)
