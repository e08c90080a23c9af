"""The curriculum benchmark: its worlds, the accounting of its baselines, its measures, and its reader of logs."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from tests.bench import curriculum
from tests.bench.lib import selection_rules, worlds


def small(seed=0, **axes) -> worlds.World:
  settings = dict(size=256, prompts=8, rollouts=8 * 8 * 80) | axes
  return worlds.mixed_skills(4.4, 0.3, **settings)(np.random.default_rng((seed, 0)))


class RecordingRule:
  """Selects the first prompts and records its calls."""

  def __init__(self, world, seed):
    self.world, self.log = world, []

  def step(self, step, generate):
    self.log.append(('selected', step))
    index = np.arange(self.world.prompts)
    k = generate(index)
    return index, k, np.full_like(k, self.world.group)

  def observe(self, index, k, n):
    self.log.append(('observed', sum(kind == 'observed' for kind, _ in self.log)))

  def predict(self, index):
    return np.full(len(index), 0.5), np.full(len(index), 1 / 12), np.ones(len(index))


# Worlds.


@pytest.mark.parametrize('wrong', [False, True])
@pytest.mark.parametrize('flips', [0.0, 0.05, 0.3])
def test_the_truth_of_a_reward_is_its_covariance_with_being_right(wrong, flips):
  world = small(flips=flips, wrong=float(wrong))
  rate_N = world.rate()
  outcomes = []  # (probability, right, reward) of all that may happen to one answer
  for right, mistake, flipped in itertools.product((0, 1), repeat=3):
    probability = (rate_N if right else 1 - rate_N) * (flips if flipped else 1 - flips)
    probability = probability * (worlds._MISTAKE if mistake else 1 - worlds._MISTAKE)
    label = (not right and mistake) if wrong else right
    outcomes.append((probability, right, float(label) if not flipped else 1.0 - label))
  mean = lambda f: sum(p * f(right, reward) for p, right, reward in outcomes)  # noqa: E731
  reward = mean(lambda _, r: r)
  covariance = mean(lambda right, r: right * r) - rate_N * reward
  np.testing.assert_allclose(world.graded(), reward, rtol=1e-12)
  index = np.arange(len(rate_N))
  np.testing.assert_allclose(world.truth(index), covariance / (reward * (1 - reward)), rtol=1e-9)
  assert (world.truth(index) < 0).all() if wrong else (world.truth(index) > 0).all()


def test_only_mixed_groups_help_and_wrong_labels_harm():
  random = np.random.default_rng(0)
  index, none = np.arange(8), np.array([0, 8] * 4)
  world = small(noise=0.0)
  before = world.held_out()
  world.learn(index, none, np.full(8, 8), world.truth(index), 0.0, random)
  assert world.held_out() == before
  world.learn(index, np.full(8, 4), np.full(8, 8), world.truth(index), 0.0, random)
  assert (
    world.held_out() > before and (world.memory_N[:8] > 0).all() and not world.memory_N[8:].any()
  )
  world = small(noise=0.0, wrong=1.0)
  before = world.held_out()
  world.learn(index, np.full(8, 4), np.full(8, 8), world.truth(index), 0.0, random)
  assert world.held_out() < before


def test_skills_jump_once_at_half_of_the_rollouts_and_fade_at_every_step():
  random, index, none = np.random.default_rng(0), np.arange(8), np.zeros(8, int)
  world = small(noise=0.0, drift=1.5)
  jumps = []
  for progress in (0.2, 0.49, 0.5, 0.7):
    before = world.skill_K
    world.learn(index, none, np.full(8, 8), np.ones(8), progress, random)
    jumps.append(bool((world.skill_K != before).any()))
  assert jumps == [False, False, True, False]
  world = small(noise=0.0, forgetting=0.1)
  world.skill_K[:] = 1.0
  world.learn(index, none, np.full(8, 8), np.ones(8), 0.0, random)
  np.testing.assert_allclose(world.skill_K, 0.9)


def test_anchors_rank_prompts_by_their_quality():
  rank = {}
  for quality in ('good', 'poor', 'shuffled'):
    world = small(size=2048, anchors=quality)
    rank[quality] = curriculum._spearman(world.anchor_Nx2.mean(1), world.rate())
  assert rank['good'] > 0.8 and 0.3 < rank['poor'] < 0.7 and abs(rank['shuffled']) < 0.1


def test_the_same_seed_is_the_same_world_and_names_are_checked():
  one, other = worlds.make('hard+flips+g16', 3), worlds.make('hard+flips+g16', 3)
  assert np.array_equal(one.rate(), other.rate()) and one.group == 16 and one.flips == 0.05
  assert not np.array_equal(one.rate(), worlds.make('hard+flips+g16', 4).rate())
  with pytest.raises(SystemExit, match='no world'):
    worlds.make('hard+fog', 0)


# Rules.


@pytest.mark.parametrize('rule', selection_rules.RULES)
def test_every_rule_runs_and_counts_its_rollouts(rule):
  world = small(rollouts=8 * 8 * 6)
  result = curriculum.run(world, rule, 0)
  assert 0 <= result['used'] <= 1 and 0 < result['visited'] <= 1 and result['to_target'] is not None


def test_an_oracle_beats_uniform_selection():
  results = {r: curriculum.run(small(rollouts=8 * 8 * 300), r, 0) for r in ('uniform', 'oracle')}
  assert results['oracle']['used'] > results['uniform']['used'] + 0.3
  assert results['oracle']['held_out'] > results['uniform']['held_out'] + 0.03


@pytest.mark.parametrize('carry', [False, True])
def test_dynamic_sampling_learns_from_mixed_groups_alone(carry):
  world = small()
  rule = selection_rules.Dynamic(world, 0, carry=carry)
  answers = iter([[4, 0, 4, 8, 4, 4, 8, 4], [1] * 6 + [0, 0], [2] * 5 + [0] * 3])
  drawn = []

  def generate(index):
    drawn.append(index)
    return np.array(next(answers))

  index, k, _ = rule.step(0, generate)
  assert len(drawn) == 2 and k.tolist() == [4] * 5 + [1] * 3
  assert index.tolist() == [*drawn[0][[0, 2, 4, 5, 7]], *drawn[1][:3]]
  assert not set(drawn[0]) & set(drawn[1])
  if carry:
    index, k, _ = rule.step(1, generate)
    assert k.tolist() == [1] * 3 + [2] * 5 and index.tolist() == [*drawn[1][3:6], *drawn[2][:5]]
  else:
    assert len(rule.index) == 0


def test_dynamic_sampling_stops_after_its_rounds():
  calls = []
  rule = selection_rules.Dynamic(small(), 0, carry=False, rounds=3)
  index, *_ = rule.step(0, lambda index: calls.append(1) or np.zeros(8, int))
  assert len(calls) == 3 and len(index) == 0


@pytest.mark.parametrize('staleness', [0, 1, 4])
def test_a_stale_rule_observes_the_given_number_of_steps_later(staleness, monkeypatch):
  spies = []
  make = lambda world, seed: spies.append(RecordingRule(world, seed)) or spies[-1]  # noqa: E731
  monkeypatch.setitem(selection_rules.RULES, 'spy', (make, {}))
  curriculum.run(small(rollouts=8 * 8 * 10, staleness=staleness), 'spy', 0)
  log = spies[0].log
  for step in range(staleness, 9):
    at = log.index(('selected', step + 1))
    assert log[at - 1] == ('observed', step - staleness) and log[at - 2] == ('selected', step)
  assert ('selected', 9) in log and sum(kind == 'observed' for kind, _ in log) == 10 - staleness


def test_greso_tops_up_missing_groups_and_accepts_a_short_batch():
  rule, sizes, mixed = (
    selection_rules.Greso(small(), 0, evidence_decay=dict(fn='none')),
    [],
    iter([3, 4, 0, 12]),
  )

  def generate(index):
    sizes.append(len(index))
    return np.where(np.arange(len(index)) < next(mixed), 4, 0)

  # 3 of 12: 5 are missing, 1.25 · 5 ÷ 1/4 = 25 is cut to 12. 7 of 24: 1 is missing, 1.25 ÷ 7/24 = 4.3, and the last.
  index, k, _ = rule.step(0, generate)
  assert sizes == [12, 12, 5] and len(index) == 7 and (k == 4).all()
  index, *_ = rule.step(1, generate)
  assert sizes[3:] == [12] and len(index) == 8


def test_calls_of_a_step_are_observed_together():
  rows = ([5, 2], [1, 8], [8, 8]), ([2, 9], [4, 0], [8, 4])
  index, k, n = curriculum._merge([tuple(map(np.array, call)) for call in rows])
  assert (index.tolist(), k.tolist(), n.tolist()) == ([2, 5, 9], [12, 1, 0], [16, 8, 4])


def test_allocated_rollouts_sum_to_those_of_the_step():
  world, drawn = small(), []
  rule = selection_rules.Allocated(world, 0, rule=dict(fn='marginal'), **selection_rules.UNIFORM)
  rule.observe(np.arange(256), np.tile([0, 4, 1, 8], 64), np.full(256, 8))
  rule.step(0, lambda index, n: drawn.append((index, n)) or n // 2)
  ((index, n),) = drawn
  assert n.sum() == 64 and set(n % 2) == {0} and n.min() >= 2
  sure_of_half = np.abs(rule.predict(index)[0] - 0.5).argmin()
  assert n[sure_of_half] == n.min() < n.max()


# Measures.


def test_gini_and_calibration_by_hand():
  assert curriculum._gini(np.array([3, 3, 3, 3])) == 0
  assert curriculum._gini(np.array([0, 0, 0, 8])) == pytest.approx(0.75)
  mean, rate = np.array([0.05, 0.08, 0.95]), np.array([0.1, 0.1, 0.5])
  assert curriculum._calibration(mean, rate) == pytest.approx((0.07 + 0.45) / 3)


def test_the_interval_of_a_uniform_posterior_covers_nine_tenths():
  world = small()
  world.graded = lambda: (np.arange(256) + 0.5) / 256
  meter = curriculum.Meter(world)
  meter.check(RecordingRule(world, 0), 0, np.arange(8))
  assert meter.checks[0]['interval'] == pytest.approx(0.9, abs=0.01)


def test_a_paired_difference_is_independent_of_the_seeds_level():
  base = np.array([1.0, 5.0, 2.0, 9.0, np.nan])
  assert curriculum.paired(base + 0.25, base) == '+0.25 ± 0'
  # Differences 1, 3: mean 2, t(0.975, 1) = 12.7, deviation √2.
  assert curriculum.paired(np.array([1.0, 3.0]), np.zeros(2)) == '+2 ± 13'
  assert curriculum.paired(np.full(5, np.nan), base) == '–'


def test_time_is_the_longest_row_or_the_mean_one():
  meter = curriculum.Meter(small(group=2))
  tokens = np.array([100.0, 300, 200, 600])
  meter.on_generate(
    0, np.array([4, 7]), np.array([0, 1]), np.array([2, 2]), tokens, np.array([0.5, 0.5])
  )
  fixed = worlds.FIXED_TOKENS
  assert meter.static == pytest.approx((600 + fixed) * curriculum.SECONDS_PER_TOKEN)
  assert meter.refilled == pytest.approx((300 + fixed) * curriculum.SECONDS_PER_TOKEN)
  assert meter.rollouts == 4 and meter.generated == 2 and meter.brier == [0.25]


# Logs.


def test_a_log_is_read_into_a_table_and_filled_between_visits(tmp_path):
  (tmp_path / 'rollouts').mkdir()
  rows = [
    (0, 7, '3 + 4', [1, 1, 0, 1]),
    (1, 2, '12 + 4', [0] * 4),
    (1, 3, '9 + 9', [0] * 4),
    (4, 7, '3 + 4', [0, 1, 0, 0]),
    (4, 9, '5 + 5', [1]),
  ]
  for step, prompt, text, scores in rows:
    with open(tmp_path / 'rollouts' / f'step_{step:06d}.jsonl', 'a') as file:
      for score in scores:
        file.write(json.dumps(dict(prompt=prompt, step=step, score=score, input=text)) + '\n')
  right, kind, group = worlds.read_log(tmp_path)
  assert right.tolist() == [[-1, 0, -1], [-1, 0, -1], [3, -1, 1]] and group == 4
  assert kind[1] == kind[2] != kind[0]
  log = worlds.Logged(right, kind, group)
  np.testing.assert_allclose(log.rate_NxT, [[0.1] * 3, [0.1] * 3, [0.7, 0.5, 0.3]])
  assert log.prompts == 1 and log.rollouts == 12
  with pytest.raises(SystemExit, match='holds no rows'):
    worlds.read_log(tmp_path / 'nowhere')


def test_a_log_is_predicted_before_it_is_observed():
  # One prompt, visited twice: all right, then all right again.
  log = worlds.Logged(np.array([[8, 8]]), np.zeros(1, int), 8)
  measures = curriculum.predict_log(log, 'mopps 1', 0)
  i = np.arange(8)
  second = 1 - np.prod((9 + i) / (10 + i)) - np.prod((1 + i) / (10 + i))
  assert measures['log_brier'] == pytest.approx(((7 / 9) ** 2 + second**2) / 2)
  assert measures['log_constant'] == 0
