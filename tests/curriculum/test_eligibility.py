"""Eligibility: streaks and retirement on written histories, combined with domains and audits."""

from __future__ import annotations

import numpy as np
import pytest
from curricula import PLAIN, G, make, observe

from jaxrl_llm.curriculum import domain_mix, eligibility, selection, slot_assignment
from jaxrl_llm.curriculum.records import DatasetInfo, StepEvidence
from jaxrl_llm.types import UserError

N = 6
FACTS = DatasetInfo(N, G, np.zeros(N, np.int32), 0.9, {})


def evidence(index, k, first):
  """What one step said."""
  index, k = np.array(index), np.array(k)
  return StepEvidence(0, index, k, np.full(len(k), G), np.full(len(k), first), 0.0 * k)


def odds(made, state):
  every = np.arange(N)
  return made.barred(state, every, every, every)


def both(state):
  return [float(state[name]) for name in ('p_easy', 'p_hard')]


# Streaks.


def test_streaks_count_trailing_visits_of_one_sort():
  made = eligibility.streaks(FACTS)
  state = made.state
  for k in (8, 8, 0, 8, 8, 8):  # prompt 0; prompt 1 is always wrong, 2 always mixed, 3 seen once
    state = made.learn(state, evidence([0, 1, 2], [k, 0, 4], first=True))
  state = made.learn(state, evidence([3], [0], first=True))
  assert state['streak'].tolist() == [[3, 0, 0, 0, 0, 0], [0, 6, 0, 1, 0, 0]]
  np.testing.assert_allclose(odds(made, state), [1 - 0.5**3, 1 - 0.5**6, 0, 0.5, 0, 0])
  again = made.learn(state, evidence([0, 1], [7, 1], first=True))  # 7/8 and 1/8 are mixed
  assert not again['streak'][:, :2].any() and state['streak'][0, 0] == 3  # pure


@pytest.mark.parametrize('n', [4, 8, 10, 16, 32])
def test_marks_part_groups_as_the_official_mean_rewards_do(n):
  """Rewards of 1 and 0.1: at least 0.98 is easy, at most 0.11 is hard."""
  right = np.arange(n + 1)
  reward = (right + 0.1 * (n - right)) / n
  made = eligibility.streaks(FACTS._replace(size=n + 1))
  seen = StepEvidence(0, right, right, np.full(n + 1, n), np.ones(n + 1, bool), 0.0 * right)
  streak = made.learn(made.state, seen)['streak']
  np.testing.assert_array_equal(streak, [reward >= 0.98, reward <= 0.11])


def test_a_long_streak_keeps_a_floor_and_does_not_wrap():
  made = eligibility.streaks(FACTS, floor=0.01)
  state = made.state
  for _ in range(300):
    state = made.learn(state, evidence([0], [8], first=True))
  assert state['streak'][0, 0] == 255
  assert odds(made, state)[0] == 0.99


@pytest.mark.parametrize(
  'k, easy, hard',
  [
    # target 0.25: easy counts as many from 1/12 on, hard from 1/6 on.
    ([8, *[4] * 11], 0.49, 0.51),  # 1 of 12
    ([8, *[4] * 12], 0.51, 0.51),  # 1 of 13
    ([0, *[4] * 5], 0.51, 0.49),  # 1 of 6
    ([0, *[4] * 6], 0.51, 0.51),  # 1 of 7
  ],
)
def test_the_two_probabilities_follow_what_is_seen(k, easy, hard):
  made = eligibility.streaks(FACTS._replace(size=20))
  seen = evidence(np.arange(len(k)), k, first=False)
  assert both(made.learn(made.state, seen)) == pytest.approx([easy, hard], abs=1e-12)
  # In the first epoch nothing can be skipped yet, and nothing is learned from that.
  first = seen._replace(first_V=np.ones(len(k), bool))
  assert both(made.learn(made.state, first)) == [0.5, 0.5]


@pytest.mark.parametrize('k, end', [([8, 0], 0.05), ([4, 4], 0.95)])
def test_the_two_probabilities_stay_in_bounds(k, end):
  made = eligibility.streaks(FACTS)
  state = made.state
  for _ in range(100):
    state = made.learn(state, evidence([0, 1], k, first=False))
  assert both(state) == pytest.approx([end, end])


