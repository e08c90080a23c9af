"""Live episodes: an object stays in one worker from reset to close, whatever ends worker, episode or run."""

from __future__ import annotations

import collections
import os
import pathlib
import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from jaxrl_llm import environments, rewards
from jaxrl_llm.config import loading as configs
from jaxrl_llm.data import games as levels
from jaxrl_llm.environments import worker_pool
from jaxrl_llm.environments.protocol import replay
from jaxrl_llm.rewards.code_execution import sandbox
from jaxrl_llm.types import Row

ROOT = pathlib.Path(__file__).parents[2]


class Players:
  """Episodes in a pool; each turn is given by its text alone."""

  def __init__(self, folder: pathlib.Path, count: int, fn: str = 'recorded', **changes):
    self.log = folder / 'calls'
    settings = configs.default().environment.to_dict() | dict(workers=2, deadline_s=20.0)
    settings |= dict(fn=f'tests.environments.recorded:{fn}', log=str(self.log)) | changes
    self.pool = environments.WorkerPool(settings)
    self.texts = {n: [] for n in range(count)}
    self.opened = self.run(self.texts)

  def request(self, n: int):
    question = 'broken' if n >= 100 else '?'
    row = Row(str(n), question, (), '', 'test', {})
    return environments.TurnRequest((n, 0, 0, 0), row, 1, list(self.texts[n]))

  def run(self, numbers):
    return self.pool.run([self.request(n) for n in numbers])

  def turn(self, text='go', numbers=None, **others):
    """One turn in all episodes; `others`: what e0, e1, … say instead. The results."""
    numbers = list(self.texts) if numbers is None else numbers
    for n in numbers:
      self.texts[n].append(others.get(f'e{n}', text))
    return self.run(numbers)

  def end(self, numbers=None):
    self.pool.end([(n, 0, 0, 0) for n in (self.texts if numbers is None else numbers)])

  def calls(self, call: str) -> collections.Counter:
    """How often each episode's environment got a call."""
    lines = self.log.read_text().splitlines() if self.log.exists() else []
    return collections.Counter(int(line.split()[0]) for line in lines if line.split()[1] == call)


def where(results):
  """(pid, object) of each result."""
  return [tuple(one.result.observation.split()[:2]) for one in results]


def steps(results):
  return [int(one.result.observation.split()[2]) for one in results]


@pytest.fixture
def players(tmp_path):
  """A function that makes a pool with live episodes, which is closed after the test."""
  made = []

  def make(count, **changes):
    made.append(Players(tmp_path, count, **changes))
    return made[-1]

  yield make
  for one in made:
    one.pool.close()


def test_an_episode_lives_in_one_object_of_one_worker_and_is_closed_once(players):
  six = players(6)
  assert [one.outcome for one in six.opened] == [rewards.OK] * 6
  homes = []
  for turn in range(1, 4):
    results = six.turn(numbers=random.Random(turn).sample(range(6), 6))
    order = random.Random(turn).sample(range(6), 6)
    assert steps(results) == [turn] * 6
    homes.append(dict(zip(order, where(results), strict=True)))
  assert homes[0] == homes[1] == homes[2] and len(set(homes[0].values())) == 6
  load = collections.Counter(pid for pid, _ in homes[0].values())
  assert sorted(load.values()) == [3, 3] and str(os.getpid()) not in load
  assert set(six.calls('reset').values()) == {1} and set(six.calls('step').values()) == {3}
  assert not six.calls('close')
  six.end([0, 1])
  six.end([0])
  assert six.calls('close') == {0: 1, 1: 1}
  six.pool.close()  # the run ends
  assert six.calls('close') == dict.fromkeys(range(6), 1)
  assert six.pool.take_counts() == dict.fromkeys(
    ('replayed', 'lost', 'worker_deaths', 'close_errors'), 0
  )


def test_submitted_turns_are_collected_as_they_end(players):
  """A step that hangs delays what waits for its worker, until its deadline, and no other worker."""
  four = players(4, deadline_s=4.0)
  home = [pid for pid, _ in where(four.turn())]
  for n in range(4):
    four.texts[n].append('hang' if n == 0 else 'go')
  four.pool.submit([four.request(n) for n in range(4)])
  assert four.pool.pending == 4 and four.pool.running
  waited, order, began = {}, [], time.monotonic()
  while four.pool.pending:
    for key, result in four.pool.collect(0.2):
      order.append(key[0])
      waited[key[0]] = time.monotonic() - began, result
  assert sorted(order) == [0, 1, 2, 3] and not four.pool.running
  assert {n for n in range(1, 4) if waited[n][0] < 4} == {n for n in range(4) if home[n] != home[0]}
  outcomes = [waited[n][1].outcome for n in range(4)]
  assert outcomes == [rewards.TIMEOUT, rewards.OK, rewards.OK, rewards.OK]
  assert steps([waited[n][1] for n in range(1, 4)]) == [2] * 3
  four.pool.submit(ended=[(n, 0, 0, 0) for n in range(1, 4)])
  while four.pool.pending:
    assert four.pool.collect(0.2) == []
  assert not four.pool.live and four.calls('close') == {1: 1, 2: 1, 3: 1}


