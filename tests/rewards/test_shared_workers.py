"""Calls of several threads share the workers, and a call whose workers another one killed loses nothing."""

from __future__ import annotations

import os
import threading
import time
import types
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool

import pytest

from jaxrl_llm import rewards
from jaxrl_llm.rewards import pool as pools
from jaxrl_llm.rewards import shared_workers
from jaxrl_llm.types import Row

OWN = """
import os, time

def meet(data_source, solution_str, ground_truth, extra_info=None):
  folder = extra_info['folder']
  open(os.path.join(folder, ground_truth), 'w').close()
  while len(os.listdir(folder)) < 2: time.sleep(0.01)
  return float(solution_str == ground_truth)

def wait(data_source, solution_str, ground_truth, extra_info=None):
  with open(os.path.join(extra_info['folder'], ground_truth), 'a') as file: file.write('x')
  while not os.path.exists(os.path.join(extra_info['folder'], 'go')): time.sleep(0.01)
  return float(solution_str == ground_truth)
"""


@pytest.fixture
def rows(tmp_path, monkeypatch):
  """f(names) → rows whose answers are these."""
  (tmp_path / 'own_shared.py').write_text(OWN)
  monkeypatch.syspath_prepend(str(tmp_path))
  folder = tmp_path / 'seen'
  folder.mkdir()
  return lambda names: [Row(x, '', (), x, 's', dict(folder=str(folder))) for x in names]


def wait_for(path) -> None:
  while not os.path.exists(path):
    time.sleep(0.01)


def test_two_calls_are_graded_at_the_same_time(rows):
  """Each completion ends once one of the other call has begun; one call after the other would time out."""
  spec = dict(fn='own_shared:meet', workers=2, deadline_s=60.0, cpu_s=60.0)
  with rewards.Pool(spec) as pool, futures.ThreadPoolExecutor(2) as threads:
    one, two = (threads.submit(pool.score, rows([x]), [x]) for x in 'ab')
    assert one.result().outcome_B.tolist() == two.result().outcome_B.tolist() == [rewards.OK]
    assert one.result().reward_B.tolist() == two.result().reward_B.tolist() == [1]


def test_a_call_whose_workers_are_killed_goes_on_with_new_ones(rows, tmp_path):
  spec = dict(fn='own_shared:wait', workers=1, deadline_s=60.0, cpu_s=60.0)
  with rewards.Pool(spec) as pool, futures.ThreadPoolExecutor(1) as threads:
    call = threads.submit(pool.score, rows('abc'), ['a', 'b', 'no'])
    wait_for(tmp_path / 'seen/a')
    pool.close()
    (tmp_path / 'seen/go').touch()
    assert call.result().reward_B.tolist() == [1, 1, 0]
    assert call.result().outcome_B.tolist() == [rewards.OK] * 3
  assert (tmp_path / 'seen/a').read_text() == 'xx'


def test_a_call_in_another_thread_ends_with_the_pool(rows, tmp_path):
  spec = dict(fn='own_shared:wait', workers=1, deadline_s=60.0, cpu_s=60.0)
  with futures.ThreadPoolExecutor(1) as threads:
    with rewards.Pool(spec) as pool:
      call = threads.submit(pool.score, rows('ab'), ['a', 'b'])
      wait_for(tmp_path / 'seen/a')
    with pytest.raises(RuntimeError, match='ended'):
      call.result()


def test_what_dropped_workers_had_ends_and_what_others_have_does_not():
  """Pebble may leave it as it is."""
  silent = types.SimpleNamespace(stop=lambda: None, join=lambda: None)
  silent.schedule = lambda *_, **__: futures.Future()
  workers = shared_workers.SharedWorkers(lambda *_: silent)
  first, team = workers.schedule(print, (), 1.0)
  workers.drop(team)
  assert isinstance(first.exception(0), BrokenProcessPool)
  second, other = workers.schedule(print, (), 1.0)
  workers.drop(team)
  assert workers.newest is other and not second.done()


@pytest.mark.parametrize('others_go_on', [True, False])
def test_a_call_behind_others_is_no_lost_one(others_go_on, monkeypatch):
  """Its own chunks do not end while the workers are at those of other calls."""
  pool = rewards.Pool(dict(fn='number'))
  team = shared_workers.Team(None, threading.local(), set())
  team.started.value = True
  future: futures.Future = futures.Future()
  ends = iter([set(), set(), {future}])

  def wait(pending, timeout_s, return_when):
    pool._ended += others_go_on
    return next(ends), set()

  monkeypatch.setattr(pools.futures, 'wait', wait)
  done = pool._wait({future: pools._Chunk(0, 1, team)})
  assert done == ({future} if others_go_on else set())