def test_greso_skips_what_is_always_wrong_and_takes_the_others_in_order():
  settings = dict(
    eligibility=dict(fn='streaks'), selection=dict(fn='skip'), utility=dict(fn='uniform')
  )
  settings['candidates'] = dict(fn='stream', multiple=2)
  curriculum, visits = make(60, **PLAIN | settings), np.zeros(60, int)
  for step in range(400):
    asked = curriculum.propose(step, 6)
    curriculum.accept(asked)
    index = asked.index
    observe(curriculum, index, np.where(index < 30, 0, 4))
    if step >= 100:
      visits[index] += 1
  assert visits[:30].sum() < 0.25 * visits.sum() and visits[:30].min() > 0


# Retirement.

SETTINGS = PLAIN | dict(eligibility=dict(fn='retire', rate=0.9, visits=2, share=0.0))


def test_a_prompt_that_was_right_twice_retires_and_one_lucky_visit_does_not():
  curriculum = make(12, **SETTINGS)
  observe(curriculum, [0, 1, 2], [8, 8, 8])
  assert curriculum.retired().size == 0  # Beta(9, 1) has mean 0.9, but that was one visit
  observe(curriculum, [0, 1], [8, 5])
  assert curriculum.retired().tolist() == [0]  # 17/18; 14/18 is not enough
  assert curriculum.metrics()['curriculum/barred_share'] == 1 / 12
  for step in range(60):
    assert 0 not in curriculum.propose(step, 11).index
  assert 0 in curriculum.propose(0, 12).index  # the batch must be full


def test_audits_go_to_the_retired_and_may_bring_them_back():
  curriculum = make(12, **SETTINGS | dict(eligibility=dict(fn='retire', share=0.25)))
  for _ in range(2):
    observe(curriculum, [0, 1, 2], [8, 8, 8])
  assert curriculum.retired().tolist() == [0, 1, 2]
  audited = np.array([curriculum.propose(step, 4).index[-1] for step in range(600)])
  counts = np.bincount(audited, minlength=12)
  assert counts[3:].sum() == 0 and counts[:3].min() > 150
  observe(curriculum, [1], [2])
  assert curriculum.retired().tolist() == [0, 2]


def test_while_nobody_is_retired_audits_go_to_anyone():
  settings = SETTINGS | dict(
    eligibility=dict(fn='retire', share=0.25), utility=dict(fn='mopps', target=0)
  )
  curriculum = make(12, **settings)
  observe(curriculum, np.arange(4), [0, 0, 0, 0])  # the four that are chosen, but for audits
  audited = {int(curriculum.propose(step, 4).index[-1]) for step in range(200)}
  assert len(audited - {0, 1, 2, 3}) == 8


@pytest.mark.parametrize(
  'setting, text',
  [
    (dict(fn='retire', rate=1.5), r'eligibility\.rate=1.5'),
    (dict(fn='retire', visits=0), r'eligibility\.visits=0'),
    (dict(fn='retire', share=-0.1), r'eligibility\.share=-0.1'),
    (dict(fn='streaks', floor=2), r'eligibility\.floor=2'),
    (dict(fn='streaks', start='p'), r"eligibility\.start='p'"),
  ],
)
def test_bad_settings_are_user_errors(setting, text):
  with pytest.raises(UserError, match=text):
    make(N, eligibility=setting)


# Seats.


def test_the_barred_sit_only_where_there_are_too_few_others():
  worth, random = np.arange(6.0), np.random.default_rng(0)
  barred = np.array([0, 0, 0, 1, 1, 1], bool)
  assert slot_assignment.assign_slots(worth, 3, random, selection.top, barred).tolist() == [2, 1, 0]
  taken = slot_assignment.assign_slots(worth, 5, random, selection.top, barred).tolist()
  assert taken[:3] == [2, 1, 0] and set(taken[3:]) < {3, 4, 5} and len(set(taken)) == 5


