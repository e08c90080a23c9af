"""A run that is killed, starved, stopped, damaged and told a wrong time equals the run that was not, bit for bit.

A chain of faults hits one run, each start resumes what the fault before it left, and the last start ends the run. After
each fault what the run has written so far is held against the uninterrupted run. tests/bench/faults.py is longer.
"""

from __future__ import annotations

import signal

import faults
import pytest
import tiny_job

from jaxrl_llm.checkpointing import metrics_log
from jaxrl_llm.distributed import preemption


@pytest.fixture(scope='module')
def nursery(tmp_path_factory):
  return faults.Nursery(tmp_path_factory.mktemp('nursery'))


@pytest.fixture(scope='module')
def uninterrupted(nursery, tmp_path_factory):
  run = tmp_path_factory.mktemp('uninterrupted') / 'run'
  status, out = nursery.start(run)
  assert status == 0, out
  assert all(row['actor/grad_norm'] > 0 for row in tiny_job.rows(run)[1:])
  return run


def hit(nursery, run, want, at: str, kind: str, skip: int = 1, **more) -> tuple[int, str]:
  """One start with a fault, which must happen."""
  status, out = nursery.start(run, fault=dict(kind=kind, at=at, skip=skip, **more))
  assert status != 0, f'{kind} at {at} did not happen: {out[-300:]}'
  faults.assert_same(run, want, whole=False)
  return status, out


def end(nursery, run, want) -> str:
  status, out = nursery.start(run)
  assert status == 0, out
  faults.assert_same(run, want)
  return out


def test_killed_at_every_stage(nursery, uninterrupted, tmp_path):
  """Of the stages of a save a few: test_checkpoint.py has all of them, and tests/bench/faults.py in a run."""
  run = tmp_path / 'run'
  for at in ('device', 'sealed', 'commit', *faults.LOOP):
    status, out = hit(nursery, run, uninterrupted, at, 'kill')
    assert status == -signal.SIGKILL, (at, out)
  end(nursery, run, uninterrupted)


def test_a_full_disk_is_one_sentence_and_nothing_is_lost(nursery, uninterrupted, tmp_path):
  run = tmp_path / 'run'
  for at in ('flushed', 'commit', 'row', 'eval'):
    status, out = hit(nursery, run, uninterrupted, at, 'full')
    told = [line for line in out.splitlines() if line.startswith('error: ')]
    assert status == 2 and len(told) == 1 and 'make room' in told[0], (at, out)
    assert 'Traceback' not in out
  end(nursery, run, uninterrupted)


def test_sigterm_saves_and_says_so_by_its_status(nursery, uninterrupted, tmp_path):
  """Not on a step that would be saved anyway: a run that saves rarely loses nothing either."""
  run, rarely = tmp_path / 'run', '--config.checkpoint.every=100'
  for at, skip, done in (('propose', 2, 3), ('rollouts', 1, 5), ('row', 1, 7)):
    status, out = nursery.start(run, rarely, fault=dict(kind='term', at=at, skip=skip))
    assert status == preemption.EXIT_PREEMPTED and 'the same command goes on' in out, out
    faults.assert_same(run, uninterrupted, whole=False)
    assert max(p.name for p in (run / 'checkpoints').iterdir()) == f'step_{done:06d}'
  # While it evaluates after step 8, which nothing has saved yet, it need not wait for the end of that.
  status, out = nursery.start(run, rarely, fault=dict(kind='term', at='eval', skip=0))
  assert status == preemption.EXIT_PREEMPTED and not (run / 'eval/step_000008.json').exists()
  assert 'resuming at step 8' in end(nursery, run, uninterrupted)


def test_a_second_sigterm_ends_the_process_at_once(nursery, tmp_path):
  status, _ = nursery.start(tmp_path / 'run', fault=dict(kind='term twice', at='propose'))
  assert status == 128 + signal.SIGTERM


def test_a_killed_grader_changes_no_score(nursery, tmp_path):
  """One worker is killed in every call, while it grades."""
  slow = '--config.rewards.fn=judges:slow', '--config.steps=4', '--config.evaluation.every=0'
  runs = [tmp_path / name for name in ('calm', 'killed')]
  for run, fault in zip(runs, (None, dict(kind='kill grader', at='score', skip=0)), strict=True):
    status, out = nursery.start(run, *slow, fault=fault)
    assert status == 0, out
  assert out.count('killed a grader') >= 4
  rows = [metrics_log.comparable(metrics_log.read(str(run / 'metrics.jsonl'))) for run in runs]
  assert rows[0] == rows[1] and len(rows[0]) == 4
  faults.assert_same(runs[1], runs[0], whole=False)


def test_a_clock_set_forward_changes_nothing(nursery, uninterrupted, tmp_path):
  """By eleven days: longer than orbax is willing to wait by that clock, unless told to."""
  run = tmp_path / 'run'
  status, out = nursery.start(run, fault=dict(kind='leap', at='land', skip=3, by=1e6))
  assert status == 0, out
  faults.assert_same(run, uninterrupted)


def test_a_damaged_newest_checkpoint_costs_its_step_and_no_more(nursery, uninterrupted, tmp_path):
  run = tmp_path / 'run'
  hit(nursery, run, uninterrupted, 'land', 'kill', skip=6)
  path, blamed = faults.damage(run, 'bit')
  out = end(nursery, run, uninterrupted).replace('\n', '')
  assert f'{path} is broken ({blamed}' in out
