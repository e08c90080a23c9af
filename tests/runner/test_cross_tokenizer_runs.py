"""Runs whose teacher has another tokenizer: they learn from it, and go on bit for bit where they are continued."""

from __future__ import annotations

import pytest
import small_tokenizers
import tiny_job


def job(folder, **changes) -> str:
  """A config file; the teacher's tokens are of bytes and of some pairs of letters and digits."""
  teacher = folder / 'teacher'
  if not teacher.exists():
    small_tokenizers.write_model(teacher, small_tokenizers.byte_level(300, 1))
  objective = dict(
    advantage=dict(fn='raw', baseline=0.0),
    ratio=dict(fn='one'),
    trust_region=dict(fn='none'),
    aggregation=dict(fn='token_mean'),
    distillation=dict(fn='on_policy_spans', teacher_prompt_tokens=12, teacher_completion_tokens=20),
    teacher=str(teacher),
  )
  known = dict(
    steps=6,
    objective=objective,
    evaluation=dict(every=0, prompts=8, samples=0),
    checkpoint=dict(every=3, keep=2),
  )
  return tiny_job.config_file(folder, **(tiny_job.UNTAUGHT | known | changes))


@pytest.mark.parametrize('mode', ['fused', 'lag'])
def test_a_continued_run_is_the_uninterrupted_one(mode, tmp_path):
  """Every metric and every file of rollouts, with two optimizer steps a batch; in lag mode with a step in flight."""
  config = job(tmp_path, mode=mode, learner=dict(minibatches=2))
  tiny_job.finish(tiny_job.start(config, tmp_path / 'whole'))
  tiny_job.finish(tiny_job.start(config, tmp_path / 'parts', '--config.steps=3'))
  tiny_job.finish(tiny_job.start(config, tmp_path / 'parts'))
  want = tiny_job.rows(tmp_path / 'whole')
  assert len(want) == 6 and tiny_job.rows(tmp_path / 'parts') == want
  for step in range(6):
    one, two = (
      (tmp_path / run / f'rollouts/step_{step:06d}.jsonl').read_text() for run in ('whole', 'parts')
    )
    assert one == two
  assert all(row['distillation/aligned'] > 0.9 for row in want)
  assert want[-1]['actor/grad_norm'] > 0


def test_a_policy_comes_nearer_to_its_teacher(tmp_path):
  """The mean advantage is minus the estimated divergence of a token's span."""
  known = dict(steps=30, prompts=8, rollouts=16, optimizer=dict(learning_rate=3e-3))
  config = job(tmp_path, **known)
  tiny_job.finish(tiny_job.start(config, tmp_path / 'run'))
  means = [row['critic/advantages/mean'] for row in tiny_job.rows(tmp_path / 'run')[1:]]
  first, last = sum(means[:5]) / 5, sum(means[-5:]) / 5
  assert first < -0.5 and last > first + 0.5
