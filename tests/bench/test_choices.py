"""The variants of rules in the benchmark of prompt selection, and what its table compares them with."""

from __future__ import annotations

import json

import jax
import pytest

from jaxrl_llm.config import loading as configs
from tests.bench import choices

EVERY, STEPS = 15, 90


def test_a_variant_changes_its_setting_and_no_other():
  plain, half = (choices.job('tiny', rule, 0) for rule in ('default', 'default-half'))
  assert (plain.prompts, half.prompts, plain.steps, half.steps) == (64, 32, STEPS, STEPS)
  both = choices.job('tiny', 'default-half-twice', 0)
  assert (both.prompts, both.learner.passes, half.learner.passes) == (32, 2, 1)
  both.prompts, both.learner.passes = plain.prompts, plain.learner.passes
  assert both.to_dict() == plain.to_dict()


def test_half_of_the_prompts_that_overrides_ask_for():
  assert choices.job('tiny', 'uniform-half', 0, ('prompts=4', 'steps=0')).prompts == 2
  assert choices.job('tiny', 'uniform-half', 0, ('prompts=4', 'steps=0')).steps == 0


def test_half_of_a_number_of_prompts_that_the_machine_gives():
  """The job of sums leaves `prompts` at 0: 4 on a CPU, or one for each of its devices where these are more."""
  assert configs.load('dapo').prompts == 0
  assert choices.job('sums', 'default-half', 0).prompts == max(4, jax.device_count()) // 2


def test_a_first_evaluation_is_shared_once(tmp_path):
  """Its samples, with the seed of the run that gets them; a run that has its own keeps it, and nothing is made up."""
  source, run = tmp_path / 'first', tmp_path / 'run'
  choices.share_first_evaluation(str(source), str(run), 3, 'mine')
  assert not run.exists()
  (source / 'eval').mkdir(parents=True)
  record = dict(model='m', settings=dict(seed=0, n=4), metrics={'acc': 0.5})
  (source / 'eval' / 'step_000000.json').write_text(json.dumps(record))
  choices.share_first_evaluation(str(source), str(run), 3, 'mine')
  path = run / 'eval' / 'step_000000.json'
  expected = record | dict(model='mine', settings=dict(seed=3, n=4))
  assert json.loads(path.read_text()) == expected
  choices.share_first_evaluation(str(source), str(run), 4, 'other')
  assert json.loads(path.read_text())['settings']['seed'] == 3
  choices.share_first_evaluation(str(source), str(tmp_path / 'more'), 4, 'other')
  more = json.loads((tmp_path / 'more' / 'eval' / 'step_000000.json').read_text())
  assert more['model'] == 'other'


def write_run(folder, points, prompts):
  """A finished run with these accuracies in percent, equal for greedy and mean@4."""
  (folder / 'eval').mkdir(parents=True)
  for at, point in enumerate(points):
    metrics = {f'val-core/all/acc/{kind}': point / 100 for kind in ('greedy', 'mean@4')}
    path = folder / 'eval' / f'step_{EVERY * at:06d}.json'
    path.write_text(json.dumps(dict(metrics=metrics)))
  row = {
    'timing_s/gen_update': 1.0,
    'timing_s/step': 2.0,
    'perf/rollouts': 8 * prompts,
    'frac_reward_zero_std': 0.25,
  }
  (folder / 'metrics.jsonl').write_text('\n'.join([json.dumps(row)] * STEPS))


@pytest.fixture
def printed(tmp_path, capsys):
  """Lines of the table for greedy accuracy, by rule."""
  for seed, shift in ((0, 0), (1, 2)):
    ends = {'uniform': 40, 'uniform-twice': 50, 'default-half': 44, 'default-twice': 56}
    for rule, end in ends.items():
      # The end of default-half differs by 4 and by 0, that of default-twice by 6 in both seeds.
      shifted = end + (shift if rule != 'default-half' else -shift)
      points = [20, 20, 20, 20, 20, 20, shifted]
      write_run(tmp_path / f'{rule}_{seed}', points, 32 if 'half' in rule else 64)
  (tmp_path / 'uniform_2').mkdir()  # begun, not finished
  write_run(tmp_path / 'else_0', [20] * 7, 64)  # of no rule
  choices.table('tiny', str(tmp_path))
  text = capsys.readouterr().out.split('\nmean@4')[0]
  return {line.split()[0]: line for line in text.splitlines() if ' seeds ' in line}


def test_a_finished_run_without_its_checkpoints_is_finished(tmp_path):
  write_run(tmp_path / 'default_0', [20] * 7, 64)
  (tmp_path / 'default_0' / 'checkpoints' / '90').mkdir(parents=True)
  kept = sorted(path.name for path in (tmp_path / 'default_0').iterdir())
  choices.drop_checkpoints(str(tmp_path / 'default_0'))
  kept.remove('checkpoints')
  assert sorted(path.name for path in (tmp_path / 'default_0').iterdir()) == kept
  assert choices.finished('tiny', str(tmp_path)) == {'default': {'0': f'{tmp_path}/default_0'}}


def test_rules_of_two_passes_are_compared_with_uniform_of_two_passes(printed):
  assert list(printed) == ['uniform', 'uniform-twice', 'default-half', 'default-twice']
  assert '+0.0 ± 0.0' in printed['uniform-twice'] and '+6.0 ± 0.0' in printed['default-twice']


def test_differences_are_paired_by_seed(printed):
  assert '+2.0 ± 2.0' in printed['default-half'] and 'mixed 75.0 %' in printed['default-half']


def test_rollouts_and_seconds_to_the_end_of_uniform(printed):
  # Its mean rises from 20 to 43 in the last 15 of 90 steps of 256 rollouts and 2 seconds; uniform's end is 41.
  rollouts, seconds = (15 * 21 / 23 + 75) * 256, (15 * 21 / 23 + 75) * 2
  assert f'{rollouts:6.0f} of 23040' in printed['default-half']
  assert f'{seconds:5.0f} of 180 s' in printed['default-half']
