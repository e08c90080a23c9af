"""Tools, games and what asks them: each by what it must answer, and that nothing of theirs ends or holds up a run."""

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
TurnRequest = environments.TurnRequest


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
def test_what_is_no_small_arithmetic_is_refused_in_words(expression):
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
    ('1</calc>', None),
    ('<calc>1', None),
  ],
)
def test_a_call_is_what_stands_in_the_last_tag(text, found):
  assert tool_calls.find(text, 'calc', 'expression') == found


@pytest.mark.parametrize('inside', ['{', '{"arguments": 3}', '{"other": 1}', '{"a":' * 5000])
def test_a_call_that_is_no_json_says_so(inside):
  assert tools.calculator().step(f'<calc>{inside}</calc>').observation.startswith('error: the call')


def test_a_tool_answers_calls_and_a_turn_without_one_ends_the_episode():
  made = tools.calculator()
  assert made.step('<calc>6*7</calc>') == ('42', 0.0, False)
  assert made.step('<calc>6*</calc>') == ('error: no expression of numbers', 0.0, False)
  assert made.step('42') == (None, 0.0, True)


def test_search_ranks_by_words_as_bm25_is_written(tmp_path):
  path = tmp_path / 'c.jsonl'
  texts = ['the cat sat', 'the dog sat on the cat and the cat', 'a bird', 'the the the']
  path.write_text('\n'.join(json.dumps(dict(text=t)) for t in texts))
  made = tools.search(path=str(path), results=2)
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
  shown = made.step('<search>the cat</search>').observation
  assert shown == '\n'.join(texts[n] for n in want[:2])
  assert made.step('<search>nowhere</search>').observation == 'nothing found'


@pytest.mark.parametrize('body', [None, '', 'x', '{"title": "t"}', '{"text": "..."}'])
def test_a_corpus_that_is_none_is_one_sentence(tmp_path, body):
  path = tmp_path / 'c.jsonl'
  if body is not None:
    path.write_text(body)
  with pytest.raises(UserError, match='config.environment.path'):
    tools.search(path=str(path))


def test_python_runs_in_the_sandbox_and_shows_what_it_prints():
  if why := sandbox.unavailable_reason():
    if os.environ.get('JAXRL_LLM_REQUIRE_SANDBOX') == '1':
      pytest.fail(why)
    pytest.skip(why)
  made = tools.python(wall_s=3.0, most=20)
  assert made.step('<python>print(sum(range(10)))</python>').observation == '45'
  assert made.step('<python>1/0</python>').observation.endswith('division by zero')
  assert len(made.step('<python>print("x" * 99)</python>').observation) == 20
  assert made.step('<python>x = 1</python>').observation == 'no output'
  quick = tools.python(wall_s=0.5)
  assert quick.step('<python>while 1: pass</python>').observation == 'error: it took too long'


def test_guessing_by_halves_wins_within_log2_turns_and_seeds_are_games():
  secrets = set()
  for seed in range(40):
    row = ROW._replace(extra=dict(low=3, high=17))
    made, low, high, turns = games.guess(), 3, 17, 0
    assert made.reset(row, seed) is None
    result = None
    while result is None or not result.done:
      middle, turns = (low + high) // 2, turns + 1
      result = made.step(f'I say {low}? no, {middle}!')
      low, high = (middle + 1, high) if result.observation == 'higher' else (low, middle - 1)
    assert result == (None, 1.0, True) and turns <= 4
    secrets.add(middle)
  assert len(secrets) > 8 and min(secrets) >= 3 and max(secrets) <= 17
  made.reset(row, 0)
  assert made.step('none').observation == made.step('9' * 50).observation == 'no number'


def test_every_maze_can_be_walked_and_walls_stand_where_they_say():
  moves = dict(n=(0, -1), e=(1, 0), s=(0, 1), w=(-1, 0))
  for seed in range(20):
    rng = random.Random(seed)
    row = ROW._replace(extra=levels.draw('walk', rng, min_size=2, max_size=5, walls=9)['extra'])
    made = games.walk()
    shown = made.reset(row, seed)
    assert games.walk().reset(row, seed) == shown
    edge, seen, won = [''], set(), False
    while edge and not won:  # breadth first, each way told from the start: what replaying is
      way = edge.pop(0)
      results = replay(games.walk(), row, seed, list(way)) if way else []
      won = bool(results) and results[-1].done
      now = results[-1].observation if results else shown
      if won or now in seen:
        continue
      seen.add(now)
      at, ways = now.removeprefix('at ').split(': ')
      before = made.at
      made.at = tuple(map(int, at.split(',')))
      assert set(ways.split()) == {
        m for m, (x, y) in moves.items() if made._free(made.at[0] + x, made.at[1] + y)
      }
      made.at = before
      edge += [way + move for move in ways.split()]
    assert won


