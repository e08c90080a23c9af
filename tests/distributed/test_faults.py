"""A run with faults equals an uninterrupted run, bit for bit: kills, full disks, SIGTERM, damage, wrong clocks.

A chain of faults hits one run: each start resumes after the fault before it, and the last start completes the run.
After each fault, the files of the run are compared with the uninterrupted run. tests/bench/faults.py is longer.
"""

from __future__ import annotations

import signal

import faults
import pytest
import tiers
import tiny_job

from jaxrl_llm.checkpointing import metrics_log
from jaxrl_llm.distributed import preemption


@pytest.fixture(scope='module')
def job_runner(tmp_path_factory):
  return faults.JobRunner(tmp_path_factory.mktemp('job'))


@pytest.fixture(scope='module')
def uninterrupted(job_runner, tmp_path_factory):
  run = tmp_path_factory.mktemp('uninterrupted') / 'run'
  status, out = job_runner.start(run)
  assert status == 0, out
  assert all(row['actor/grad_norm'] > 0 for row in tiny_job.rows(run)[1:])
  return run


def run_with_fault(
  job_runner, run, want, at: str, kind: str, skip: int = 1, **more
) -> tuple[int, str]:
  """Start the run with a fault, which must occur."""
  status, out = job_runner.start(run, fault=dict(kind=kind, at=at, skip=skip, **more))
  assert status != 0, f'{kind} at {at} did not happen: {out[-300:]}'
  faults.assert_same(run, want, complete=False)
  return status, out


def complete(job_runner, run, want) -> str:
  status, out = job_runner.start(run)
  assert status == 0, out
  faults.assert_same(run, want)
  return out


def test_killed_at_every_stage(job_runner, uninterrupted, tmp_path):
  """A few stages of a save; test_checkpoint.py covers all of them, and tests/bench/faults.py all in a run."""
  run = tmp_path / 'run'
  stages = ('sealed', 'land', 'half_row', 'commit', 'device', 'propose', 'rollouts', 'row')
  for at in stages[: 2 * tiers.REPEATS]:
    status, out = run_with_fault(job_runner, run, uninterrupted, at, 'kill')
    assert status == -signal.SIGKILL, (at, out)
  complete(job_runner, run, uninterrupted)


def test_a_full_disk_gives_one_message_and_loses_nothing(job_runner, uninterrupted, tmp_path):
  run = tmp_path / 'run'
  for at in ('flushed', 'row', 'commit', 'evaluation')[: 2 * tiers.REPEATS]:
    status, out = run_with_fault(job_runner, run, uninterrupted, at, 'full')
    errors = [line for line in out.splitlines() if line.startswith('error: ')]
    assert status == 2 and len(errors) == 1 and 'make room' in errors[0], (at, out)
    assert 'Traceback' not in out
  complete(job_runner, run, uninterrupted)


def test_sigterm_saves_and_exits_with_its_status(job_runner, uninterrupted, tmp_path):
  """Checkpoints are rare, so that no step would have been saved anyway."""
  run, rare_saves = tmp_path / 'run', '--config.checkpoint.every=100'
  for at, skip, done in (('propose', 2, 3), ('rollouts', 1, 5), ('row', 1, 7)):
    status, out = job_runner.start(run, rare_saves, fault=dict(kind='term', at=at, skip=skip))
    assert status == preemption.EXIT_PREEMPTED and 'the same command goes on' in out, out
    faults.assert_same(run, uninterrupted, complete=False)
    assert max(p.name for p in (run / 'checkpoints').iterdir()) == f'step_{done:06d}'
  # The evaluation after step 8, which is not saved yet, is interrupted at once.
  status, out = job_runner.start(run, rare_saves, fault=dict(kind='term', at='evaluation', skip=0))
  assert status == preemption.EXIT_PREEMPTED and not (run / 'eval/step_000008.json').exists()
  assert 'resuming at step 8' in complete(job_runner, run, uninterrupted)


def test_a_second_sigterm_ends_the_process_at_once(job_runner, tmp_path):
  status, _ = job_runner.start(tmp_path / 'run', fault=dict(kind='term twice', at='propose'))
  assert status == 128 + signal.SIGTERM


def test_a_killed_grader_changes_no_score(job_runner, tmp_path):
  """One worker is killed during grading, in every call."""
  slow = '--config.rewards.fn=judges:slow', '--config.steps=4', '--config.evaluation.every=0'
  runs = [tmp_path / name for name in ('calm', 'killed')]
  for run, fault in zip(runs, (None, dict(kind='kill grader', at='score', skip=0)), strict=True):
    status, out = job_runner.start(run, *slow, fault=fault)
    assert status == 0, out
  assert out.count('killed a grader') >= 4
  rows = [metrics_log.comparable(metrics_log.read(str(run / 'metrics.jsonl'))) for run in runs]
  assert rows[0] == rows[1] and len(rows[0]) == 4
  faults.assert_same(runs[1], runs[0], complete=False)


def test_a_clock_set_forward_changes_nothing(job_runner, uninterrupted, tmp_path):
  """By eleven days, which exceeds the default timeout of orbax on that clock."""
  run = tmp_path / 'run'
  status, out = job_runner.start(run, fault=dict(kind='leap', at='land', skip=3, by=1e6))
  assert status == 0, out
  faults.assert_same(run, uninterrupted)


def test_a_damaged_newest_checkpoint_costs_only_its_step(job_runner, uninterrupted, tmp_path):
  run = tmp_path / 'run'
  run_with_fault(job_runner, run, uninterrupted, 'land', 'kill', skip=6)
  path, file = faults.damage(run, 'bit')
  out = complete(job_runner, run, uninterrupted).replace('\n', '')
  assert f'{path} is broken ({file}' in out
