"""Alarms on rows of metrics and in real runs: reported once, with advice, and silent in a healthy run."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import tiny_job

from jaxrl_llm.config import loading as configs
from jaxrl_llm.monitoring import alarms
from jaxrl_llm.types import UserError

HEALTHY = {
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
# A part of the advice of each alarm, with its numbers.
ADVICE = dict(
  non_finite='Lower config.optimizer.learning_rate',
  probs_gap='2.0e-04 is above 0.0001: the tokens were not sampled from the policy that is trained',
  grading='20% of the rollouts could not be graded (0 time-outs, 0 crashes, 6 errors',
  format='No completion of the first batch holds an answer that config.rewards.fn can read',
  unrewarded='No completion of the first batch got any reward',
  prompt_paid='75% of the prompts get the full reward when graded as completions',
  still='gradient 1.2e+00, update 0.0e+00, although the learning rate is 1.0e-05 and rewards differ within groups',
  entropy='Entropy is down to 0.0050 nats per token (config.monitoring.alarms.entropy=0.01)',
  all_wrong='the format that config.rewards.fn reads',
  all_right='Use harder rows',
  same_reward='Does config.rewards distinguish good answers from bad ones?',
  truncated='100% of the rollouts were cut off',
)


def health(**changes) -> alarms.Health:
  config = configs.default()
  for name, value in changes.items():
    configs._override(config, f'--config.{name.replace("__", ".")}={value}')
  return alarms.Health(config, 'float32')


def observed(monitor: alarms.Health, rows, start=0):
  """Returns the alarms as (step, name, text), and {alarm: on} for each row."""
  reported, states = [], []
  for step, row in enumerate(rows, start):
    metrics, alarms = monitor.observe(HEALTHY | row | {'training/global_step': step})
    reported += [(step, alarm.name, alarm.text) for alarm in alarms]
    states.append({name.removeprefix('health/'): on for name, on in metrics.items()})
  return reported, states


def test_every_alarm_has_a_condition_and_an_advice():
  assert (
    set(BAD) == set(ADVICE) == set(alarms.NAMES) == set(alarms.conditions(HEALTHY, health().bounds))
  )


def test_a_healthy_run_raises_no_alarm():
  reported, states = observed(health(), [{}] * 30)
  assert reported == [] and not any(on for row in states for on in row.values())


@pytest.mark.parametrize('name', alarms.NAMES)
def test_each_alarm_is_reported_once_with_advice(name):
  reported, states = observed(health(), [{}] * 2 + [BAD[name]] * 25)
  first = 11 if name in alarms.LASTING else 2
  assert [(step, alarm) for step, alarm, _ in reported] == [(first, name)]
  assert (
    ADVICE[name] in reported[0][2]
    and f'{name}' in reported[0][2]
    and f'step {first}:' in reported[0][2]
  )
  for step, row in enumerate(states):
    assert row == {other: float(other == name and step >= first) for other in alarms.NAMES}


@pytest.mark.parametrize('name', alarms.NAMES)
def test_an_alarm_is_reported_again_only_after_quiet_steps(name):
  """An intermittent condition must not flood the console."""
  need = 10 if name in alarms.LASTING else 1
  rows = [BAD[name]] * need + [{}] * 9 + [BAD[name]] * need + [{}] * 10 + [BAD[name]] * need
  reported, states = observed(health(), rows)
  assert [step for step, *_ in reported] == [need - 1, len(rows) - 1]
  assert [row[name] for row in states].count(1.0) == 3


def test_differing_rewards_raise_an_alarm_although_every_group_is_masked():
  """The mask may be the fault: gradient 0, all groups masked, and rewards from 0 to 0.25."""
  row = {'actor/grad_norm': 0.0, 'actor/update_norm': 0.0, 'frac_reward_zero_std': 1.0}
  dense = row | {'critic/score/group_std': 0.08}
  assert [name for _, name, _ in observed(health(), [dense] * 12)[0]] == ['still']
  for quiet in (
    row | {'critic/score/group_std': 0.0},
    row | {'critic/score/group_std': 1e-7},
    dense | {'actor/lr': 0.0},
    dense | {'training/trained_tokens': 0.0},
  ):
    assert observed(health(), [quiet] * 12)[0] == []
  taught = dense | {'training/trained_tokens': 0.0, 'training/demonstration_tokens': 40.0}
  assert [name for _, name, _ in observed(health(), [taught] * 12)[0]] == ['still']


GRADED = {
  'grade/right': 0.0, 'grade/lowest': 0.05, 'grade/highest': 0.2, 'grade/out_of_bounds': 0.0,
}  # fmt: skip


def test_scores_that_never_reach_right_are_reported_once():
  best = GRADED | {'grade/highest': 0.25}
  rows = [GRADED] * 20 + [best] * 11 + [GRADED] * 30
  reported, _ = observed(health(), rows)
  assert [(step, name) for step, name, _ in reported] == [(31, 'never_right')]  # 32 rollouts a step
  text = reported[0][2]
  assert 'No score of 1024 rollouts reached config.rewards.right=1: the highest is 0.25' in text
  assert 'fraction of the way from 0 to 1' in text and '25% at best' in text
  assert text.endswith('--config.rewards.right=0.25.')


@pytest.mark.parametrize(
  'rows',
  [
    [GRADED] * 10 + [GRADED | {'grade/right': 0.03}] + [GRADED] * 60,  # one score reached it
    [GRADED | {'grade/highest': 0.05}] * 60,  # equal scores have other alarms
    [GRADED] * 31,
    [{}] * 60,
  ],
)
def test_never_right_is_silent_after_a_right_score_or_for_few_rollouts(rows):
  assert observed(health(), rows)[0] == []


def test_scores_out_of_bounds_are_reported_once_with_wider_bounds():
  wide = GRADED | {'grade/right': 0.1, 'grade/out_of_bounds': 0.125, 'grade/lowest': -1.5}
  reported, _ = observed(health(), [GRADED | {'grade/right': 0.1}] * 2 + [wide, GRADED] * 20)
  assert [(step, name) for step, name, _ in reported] == [(2, 'out_of_bounds')]
  assert '12.5% of the scores lie outside of 0 to 1: they range from -1.5 to 0.2' in reported[0][2]
  assert reported[0][2].endswith("--config.rewards.bounds='(-1.5, 1)'.")


def test_a_restart_does_not_repeat_an_alarm_which_may_stop_the_run():
  rows = [GRADED] * 40
  first, second = health(), health()
  observed(first, rows[:20])
  second.load_state_dict(json.loads(json.dumps(first.state_dict())))
  assert [step for step, *_ in observed(second, rows, start=20)[0]] == [31]
  third = health(monitoring__alarms__stop=('never_right',))
  third.load_state_dict(json.loads(json.dumps(second.state_dict())))
  reported, _ = observed(third, rows, start=60)
  assert reported == []
  stopping = health(
    monitoring__alarms__stop=('never_right',), monitoring__alarms__right_rollouts=32
  )
  _, alarms = stopping.observe(HEALTHY | GRADED | {'training/global_step': 0})
  with pytest.raises(
    UserError, match='config.monitoring.alarms.stop names never_right: never_right, at step 0'
  ):
    stopping.check(alarms)


def test_an_intermittent_condition_does_not_last():
  rows = ([BAD['entropy']] * 9 + [{}]) * 5
  assert observed(health(), rows)[0] == []


@pytest.mark.parametrize('name', ['entropy', 'still', 'all_wrong', 'truncated'])
def test_steps_without_an_update_or_rollouts_do_not_change_the_counts(name):
  empty = dict.fromkeys(HEALTHY, 0.0) | {'frac_reward_zero_std': 1.0}
  for metric in ('critic/score/min', 'critic/score/max', 'response_length/clip_ratio'):
    empty[metric] = float('nan')
  reported, _ = observed(health(), [empty] * 30)
  assert reported == []
  reported, _ = observed(health(), [BAD[name], empty] * 10)
  assert [(step, alarm) for step, alarm, _ in reported] == [(18, name)]


@pytest.mark.parametrize(
  'row, name',
  [
    ({'actor/pg_loss': float('nan')}, 'non_finite'),
    ({'actor/grad_norm': float('inf')}, 'non_finite'),
    ({'actor/grad_norm': 0.0}, 'still'),
  ],
)
def test_other_conditions_of_an_alarm(row, name):
  reported, _ = observed(health(monitoring__alarms__steps=1), [row])
  assert [alarm for _, alarm, _ in reported] == [name]


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
def test_harmless_rows(row):
  assert observed(health(monitoring__alarms__steps=1), [row])[0] == []


def gap_bound(dtype, **changes):
  config = configs.default()
  config.update(changes)
  return alarms.Health(config, dtype).bounds.probs_gap


def test_the_gap_of_rounded_weights_is_no_alarm():
  rounded = lambda name: dict(rollout=dict(weights_dtype=name))  # noqa: E731
  assert gap_bound('float32') == 1e-4 and gap_bound('bfloat16') == 1e-2
  assert (
    gap_bound('float32', **rounded('bfloat16'))
    == gap_bound('bfloat16', **rounded('bfloat16'))
    == 1e-2
  )
  assert gap_bound('float32', **rounded('int8')) == gap_bound('bfloat16', **rounded('int8')) == 0.04
  assert gap_bound('bfloat16', **rounded('float8_e4m3fn')) == 0.1
  # No gap is expected where the update rounds likewise. A configured bound has precedence.
  assert gap_bound('float32', **rounded('int8'), learner=dict(quantize=True)) == 1e-4
  assert gap_bound('float32', **rounded('int8'), monitoring=dict(alarms=dict(probs_gap=0.3))) == 0.3


@pytest.mark.parametrize(
  'change',
  [
    '--config.mode=lag',
    '--config.learner.minibatches=2',
    '--config.rollout.stop.fn=rounds',
    '--config.rollout.cache_dtype=int8',
    '--config.curriculum.hint.fn=guide',
    '--config.replay.collect.fn=mixed',
    '--config.replay.reuse.fn=mixed_groups',
    '--config.replay.reuse.fn=self_imitation',
    '--config.replay.reuse.fn=recomposed',
  ],
)
def test_no_gap_alarm_where_sampler_and_trainer_differ_on_purpose(change):
  config = configs.default()
  configs._override(config, change)
  reported, _ = observed(alarms.Health(config, 'float32'), [BAD['probs_gap']] * 3)
  assert reported == []


def test_the_gap_bound_is_wider_in_bfloat16_and_configurable():
  row = {'training/rollout_probs_diff_mean': 5e-3}
  assert observed(alarms.Health(configs.default(), 'bfloat16'), [row])[0] == []
  assert observed(health(monitoring__alarms__probs_gap=0.02), [row])[0] == []
  assert observed(health(), [row])[0]


def test_an_alarm_in_stop_ends_the_run():
  monitor = health(monitoring__alarms__stop=('entropy',), monitoring__alarms__steps=2)
  for name, ends in (('truncated', False), ('entropy', True)):
    for step in range(2):
      _, alarms = monitor.observe(HEALTHY | BAD[name] | {'training/global_step': step})
    assert [alarm.name for alarm in alarms] == [name]
    if not ends:
      monitor.check(alarms)
    else:
      with pytest.raises(
        UserError, match='config.monitoring.alarms.stop names entropy: entropy for 2 steps'
      ):
        monitor.check(alarms)


def test_counts_continue_after_a_restart():
  rows = [BAD['entropy']] * 6 + [BAD['entropy'] | BAD['grading']] * 6
  expected, _ = observed(health(), rows)
  before = health()
  reported, _ = observed(before, rows[:8])
  after = health()
  after.load_state_dict(json.loads(json.dumps(before.state_dict())))
  assert reported + observed(after, rows[8:], start=8)[0] == expected and len(expected) == 2


@pytest.mark.parametrize(
  'name, value, message',
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
def test_bad_settings_are_refused(name, value, message):
  config = configs.default()
  config.monitoring.alarms[name] = value
  with pytest.raises(UserError, match=message):
    alarms.Health(config, 'float32')


def small_config(folder, **changes):
  defaults = dict(steps=5, evaluation=dict(every=0, prompts=0, samples=0))
  return tiny_job.config_file(folder, **defaults | changes)


def test_alarms_do_not_change_a_run(tmp_path):
  """The second run has a bound that every policy violates: one report, also over a restart."""
  out = tiny_job.finish(
    tiny_job.start(
      small_config(tmp_path, monitoring=dict(alarms=dict(steps=3))), tmp_path / 'healthy'
    )
  )
  assert 'warning' not in out
  rows = tiny_job.rows(tmp_path / 'healthy')
  assert {name for name in rows[0] if name.startswith('health/')} == {
    f'health/{name}' for name in alarms.NAMES
  }
  assert not any(row[f'health/{name}'] for row in rows for name in alarms.NAMES)
  assert rows[0]['actor/update_norm'] == 0 and all(row['actor/update_norm'] > 0 for row in rows[1:])
  config = small_config(tmp_path, monitoring=dict(alarms=dict(steps=3, entropy=9.0)))
  first = tiny_job.finish(tiny_job.start(config, tmp_path / 'run', '--config.steps=4'))
  second = tiny_job.finish(tiny_job.start(config, tmp_path / 'run'))
  assert first.count('warning: entropy for 3 steps, at step 3') == 1
  assert 'warning' not in second
  entropy = [row['health/entropy'] for row in tiny_job.rows(tmp_path / 'run')]
  assert entropy == [0, 0, 0, 1, 1]
  for expected, actual in zip(rows, tiny_job.rows(tmp_path / 'run'), strict=True):
    assert expected | {'health/entropy': 0} == actual | {'health/entropy': 0}


def output_of_refused_run(config: str, run) -> str:
  """Returns the output of a run that ends with a UserError."""
  process = tiny_job.start(config, run)
  output, _ = process.communicate(timeout=250)
  assert process.returncode == 2 and 'Traceback' not in output, output
  return output


def test_the_batch_of_a_skipped_update_is_saved_and_max_skipped_ends_the_run(tmp_path):
  """A huge learning rate: the weights overflow, then the gradient."""
  config = small_config(tmp_path, steps=20, optimizer=dict(learning_rate=1e38, max_skipped=2))
  run = tmp_path / 'run'
  output = output_of_refused_run(config, run)
  assert 'error: config.optimizer.max_skipped=2' in output
  rows = tiny_job.rows(run)
  (step,) = [row['training/global_step'] for row in rows if row['actor/skipped_updates'] == 1]
  path = run / f'non_finite/step_{step:06d}'
  assert f'{path}.npz' in output.replace('\n', '') and 'non_finite, at step' in output
  assert sorted(os.listdir(path.parent)) == [f'{path.name}.jsonl', f'{path.name}.npz']
  with np.load(f'{path}.npz') as arrays:
    length_B, reward_B = arrays['rollout.length_B'], arrays['reward_B']
  entries = [json.loads(line) for line in open(f'{path}.jsonl')]
  # The batch learned in `step` was sampled and graded one step before.
  with open(run / f'rollouts/step_{step - 1:06d}.jsonl') as file:
    before = [json.loads(line) for line in file]
  assert [(x['input'], x['output'], x['score']) for x in entries] == [
    (x['input'], x['output'], x['score']) for x in before
  ]
  assert length_B.tolist() == [x['length'] for x in before] and len(reward_B) == len(before)


def test_a_run_that_cannot_be_graded_ends_with_the_reason(tmp_path):
  config = small_config(tmp_path, rewards=dict(fn='judges:broken'), sft=None)
  output = output_of_refused_run(config, tmp_path / 'run')
  assert (
    'error: config.rewards.failed.stop_share=0.5: 48 of 48 rollouts of the last 3 steps' in output
  )
  assert '(0 timeout, 0 crash, 48 error)' in output and 'no such column' in output
  assert 'warning: grading, at step 0: 100% of the rollouts' in output
  rows = tiny_job.rows(tmp_path / 'run')
  assert [row['grade/dropped'] for row in rows] == [16] * 3
  assert [row['training/trained_tokens'] for row in rows] == [0] * 3
