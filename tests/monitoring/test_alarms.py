"""Alarms: each by rows of metrics and, where a run can be made to, by a run; told once; none where all is well."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import tiny_job

from jaxrl_llm.config import loading as configs
from jaxrl_llm.monitoring import alarms
from jaxrl_llm.types import UserError

WELL = {
  'training/trained_tokens': 200.0,
  'training/rollout_probs_diff_mean': 1e-7,
  'actor/skipped_updates': 0.0,
  'actor/grad_norm': 1.2,
  'actor/update_norm': 1e-3,
  'actor/lr': 1e-5,
  'actor/entropy': 0.4,
  'frac_reward_zero_std': 0.5,
  'critic/score/min': 0.0,
  'critic/score/max': 1.0,
  'curriculum/observed_success': 0.4,
  'response_length/clip_ratio': 0.2,
  'grade/failed_share': 0.0,
  'grade/timeouts': 0,
  'grade/crashes': 0,
  'grade/errors': 0,
  'perf/rollouts': 32,
  'critic/score/group_std': 0.3,
  'grade/unread': 0.9,
  'grade/unrewarded': 0.9,
  'grade/prompts_paid': 0.4,
}
EQUAL = {'critic/score/min': 0.0, 'critic/score/max': 0.0}
BAD = dict(
  non_finite={'actor/skipped_updates': 1.0},
  probs_gap={'training/rollout_probs_diff_mean': 2e-4},
  grading={'grade/failed_share': 0.2, 'grade/errors': 6},
  format={'grade/unread': 1.0},
  unrewarded={'grade/unrewarded': 1.0},
  prompt_paid={'grade/prompts_paid': 0.75},
  still={'actor/update_norm': 0.0},
  entropy={'actor/entropy': 0.005},
  all_wrong=EQUAL | {'curriculum/observed_success': 0.0},
  all_right={'critic/score/min': 1.0, 'curriculum/observed_success': 1.0},
  same_reward=EQUAL | {'critic/score/max': 0.0, 'curriculum/observed_success': float('nan')},
  truncated={'response_length/clip_ratio': 1.0},
)
# What to do, and with what value it was found.
SAYS = dict(
  non_finite='Lower config.optimizer.learning_rate',
  probs_gap='2.0e-04 is above 0.0001: what was sampled was not sampled from the policy that learns',
  grading='20% of the rollouts could not be graded (0 time-outs, 0 crashes, 6 errors',
  format='No reply of the first batch holds what config.rewards.fn reads',
  unrewarded='No reply of the first batch got any reward',
  prompt_paid='75% of the prompts, graded as if they were replies, are paid in full',
  still='gradient 1.2e+00, update 0.0e+00, although the learning rate is 1.0e-05 and rewards differ within groups',
  entropy='Entropy is down to 0.0050 nats a token (config.monitoring.alarms.entropy=0.01)',
  all_wrong='what config.rewards.fn reads (the format)',
  all_right='Give harder rows',
  same_reward='Does config.rewards tell good answers from bad?',
  truncated='100% of the rollouts were cut off',
)


def made(**changes) -> alarms.Health:
  config = configs.default()
  for name, value in changes.items():
    configs._override(config, f'--config.{name.replace("__", ".")}={value}')
  return alarms.Health(config, 'float32')


def watched(own: alarms.Health, rows, start=0):
  """[(step, name, text)] of what was told, and health/… of each row."""
  told, held = [], []
  for step, row in enumerate(rows, start):
    now, alarms = own.observe(WELL | row | {'training/global_step': step})
    told += [(step, alarm.name, alarm.text) for alarm in alarms]
    held.append({name.removeprefix('health/'): on for name, on in now.items()})
  return told, held


def test_the_names_are_those_of_the_tables():
  assert set(BAD) == set(SAYS) == set(alarms.NAMES) == set(alarms.conditions(WELL, made().bounds))


def test_all_is_well():
  told, held = watched(made(), [{}] * 30)
  assert told == [] and not any(on for row in held for on in row.values())


@pytest.mark.parametrize('name', alarms.NAMES)
def test_each_is_told_once_when_it_begins_and_says_what_to_do(name):
  told, held = watched(made(), [{}] * 2 + [BAD[name]] * 25)
  first = 11 if name in alarms.LASTING else 2
  assert [(step, alarm) for step, alarm, _ in told] == [(first, name)]
  assert SAYS[name] in told[0][2] and f'{name}' in told[0][2] and f'step {first}:' in told[0][2]
  for step, row in enumerate(held):
    assert row == {other: float(other == name and step >= first) for other in alarms.NAMES}


@pytest.mark.parametrize('name', alarms.NAMES)
def test_it_is_told_again_only_after_a_quiet_while(name):
  """What comes and goes would fill the screen."""
  need = 10 if name in alarms.LASTING else 1
  rows = [BAD[name]] * need + [{}] * 9 + [BAD[name]] * need + [{}] * 10 + [BAD[name]] * need
  told, held = watched(made(), rows)
  assert [step for step, *_ in told] == [need - 1, len(rows) - 1]
  assert [row[name] for row in held].count(1.0) == 3


def test_rewards_that_differ_ring_although_the_update_masks_every_group():
  """The mask itself may be what is wrong: gradient 0, all groups masked, and rewards from 0 to 0.25."""
  row = {'actor/grad_norm': 0.0, 'actor/update_norm': 0.0, 'frac_reward_zero_std': 1.0}
  dense = row | {'critic/score/group_std': 0.08}
  assert [name for _, name, _ in watched(made(), [dense] * 12)[0]] == ['still']
  for quiet in (
    row | {'critic/score/group_std': 0.0},
    row | {'critic/score/group_std': 1e-7},
    dense | {'actor/lr': 0.0},
    dense | {'training/trained_tokens': 0.0},
  ):
    assert watched(made(), [quiet] * 12)[0] == []


GRADED = {
  'grade/right': 0.0, 'grade/lowest': 0.05, 'grade/highest': 0.2, 'grade/out_of_bounds': 0.0,
}  # fmt: skip


def test_it_says_once_what_scores_below_right_mean_for_the_curriculum():
  best = GRADED | {'grade/highest': 0.25}
  rows = [GRADED] * 20 + [best] * 11 + [GRADED] * 30
  told, _ = watched(made(), rows)
  assert [(step, name) for step, name, _ in told] == [(31, 'never_right')]  # 32 rollouts a step
  text = told[0][2]
  assert 'No score of 1024 rollouts reached config.rewards.right=1: the highest is 0.25' in text
  assert 'the way from 0 to 1' in text and '25% at best' in text
  assert text.endswith('--config.rewards.right=0.25.')


@pytest.mark.parametrize(
  'rows',
  [
    [GRADED] * 10 + [GRADED | {'grade/right': 0.03}] + [GRADED] * 60,  # some score did
    [GRADED | {'grade/highest': 0.05}] * 60,  # all are equal: others say so
    [GRADED] * 31,
    [{}] * 60,
  ],
)
def test_it_says_nothing_of_right_where_some_score_is_or_few_were_graded(rows):
  assert watched(made(), rows)[0] == []


def test_scores_beyond_the_bounds_are_told_once_with_bounds_that_hold_them():
  wide = GRADED | {'grade/right': 0.1, 'grade/out_of_bounds': 0.125, 'grade/lowest': -1.5}
  told, _ = watched(made(), [GRADED | {'grade/right': 0.1}] * 2 + [wide, GRADED] * 20)
  assert [(step, name) for step, name, _ in told] == [(2, 'out_of_bounds')]
  assert '12.5% of the scores lie outside of 0 to 1: they go from -1.5 to 0.2' in told[0][2]
  assert told[0][2].endswith("--config.rewards.bounds='(-1.5, 1)'.")


def test_what_is_told_once_stays_told_over_a_restart_and_may_stop_the_run():
  rows = [GRADED] * 40
  one, other = made(), made()
  watched(one, rows[:20])
  other.load_state_dict(json.loads(json.dumps(one.state_dict())))
  assert [step for step, *_ in watched(other, rows, start=20)[0]] == [31]
  last = made(health__stop=('never_right',))
  last.load_state_dict(json.loads(json.dumps(other.state_dict())))
  told, _ = watched(last, rows, start=60)
  assert told == []
  again = made(health__stop=('never_right',), health__right_rollouts=32)
  _, alarms = again.observe(WELL | GRADED | {'training/global_step': 0})
  with pytest.raises(
    UserError, match='config.monitoring.alarms.stop names never_right: never_right, at step 0'
  ):
    again.check(alarms)


def test_what_is_bad_now_and_then_does_not_last():
  rows = ([BAD['entropy']] * 9 + [{}]) * 5
  assert watched(made(), rows)[0] == []


@pytest.mark.parametrize('name', ['entropy', 'still', 'all_wrong', 'truncated'])
def test_steps_without_an_update_or_rollouts_say_nothing_and_break_no_row(name):
  none = dict.fromkeys(WELL, 0.0) | {'frac_reward_zero_std': 1.0}
  for metric in ('critic/score/min', 'critic/score/max', 'response_length/clip_ratio'):
    none[metric] = float('nan')
  told, _ = watched(made(), [none] * 30)
  assert told == []
  told, _ = watched(made(), [BAD[name], none] * 10)
  assert [(step, alarm) for step, alarm, _ in told] == [(18, name)]


@pytest.mark.parametrize(
  'row, name',
  [
    ({'actor/pg_loss': float('nan')}, 'non_finite'),
    ({'actor/grad_norm': float('inf')}, 'non_finite'),
    ({'actor/grad_norm': 0.0}, 'still'),
  ],
)
def test_further_signs(row, name):
  told, _ = watched(made(health__steps=1), [row])
  assert [alarm for _, alarm, _ in told] == [name]


@pytest.mark.parametrize(
  'row',
  [
    {'actor/lr': 0.0, 'actor/update_norm': 0.0},  # before the first step, or after the last
    {
      'frac_reward_zero_std': 1.0,
      'critic/score/group_std': 0.0,
      'actor/grad_norm': 0.0,
      'actor/update_norm': 0.0,
    },  # fmt: skip
    {'critic/score/min': 0.0, 'critic/score/max': 0.5},
  ],
)
def test_what_is_no_sign(row):
  assert watched(made(health__steps=1), [row])[0] == []


def bound(dtype, **changes):
  config = configs.default()
  config.update(changes)
  return alarms.Health(config, dtype).bounds.probs_gap


def test_the_gap_that_rounded_weights_make_is_no_alarm():
  low = lambda name: dict(rollout=dict(weights_dtype=name))  # noqa: E731
  assert bound('float32') == 1e-4 and bound('bfloat16') == 1e-2
  assert bound('float32', **low('bfloat16')) == bound('bfloat16', **low('bfloat16')) == 1e-2
  assert bound('float32', **low('int8')) == bound('bfloat16', **low('int8')) == 0.04
  assert bound('bfloat16', **low('float8_e4m3fn')) == 0.1
  # Where the update rounds likewise there should be none; and what is said counts.
  assert bound('float32', **low('int8'), quantize_update=True) == 1e-4
  assert bound('float32', **low('int8'), health=dict(probs_gap=0.3)) == 0.3


@pytest.mark.parametrize(
  'change',
  [
    '--config.mode=lag',
    '--config.learner.minibatches=2',
    '--config.rollout.stop.fn=rounds',
    '--config.rollout.cache_dtype=int8',
    '--config.curriculum.hint.fn=guide',
    '--config.replay.collect.fn=mixed',
  ],
)
def test_sampler_and_trainer_may_differ_where_they_are_meant_to(change):
  config = configs.default()
  configs._override(config, change)
  told, _ = watched(alarms.Health(config, 'float32'), [BAD['probs_gap']] * 3)
  assert told == []


def test_in_bfloat16_the_gap_may_be_wider_and_the_bound_can_be_set():
  row = {'training/rollout_probs_diff_mean': 5e-3}
  assert watched(alarms.Health(configs.default(), 'bfloat16'), [row])[0] == []
  assert watched(made(health__probs_gap=0.02), [row])[0] == []
  assert watched(made(), [row])[0]


def test_a_run_ends_where_that_is_asked():
  own = made(health__stop=('entropy',), health__steps=2)
  for name, ends in (('truncated', False), ('entropy', True)):
    for step in range(2):
      _, alarms = own.observe(WELL | BAD[name] | {'training/global_step': step})
    assert [alarm.name for alarm in alarms] == [name]
    if not ends:
      own.check(alarms)
    else:
      with pytest.raises(
        UserError, match='config.monitoring.alarms.stop names entropy: entropy for 2 steps'
      ):
        own.check(alarms)


def test_it_goes_on_where_a_run_is_continued():
  rows = [BAD['entropy']] * 6 + [BAD['entropy'] | BAD['grading']] * 6
  want, _ = watched(made(), rows)
  before = made()
  told, _ = watched(before, rows[:8])
  after = made()
  after.load_state_dict(json.loads(json.dumps(before.state_dict())))
  assert told + watched(after, rows[8:], start=8)[0] == want and len(want) == 2


@pytest.mark.parametrize(
  'name, value, told',
  [
    (
      'entropy',
      -1.0,
      'config.monitoring.alarms.entropy=-1.0 must be a finite number from 0 to inf',
    ),
    ('truncated', 1.5, 'config.monitoring.alarms.truncated=1.5 must be'),
    ('failed', -0.1, 'config.monitoring.alarms.failed=-0.1 must be'),
    ('probs_gap', 2.0, 'config.monitoring.alarms.probs_gap=2.0 must be'),
    ('steps', 0, 'config.monitoring.alarms.steps=0 must be a whole number'),
    ('right_rollouts', 0, 'config.monitoring.alarms.right_rollouts=0 must be a whole number'),
    ('stop', ('entrpy',), "config.monitoring.alarms.stop names 'entrpy'; choose of: all_right"),
  ],
)
def test_bad_settings_are_told(name, value, told):
  config = configs.default()
  config.monitoring.alarms[name] = value
  with pytest.raises(UserError, match=told):
    alarms.Health(config, 'float32')


def small(folder, **changes):
  few = dict(steps=5, evaluation=dict(every=0, prompts=0, samples=0))
  return tiny_job.config_file(folder, **few | changes)


def test_a_healthy_run_says_nothing_and_one_with_alarms_goes_on_exactly(tmp_path):
  """The second has a bound that every policy breaks: told once, also where the run is continued after it."""
  out = tiny_job.finish(
    tiny_job.start(small(tmp_path, monitoring=dict(alarms=dict(steps=3))), tmp_path / 'well')
  )
  assert 'warning' not in out
  rows = tiny_job.rows(tmp_path / 'well')
  assert {name for name in rows[0] if name.startswith('health/')} == {
    f'health/{name}' for name in alarms.NAMES
  }
  assert not any(row[f'health/{name}'] for row in rows for name in alarms.NAMES)
  assert rows[0]['actor/update_norm'] == 0 and all(row['actor/update_norm'] > 0 for row in rows[1:])
  config = small(tmp_path, monitoring=dict(alarms=dict(steps=3, entropy=9.0)))
  first = tiny_job.finish(tiny_job.start(config, tmp_path / 'run', '--config.steps=4'))
  again = tiny_job.finish(tiny_job.start(config, tmp_path / 'run'))
  assert first.count('warning: entropy for 3 steps, at step 3') == 1
  assert 'warning' not in again
  told = [row['health/entropy'] for row in tiny_job.rows(tmp_path / 'run')]
  assert told == [0, 0, 0, 1, 1]
  for one, other in zip(rows, tiny_job.rows(tmp_path / 'run'), strict=True):
    assert one | {'health/entropy': 0} == other | {'health/entropy': 0}


def refused(config: str, run) -> str:
  """What a run printed that ended with a sentence."""
  process = tiny_job.start(config, run)
  told, _ = process.communicate(timeout=250)
  assert process.returncode == 2 and 'Traceback' not in told, told
  return told


def test_the_batch_of_a_skipped_update_is_kept_and_the_run_ends_after_some(tmp_path):
  """A learning rate beyond all bounds: the weights overflow, and the gradient after that."""
  config = small(tmp_path, steps=20, optimizer=dict(learning_rate=1e38, max_skipped=2))
  run = tmp_path / 'run'
  told = refused(config, run)
  assert 'error: config.optimizer.max_skipped=2' in told
  rows = tiny_job.rows(run)
  (step,) = [row['training/global_step'] for row in rows if row['actor/skipped_updates'] == 1]
  path = run / f'non_finite/step_{step:06d}'
  assert f'{path}.npz' in told.replace('\n', '') and 'non_finite, at step' in told
  assert sorted(os.listdir(path.parent)) == [f'{path.name}.jsonl', f'{path.name}.npz']
  with np.load(f'{path}.npz') as arrays:
    length_B, reward_B = arrays['rollout.length_B'], arrays['reward_B']
  words = [json.loads(line) for line in open(f'{path}.jsonl')]
  # What call `step` learned was sampled, and graded, in the one before.
  with open(run / f'rollouts/step_{step - 1:06d}.jsonl') as file:
    before = [json.loads(line) for line in file]
  assert [(x['input'], x['output'], x['score']) for x in words] == [
    (x['input'], x['output'], x['score']) for x in before
  ]
  assert length_B.tolist() == [x['length'] for x in before] and len(reward_B) == len(before)


def test_a_run_whose_answers_cannot_be_graded_ends_with_the_reason(tmp_path):
  config = small(tmp_path, rewards=dict(fn='judges:broken'), sft=None)
  told = refused(config, tmp_path / 'run')
  assert (
    'error: config.rewards.failed.stop_share=0.5: 48 of 48 rollouts of the last 3 steps' in told
  )
  assert '(0 timeout, 0 crash, 48 error)' in told and 'no such column' in told
  assert 'warning: grading, at step 0: 100% of the rollouts' in told
  rows = tiny_job.rows(tmp_path / 'run')
  assert [row['grade/dropped'] for row in rows] == [16] * 3
  assert [row['training/trained_tokens'] for row in rows] == [0] * 3
