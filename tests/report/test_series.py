"""Curves, distributions and health checks against values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl_llm.report import alarm_history, series


def test_a_curve_has_a_band_of_one_deviation_and_omits_non_finite_values():
  steps = np.arange(12.0)
  values = np.where(steps % 2 == 0, 1.0, 3.0)
  values[4] = np.nan
  result = series.curve(steps, values)
  assert result['x'] == [s for s in steps if s != 4] and result['y'][:3] == [1, 3, 1]
  # The first window is of 3 steps: 1, 3, 1.
  np.testing.assert_allclose(result['mid'][0], 5 / 3, rtol=1e-3)
  np.testing.assert_allclose(result['hi'][0] - result['mid'][0], np.std([1, 3, 1]), rtol=1e-3)
  assert series.curve(np.zeros(0), np.zeros(0))['x'] == []


def test_a_long_curve_has_few_points_with_the_same_mean():
  steps = np.arange(10_000.0)
  result = series.curve(steps, steps**2)
  assert len(result['x']) == 160
  np.testing.assert_allclose(np.mean(result['y']), (steps**2).mean(), rtol=1e-2)


def test_a_distribution_has_shares_for_each_range_of_steps():
  steps = np.repeat(np.arange(100), 4)
  values = np.tile([0.0, 1.0, 1.0, 2.0], 100)
  result = series.distribution_by_step(steps, values)
  assert result['edges'] == [-0.5, 0.5, 1.5, 2.5]
  assert (
    result['share'] == [[0.25, 0.5, 0.25]] * 34
    and result['x'][0] == [0, 2]
    and result['x'][-1] == [99, 99]
  )
  assert result['mean'][0] == result['p50'][0] == 1 and sum(result['count']) == 400
  wide = series.distribution_by_step(steps, values * 1000.5)
  assert len(wide['edges']) == 25 and np.allclose(np.sum(wide['share'], 1), 1)
  assert series.distribution_by_step(np.zeros(0), np.zeros(0))['x'] == []


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


def only_check(rows, title='Entropy'):
  (found,) = [c for c in alarm_history.check_results(rows, {}, True) if c['title'] == title]
  return found


def test_a_check_shows_the_alarms_that_the_run_recorded():
  assert (
    only_check(flags(0, 0))['state'] == 'passing'
    and only_check(flags(name='still'))['state'] == 'not_recorded'
  )
  past = only_check(flags(0, 1, 1, 0, 1, 0))
  assert past['state'] == 'recovered' and past['steps'] == [[1, 2], [4, 4]]
  rows = flags(0, 0, 1)
  assert only_check(rows)['state'] == 'failing' and alarm_history.check_results(rows, {}, True)[
    0
  ] == only_check(rows)
  assert alarm_history.summary(alarm_history.check_results(rows, {}, True)).startswith(
    'Needs attention: 1 of 1'
  )
  assert only_check(rows)['values'] == [
    dict(name='actor/entropy', last=0.004, least=0.004, most=0.004, at=0)
  ]


def test_a_failing_check_has_the_advice_of_its_alarm():
  from jaxrl_llm.config import loading
  from jaxrl_llm.monitoring import alarms

  config = loading.default()
  (found,) = [
    c
    for c in alarm_history.check_results(flags(1), config.to_dict(), True)
    if c['title'] == 'Entropy'
  ]
  row = flags(1)[0]
  assert found['text'] == alarms.advice('entropy', row, alarms.bounds(config, 'float32'))
  assert '0.0040' in found['text'] and 'config.monitoring.alarms.entropy=0.01' in found['text']


def test_every_alarm_has_its_check():
  from jaxrl_llm.monitoring import alarms

  assert set(alarm_history._CHECKS) == set(alarms.NAMES)


# metric → (a good value, a bad one), each with its text; the sentence of a check must change with its numbers.
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
def test_a_passing_check_states_its_numbers(name, settings):
  from jaxrl_llm.config import loading

  settings = loading.default().to_dict() if settings is None else settings
  title, sentences = alarm_history._CHECKS[name]
  texts = []
  for which in (0, 1):
    row = {'training/global_step': 7, f'health/{name}': 0.0}
    row |= {metric: VALUES[metric][which][0] for metric in sentences}
    (check,) = [
      c for c in alarm_history.check_results([row], settings, True) if c['title'] == title
    ]
    assert check['state'] == 'passing'
    for metric in sentences:
      assert VALUES[metric][which][1] in check['text']
    assert '{' not in check['text'] and ('alarm' in check['text']) <= bool(settings)
    texts.append(check['text'])
  assert texts[0] != texts[1]


def test_a_check_without_numbers_has_a_text():
  row = {'training/global_step': 0, 'health/entropy': 0.0}
  assert only_check([row])['text'] == 'The run recorded no number of it.'