def test_a_killed_worker_costs_its_own_episodes_a_replay_and_the_others_nothing(players):
  four = players(4)
  before = where(four.turn())
  os.kill(int(before[0][0]), signal.SIGKILL)
  hurt = [n for n in range(4) if before[n][0] == before[0][0]]
  results = four.turn()
  assert steps(results) == [2] * 4 and len(hurt) == 2
  assert [one.result.reward for one in results] == [2.0] * 4
  for n, home in enumerate(where(results)):
    assert (home == before[n]) == (n not in hurt)
  assert four.calls('step') == {n: 3 if n in hurt else 2 for n in range(4)}
  assert where(four.turn()) == where(results)  # the replayed ones live again
  counts = four.pool.take_counts()
  assert (counts['replayed'], counts['lost'], counts['worker_deaths']) == (2, 0, 1)


def test_what_cannot_be_replayed_is_lost_with_its_worker(players):
  four = players(4, fn='unreplayable')
  before = where(four.turn())
  assert not four.pool.factory.replayable
  os.kill(int(before[0][0]), signal.SIGKILL)
  hurt = [n for n in range(4) if before[n][0] == before[0][0]]
  results = four.turn()
  assert [n for n, one in enumerate(results) if one.outcome == rewards.SKIP] == hurt
  assert 'replayable = False' in results[hurt[0]].message
  assert {n for n in range(4) if four.pool.is_lost((n, 0, 0, 0))} == set(hurt)
  counts = four.pool.take_counts()
  assert (counts['replayed'], counts['lost'], counts['worker_deaths']) == (0, 2, 1)
  assert four.calls('step') == {n: 1 if n in hurt else 2 for n in range(4)}


def test_a_worker_killed_within_a_step_is_given_a_second_try(players, tmp_path):
  two = players(2)
  two.turn()
  once, other = two.turn(e0=f'die {tmp_path / "marker"}')
  assert steps([once, other]) == [2, 2]
  again, other = two.turn(e0='die')
  assert (again.outcome, other.outcome) == (rewards.CRASH, rewards.OK)
  assert 'exit code -9' in again.message and two.pool.take_counts()['worker_deaths'] == 3


def test_a_worker_that_ends_between_two_turns_is_no_fault_of_the_next_one(players, tmp_path):
  two = players(2, workers=1)
  two.turn(e1=f'leave {tmp_path / "marker"}')
  two.pool._workers[0].process.join()
  assert steps(two.turn()) == [2, 2] and two.pool.take_counts()['replayed'] == 2


def test_a_worker_that_is_terminated_closes_its_environments_first(players):
  two = players(2, workers=1)
  os.kill(int(where(two.turn())[0][0]), signal.SIGTERM)
  two.pool._workers[0].process.join()
  assert two.calls('close') == {0: 1, 1: 1}
  assert steps(two.turn()) == [2, 2] and two.pool.take_counts()['replayed'] == 2


def test_workers_that_cannot_start_stop_the_run(players, monkeypatch):
  monkeypatch.setattr(worker_pool, '_MAX_IDLE_DEATHS', 0)
  none = players(0, workers=1)
  none.pool.settings['fn'] = 'tests.environments.recorded:no_such_function'
  none.texts[0] = []
  with pytest.raises(RuntimeError, match='the environment workers cannot be started'):
    none.run([0])
  assert not none.pool.live


@pytest.mark.parametrize(
  'word, field', [('hang', 'deadline_s'), ('deaf', 'deadline_s'), ('spin', 'cpu_s')]
)
def test_a_step_past_its_time_ends_its_own_episode_alone(players, word, field):
  limits = dict(deadline_s=2.0) if field == 'deadline_s' else dict(cpu_s=0.05, deadline_s=60.0)
  three = players(3, workers=1, **limits)
  three.turn()
  begin = time.monotonic()
  late, *others = three.turn(e0=word)
  assert (late.outcome, late.result) == (rewards.TIMEOUT, None) and field in late.message
  assert steps(others) == [2, 2] and three.pool.take_counts()['replayed'] == 2
  assert time.monotonic() - begin < 15


def test_memory_beyond_the_limit_is_a_crash_of_its_episode_alone(players):
  three = players(3, workers=1, worker_memory_mb=128)
  before = where(three.turn('hold 8'))
  full, *others = three.turn(e0='hold 400')
  assert full.outcome == rewards.CRASH and 'MemoryError' in full.message
  assert where(others) == before[1:] and three.pool.take_counts()['worker_deaths'] == 0
  three.end()
  assert three.calls('close') == dict.fromkeys(range(3), 1)


