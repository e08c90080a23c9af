"""Two runs of the command line that share rollouts through a folder, while one of them is killed."""

from __future__ import annotations

import random
import signal

import faults
import tiers
import tiny_job

from jaxrl_llm.replay import shared_rollouts


def test_two_runs_share_rollouts_while_one_is_killed_at_random_moments(tmp_path):
  """Both take every step once, learn from each other, and read nothing malformed."""
  shared, chance = tmp_path / 'shared', random.Random(0)
  reuse = dict(fn='shared', folder=str(shared), max_age=100)
  runner = faults.JobRunner(tmp_path, replay=dict(reuse=reuse))
  one, other = tmp_path / 'one', tmp_path / 'other'
  beside = tiny_job.start(runner.config, other, '--config.seed=2')
  for _ in range(2 * tiers.REPEATS):
    at = chance.choice([stage for stage in faults.LOOP if stage != 'half_row'])
    fault = dict(kind='kill', at=at, skip=chance.randint(1, 3))
    status, out = runner.start(one, fault=fault)
    assert status == -signal.SIGKILL, (fault, out)
  status, out = runner.start(one)
  assert status == 0, out
  tiny_job.finish(beside)
  learned = 0
  for run in (one, other):
    rows = tiny_job.rows(run)
    assert [row['training/global_step'] for row in rows] == list(range(faults.STEPS))
    assert sum(row['shared/malformed_groups'] + row['shared/errors'] for row in rows) == 0
    assert sum(row['shared/published_groups'] for row in rows) > 0
    learned += sum(row['replay/rows'] for row in rows)
  assert learned > 0
  files = sorted(shared.glob('*/*'))
  assert len(files) > 2
  for file in files:
    assert shared_rollouts._FILE.fullmatch(file.name)
    assert all(shared_rollouts.from_line(line) for line in file.read_bytes().splitlines())
