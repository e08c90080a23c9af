"""pass@k, votes and intervals against every subset, and against what repeated draws say."""

from __future__ import annotations

import collections
import itertools

import numpy as np
import pytest
from scipy import stats

from jaxrl_llm.evaluation import estimate

N = 6


def drawn(prompts: int = 40, seed: int = 0):
  """Answers (−1 is none), who is right, and weights; an answer is as right whoever gives it."""
  random = np.random.default_rng(seed)
  answer_PxN = random.integers(-1, 3, (prompts, N))
  key_P = random.integers(0, 3, prompts)
  weight_PxN = random.choice([0.25, 0.5, 1.0, 1.7], (prompts, N))
  return answer_PxN, answer_PxN == key_P[:, None], weight_PxN


def share(answers, right, weights) -> float:
  """What a vote of these few is worth, as one would count by hand."""
  sums, good = collections.Counter(), {}
  for answer, is_right, weight in zip(answers, right, weights, strict=True):
    if answer >= 0:
      sums[answer] += weight
      good[answer] = is_right
  if not sums:
    return 0.0
  top = [a for a, total in sums.items() if abs(total - max(sums.values())) < 1e-9]
  return float(np.mean([good[a] for a in top]))


@pytest.mark.parametrize('k', range(1, N + 1))
def test_pass_at_k_is_the_mean_over_all_subsets(k):
  right_PxN = drawn()[1]
  every = itertools.combinations(range(N), k)
  brute_SxP = np.array([right_PxN[:, list(s)].any(1) for s in every])
  np.testing.assert_allclose(estimate.passes(right_PxN, k), brute_SxP.mean(0), atol=1e-12)


def test_pass_at_k_is_unbiased_where_the_plug_in_is_not():
  random, rate, k = np.random.default_rng(0), 0.2, 4
  right_PxN = random.random((20_000, N)) < rate
  truth = 1 - (1 - rate) ** k
  got_P = estimate.passes(right_PxN, k)
  error = got_P.std() / np.sqrt(len(got_P))
  assert abs(got_P.mean() - truth) < 4 * error
  plug_in = 1 - (1 - right_PxN.mean(1)) ** k
  assert abs(plug_in.mean() - truth) > 10 * error


def test_pass_at_k_of_many_samples_does_not_overflow():
  right_PxN = np.zeros((1, 5000), bool)
  right_PxN[0, 0] = True
  np.testing.assert_allclose(estimate.passes(right_PxN, 2500), 0.5, rtol=1e-12)


@pytest.mark.parametrize('k', range(1, N + 1))
@pytest.mark.parametrize('weighted', [False, True])
def test_votes_are_the_mean_over_all_subsets_and_ties_share(k, weighted):
  answer_PxN, right_PxN, weight_PxN = drawn()
  if not weighted:
    weight_PxN = np.ones_like(weight_PxN)
  brute_P = [
    np.mean([share(a[s], r[s], w[s]) for s in map(list, itertools.combinations(range(N), k))])
    for a, r, w in zip(answer_PxN, right_PxN, weight_PxN, strict=True)
  ]
  got_P, whole = estimate.votes(answer_PxN, right_PxN, k, weight_PxN if weighted else None)
  assert whole
  np.testing.assert_allclose(got_P, brute_P, atol=1e-12)


def test_a_vote_of_one_is_the_sample_itself():
  answer_PxN, right_PxN, weight_PxN = drawn()
  for weights in (None, weight_PxN):
    got_P, _ = estimate.votes(answer_PxN, right_PxN, 1, weights)
    np.testing.assert_allclose(got_P, right_PxN.mean(1), atol=1e-12)


def test_weights_overrule_the_majority_and_must_be_there():
  answer, right = np.array([[0, 0, 1]]), np.array([[False, False, True]])
  assert estimate.votes(answer, right, 3)[0] == [0.0]
  assert estimate.votes(answer, right, 3, np.array([[0.2, 0.2, 0.9]]))[0] == [1.0]
  assert estimate.votes(answer, right, 3, np.array([[0.1, 0.2, 0.3]]))[0] == [
    0.5
  ]  # as floats 0.30000000000000004
  with pytest.raises(ValueError, match='above 0'):
    estimate.votes(answer, right, 3, np.array([[0.2, 0.2, 0.0]]))


def test_drawn_subsets_stand_for_all_and_are_the_same_again(monkeypatch):
  answer_PxN, right_PxN, weight_PxN = drawn(200)
  exact_P, whole = estimate.votes(answer_PxN, right_PxN, 3, weight_PxN)
  monkeypatch.setattr(estimate, '_MAX_SUBSETS', 1)
  told_P, drawn_whole = estimate.votes(answer_PxN, right_PxN, 3, weight_PxN)
  assert whole and not drawn_whole
  chosen_SxN, _ = estimate.subsets(N, 3)
  assert set(chosen_SxN.sum(1)) == {3.0} and len(np.unique(chosen_SxN, axis=0)) == 20
  assert 0 < np.abs(told_P - exact_P).max() < 5 * 0.5 / np.sqrt(4096)
  np.testing.assert_array_equal(estimate.votes(answer_PxN, right_PxN, 3, weight_PxN)[0], told_P)


