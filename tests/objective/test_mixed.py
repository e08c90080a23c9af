"""Zero-variance groups in the mask, in every denominator and in the metric."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from objective_table import G, settings

from jaxrl_llm import objective
from jaxrl_llm.rewards import outcomes
from jaxrl_llm.types import Batch, Prompts, Rollout

DAPO = dict(
  trust_region=dict(fn='clip', low=0.2, high=0.28),
  aggregation=dict(fn='token_mean'),
  zero_variance=dict(fn='mask'),
)
LENGTHS = (3, 1, 2, 4)


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def batch(reward_PxG, correct_PxG=None, length_PxG=None, parts_BxK=None) -> Batch:
  """Groups of G rows with these rewards, sampled on policy; no row is right unless `correct_PxG` says so."""
  reward_PxG = np.asarray(reward_PxG, float)
  P = len(reward_PxG)
  length_B = np.tile(LENGTHS, P) if length_PxG is None else np.ravel(length_PxG)
  B, T = P * G, max(LENGTHS)
  logp_BxT = np.log(np.random.default_rng(P).uniform(0.05, 0.95, (B, T)))
  rollout = Rollout(
    np.zeros((B, T), np.int32),
    logp_BxT,
    length_B.astype(np.int32),
    np.ones(B, np.int8),
    np.zeros((B, T), np.int32),
    np.ones(B),
    np.zeros((B, 0)),
  )
  prompts = Prompts(
    np.zeros((P, 3), np.int32), np.full(P, 3, np.int32), *[np.arange(P)] * 2, np.zeros(P)
  )
  correct_B = np.zeros(B) if correct_PxG is None else np.ravel(correct_PxG).astype(float)
  return Batch(prompts, rollout, reward_PxG.ravel(), correct_B, parts_BxK=parts_BxK)


def coefficients(given: Batch, **changes):
  method = objective.method(settings(**DAPO | changes))
  target = objective.targets(method, given, G)
  c_BxT, _ = objective.coefficients(method, target, given.rollout.logp_BxT)
  return np.asarray(c_BxT).reshape(-1, G, max(LENGTHS)), np.asarray(target.mask_BxT)


def test_dense_rewards_below_right_have_the_coefficients_of_the_formula():
  """c = A / (tokens of mixed groups), A = (r − mean) / (std + 1e-6), std over n − 1: by hand."""
  reward_PxG = np.array([[0, 0.05, 0.25, 0.1], [0.1] * 4, [0.2, 0.25, 0.2, 0.2]])
  got, _ = coefficients(batch(reward_PxG))
  want = np.zeros_like(got)
  for p in (0, 2):
    r = reward_PxG[p]
    mean = sum(r) / 4
    std = (sum((x - mean) ** 2 for x in r) / 3) ** 0.5
    for g, length in enumerate(LENGTHS):
      want[p, g, :length] = (r[g] - mean) / (std + 1e-6) / (2 * sum(LENGTHS))
  np.testing.assert_allclose(got, want, rtol=1e-12, atol=0)


@pytest.mark.parametrize('apart, counts', [(0, False), (1e-7, False), (9e-7, False), (2e-6, True)])
def test_scores_no_further_apart_than_a_millionth_are_equal(apart, counts):
  got, mask_BxT = coefficients(batch([[0.2, 0.2 + apart, 0.2, 0.2], [0, 0.1, 0, 0]]))
  assert mask_BxT[:G].any() == counts == got[0].any() and got[1].any()
  tokens = sum(LENGTHS) * (1 + counts)
  assert mask_BxT.sum() == tokens and abs(got[1]).max() == pytest.approx(1.5 / tokens, rel=1e-4)


def test_rows_that_do_not_exist_differ_from_nothing():
  length_PxG = [[3, 1, 2, 0], [0, 0, 0, 0], [0, 2, 0, 0]]
  given = batch([[0.1, 0.1, 0.1, 0.9], [0.1, 0.2, 0.3, 0.4], [0, 0.7, 0, 0]], length_PxG=length_PxG)
  own = objective.group_rows(given.prompts, G)
  assert not objective.mixed_group_mask(given.reward_B[:, None], given.rollout.length_B, own).any()


def test_binary_scores_are_mixed_as_right_and_wrong_answers_are():
  """To the bit, whatever rows exist: the rule of DAPO's paper, 0 < right < G."""
  r = np.random.default_rng(0)
  right_PxG = r.random((400, G)) < r.random((400, 1))
  length_PxG = r.integers(0, 3, (400, G))
  given = batch(right_PxG, right_PxG, length_PxG)
  own = objective.group_rows(given.prompts, G)
  got = np.asarray(objective.mixed_group_mask(given.reward_B[:, None], given.rollout.length_B, own))
  exists = length_PxG > 0
  right = (right_PxG & exists).sum(1)
  want = (right > 0) & (right < exists.sum(1))
  assert got.dtype == np.float32 and 0.2 < want.mean() < 0.8
  np.testing.assert_array_equal(got.reshape(-1, G), np.repeat(want[:, None], G, 1))
  host = outcomes.mixed(given.reward_B[:, None], exists.ravel(), np.repeat(np.arange(400), G), 400)
  np.testing.assert_array_equal(host, want)


def test_a_length_penalty_mixes_no_group():
  shape = dict(fn='overlong', buffer_tokens=2, factor=0.5)
  got, mask_BxT = coefficients(batch([[0.1] * 4, [0, 0.2, 0.1, 0]]), shape=shape)
  assert not mask_BxT[:G].any() and not got[0].any() and got[1].any()


def test_where_each_reward_is_normalized_alone_any_of_them_mixes_a_group():
  """GDPO: 2·(1, 0) and 1·(0, 2) have one sum and teach; a part of weight 0 is for the log."""
  parts_BxK = np.zeros((2 * G, 3))
  parts_BxK[:G, 0], parts_BxK[:G, 1] = [1, 0, 1, 0], [0, 2, 0, 2]
  parts_BxK[:, 2] = np.arange(2 * G)
  given = batch([[2] * 4, [0] * 4], parts_BxK=parts_BxK)
  changes = DAPO | dict(advantage='decoupled')
  method = objective.method(settings(**changes))._replace(weight_K=(2.0, 1.0, 0.0))
  target = objective.targets(method, given, G)
  assert np.asarray(target.mask_BxT).reshape(2, -1).any(1).tolist() == [True, False]
  assert np.asarray(target.advantage_BxT)[:G].any()
  summed = objective.targets(objective.method(settings(**DAPO)), given, G)
  assert not np.asarray(summed.mask_BxT).any()
