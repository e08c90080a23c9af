"""Curves and distributions: means and shares that can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl_llm.report import alarm_history, series


def test_a_curve_has_a_band_of_one_deviation_and_leaves_out_what_is_not_finite():
  steps = np.arange(12.0)
  values = np.where(steps % 2 == 0, 1.0, 3.0)
  values[4] = np.nan
  told = series.curve(steps, values)
  assert told['x'] == [s for s in steps if s != 4] and told['y'][:3] == [1, 3, 1]
  # The first window is of 3 steps: 1, 3, 1.
  np.testing.assert_allclose(told['mid'][0], 5 / 3, rtol=1e-3)
  np.testing.assert_allclose(told['hi'][0] - told['mid'][0], np.std([1, 3, 1]), rtol=1e-3)
  assert series.curve(np.zeros(0), np.zeros(0))['x'] == []


def test_a_long_curve_is_told_in_few_points_with_the_same_mean():
  steps = np.arange(10_000.0)
  told = series.curve(steps, steps**2)
  assert len(told['x']) == 160
  np.testing.assert_allclose(np.mean(told['y']), (steps**2).mean(), rtol=1e-2)


def test_a_distribution_is_shares_of_each_stretch_of_steps():
  steps = np.repeat(np.arange(100), 4)
  values = np.tile([0.0, 1.0, 1.0, 2.0], 100)
  told = series.spread(steps, values)
  assert told['edges'] == [-0.5, 0.5, 1.5, 2.5]
  assert (
    told['share'] == [[0.25, 0.5, 0.25]] * 34
    and told['x'][0] == [0, 2]
    and told['x'][-1] == [99, 99]
  )
  assert told['mean'][0] == told['p50'][0] == 1 and sum(told['count']) == 400
  wide = series.spread(steps, values * 1000.5)
  assert len(wide['edges']) == 25 and np.allclose(np.sum(wide['share'], 1), 1)
  assert series.spread(np.zeros(0), np.zeros(0))['x'] == []


def flags(*values, name='entropy'):
  return [
    {
      'training/global_step': i,
      f'health/{name}': float(v),
      'actor/entropy': 0.004,
      'actor/lr': None,
    }
    for i, v in enumerate(values)
  ]


def one(rows, title='Entropy'):
  (found,) = [c for c in alarm_history.verdicts(rows, {}, True) if c['title'] == title]
  return found


def test_a_verdict_is_what_the_runs_own_alarm_said():
  assert one(flags(0, 0))['state'] == 'well' and one(flags(name='still'))['state'] == 'unknown'
  past = one(flags(0, 1, 1, 0, 1, 0))
  assert past['state'] == 'past' and past['steps'] == [[1, 2], [4, 4]]
  rows = flags(0, 0, 1)
  assert one(rows)['state'] == 'now' and alarm_history.verdicts(rows, {}, True)[0] == one(rows)
  assert alarm_history.overall(alarm_history.verdicts(rows, {}, True)).startswith(
    'Needs attention: 1 of 1'
  )
  assert one(rows)['values'] == [
    dict(name='actor/entropy', last=0.004, least=0.004, most=0.004, at=0)
  ]


def test_the_words_are_those_of_the_alarm_with_its_bound_and_remedy():
  from jaxrl_llm.config import loading
  from jaxrl_llm.monitoring import alarms

  laid = loading.default()
  (found,) = [
    c for c in alarm_history.verdicts(flags(1), laid.to_dict(), True) if c['title'] == 'Entropy'
  ]
  row = flags(1)[0]
  assert found['words'] == alarms.advice('entropy', row, alarms.bounds(laid, 'float32'))
  assert '0.0040' in found['words'] and 'config.monitoring.alarms.entropy=0.01' in found['words']


def test_every_alarm_has_its_check():
  from jaxrl_llm.monitoring import alarms

  assert set(alarm_history._CHECKS) == set(alarms.NAMES)


# metric → (a good value, a bad one) and how each is written; every card must change its sentence with its numbers.
VALUES = {
  'training/rollout_probs_diff_mean': ((1e-7, '1.0e-07'), (0.25, '2.5e-01')),
  'training/rollout_probs_diff_max': ((1e-6, '1.0e-06'), (0.5, '5.0e-01')),
  'actor/skipped_updates': ((0.0, '0 updates'), (3.0, '3 updates')),
  'actor/grad_norm': ((0.52, '0.52 now'), (0.0, '0 now')),
  'actor/update_norm': ((0.013, '0.013'), (0.0, 'by 0,')),
  'response_length/clip_ratio': ((0.01, '1.0%'), (0.844, '84.4%')),
  'actor/entropy': ((0.9, '0.9 nats'), (0.0, '0 nats')),
  'grade/failed_share': ((0.0, '0.0%'), (0.08, '8.0%')),
  'curriculum/observed_success': ((0.5, '50.0%'), (0.0, '0.0%')),
  'critic/score/min': ((0.0, 'lowest reward is 0'), (0.25, 'lowest reward is 0.25')),
  'critic/score/max': ((1.0, 'highest 1'), (0.25, 'highest 0.25')),
  'grade/unread': ((0.0, '0%'), (0.97, '97%')),
  'grade/unrewarded': ((0.0, '0%'), (0.97, '97%')),
  'grade/prompts_paid': ((0.0, '0%'), (0.4, '40%')),
}


@pytest.mark.parametrize('settings', [None, {}], ids=['bounds', 'without'])
@pytest.mark.parametrize('name', sorted(alarm_history._CHECKS))
def test_a_card_that_is_well_says_its_own_numbers(name, settings):
  from jaxrl_llm.config import loading

  settings = loading.default().to_dict() if settings is None else settings
  title, sentences = alarm_history._CHECKS[name]
  said = []
  for which in (0, 1):
    row = {'training/global_step': 7, f'health/{name}': 0.0}
    row |= {metric: VALUES[metric][which][0] for metric in sentences}
    (card,) = [c for c in alarm_history.verdicts([row], settings, True) if c['title'] == title]
    assert card['state'] == 'well'
    for metric in sentences:
      assert VALUES[metric][which][1] in card['words']
    assert '{' not in card['words'] and ('alarm' in card['words']) <= bool(settings)
    said.append(card['words'])
  assert said[0] != said[1]


def test_a_card_without_numbers_says_so():
  row = {'training/global_step': 0, 'health/entropy': 0.0}
  assert one([row])['words'] == 'The run recorded no number of it.'
