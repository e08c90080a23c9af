"""Rewards between 0 and config.rewards.right train, by the real command, and the run says what they mean."""

from __future__ import annotations

import json

import tiny_job

JOB = dict(
  sft=None,
  steps=3,
  rewards=dict(fn='judges:quarter_odd'),
  objective=dict(
    advantage=dict(fn='group_normalized', eps=1e-6),
    aggregation=dict(fn='token_mean'),
    zero_variance=dict(fn='mask'),
  ),
  monitoring=dict(alarms=dict(right_rollouts=32)),
  evaluation=dict(every=0, prompts=0, samples=0),
)


def test_dense_rewards_move_the_weights_and_every_metric_calls_them_mixed(tmp_path):
  out = tiny_job.finish(tiny_job.start(tiny_job.config_file(tmp_path, **JOB), tmp_path / 'run'))
  rows = tiny_job.rows(tmp_path / 'run')
  assert len(rows) == 3
  for row in rows:
    assert row['grade/right'] == 0 and 0 < row['grade/highest'] <= 0.25
    assert row['curriculum/mixed_share'] >= 0.75 and row['critic/score/group_std'] > 0.01
    assert 0 < row['curriculum/observed_success'] <= 0.25
  for row in rows[1:]:
    assert row['actor/grad_norm'] > 0 < row['actor/update_norm']
    assert row['frac_reward_zero_std'] <= 0.25
  # Once, after the second of the steps of 16 rollouts.
  assert out.count('never_right') == 1 and 'never_right, at step 1: No score of 32 rollouts' in out
  assert '--config.rewards.right=0.' in out
  with open(tmp_path / 'run' / 'choices.jsonl') as file:
    assert all(0 < p < 1 for line in file for p in json.loads(line)['mixed'])
