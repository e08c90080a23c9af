"""Strengths of kinds fitted to Beta-binomial counts: recovered, calibrated, and no worse for chosen prompts."""

from __future__ import annotations

import numpy as np
import pytest
from curricula import PLAIN, G, make, observe
from scipy import optimize, stats

from jaxrl_llm.curriculum import pooled_sums
from jaxrl_llm.types import UserError

EXACT = dict(visits=1e-6, memory=1e9)  # no shrinkage, all visits


def fitted(kind, decay=1.0, **pooling):
  pooling = dict(fn='fitted_kind') | pooling
  kind = np.asarray(kind)
  return make(len(kind), kind=kind, **PLAIN | dict(prior_pooling=pooling, kind_decay=decay))


def strength(curriculum, index: int) -> float:
  """α + β of a prompt, that of its kind where it has no visit."""
  alpha, beta = curriculum.posterior(np.array([index]))
  return float((alpha + beta)[0])


def mixed(p):
  return 1 - p**G - (1 - p) ** G


def calibration(predicted, truth) -> float:
  """Σ over ten bins of the prediction: share · |mean prediction − mean truth|."""
  bins = np.minimum((predicted * 10).astype(int), 9)
  return np.abs(np.bincount(bins, predicted - truth, 10)).sum() / len(truth)


@pytest.mark.parametrize('mean, true', [(0.5, 1.0), (0.3, 4.0), (0.8, 0.3), (0.5, 20.0)])
def test_counts_in_exact_proportions_give_their_strength(mean, true):
  pmf = stats.betabinom.pmf(np.arange(G + 1), G, true * mean, true * (1 - mean))
  k = np.repeat(np.arange(G + 1), np.rint(20_000 * pmf).astype(int))
  curriculum = fitted(np.zeros(len(k) + 1, int), **EXACT)
  observe(curriculum, np.arange(len(k)), k)
  assert strength(curriculum, len(k)) == pytest.approx(true, rel=0.01)
  assert curriculum.predict(np.array([len(k)]))[0] == pytest.approx(mean, abs=1e-3)


def test_moments_agree_with_the_marginal_likelihood():
  random = np.random.default_rng(0)
  k = random.binomial(G, random.beta(0.6, 1.4, 4000))
  curriculum = fitted(np.zeros(4001, int), **EXACT)
  observe(curriculum, np.arange(4000), k)
  count = np.bincount(k, minlength=G + 1)
  loss = lambda x: -count @ stats.betabinom.logpmf(np.arange(G + 1), G, *np.exp(x))  # noqa: E731
  best = np.exp(optimize.minimize(loss, np.zeros(2), method='Nelder-Mead').x).sum()
  assert strength(curriculum, 4000) == pytest.approx(best, rel=0.06)


def test_pairs_of_graded_scores_have_no_variance_within_the_prompt():
  """Scores x = p exactly for each prompt: as coins, a part of their spread would count as noise."""
  random = np.random.default_rng(0)
  p = random.beta(2, 2, 4000)
  curricula = [fitted(np.zeros(4001, int), **EXACT) for _ in range(2)]
  for curriculum, graded in zip(curricula, (G * p * (1 - p), None), strict=True):
    observe(curriculum, np.arange(4000), G * p, graded=graded)
  true = p.mean() * (1 - p.mean()) / p.var() - 1
  assert strength(curricula[0], 4000) == pytest.approx(true, rel=0.01)
  assert strength(curricula[1], 4000) > 1.3 * true


KINDS, N = 8, 8000
MEAN = np.array([0.1, 0.9, 0.3, 0.7, 0.5, 0.2, 0.5, 0.8])
STRENGTH = np.array([0.4, 0.4, 1.0, 1.0, 10.0, 10.0, 40.0, 40.0])


def world(random):
  kind = np.arange(N) % KINDS
  return kind, random.beta((STRENGTH * MEAN)[kind], (STRENGTH * (1 - MEAN))[kind])


