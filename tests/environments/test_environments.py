"""Tools, games, the worker pool and turn templates; no failure of an environment ends or blocks a run."""

from __future__ import annotations

import json
import os
import random
import time

import pytest

from jaxrl_llm import environments, rewards
from jaxrl_llm.config import loading as configs
from jaxrl_llm.data import games as levels
from jaxrl_llm.environments import games, tool_calls, tools
from jaxrl_llm.environments.protocol import replay
from jaxrl_llm.models import tokenizer
from jaxrl_llm.rewards.code_execution import sandbox
from jaxrl_llm.rewards.parsing import arithmetic
from jaxrl_llm.types import Row, UserError

ROW = Row('a', '?', (), '3', 'test', {})


def request(episode, texts):
  return environments.TurnRequest((episode, 0, 0, 0), ROW, 1, texts)


@pytest.mark.parametrize(
  'expression, value',
  [
    ('2+3*4', '14'), ('(2+3)*4', '20'), ('7/2', '3.5'), ('-1/8', '-0.125'), ('1/3', '1/3'),
    ('0.1+0.2', '0.3'), ('2**10', '1024'), ('2^3', '8'), ('17 // 5 + 17 % 5', '5'), ('-(3)', '-3'),
    ('2**-2', '0.25'), ('999*999*999', '997002999'),
  ],
)  # fmt: skip
def test_arithmetic_is_exact(expression, value):
  assert arithmetic.calculate(expression) == value


@pytest.mark.parametrize(
  'expression',
  [
    '', '1/0', '1%0', '9**9**9', '10**1000', '9**999**9', '2**0.5', '__import__("os").getpid()', 'x', 'True',
    '[1][0]', '"a"*9', '1 if 1 else 2', '(lambda: 1)()', '1+' * 90 + '1+' * 20 + '1', '(' * 150, '1e999', '0**-1',
    '1 << 9', '1j', '1\x00', '9' * 199 + '*9' * 0 + '**9',
  ],
)  # fmt: skip
def test_other_expressions_than_small_arithmetic_raise_errors(expression):
  with pytest.raises(ValueError):
    arithmetic.calculate(expression)


@pytest.mark.parametrize(
  'text, found',
  [
    ('so <calc>1+2</calc>', '1+2'),
    ('<calc>1</calc> then <calc> 2 </calc>', '2'),
    ('<calc>{"name": "calc", "arguments": {"expression": "4*5"}}</calc>', '4*5'),
    ('<calc>{"expression": 6}</calc> done', '6'),
    ('no call', None),
    ('<calc>1</calc> is <calc>', '1'),
    ('<CALC>1</CALC>', None),
  ],
)
def test_a_call_is_the_content_of_the_last_tag(text, found):
  assert tool_calls.find(text, 'calc', 'expression') == found


@pytest.mark.parametrize(
  'inside',
  [
    '{',
    '{"arguments": 3}',
    '{"arguments": "{}"}',
    '{"other": 1}',
    '{"a":' * 5000,
    '{"a": 1} {"b": 2}',
  ],
)
def test_a_call_with_invalid_json_gets_an_error_observation(inside):
  found = tools.calculator().step(f'<calc>{inside}</calc>')
  assert found.observation.startswith('error: the call') and not found.done


@pytest.mark.parametrize(
  'text, missing', [('so <calc>1', '</calc>'), ('1</calc>', '<calc>'), ('</calc>1<calc>', '<calc>')]
)
def test_a_call_without_its_beginning_or_its_end_gets_an_error_observation(text, missing):
  found = tools.calculator().step(text)
  assert found.observation.startswith('error: the call does not') and found.observation.endswith(
    missing
  )
  assert not found.done


def test_a_tool_runs_calls_and_a_turn_without_one_ends_the_episode():
  tool = tools.calculator()
  assert tool.step('<calc>6*7</calc>') == ('42', 0.0, False)
  assert tool.step('<calc>6*</calc>') == ('error: no expression of numbers', 0.0, False)
  assert tool.step('42') == (None, 0.0, True)


def test_search_ranks_by_the_formula_of_bm25(tmp_path):
  path = tmp_path / 'c.jsonl'
  texts = ['the cat sat', 'the dog sat on the cat and the cat', 'a bird', 'the the the']
  path.write_text('\n'.join(json.dumps(dict(text=t)) for t in texts))
  tool = tools.search(path=str(path), results=2)
  index = tools._index(str(path))
  import math

  def score(text):
    words, mean = text.split(), sum(len(t.split()) for t in texts) / 4
    total = 0
    for word in ('the', 'cat'):
      n, tf = sum(word in t.split() for t in texts), words.count(word)
      idf = math.log(1 + (4 - n + 0.5) / (n + 0.5))
      total += idf * tf * 2.2 / (tf + 1.2 * (0.25 + 0.75 * len(words) / mean))
    return total

  want = sorted((n for n in range(4) if score(texts[n])), key=lambda n: -score(texts[n]))
  assert index.best('the CAT', 9) == want and len(want) == 3
  observation = tool.step('<search>the cat</search>').observation
  assert observation == '\n'.join(texts[n] for n in want[:2])
  assert tool.step('<search>nowhere</search>').observation == 'nothing found'