def test_sizes_double_up_to_all():
  assert [estimate.sizes(n) for n in (0, 1, 2, 4, 6)] == [[], [1], [1, 2], [1, 2, 4], [1, 2, 4, 6]]


def test_the_interval_of_one_answer_a_prompt_is_wilson_s():
  for right, count in ((0, 8), (3, 8), (8, 8), (150, 200)):
    estimated = estimate.interval(np.arange(count) < right)
    want = stats.binomtest(right, count).proportion_ci(method='wilson')
    np.testing.assert_allclose(estimated, [right / count, *want], atol=1e-12)


@pytest.mark.parametrize(
  'prompts, a, b, samples', [(30, 1, 1, 1), (30, 0.5, 0.5, 4), (100, 0.3, 6, 4)]
)
def test_intervals_hold_the_truth_as_often_as_they_say(prompts, a, b, samples):
  """Prompts of rate Beta(a, b), a few samples each."""
  random, runs = np.random.default_rng(0), 2000
  hits = 0
  for _ in range(runs):
    estimated = estimate.interval(random.binomial(samples, random.beta(a, b, prompts)) / samples)
    hits += estimated.low <= a / (a + b) <= estimated.high
  # Four Monte-Carlo errors, 0.005 each, and what a normal tail misses of so few prompts.
  assert 0.93 - 0.02 < hits / runs < 0.95 + 0.02


def test_rewards_beyond_rates_have_student_s_interval():
  x_P = np.array([-1.0, 0.5, 2.0, 3.0, 0.0])
  want = stats.t.interval(0.95, 4, x_P.mean(), stats.sem(x_P))
  np.testing.assert_allclose(estimate.interval(x_P)[1:], want, rtol=1e-3)
  for freedom in (1, 2, 4, 5, 9, 200):
    np.testing.assert_allclose(estimate._t(freedom), stats.t.ppf(0.975, freedom), atol=4e-4)
  assert estimate.interval(np.array([2.0])) == (2.0, None, None)


def test_differences_of_pairs_cover_and_are_narrower_than_of_strangers(monkeypatch):
  """Two samplers on the same prompts, right at rates q and 0.9·q with a mean of 1/2 over q: 0.05 apart."""
  monkeypatch.setattr(estimate, '_SIGN_FLIPS', 16)  # the test beside it is not looked at here
  random, runs, hits, widths = np.random.default_rng(0), 400, 0, []
  for _ in range(runs):
    rate_P = random.beta(0.5, 0.5, 60)
    x_P, y_P = random.binomial(4, rate_P) / 4, random.binomial(4, 0.9 * rate_P) / 4
    estimated = estimate.difference(x_P, y_P)
    hits += estimated.low <= 0.05 <= estimated.high
    apart = np.sqrt((x_P.var() + y_P.var()) / 60) * 1.96
    widths.append((estimated.high - estimated.low) / (2 * apart))
  # Four Monte-Carlo errors, 0.011 each.
  assert 0.95 - 0.044 < hits / runs < 0.95 + 0.044 and np.mean(widths) < 0.6


def test_the_sign_flip_test_is_that_of_all_signs_and_says_nothing_of_nothing():
  random = np.random.default_rng(1)
  x_P, y_P = random.integers(0, 5, 12) / 4, random.integers(0, 4, 12) / 4
  d_P = x_P - y_P
  signs = np.array(list(itertools.product((-1, 1), repeat=12)))
  want = (np.abs(signs @ d_P) >= abs(d_P.sum()) - 1e-9).mean()
  assert estimate.difference(x_P, y_P).p == want
  assert estimate.difference(x_P, x_P) == (0.0, 0.0, 0.0, 1.0)
  # Drawn signs: 40 wins of 60 by one each is a two-sided binomial test.
  p = estimate.difference(np.arange(60) < 40, np.arange(60) >= 40).p
  assert abs(p - stats.binomtest(40, 60).pvalue) < 4 * np.sqrt(0.0134 / 2**14) + 1 / 2**14


def test_equal_evaluations_differ_as_often_as_is_said():
  """Of scores without ties in 5 of 100; of right and wrong, where many sums are equal, in no more."""
  random, runs = np.random.default_rng(0), 600
  low = lambda x_2xP: estimate.difference(*x_2xP).p <= 0.05  # noqa: E731
  share_low = sum(low(random.random((2, 10))) for _ in range(runs)) / runs
  assert abs(share_low - 0.05) < 0.027  # three Monte-Carlo errors
  assert sum(low(random.random((2, 12)) < 0.5) for _ in range(runs)) / runs < 0.05 + 0.027