def errors(pooling: dict, chosen: bool) -> float:
  """Calibration error of P(mixed) of all prompts after 40 steps of 64 prompts."""
  random = np.random.default_rng(1)
  kind, p = world(random)
  settings = dict(prior_pooling=pooling, kind_decay=0.99, evidence_decay=dict(fn='none'))
  curriculum = make(N, kind=kind, **settings)
  for step in range(40):
    index = random.choice(N, 64, replace=False)
    if chosen:
      proposal = curriculum.propose(step, 64)
      curriculum.accept(proposal)
      index = proposal.index
    observe(curriculum, index, random.binomial(G, p[index]))
  return calibration(curriculum.predict(np.arange(N))[2], mixed(p))


# Kinds that are rarely chosen keep few visits, and with them the strength of all kinds.
@pytest.mark.parametrize('chosen, most', [(False, 0.03), (True, 0.06)])
def test_predictions_are_calibrated_and_those_of_a_fixed_strength_are_not(chosen, most):
  fit = errors(dict(fn='fitted_kind'), chosen)
  fixed = errors(dict(fn='kind', strength=2.0), chosen)
  print(f'calibration error {fit:.4f}, fixed {fixed:.4f}, chosen={chosen}')
  assert fit < most < fixed


def test_a_kind_of_few_visits_has_the_strength_of_all_kinds():
  pmf = stats.betabinom.pmf(np.arange(G + 1), G, 5.0, 5.0)
  k = np.repeat(np.arange(G + 1), np.rint(2000 * pmf).astype(int))
  kind = np.r_[np.zeros(len(k), int), [1, 1]]
  curriculum = fitted(kind)
  before = strength(curriculum, len(k))
  observe(curriculum, np.arange(len(k)), k)
  assert before == pytest.approx(2.0) and strength(curriculum, len(k)) == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize('memory, visits', [(1.0, 3), (1e9, 5)])
def test_moments_are_of_the_last_visits(memory, visits):
  curriculum = fitted(np.zeros(9, int), memory=memory)
  observe(curriculum, [0, 1], [3, 8])
  observe(curriculum, [2, 3, 4], [1, 2, 3])
  assert curriculum.state_dict()['share_moments'][0, 0] == pytest.approx(visits)


def test_only_first_visits_count_until_there_are_none():
  curriculum = fitted([0, 0, 0])
  observe(curriculum, [0], [4])
  prior = curriculum.posterior(np.array([2]))
  for _ in range(32):
    observe(curriculum, [0], [8])
  assert curriculum.posterior(np.array([2])) == prior
  observe(curriculum, [0], [8])
  assert curriculum.predict(np.array([2]))[0] > 0.6
  assert strength(curriculum, 2) == pytest.approx(float(sum(prior)[0]), rel=1e-6)
  observe(curriculum, [1], [8])
  now = curriculum.posterior(np.array([2]))
  observe(curriculum, [0], [8])  # not first, and first visits are back
  assert curriculum.posterior(np.array([2])) == now


def test_a_kind_without_evidence_is_like_the_others():
  """Of kinds 0 and 1, 3 of 16 rollouts are right; 2 has none, and two pseudo-counts of (3 + 1) / (16 + 2)."""
  curriculum = fitted([0, 1, 2, 2])
  observe(curriculum, np.arange(2), np.array([0, 3]))
  expected = np.array([2 * 4 / 18 / 10, (3 + 2 * 4 / 18) / 10, 4 / 18])
  rates = pooled_sums.kind_rates(np.array([[0.0, 3.0, 0.0], [8.0, 5.0, 0.0]]))
  np.testing.assert_allclose(rates, expected)
  np.testing.assert_allclose(curriculum.predict(np.arange(2, 4))[0], 4 / 18, rtol=1e-6)
  assert fitted([0, 1]).predict(np.arange(2))[0].tolist() == [0.5, 0.5]


@pytest.mark.parametrize('name, value', [('strength', 0.0), ('visits', 0.0), ('memory', 0.5)])
def test_settings_out_of_range_are_user_errors(name, value):
  with pytest.raises(
    UserError, match=rf'config\.curriculum\.prior_pooling\.{name}={value} must be'
  ):
    fitted([0], **{name: value})