@pytest.mark.parametrize('body', [None, '', 'x', '{"title": "t"}', '{"text": "..."}'])
def test_an_invalid_corpus_raises_a_user_error(tmp_path, body):
  path = tmp_path / 'c.jsonl'
  if body is not None:
    path.write_text(body)
  with pytest.raises(UserError, match='config.environment.path'):
    tools.search(path=str(path))


def test_python_runs_in_the_sandbox_and_returns_its_output():
  if why := sandbox.unavailable_reason():
    if os.environ.get('JAXRL_LLM_REQUIRE_SANDBOX') == '1':
      pytest.fail(why)
    pytest.skip(why)
  tool = tools.python(wall_s=3.0, most=20)
  assert tool.step('<python>print(sum(range(10)))</python>').observation == '45'
  assert tool.step('<python>1/0</python>').observation.endswith('division by zero')
  assert len(tool.step('<python>print("x" * 99)</python>').observation) == 20
  assert tool.step('<python>x = 1</python>').observation == 'no output'
  quick = tools.python(wall_s=0.5)
  assert quick.step('<python>while 1: pass</python>').observation == 'error: it took too long'


def test_bisection_wins_within_log2_turns_and_seeds_draw_numbers():
  secrets = set()
  for seed in range(40):
    row = ROW._replace(extra=dict(low=3, high=17))
    game, low, high, turns = games.guess(), 3, 17, 0
    assert game.reset(row, seed) is None
    result = None
    while result is None or not result.done:
      middle, turns = (low + high) // 2, turns + 1
      result = game.step(f'I say {low}? no, {middle}!')
      low, high = (middle + 1, high) if result.observation == 'higher' else (low, middle - 1)
    assert result == (None, 1.0, True) and turns <= 4
    secrets.add(middle)
  assert len(secrets) > 8 and min(secrets) >= 3 and max(secrets) <= 17
  game.reset(row, 0)
  assert game.step('none').observation == game.step('9' * 50).observation == 'no number'


def test_every_maze_has_a_path_and_observations_list_its_free_moves():
  moves = dict(n=(0, -1), e=(1, 0), s=(0, 1), w=(-1, 0))
  for seed in range(20):
    rng = random.Random(seed)
    row = ROW._replace(extra=levels.draw('walk', rng, min_size=2, max_size=5, walls=9)['extra'])
    game = games.walk()
    first = game.reset(row, seed)
    assert games.walk().reset(row, seed) == first
    edge, visited, won = [''], set(), False
    while edge and not won:  # breadth first, each path replayed from the start
      way = edge.pop(0)
      results = replay(games.walk(), row, seed, list(way)) if way else []
      won = bool(results) and results[-1].done
      now = results[-1].observation if results else first
      if won or now in visited:
        continue
      visited.add(now)
      at, ways = now.removeprefix('at ').split(': ')
      before = game.at
      game.at = tuple(map(int, at.split(',')))
      assert set(ways.split()) == {
        m for m, (x, y) in moves.items() if game._free(game.at[0] + x, game.at[1] + y)
      }
      game.at = before
      edge += [way + move for move in ways.split()]
    assert won


def test_two_agents_walk_in_turns_and_each_is_paid_for_its_own_progress():
  drawn = levels.draw('pair_walk', random.Random(0), min_size=3, max_size=3, walls=1)
  shown = games.pair_walk()
  shown.reset(ROW._replace(extra=drawn['extra']), 0)
  assert drawn['question'] == shown._observation() and drawn['answer'] in drawn['extra']['first']
  level = dict(size=3, start_x=0, start_y=0, goal_x=1, goal_y=1, walls=0, first='ew')
  game = games.pair_walk(progress=0.2)
  assert game.reset(ROW._replace(extra=level), 0) is None
  results = [game.step(text) for text in ('s', 'e', 'w', 's', 'w', 'n s')]
  # The first agent cannot move down, nor the second to the right.
  assert [r.observation for r in results] == [
    *('ns 0,0 to 1,1:', 'ew 0,0 to 1,1:', 'ns 0,0 to 1,1:', 'ew 0,1 to 1,1:', 'ns 0,1 to 1,1:'),
    'ew 0,2 to 1,1:',
  ]
  assert [round(r.reward, 6) for r in results] == [0, 0, 0, 0.1, 0, -0.1]
  game.step('e'), game.step('wait')
  assert game.step('-').observation == 'ns 1,2 to 1,1:'
  end = game.step('n')
  assert end.done and end.reward == pytest.approx(1.1) and end.observation is None


