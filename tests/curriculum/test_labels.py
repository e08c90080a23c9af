"""Labels that rollouts contradict: written histories, continuation, and a simulated data set."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxrl_llm.curriculum.answer_consensus import majority, refined, slope
from jaxrl_llm.curriculum.labels import LabelRefiner, SuspectLabel
from jaxrl_llm.types import UserError

RISING = [0.25, 0.375, 0.5, 0.625, 0.75, 0.875]


@pytest.mark.parametrize(
  'answers, value, share',
  [
    ('aab', 'a', 2 / 3),
    ('aabb', None, 0.0),
    ('abc', None, 0.0),
    ('a', 'a', 1.0),
    (['a', 'a', None], 'a', 2 / 3),
    (['a', None, None], None, 0.0),  # each completion without an answer is one of its own
    ([None, None], None, 0.0),
    ([], None, 0.0),
  ],
)
def test_the_majority_is_unique_or_none(answers, value, share):
  assert majority(list(answers)) == (value, pytest.approx(share))


def test_slope_is_that_of_least_squares():
  share = np.random.default_rng(0).random(9)
  assert slope(share) == pytest.approx(np.polyfit(np.arange(9), share, 1)[0])
  assert slope([0.3]) == slope([]) == 0


def test_a_majority_that_grows_and_stays_becomes_the_label_from_the_sixth_visit():
  assert refined(['b'] * 6, RISING) == 'b'
  assert refined(['b'] * 5, RISING[1:]) is None  # too early
  assert refined(['b'] * 5, RISING[1:], after=4) == 'b'


@pytest.mark.parametrize(
  'answers, shares',
  [
    ('bbbbbb', [0.75] * 6),  # sure, but from the start
    ('bbbbbb', RISING[::-1]),
    ('bbbbbb', [0.5, 0.54, 0.58, 0.62, 0.66, 0.7]),  # 0.04 a visit
    ('aaaabb', RISING),  # not the mode of its history
    ('aacbbc', RISING),  # nor is there one
    ([None, None, 'a', None, 'b', 'b'], RISING),  # ties are the mode
    ([None, None, 'a', 'c', 'b', 'b'], RISING),  # or as frequent
    (['b', 'b', 'b', 'b', 'b', None], RISING),  # none now
  ],
)
def test_otherwise_the_given_label_stays(answers, shares):
  assert refined(list(answers), shares) is None


def test_the_threshold_itself_counts():
  assert refined(['b'] * 6, [0.0, 0.125, 0.25, 0.375, 0.5, 0.625], min_slope=0.125) == 'b'


def visits(care, prompt, *groups):
  for group in groups:
    care.observe([prompt], [list(group)])


def test_care_uses_the_label_of_now_and_takes_it_back():
  care = LabelRefiner()
  visits(care, 7, 'aabc', 'abbc', 'abbc', 'abbc', 'bbbc')
  assert care.label(7, 'a') == 'a'
  visits(care, 7, 'bbbb')
  assert care.label(7, 'a') == 'b' and care.label(8, 'a') == 'a'
  given = ['a'] * 9
  assert care.suspects(given.__getitem__) == [SuspectLabel(7, 'a', 'b', 1.0, 6)]
  assert care.suspects(lambda index: 'b') == [], 'a majority that agrees accuses nobody'
  visits(care, 7, 'abcd')
  assert care.label(7, 'a') == 'a' and care.suspects(given.__getitem__) == []


def test_it_continues_from_its_state():
  one, other = LabelRefiner(), LabelRefiner()
  visits(one, 3, 'aabc', [None] * 4, 'abbc', 'bbbc')
  state = json.loads(json.dumps(one.state_dict()))
  other.load_state_dict(state)
  for care in (one, other):
    visits(care, 3, 'bbbb', 'bbbb')
  assert one.state_dict() == other.state_dict() != state
  assert (
    other.suspects(lambda index: 'a')
    == one.suspects(lambda index: 'a')
    == [SuspectLabel(3, 'a', 'b', 1.0, 6)]
  )


@pytest.mark.parametrize(
  'settings, message',
  [
    (dict(after=0), 'after=0 must be a whole number'),
    (dict(min_slope=float('nan')), 'min_slope=nan must be a finite number'),
  ],
)
def test_settings_that_cannot_be_are_told(settings, message):
  with pytest.raises(UserError, match=message):
    LabelRefiner(**settings)


def simulate(seed: int, min_slope: float, N: int = 400, visits: int = 10, G: int = 8):
  """A fifth of the labels is wrong; the policy learns most prompts, and some not at all.

  Right answers' chance goes from its start to its end in equal steps. Half of the wrong labels are a
  mistake that the policy makes itself, ever more often where it is rewarded for it.
  """
  random = np.random.default_rng(seed)
  wrong_N = random.random(N) < 0.2
  start_N = random.uniform(0.1, 0.7, N)
  end_N = np.where(random.random(N) < 0.25, start_N, random.uniform(0.7, 0.98, N))
  active_N = wrong_N & (random.random(N) < 0.5)
  care, given = LabelRefiner(min_slope=min_slope), ['wrong' if w else 'right' for w in wrong_N]
  for visit in range(visits):
    at = visit / (visits - 1)
    p_N = (1 - at) * start_N + at * end_N
    mistake_N = np.where(active_N, (0.2 + 0.2 * at) * (1 - p_N), 0)
    draw_NxG = random.random((N, G))
    other_NxG = random.integers(0, 4, (N, G))
    groups = [
      [
        'right' if u < p else 'wrong' if u < p + m else f'other {o}'
        for u, o in zip(draws, others, strict=True)
      ]
      for p, m, draws, others in zip(p_N, mistake_N, draw_NxG, other_NxG, strict=True)
    ]
    care.observe(np.arange(N), groups)
  found = {s.prompt for s in care.suspects(given.__getitem__)}
  hits = len(found & set(np.flatnonzero(wrong_N)))
  return hits / len(found), hits / wrong_N.sum(), care, given


def test_the_list_is_precise_and_finds_those_that_are_learned_fast_enough():
  published = np.array([simulate(seed, 0.05)[:2] for seed in range(3)])
  lenient = np.array([simulate(seed, 0.02)[:2] for seed in range(3)])
  # 0.05 a visit is 0.45 in ten: few are learned that fast, and those good from the start have no slope.
  assert published[:, 0].min() > 0.9 and published[:, 1].min() > 0.15
  assert lenient[:, 0].min() > 0.9 and lenient[:, 1].min() > 0.45


def test_no_label_is_replaced_by_a_wrong_answer_often():
  _, _, care, given = simulate(0, 0.02)
  now = [care.label(i, label) for i, label in enumerate(given)]
  assert np.mean([n == 'right' for n in now]) > np.mean([g == 'right' for g in given]) + 0.08
  assert sum(n != 'right' and g == 'right' for n, g in zip(now, given, strict=True)) <= 2


def test_what_is_remembered_of_a_prompt_does_not_grow_with_its_visits():
  """The newest 64 visits count; up to so many the rule is that of the whole history."""
  care, long = LabelRefiner(min_slope=0.001), LabelRefiner(min_slope=0.001)
  rising = [['a'] * max(3 - i // 16, 0) + ['b'] * (i // 8 + 1) for i in range(64)]
  visits(care, 3, *rising)
  visits(long, 3, *[['c'] * 4] * 100, *rising)
  assert care.state_dict() == long.state_dict()
  assert care.label(3, 'a') == long.label(3, 'a') == 'b'
  ((_, answers, shares),) = long.state_dict()['visits']
  assert len(answers) == len(shares) == 64
