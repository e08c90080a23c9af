"""Each stage against exact enumeration or many draws."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from jaxrl_llm.config import stages
from jaxrl_llm.curriculum import (
  candidates,
  evidence,
  rate_estimate,
  selection,
  slot_assignment,
  utility,
)


def beta_binomial(k: int, n: int, a: int, b: int) -> Fraction:
  """P(k of n) for whole a, b, exactly: C(n, k)·B(a + k, b + n − k) / B(a, b)."""

  def beta(x, y):
    return Fraction(math.factorial(x - 1) * math.factorial(y - 1), math.factorial(x + y - 1))

  return math.comb(n, k) * beta(a + k, b + n - k) / beta(a, b)


@pytest.mark.parametrize('a, b', [(1, 1), (1, 9), (9, 1), (3, 5), (40, 2)])
@pytest.mark.parametrize('group', [1, 2, 4, 8, 16])
def test_mixed_group_is_the_beta_binomial_without_its_ends(a, b, group):
  exact = sum((beta_binomial(k, group, a, b) for k in range(1, group)), Fraction(0))
  probability = utility.mixed_group(np.zeros(1), np.array([float(a)]), np.array([float(b)]), group)
  np.testing.assert_allclose(probability, float(exact), rtol=1e-12, atol=1e-15)


def test_groups_may_be_of_another_size_for_each_prompt():
  random = np.random.default_rng(4)
  alpha, beta = 5 * random.random((2, 6))
  group = np.array([1, 16, 4, 4, 0, 7])
  one = lambda i: utility.mixed_group(alpha[[i]], alpha[[i]], beta[[i]], int(group[i]))[0]  # noqa: E731
  each = [one(i) for i in range(6)]
  np.testing.assert_array_equal(utility.mixed_group(alpha, alpha, beta, group), each)
  assert utility.mixed_group(alpha[:0], alpha[:0], beta[:0], group[:0]).size == 0


def test_mixed_group_is_what_draws_give_for_broken_counts():
  alpha, beta = np.array([0.2, 1.7, 4.5]), np.array([2.9, 0.4, 4.5])
  random = np.random.default_rng(0)
  k = random.binomial(8, random.beta(alpha, beta, size=(200_000, 3)))
  drawn = ((k > 0) & (k < 8)).mean(0)
  probability = utility.mixed_group(alpha, alpha, beta, 8)
  np.testing.assert_allclose(probability, drawn, atol=0.005)  # four standard errors


# Of rates 0, 1/4, 1/2 and 1: settings, and what the utility is there.
OF_A_RATE = dict(
  mopps=[({}, [-0.25, -0.0625, 0, -0.25]), (dict(target=0.25), [-0.0625, 0, -0.0625, -0.5625])],
  bots=[(dict(target=0.25), [-0.25, 0, -0.25, -0.75])],
  vade=[({}, [0, 0.140625, 0.125, 0])],
  information=[({}, [0, 0.1875, 0.25, 0])],
  uniform=[({}, [0, 0, 0, 0])],
)
# What hangs on more than the rate has a test of its own below.
OF_MORE = {'mixed_group', 'per_token', 'per_root_token'}


def test_every_utility_is_told_of_here():
  listed = {*OF_A_RATE} | OF_MORE
  assert {*stages.choices(utility)} == listed, (
    'a utility needs a line in OF_A_RATE, or a test and its name in OF_MORE'
  )


@pytest.mark.parametrize('name', OF_A_RATE)
def test_utilities_of_a_rate(name):
  rate, none = np.array([0.0, 0.25, 0.5, 1.0]), np.ones(4)
  for settings, wanted in OF_A_RATE[name]:
    assert getattr(utility, name)(rate, none, none, 8, **settings).tolist() == wanted


def test_vade_prefers_one_third():
  rate = np.linspace(0, 1, 1201)
  assert rate[utility.vade(rate, rate, rate, 8).argmax()] == pytest.approx(1 / 3, abs=1e-9)


def test_utilities_of_a_token():
  alpha, beta, length = np.array([1.0, 3.0]), np.array([2.0, 1.0]), np.array([0.5, 4.0])
  rate = alpha / (alpha + beta)
  mixed = utility.mixed_group(rate, alpha, beta, 8)
  assert utility.per_token(rate, alpha, beta, 8, length) == pytest.approx(mixed * [2, 0.25])
  deviation = np.sqrt(utility.information(rate, alpha, beta, 8))
  score = utility.per_root_token(rate, alpha, beta, 8, length)
  assert score == pytest.approx(deviation / np.sqrt(length))


def test_thompson_draws_from_the_posterior():
  alpha, beta = np.full(100_000, 3.0), np.full(100_000, 1.0)
  drawn = rate_estimate.thompson(alpha, beta, np.random.default_rng(0))
  assert drawn.mean() == pytest.approx(0.75, abs=0.003)
  assert drawn.var() == pytest.approx(3 / (16 * 5), abs=0.001)
  assert (rate_estimate.mean(alpha, beta, None) == 0.75).all()


def test_a_subset_holds_every_free_prompt_equally_often():
  free_N = np.ones(40, bool)
  free_N[[3, 8]] = False
  random, count_N = np.random.default_rng(0), np.zeros(40, int)
  for _ in range(3800):
    chosen = candidates.subset(free_N, 2, 0, count_N, random, limit=10)
    assert (np.diff(chosen) > 0).all() and len(chosen) == 10
    count_N[chosen] += 1
  assert not count_N[~free_N].any()
  # 1,000 each, with a standard deviation of √(3800 · 10/38 · 28/38) = 27.
  assert (np.abs(count_N[free_N] - 1000) < 4 * 27.2).all()


@pytest.mark.parametrize('limit, slots, count', [(38, 2, 38), (1000, 2, 38), (5, 9, 9)])
def test_a_subset_is_all_free_prompts_up_to_its_limit_and_fills_the_slots(limit, slots, count):
  free_N = np.ones(40, bool)
  free_N[[3, 8]] = False
  chosen = candidates.subset(free_N, slots, 0, None, np.random.default_rng(0), limit=limit)
  assert len(set(chosen.tolist())) == count and free_N[chosen].all()
  # Where all are candidates, nothing is drawn: the choice is that of `everything`.
  random = np.random.default_rng(0)
  candidates.subset(free_N, slots, 0, None, random, limit=limit)
  assert (random.random() == np.random.default_rng(0).random()) == (count == 38)


def windows(size, slots, multiple=16, seed=5, busy=lambda step: ()):
  """The candidates of steps with so many slots each, and how often each prompt has been one."""
  passes_N, found = np.zeros(size, np.int32), []
  for step, count in enumerate(slots):
    free_N = np.ones(size, bool)
    free_N[list(busy(step))] = False
    found.append(candidates.stream(free_N, count, seed, passes_N, None, multiple=multiple))
    assert len(set(found[-1].tolist())) == len(found[-1]) == min(count * multiple, free_N.sum())
    assert free_N[found[-1]].all()
    passes_N[found[-1]] += 1
  return found, passes_N


@pytest.mark.parametrize('size, slots, multiple', [(64, 4, 4), (50, 3, 1), (20, 4, 16), (10, 6, 1)])
def test_a_stream_passes_over_every_prompt_once_an_epoch(size, slots, multiple):
  window = min(slots * multiple, size)
  steps = 3 * size // window
  found, passes_N = windows(size, [slots] * steps, multiple)
  stream = np.concatenate(found)
  whole = len(stream) // size
  for epoch in range(whole):
    # A window may hold prompts of two epochs, whose order is that of the stream.
    assert np.isin(np.arange(size), stream[epoch * size : (epoch + 1) * size]).all()
  assert passes_N.min() >= whole and passes_N.max() <= whole + 1
  assert not np.array_equal(stream[:size], stream[size : 2 * size])  # each in an order of its own
  other, _ = windows(size, [slots], multiple, seed=6)
  assert not np.array_equal(other[0], found[0])


def test_a_stream_covers_its_prompts_whatever_the_slots_of_a_step():
  """After every epoch each prompt has been a candidate exactly once more, and nothing twice before all once."""
  random = np.random.default_rng(0)
  slots = random.integers(1, 8, 300)
  found, _ = windows(37, slots, multiple=1)
  order, seen = np.concatenate(found), np.zeros(37, int)
  for epoch in range(len(order) // 37):
    assert sorted(order[epoch * 37 : (epoch + 1) * 37].tolist()) == [*range(37)], epoch
  np.add.at(seen, order, 1)
  assert seen.max() - seen.min() <= 1


def test_a_prompt_that_runs_keeps_its_place_in_the_stream():
  """Prompts 0 to 3 run on for the whole first epoch, and come as soon as they are free."""
  found, passes_N = windows(20, [4] * 5, multiple=1, busy=lambda step: range(4) if step < 4 else ())
  assert set(np.concatenate(found[:4]).tolist()) == set(range(4, 20))
  assert set(found[4].tolist()) == set(range(4)) and (passes_N == 1).all()


def test_top_breaks_ties_at_random_and_puts_the_best_first():
  worth = np.array([1.0, 3.0, 1.0, 1.0, 2.0, 0.0])
  drawn = np.array([selection.top(worth, 3, np.random.default_rng(s)) for s in range(600)])
  assert (drawn[:, 0] == 1).all() and (drawn[:, 1] == 4).all()
  third = np.bincount(drawn[:, 2], minlength=6)
  assert third[[1, 4, 5]].sum() == 0
  assert (np.abs(third[[0, 2, 3]] - 200) < 50).all()


@pytest.mark.parametrize('seed', range(20))
def test_top_is_what_a_sort_gives(seed):
  random = np.random.default_rng(seed)
  worth = random.integers(0, 6, 50) * 0.1  # many ties
  for slots in (1, 7, 49, 50):
    taken = selection.top(worth, slots, random)
    assert len(set(taken.tolist())) == slots
    assert worth[taken].tolist() == sorted(worth.tolist(), reverse=True)[:slots]


def test_skip_takes_candidates_as_they_come():
  assert selection.skip(np.array([0.0, 9, 1]), 2, None).tolist() == [0, 1]


def test_softmax_draws_in_proportion_and_without_replacement():
  worth, temperature = np.array([0.0, 0.1, 0.2]), 0.1
  weight = np.exp(worth / temperature)
  weight /= weight.sum()
  draws = [
    selection.softmax(worth, 2, np.random.default_rng(s), temperature=temperature)
    for s in range(20_000)
  ]
  drawn = np.array(draws)
  for first in range(3):
    assert (drawn[:, 0] == first).mean() == pytest.approx(weight[first], abs=0.015)
    for second in set(range(3)) - {first}:
      expected = weight[first] * weight[second] / (1 - weight[first])
      pair = (drawn[:, 0] == first) & (drawn[:, 1] == second)
      assert pair.mean() == pytest.approx(expected, abs=0.015)
  assert (drawn[:, 0] != drawn[:, 1]).all()


class Last:
  """Draws the last ones, so that a test can count what was drawn."""

  def choice(self, size, count, **_):
    return np.arange(size - count, size)


NOBODY, ALL = np.zeros(0, int), np.ones(10, bool)


@pytest.mark.parametrize('share', [0.05, 0.3])
def test_audits_get_their_share_of_slots_that_vary(share):
  """Also where the step at which one would be due has fewer slots, every time."""
  for slots in ([4, 4, 4, 4, 1] * 40, [2, 4] * 40, [0, 7, 3] * 50):
    before = np.cumsum([0, *slots])[:-1]
    counts = [slot_assignment.audit_count(b, n, share) for b, n in zip(before, slots, strict=True)]
    assert sum(counts) == math.floor(share * sum(slots) + 1e-9)


@pytest.mark.parametrize('share', [0.0, 0.05, 0.29, 0.5, 1.0])
@pytest.mark.parametrize('slots', [1, 4, 10])
def test_audits_get_exactly_their_share(share, slots):
  given = 0
  for step in range(100):
    count = slot_assignment.audit_count(step * slots, slots, share)
    index = slot_assignment.replace_with_audits(
      np.arange(slots), count, np.ones(50, bool), NOBODY, Last()
    )
    assert index.tolist() == [*range(slots - count), *range(50 - count, 50)]
    given += count
  assert given == round(100 * slots * share)


def test_audits_draw_uniformly_from_all_that_are_free_and_not_kept():
  counts, chosen, free_N = np.zeros(13, int), np.array([7, 2, 4, 0]), np.ones(13, bool)
  free_N[[5, 10, 12]] = False
  for step in range(4000):
    index = slot_assignment.replace_with_audits(
      chosen, 2, free_N, NOBODY, np.random.default_rng(step)
    )
    assert index[:2].tolist() == [7, 2] and len(set(index.tolist())) == 4
    counts += np.bincount(index[2:], minlength=13)
  assert counts[[7, 2, 5, 10, 12]].sum() == 0
  expected = 8000 / 8
  # 7 degrees of freedom, one in a thousand; the draw is seeded.
  assert ((counts[[0, 1, 3, 4, 6, 8, 9, 11]] - expected) ** 2 / expected).sum() < 24.3


def test_audits_draw_from_the_barred_where_there_are_any():
  def draw(barred):
    return slot_assignment.replace_with_audits(
      np.arange(4), 3, ALL, barred, np.random.default_rng(0)
    )

  assert set(draw(np.array([5, 7, 8, 9]))[1:]) < {5, 7, 8, 9} and draw(np.array([6, 7, 8]))[0] == 0
  assert draw(np.array([9, 2])).tolist() == [0, 1, 2, 9]  # 2 was drawn for want of others


@pytest.mark.parametrize('index', [[0], [3, 4, 5], [5, 4, 3], [0, 2, 1, 3], [0, 1, 1, 3], [2, 9]])
def test_a_slice_stands_for_numbers_in_a_row_alone(index):
  every, index = np.arange(20), np.array(index)
  selector = evidence.contiguous(index)
  assert every[selector].tolist() == index.tolist()
  assert isinstance(selector, slice) == (index.tolist() in ([0], [3, 4, 5]))