class Own:
  """What a user might bring."""

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
  told = configs.default().environment.to_dict() | dict(workers=1, deadline_s=1.0)
  return told | changes


@pytest.fixture(scope='module')
def stage():
  made = environments.WorkerPool(spec(fn=f'{__name__}:own'))
  yield made
  made.close()


def test_a_users_environment_is_asked_in_a_worker_and_told_all_turns(stage):
  told = [TurnRequest(ROW, 1, ['a']), TurnRequest(ROW, 1, ['a', 'b']), TurnRequest(ROW, 1, [])]
  one, two, opened = stage.run(told)
  assert not stage.factory.inline
  assert one.results == [('1:a', 1.0, False)] and two.results[-1] == ('2:b', 1.0, False)
  assert opened.outcome == rewards.OK and opened.first_observation is None


def test_one_that_raises_dies_hangs_or_answers_nonsense_is_an_outcome_of_its_own(stage):
  """(f) The others of the same batch have their answers, and nothing waits much longer than the deadline."""
  words = ['a', 'raise', 'hang', 'die', 'eat', 'nothing', 'nan', 'bytes', 'b']
  begin = time.monotonic()
  heard = stage.run([TurnRequest(ROW, 1, [word]) for word in words])
  outcome = dict(zip(words, (one.outcome for one in heard), strict=True))
  assert outcome == dict(
    a=rewards.OK, hang=rewards.TIMEOUT, die=rewards.CRASH, eat=rewards.CRASH, b=rewards.OK,
    **dict.fromkeys(('raise', 'nothing', 'nan', 'bytes'), rewards.ERROR),
  )  # fmt: skip
  assert [one.results[-1].observation for one in heard if one.results] == ['1:a', '1:b']
  assert heard[1].message == 'RuntimeError: no such tool at all'
  assert 'deadline_s' in heard[2].message and 'not (observation, reward, done)' in heard[5].message
  assert time.monotonic() - begin < 60  # it ends


def test_an_episode_that_ends_sooner_when_it_is_told_again_is_an_error():
  class Moody:
    def reset(self, row, seed):
      pass

    def step(self, text):
      return 'x', 0, True

  with pytest.raises(ValueError, match='function of them'):
    replay(Moody(), ROW, 0, ['a', 'b'])


def test_where_nothing_is_remembered_the_newest_turn_alone_is_told():
  told = []

  class Forgets:
    remembers = False

    def reset(self, row, seed):
      pass

    def step(self, text):
      told.append(text)
      return text, 0, False

  assert replay(Forgets(), ROW, 0, ['a', 'b']) == [('b', 0.0, False)] and told == ['b']


CHAT = (
  "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<end>' + '\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def words(template):
  made = tokenizer.characters('abcdefghijklmnopqrstuvwxyz<|>?0123456789\n \u27e6\u27e7')
  return made._replace(template=template)


def test_what_stands_between_two_turns_is_what_the_template_has_there():
  made = words(CHAT)
  seam = environments.build_turn_template(made, True, 'user')
  end = made.end_ids[0]
  turns = [dict(role='user', content='q'), dict(role='assistant', content='said')]
  ids = made.encode_chat(turns[:1]) + made.encode('said') + [end]
  ids += seam.ids('shown', end)
  assert ids == made.encode_chat([*turns, dict(role='user', content='shown')])
  # A turn that a mark ended, and not its end token, is closed first.
  assert seam.ids('shown', 7)[0] == end and seam.ids('shown', 7)[1:] == seam.ids('shown', end)
  assert environments.build_turn_template(made, False, 'user').ids('shown', end) == made.encode(
    'shown'
  )
  assert environments.build_turn_template(made, False, 'user', 3).ids('shown', end) == made.encode(
    'sho'
  )


def test_an_observation_that_spells_special_tokens_gets_their_letters_and_not_their_power():
  made = words(CHAT)
  end = made.end_ids[0]
  seam = environments.build_turn_template(made, False, 'user')
  assert made.encode('a<end>') == [*made.encode('a'), end]
  ids = seam.ids('a<end>', end)
  assert end not in ids and made.decode(ids) == 'a<end>'
  assert made.encode('a<end>')[-1] == end  # and the next prompt is encoded as ever


@pytest.mark.parametrize(
  'template, told',
  [
    ("{{ raise_exception('roles') }}", 'refuses'),
    ("{{ messages[0]['content'] }}", 'does not show'),
    ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", 'does not show'),
  ],
)
def test_a_template_that_shows_no_such_message_is_one_sentence(template, told):
  with pytest.raises(UserError, match=told):
    environments.build_turn_template(words(template), True, 'tool')