def test_each_domain_gets_its_quota_of_the_best():
  worth, own = np.array([5.0, 4, 3, 2, 1, 0]), np.array([0, 0, 0, 1, 1, 1])
  for quota, expected in (([1, 2], {0, 3, 4}), ([0, 3], {3, 4, 5}), ([3, 0], {0, 1, 2})):
    random = np.random.default_rng(0)
    taken = slot_assignment.assign_slots(
      worth, 3, random, selection.top, None, own, np.array(quota)
    )
    assert set(taken.tolist()) == expected
  # Domain 1 has one prompt that may sit: the rest of its quota goes to the best of the others.
  barred = np.array([0, 0, 0, 0, 1, 1], bool)
  taken = slot_assignment.assign_slots(
    worth, 3, np.random.default_rng(0), selection.top, barred, own, np.array([0, 3])
  )
  assert set(taken.tolist()) == {3, 0, 1}


# Domains.


def shares(done_2xD, slots=200_000, **settings):
  drawn = domain_mix.mix(
    ['a', 'b'], np.array(done_2xD), slots, np.random.default_rng(0), **settings
  )
  return drawn[0] / slots


@pytest.mark.parametrize(
  'done_2xD, a, b',
  [
    ([[49, 0], [0, 0]], 0.6, 0.4),  # fewer than 50 rollouts say nothing
    ([[60, 40], [1, 9]], 0.6, 0.4),  # as it should be
    ([[30, 70], [1, 9]], 0.6 * 2, 0.4 * 4 / 7),
    ([[100, 0], [1, 9]], 0.6 * 0.6, 0.4 * 10),  # of the second nothing has come back
    ([[1, 999], [1, 9]], 0.6 * 10, 0.4 * 0.4 / 0.999),  # at most tenfold
  ],
)
def test_a_domain_is_drawn_by_how_much_it_lacks(done_2xD, a, b):
  targets = dict(a=3.0, b=2.0)
  assert shares(done_2xD, targets=targets) == pytest.approx(a / (a + b), abs=0.005)


def test_tokens_may_be_what_is_balanced():
  done_2xD, targets = [[50, 50], [900, 100]], dict(a=1, b=1)
  a, b = 0.5 / 0.9, 0.5 / 0.1
  drawn = shares(done_2xD, targets=targets, measure='tokens')
  assert drawn == pytest.approx(a / (a + b), abs=0.005)


def test_a_domain_whose_rollouts_are_lost_is_drawn_more_often():
  """Seven of eight of domain a are: its share A solves A = (1 − A)/((1 − A) + 8A), where 1/9 would come uncorrected."""
  source = ['ab'[i % 2] for i in range(200)]
  settings = PLAIN | dict(domain_mix=dict(fn='mix', targets=dict(a=1.0, b=1.0)))
  curriculum, done = make(200, fields=dict(source=source), **settings), np.zeros(2)
  for step in range(300):
    index = curriculum.propose(step, 8).index
    n = np.where(index % 2 == 0, 1, 8)
    curriculum.observe(index, n // 2, n, None, 10 * n)
    done += np.bincount(index % 2, n, minlength=2)
  assert done[0] / done.sum() == pytest.approx(
    0.24, abs=0.05
  )  # of what it would be, 1/9, uncorrected
  assert curriculum.state_dict()['done'].tolist() == [done.tolist(), (10 * done).tolist()]


@pytest.mark.parametrize(
  'setting, text',
  [
    (dict(targets=dict(a=1.0)), r'targets=.* must name the sources of the data, each once: a, b'),
    (dict(targets=dict(a=1.0, b=1.0, c=1.0)), r'targets=.* must name the sources'),
    (dict(targets=dict(a=1.0, b=0.0)), r'domain_mix\.targets\.b=0.0 must be a number above 0'),
    (dict(targets=dict(a=1, b=1), measure='time'), r"domain_mix\.measure='time' must be one of"),
    (dict(), r'domain_mix\.targets is missing'),
  ],
)
def test_bad_domains_are_user_errors(setting, text):
  with pytest.raises(UserError, match=text):
    make(N, domain_mix=dict(fn='mix') | setting)


def test_domains_need_the_sources():
  with pytest.raises(UserError, match=r"domain_mix\.fn='mix' needs the source of every prompt"):
    make(N, fields={}, domain_mix=dict(fn='mix', targets=dict(a=1.0)))