def test_episodes_that_fail_are_closed_once_too(players):
  two = players(2, workers=1)
  assert two.turn('raise')[0].outcome == rewards.ERROR
  two.texts[100] = []  # its reset fails
  (broken,) = two.run([100])
  assert broken.outcome == rewards.ERROR and 'no reset' in broken.message
  two.end()
  two.pool.close()
  assert two.calls('close') == {0: 1, 1: 1, 100: 1}


def test_what_an_environment_started_ends_with_its_killed_worker(players):
  one = players(1, workers=1, deadline_s=1.0)
  (result,) = one.turn('child')
  child = int(result.result.observation.split()[3])
  assert alive(child)
  one.turn('deaf')
  for _ in range(200):  # a killed process ends when it is next scheduled
    if not alive(child):
      return
    time.sleep(0.05)
  raise AssertionError(f'process {child} still runs')


def alive(pid: int) -> bool:
  try:
    return pathlib.Path(f'/proc/{pid}/stat').read_text().split(')')[1].split()[0] != 'Z'
  except FileNotFoundError:
    return False


def test_a_killed_trainer_leaves_no_worker_and_no_open_environment(tmp_path):
  program = f"""
    import pathlib, sys, time
    from tests.environments.test_live_episodes import Players
    players = Players(pathlib.Path({str(tmp_path)!r}), 3)
    print(*(one.result.observation.split()[0] for one in players.turn()), flush=True)
    time.sleep(600)
  """
  environment = os.environ | dict(PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path]))
  trainer = subprocess.Popen(
    [sys.executable, '-c', textwrap.dedent(program)],
    stdout=subprocess.PIPE,
    cwd=ROOT,
    env=environment,
  )
  workers = set(map(int, trainer.stdout.readline().split()))
  trainer.kill()
  trainer.wait()
  assert len(workers) == 2
  begin = time.monotonic()
  while any(map(alive, workers)) and time.monotonic() - begin < 30:
    time.sleep(0.05)
  assert not any(map(alive, workers))
  lines = (tmp_path / 'calls').read_text().splitlines()
  assert sorted(line for line in lines if 'close' in line) == ['0 close', '1 close', '2 close']


ENVIRONMENTS = dict(
  calculator=('<calc>1+{}</calc>', 'so <calc>2*</calc>', '7'),
  python=('<python>print({}+1)</python>', '<python>1/0</python>', 'done'),
  search=('<search>the cat {}</search>', '<search>nothing</search>', 'end'),
  guess=('{}', 'none', 'I say {}'),
  walk=('e', 's', 'n', 'w'),
  pair_walk=('e', 's', 'w', 'n'),
  discussion=('{}', 'so <score>2</score>', '<score>3</score>', 'none'),
)


@pytest.mark.parametrize('name', ENVIRONMENTS)
def test_the_shipped_environments_give_live_what_a_replay_gives(name, tmp_path):
  """Observations and rewards, turn by turn, of episodes that take turns with each other."""
  settings = configs.default().environment.to_dict() | dict(fn=name, workers=1)
  if name == 'python' and (why := sandbox.unavailable_reason()):
    pytest.skip(why)
  if name == 'search':
    (tmp_path / 'texts').write_text('{"text": "the cat 1 2 3"}\n{"text": "a dog"}\n')
    settings['path'] = str(tmp_path / 'texts')
  pool, rng = environments.WorkerPool(settings), random.Random(0)
  extra = {}
  if name in ('guess', 'walk', 'pair_walk'):
    extra = levels.draw(name, rng, **levels.GAMES[name][1])['extra']
  row = Row('a', '?', (), '3', 'test', extra)
  requests = [environments.TurnRequest((n, 0, 0, 0), row, n // 2, []) for n in range(4)]
  opened = pool.run(requests)
  assert opened[0].first_observation == opened[1].first_observation
  live = list(requests)
  for _ in range(6):
    for one in live:
      one.texts.append(rng.choice(ENVIRONMENTS[name]).format(rng.randrange(9)))
    results = pool.run(live)
    for one, got in zip(live, results, strict=True):
      want = replay(pool.factory.make(), row, one.seed, one.texts)[-1]
      assert got == environments.TurnResult(rewards.OK, result=want)
    over = [environments.ends_episode(got.result) for got in results]
    pool.end([one.key for one, ended in zip(live, over, strict=True) if ended])
    live = [one for one, ended in zip(live, over, strict=True) if not ended]
  assert max(len(one.texts) for one in requests) > 1
  assert set(pool.live) == {one.key for one in live} and pool.take_counts()['replayed'] == 0
  pool.close()