class Own:
  """An environment of a user, with failures by the text of a turn."""

  def __init__(self, kind: str = 'counts'):
    self.kind = kind

  def reset(self, row, seed):
    self.turns = 0
    return {'shows': 'look', 'odd': 3}.get(self.kind)

  def step(self, text):
    self.turns += 1
    if text == 'raise':
      raise RuntimeError('no such tool\nat all')
    if text == 'hang':
      while True:
        pass
    if text == 'die':
      os._exit(3)
    if text == 'eat':
      raise MemoryError
    if text == 'nothing':
      return None
    if text == 'nan':
      return 'x', float('nan'), False
    if text == 'bytes':
      return b'x', 0.0, False
    return f'{self.turns}:{text}', 1, False


def own(kind='counts'):
  return Own(kind)


def spec(**changes):
  settings = configs.default().environment.to_dict() | dict(workers=1, deadline_s=1.0)
  return settings | changes


@pytest.fixture(scope='module')
def pool():
  workers = environments.WorkerPool(spec(fn=f'{__name__}:own'))
  yield workers
  workers.close()


def test_a_users_environment_runs_in_a_worker_and_replays_turns_that_it_did_not_see(pool):
  turns = (['a'], ['a', 'b'], [])
  one, two, opened = pool.run([request(n, texts) for n, texts in enumerate(turns)])
  assert not pool.factory.inline
  assert one.result == ('1:a', 1.0, False) and two.result == ('2:b', 1.0, False)
  assert opened.outcome == rewards.OK and opened.first_observation is None


def test_an_environment_that_fails_hangs_or_returns_nonsense_has_its_own_outcome(pool):
  """Other episodes of the batch have results, and no call waits much longer than the deadline."""
  words = ['a', 'raise', 'hang', 'die', 'eat', 'nothing', 'nan', 'bytes', 'b']
  begin = time.monotonic()
  results = pool.run([request(100 + n, [word]) for n, word in enumerate(words)])
  outcome = dict(zip(words, (one.outcome for one in results), strict=True))
  assert outcome == dict(
    a=rewards.OK, hang=rewards.TIMEOUT, die=rewards.CRASH, eat=rewards.CRASH, b=rewards.OK,
    **dict.fromkeys(('raise', 'nothing', 'nan', 'bytes'), rewards.ERROR),
  )  # fmt: skip
  assert [one.result.observation for one in results if one.result] == ['1:a', '1:b']
  message = 'RuntimeError: no such tool at all, at '
  assert results[1].message.startswith(message) and 'test_environments.py:' in results[1].message
  assert (
    'deadline_s' in results[2].message and 'not (observation, reward, done)' in results[5].message
  )
  assert time.monotonic() - begin < 60  # it ends


def test_an_episode_that_ends_sooner_in_replay_is_an_error():
  class Moody:
    def reset(self, row, seed):
      pass

    def step(self, text):
      return 'x', 0, True

  with pytest.raises(ValueError, match='function of them'):
    replay(Moody(), ROW, 0, ['a', 'b'])


def test_without_memory_only_the_newest_turn_is_replayed():
  turns = []

  class Forgets:
    remembers = False

    def reset(self, row, seed):
      pass

    def step(self, text):
      turns.append(text)
      return text, 0, False

  assert replay(Forgets(), ROW, 0, ['a', 'b']) == [('b', 0.0, False)] and turns == ['b']


CHAT = (
  "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<end>' + '\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def words(template):
  characters = tokenizer.characters('abcdefghijklmnopqrstuvwxyz<|>?0123456789\n \u27e6\u27e7')
  return characters._replace(template=template)


def test_ids_between_two_turns_are_those_of_the_template():
  chat = words(CHAT)
  template = environments.build_turn_template(chat, True, 'user')
  end = chat.end_ids[0]
  turns = [dict(role='user', content='q'), dict(role='assistant', content='said')]
  ids = chat.encode_chat(turns[:1]) + chat.encode('said') + [end]
  ids += template.ids('shown', end)
  assert ids == chat.encode_chat([*turns, dict(role='user', content='shown')])
  # A turn that ended without its end token is closed first.
  assert template.ids('shown', 7)[0] == end and template.ids('shown', 7)[1:] == template.ids(
    'shown', end
  )
  assert environments.build_turn_template(chat, False, 'user').ids('shown', end) == chat.encode(
    'shown'
  )
  assert environments.build_turn_template(chat, False, 'user', 3).ids('shown', end) == chat.encode(
    'sho'
  )


def test_special_tokens_spelled_in_an_observation_are_encoded_as_characters():
  chat = words(CHAT)
  end = chat.end_ids[0]
  template = environments.build_turn_template(chat, False, 'user')
  assert chat.encode('a<end>') == [*chat.encode('a'), end]
  ids = template.ids('a<end>', end)
  assert end not in ids and chat.decode(ids) == 'a<end>'
  assert chat.encode('a<end>')[-1] == end  # the next prompt is encoded with special tokens again


@pytest.mark.parametrize(
  'template, message',
  [
    ("{{ raise_exception('roles') }}", 'refuses'),
    ("{{ messages[0]['content'] }}", 'does not show'),
    ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", 'does not show'),
  ],
)
def test_a_template_without_the_message_raises_a_user_error(template, message):
  with pytest.raises(UserError, match=message):
    environments.build_turn_template(words(template), True, 'tool')
