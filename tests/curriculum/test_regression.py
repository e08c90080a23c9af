"""Success rates regressed on features: ridge by least squares, measured reliability, calibrated predictions."""

from __future__ import annotations

import numpy as np
import pytest
from curricula import PLAIN, G, make, observe

from jaxrl_llm.curriculum import pooled_sums
from jaxrl_llm.types import UserError

N, F = 7000, 6


def regressed(z, **settings):
  pooling = dict(fn='regression', feature='z') | settings
  return make(len(z), fields=dict(z=z), **PLAIN | dict(prior_pooling=pooling))


def world(true=20.0):
  """Unit features, and success rates whose means depend on them, of a Beta of this strength."""
  random = np.random.default_rng(0)
  z = random.normal(size=(N, F))
  z /= np.linalg.norm(z, axis=1, keepdims=True)
  mean = 0.5 + 0.4 * z[:, 0] - 0.1 * z[:, 1]
  return z, mean, random.beta(true * mean, true * (1 - mean)), random


def watch(curriculum, p, random, steps=30):
  for index in np.split(random.permutation(N)[: 64 * steps], steps):
    observe(curriculum, index, random.binomial(G, p[index]))


def calibration(predicted, truth) -> float:
  """Σ over ten bins of the prediction: share · |mean prediction − mean truth|."""
  bins = np.minimum((predicted * 10).astype(int), 9)
  return np.abs(np.bincount(bins, predicted - truth, 10)).sum() / len(truth)


def test_the_rate_is_the_least_squares_solution():
  z, _, p, random = world()
  curriculum = regressed(z, memory=1e12, ridge=2.0)
  index = np.arange(50)
  k = random.binomial(G, p[:50])
  observe(curriculum, index[:20], k[:20])
  observe(curriculum, index[20:], k[20:])
  features = np.c_[z.astype(np.float32), np.ones(N)].astype(np.float16).astype(float)
  rows = np.r_[features[:50], np.sqrt(2) * np.eye(F + 1)]  # the ridge as rows of data
  theta = np.linalg.lstsq(rows, np.r_[k / G - 0.5, np.zeros(F + 1)], rcond=None)[0]
  unseen = np.arange(50, N)
  expected = np.clip(0.5 + features[unseen] @ theta, 0.02, 0.98)
  np.testing.assert_allclose(curriculum.predict(unseen)[0], expected, atol=1e-4)  # of float16


@pytest.mark.parametrize('true', [1.0, 5.0, 20.0])
def test_the_strength_is_the_measured_reliability(true):
  z, _, p, random = world(true)
  curriculum = regressed(z)
  watch(curriculum, p, random)
  alpha, beta = curriculum.posterior(np.flatnonzero(curriculum.visits(np.arange(N)) == 0))
  assert (alpha + beta)[0] == pytest.approx(true, rel=0.25)


def test_residuals_are_of_predictions_before_the_visit():
  curriculum = regressed(np.eye(3))
  observe(curriculum, [0, 1], [8, 2])
  pairs, rate = np.array([1, 2 / 56]), np.array([1, 0.25])
  residual = (pairs - rate + 0.25).sum()  # of ½ for both
  np.testing.assert_allclose(curriculum.state_dict()['share_residual'], [residual, 0.5, 2])


def test_predictions_from_features_are_calibrated_and_sharper():
  z, mean, p, random = world()
  curriculum, plain = regressed(z), make(N, **PLAIN | dict(prior_pooling=dict(fn='kind')))
  watch(curriculum, p, random)
  watch(plain, p, np.random.default_rng(1))
  new = np.flatnonzero(curriculum.visits(np.arange(N)) + plain.visits(np.arange(N)) == 0)
  truth = 1 - p[new] ** G - (1 - p[new]) ** G
  ours, others = (c.predict(new)[2] for c in (curriculum, plain))
  error, other = calibration(ours, truth), calibration(others, truth)
  print(f'calibration error {error:.4f}, kind {other:.4f}, of {len(new)} prompts')
  assert error < 0.03 < other
  assert ((ours - truth) ** 2).mean() < 0.5 * ((others - truth) ** 2).mean()
  assert np.abs(curriculum.predict(new)[0] - mean[new]).mean() < 0.03


def test_features_without_a_relation_claim_nothing():
  z, _, _, random = world()
  p = random.beta(0.5, 0.5, N)
  curriculum = regressed(z)
  watch(curriculum, p, random)
  unseen = np.flatnonzero(curriculum.visits(np.arange(N)) == 0)
  alpha, beta = curriculum.posterior(unseen)
  assert (alpha + beta)[0] == pytest.approx(1, rel=0.2)
  assert np.abs(alpha / (alpha + beta) - 0.5).mean() < 0.05


def test_many_features_are_projected():
  z = np.repeat(np.eye(100), 2, axis=0)
  curriculum = regressed(z, dimensions=32, ridge=0.01)
  assert curriculum.state_dict()['share_gram'].shape == (33, 33)
  for _ in range(3):
    observe(curriculum, [0, 2], [8, 0])
  mean = curriculum.predict(np.array([1, 3]))[0]
  assert mean[0] > 0.9 and mean[1] < 0.1


@pytest.mark.parametrize('memory, equal', [(1.0, True), (1e6, False)])
def test_older_visits_decay(memory, equal):
  z = np.tile(np.eye(2), (2, 1))
  both, last = regressed(z, memory=memory), regressed(z, memory=memory)
  observe(both, [0], [8])
  for curriculum in (both, last):
    observe(curriculum, [1], [0])
  rate, expected = (c.predict(np.array([2, 3]))[0] for c in (both, last))
  assert np.allclose(rate, expected, rtol=1e-6) == equal


def test_predictions_of_large_data_sets_are_computed_in_turn(monkeypatch):
  monkeypatch.setattr(pooled_sums, '_REFRESHED', 2)
  curriculum = regressed(np.ones((5, 1)))
  means = []
  for index in range(3):
    observe(curriculum, [0] if index == 0 else np.zeros(0, int), [8] if index == 0 else [])
    means.append(curriculum.predict(np.arange(1, 5))[0] > 0.6)
  assert np.array(means).astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


def test_revisits_count_after_32_of_them():
  curriculum = regressed(np.eye(3))
  observe(curriculum, [0], [4])
  for _ in range(32):
    observe(curriculum, [0], [8])
  before = curriculum.state_dict()['share_moment']
  assert not before.any()
  observe(curriculum, [0], [8])
  assert curriculum.state_dict()['share_moment'].any()


@pytest.mark.parametrize(
  'name, value',
  [('dimensions', 0), ('ridge', 0.0), ('strength', 0.0), ('visits', 0.0), ('memory', 0.5)],
)
def test_settings_out_of_range_are_user_errors(name, value):
  with pytest.raises(
    UserError, match=rf'config\.curriculum\.prior_pooling\.{name}={value} must be'
  ):
    regressed(np.eye(3), **{name: value})
