"""Allocation rules: totals, published tables, enumeration, monotonicity."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from jaxrl_llm.config import stages
from jaxrl_llm.curriculum import allocation
from jaxrl_llm.types import UserError

RULES = dict(
  equal=dict(fn='equal'),
  neyman=dict(fn='neyman'),
  xrpo=dict(fn='xrpo'),
  mixed=dict(fn='marginal'),
  knapsack=dict(fn='marginal', right=1, wrong=2),
)


def rule(name: str):
  return stages.pick(allocation, RULES[name])


def posterior(P: int, seed: int = 0):
  random = np.random.default_rng(seed)
  k = random.integers(0, 9, P)
  return 1.0 + k, 9.0 - k, random.integers(0, 3, P) * random.uniform(20, 900, P)


@pytest.mark.parametrize('name', RULES)
@pytest.mark.parametrize(
  'P, parts, unit', [(1, 1, 4), (1, 40, 4), (5, 5, 4), (7, 23, 4), (64, 128, 4), (6, 200, 1)]
)
def test_every_part_is_given_and_every_prompt_has_one(name, P, parts, unit):
  given = rule(name)(*posterior(P), parts, unit)
  assert given.parts.dtype == np.int32 and given.parts.shape == given.weight.shape == (P,)
  assert given.parts.sum() == parts and given.parts.min() >= 1
  assert (given.weight >= 1).all()


@pytest.mark.parametrize('name', RULES)
def test_too_few_parts_are_refused(name):
  with pytest.raises(ValueError, match='each prompt needs a part'):
    rule(name)(*posterior(5), 4, 4)


@pytest.mark.parametrize('name', RULES)
def test_like_prompts_get_alike(name):
  even = rule(name)(np.full(6, 3.0), np.full(6, 5.0), np.full(6, 50.0), 21, 2)
  assert even.parts.max() - even.parts.min() <= (1 if name not in ('et', 'hw') else 20)
  if name not in ('et', 'hw'):
    return
  # DARS fills one prompt's demand before the next one's: only with enough of them are they alike.
  even = rule(name)(np.full(6, 3.0), np.full(6, 5.0), np.full(6, 50.0), 60, 2)
  assert even.parts.tolist() == [10] * 6


# What the papers say.


def test_an_even_split_gives_the_rest_to_the_first():
  assert rule('equal')(*posterior(4), 18, 4).parts.tolist() == [5, 5, 4, 4]


def test_neyman_is_spread_over_the_root_of_length():
  # Deviations 1 : ½ at equal length, and at four times the length half as many.
  alpha, beta = (
    np.array([500.0, 500 - 250 * 3**0.5, 500.0]),
    np.array([500.0, 500 + 250 * 3**0.5, 500.0]),
  )
  given = allocation.neyman(alpha, beta, np.array([100.0, 100.0, 400.0]), 400, 1, most=1000)
  np.testing.assert_allclose(given.parts, [200, 100, 100], atol=1)
  np.testing.assert_allclose(given.weight, [1, 4 / 3, 4 / 3], atol=0.03)  # n̄ / n, never below 1


def test_neyman_takes_an_unknown_length_for_the_mean_and_holds_its_bounds():
  alpha = beta = np.full(4, 3.0)
  given = allocation.neyman(alpha, beta, np.array([0, 100.0, 300.0, 200.0]), 80, 1)
  assert given.parts[0] == given.parts[3] and given.parts[1] > given.parts[0] > given.parts[2]
  sure = allocation.neyman(np.array([1.0, 9999.0]), np.array([1.0, 0.001]), np.zeros(2), 33, 1)
  assert sure.parts.tolist() == [32, 1]
  assert sure.weight[1] == pytest.approx(16.5)
  floored = allocation.neyman(
    np.array([1.0, 9999.0]), np.array([1.0, 1e-3]), np.zeros(2), 65, 1, most=64
  )
  assert floored.weight[1] == pytest.approx(1 / 0.05)


def test_neyman_gives_what_rounding_leaves_to_those_cut_most():
  # The last three round up together, at 2.5 parts, where the first one stands at 1.3.
  length = np.array([(2.5 / 1.3) ** 2, 1, 1, 1])
  given = [
    allocation.neyman(np.full(4, 2.0), np.full(4, 3.0), length, n, 1).parts for n in range(7, 11)
  ]
  assert np.array(given).tolist() == [[1, 2, 2, 2], [1, 3, 2, 2], [1, 3, 3, 2], [1, 3, 3, 3]]


@pytest.mark.parametrize('freedom', [1, 2, 3, 4, 7, 15, 31])
def test_students_quantile_is_where_its_density_has_that_mass(freedom):
  t = allocation._student(0.975, freedom)
  x = np.linspace(0, t, 20001)
  log_c = (
    math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
  )
  density = np.exp(log_c) * (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
  mass = 0.5 + np.sum((density[1:] + density[:-1]) / 2 * np.diff(x))
  assert mass == pytest.approx(0.975, abs=5e-4)


def beta_pair(alpha):
  return np.array([4.0, alpha]), np.array([4.0, 8 - alpha])


def test_xrpo_by_hand():
  # unit 4 from 4 rollouts each: h(4) = 3.182 s/2, h(8) = 2.365 s/√8, h(12) = 2.201 s/√12.
  alpha, beta = np.array([4.0, 1.0]), np.array([4.0, 7.0])
  s = np.sqrt(alpha * beta / (8 * 9))
  first, second = 3.182 / 2 - 2.365 / 8**0.5, 2.365 / 8**0.5 - 2.201 / 12**0.5
  given = [
    allocation.xrpo(alpha, beta, np.zeros(2), n, 4, bonus=0.0).parts.tolist() for n in (3, 4)
  ]
  assert s[0] * second < s[1] * first  # so the second part goes to the other
  assert given == [[2, 1], [2, 2]]
  # 0.29 and 0.25 of the other's deviation, on either side of second/first = 0.266.
  assert (
    allocation.xrpo(*beta_pair(0.172), np.zeros(2), 4, 4, bonus=0.0).parts.tolist(),
    allocation.xrpo(*beta_pair(0.127), np.zeros(2), 4, 4, bonus=0.0).parts.tolist(),
  ) == ([2, 2], [3, 1])
  # A bonus that outweighs everything evens out what the deviation alone would not.
  skewed = np.array([4.0, 1e-3]), np.array([4.0, 8.0])
  alone = allocation.xrpo(*skewed, np.zeros(2), 6, 4, bonus=0.0).parts.tolist()
  assert alone == [5, 1]
  assert allocation.xrpo(*skewed, np.zeros(2), 6, 4, bonus=50.0).parts.tolist() == [3, 3]


# What is optimal.


def moment(alpha, beta, right, wrong):
  """E[p^right (1 − p)^wrong] under Beta(α, β), by the gamma function."""
  g = math.lgamma
  logs = g(alpha + right) - g(alpha) + g(beta + wrong) - g(beta)
  return math.exp(logs + g(alpha + beta) - g(alpha + beta + right + wrong))


def worth(alpha, beta, n, right, wrong):
  m = lambda a, b: moment(alpha, beta, right + a, wrong + b)  # noqa: E731
  return m(0, 0) - m(n, 0) - m(0, n)


@pytest.mark.parametrize('right, wrong', [(0, 0), (1, 1), (1, 2)])
@pytest.mark.parametrize('unit, parts', [(1, 9), (2, 8), (4, 7)])
def test_marginal_finds_the_best_of_all_ways_to_share(right, wrong, unit, parts):
  alpha, beta = np.array([0.5, 2.0, 6.0]), np.array([7.0, 2.0, 1.5])
  total = lambda way: sum(  # noqa: E731
    worth(a, b, unit * n, right, wrong) for a, b, n in zip(alpha, beta, way, strict=True)
  )
  ways = [w for w in itertools.product(range(1, parts), repeat=3) if sum(w) == parts]
  best = max(ways, key=total)
  given = allocation.marginal(alpha, beta, np.zeros(3), parts, unit, right=right, wrong=wrong)
  assert tuple(given.parts) == best
  assert len({*best}) > 1, 'the case says nothing'


def test_marginal_gives_most_to_what_is_hard_but_possible():
  k = np.array([0.0, 0.4, 4, 7.6])
  given = allocation.marginal(k + 0.5, 8.5 - k, np.zeros(4), 32, 1).parts
  assert given[1] > given[2] and given[3] > given[2]


@pytest.mark.parametrize('name', RULES)
def test_more_parts_never_take_one_away(name):
  who, last = posterior(9, seed=3), np.zeros(9)
  for parts in range(9, 70):
    given = rule(name)(*who, parts, 2).parts
    if name == 'neyman':  # rounding to a total may take one back (the Alabama paradox)
      assert (given >= last - 1).all()
    else:
      assert (given >= last).all()
    last = given


@pytest.mark.parametrize(
  'settings, message',
  [
    (dict(fn='neyman', propensity_floor=0), 'propensity_floor=0 must be a number above 0'),
    (dict(fn='xrpo', confidence=1.0), 'confidence=1.0 must be between'),
    (dict(fn='marginal', wrong=0.5), "wrong=0.5 of 'marginal' must be a whole number"),
    (dict(fn='neyman', most=0), 'most=0 must be a number of at least 1'),
    (dict(fn='xrpo', most=0), 'most=0 must be a number of at least 1'),
  ],
)
def test_settings_that_cannot_be_are_told(settings, message):
  with pytest.raises(UserError, match=message):
    stages.pick(allocation, settings)(*posterior(3), 12, 4)
