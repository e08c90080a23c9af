"""Bias, exactly: two tokens, three positions, all eight answers counted with their probabilities.

The policy has one logit for each of the seven prefixes. An estimator's expectation is a sum over answers (or over pairs
of answers, where it looks at groups), so that nothing here is a matter of luck.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_table import settings

from jaxrl_llm import objective
from jaxrl_llm.types import Batch, Prompts, Rollout

ANSWERS = np.array(list(itertools.product((0, 1), repeat=3)))
# Prefix '', '0', '1', '00', … as 0 … 6.
PREFIX = np.stack(
  [np.zeros(8, int), 1 + ANSWERS[:, 0], 3 + 2 * ANSWERS[:, 0] + ANSWERS[:, 1]], axis=1
)
_R = np.random.default_rng(3)
THETA, BEHAVIOR, REFERENCE = _R.normal(size=(3, 7))
REWARD = _R.uniform(0, 1, 8)


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def logp(theta):
  """Of each token of each answer, [8, 3]."""
  z = jnp.asarray(theta)[PREFIX]
  return jnp.where(ANSWERS == 1, jax.nn.log_sigmoid(z), jax.nn.log_sigmoid(-z))


def chance(theta):
  return jnp.exp(logp(theta).sum(1))


def truth(reward=REWARD):
  return jax.grad(lambda t: (chance(t) * reward).sum())(jnp.asarray(THETA))


def expected(sampler, reward=REWARD, group=1, importance=None, **choices):
  """E over answers drawn from `sampler` of Σ c·∇log π, times the rows that c is divided by."""
  method = objective.method(
    settings(**(dict(aggregation='sequence_sum', trust_region='none') | choices))
  )
  groups = list(itertools.product(range(8), repeat=group))
  x, b, ref = (np.asarray(logp(t)) for t in (THETA, sampler, REFERENCE))
  total = np.zeros((8, 3))
  for rows in groups:
    rows = np.array(rows)
    n = len(rows)
    rollout = Rollout(
      ANSWERS[rows],
      b[rows],
      np.full(n, 3),
      np.ones(n, np.int8),
      np.zeros((n, 3), np.int32),
      np.ones(n) if importance is None else importance[rows],
      np.zeros((n, 0)),
    )
    prompts = Prompts(
      np.zeros((1, 1), np.int32), np.ones(1, np.int32), *[np.arange(1)] * 2, np.zeros(1)
    )
    correct = (reward[rows] > 0.5).astype(float)
    batch = Batch(prompts, rollout, reward[rows], correct)
    target = objective.targets(method, batch, n).with_arrays(
      old_BxT=x[rows] if method.needs_old else None,
      reference_BxT=ref[rows] if method.needs_reference else None,
    )
    c = np.asarray(objective.coefficients(method, target, x[rows])[0])
    np.add.at(total, rows, c * np.asarray(chance(sampler))[rows].prod())
  return jax.grad(lambda t: (total * logp(t)).sum())(jnp.asarray(THETA))


RAW = dict(advantage='raw')


@pytest.mark.parametrize(
  'choices',
  [
    dict(ratio='one'),
    dict(ratio='direct_product'),
    dict(ratio='token'),
    dict(advantage=dict(fn='raw', baseline=0.3), ratio='one'),
  ],
)
def test_on_policy_the_gradient_is_exact(choices):
  np.testing.assert_allclose(expected(THETA, **(RAW | choices)), truth(), atol=1e-12)


@pytest.mark.parametrize(
  'choices',
  [
    dict(ratio='direct_product'),
    dict(ratio='one', importance_correction=dict(fn='sequence_truncate', high=1e6)),
    dict(ratio='product', importance_correction=dict(fn='sequence_mask', high=1e6)),
  ],
)
def test_off_policy_the_product_of_ratios_is_exact(choices):
  np.testing.assert_allclose(expected(BEHAVIOR, **RAW, **choices), truth(), atol=1e-10)


def test_rows_weighted_by_how_they_were_drawn_are_exact():
  importance = np.asarray(chance(THETA) / chance(BEHAVIOR))
  got = expected(BEHAVIOR, **RAW, ratio='one', importance=importance)
  np.testing.assert_allclose(got, truth(), atol=1e-10)


@pytest.mark.parametrize(
  'choices',
  [
    dict(ratio='one'),
    dict(ratio='token'),
    dict(ratio='sequence'),
    dict(ratio='prefix_min'),
    dict(ratio='one', importance_correction='token'),
    dict(ratio='one', importance_correction=dict(fn='sequence_truncate', high=1.5)),
    dict(ratio='one', importance_correction=dict(fn='sequence_mask', high=1.5)),
    dict(ratio='direct_product', trust_region='clip'),
  ],
)
def test_off_policy_everything_else_is_biased(choices):
  assert np.abs(expected(BEHAVIOR, **RAW, **choices) - truth()).max() > 1e-2


def test_the_last_token_needs_no_other_correction_than_its_prefix():
  """Token ratios leave the prefix's distribution to the sampler: exact where only the last token moved."""
  moved = np.where(np.arange(7) < 3, THETA, BEHAVIOR)
  got = expected(moved, **RAW, ratio='token')
  np.testing.assert_allclose(got[3:], truth()[3:], atol=1e-12)
  assert np.abs(got[:3] - truth()[:3]).max() > 1e-3


def test_leave_one_out_is_exact_and_the_group_mean_too_small():
  got = expected(THETA, group=2, advantage='leave_one_out', ratio='one')
  np.testing.assert_allclose(got, truth(), atol=1e-10)
  got = expected(THETA, group=2, advantage='group_centered', ratio='one')
  np.testing.assert_allclose(got, truth() / 2, atol=1e-10)  # (G − 1)/G


def test_a_shifted_baseline_is_unbiased_on_policy_and_pulls_to_its_own_samples_off_policy():
  for sampler, changes in ((THETA, False), (BEHAVIOR, True)):
    plain = expected(sampler, group=2, advantage='group_centered', ratio='one')
    shifted = expected(sampler, group=2, advantage=dict(fn='shifted', shift=-0.1), ratio='one')
    own = jax.grad(lambda t: 0.1 * (chance(sampler) * logp(t).sum(1)).sum())(jnp.asarray(THETA))  # noqa: B023
    np.testing.assert_allclose(shifted - plain, own, atol=1e-12)
    assert (np.abs(own).max() > 1e-3) == changes


@pytest.mark.parametrize('most', [0.5, 1.0, 2.0])
def test_truncation_shrinks_the_gradient_of_what_it_truncates_by_the_predicted_factor(most):
  """One rewarded answer: the direction stays, the length is min(1, C/ρ)."""
  rho = np.asarray(chance(THETA) / chance(BEHAVIOR))
  for answer in range(8):
    reward = np.eye(8)[answer]
    choices = dict(ratio='one', importance_correction=dict(fn='sequence_truncate', high=most))
    got = expected(BEHAVIOR, reward, **RAW, **choices)
    np.testing.assert_allclose(got, min(1, most / rho[answer]) * truth(reward), atol=1e-10)


def test_clipping_removes_gains_and_keeps_losses():
  """What is already likelier than 1+ε: no pull up (the bias is downwards), the whole pull down."""
  ratio = np.asarray(chance(THETA) / chance(BEHAVIOR))
  choices = dict(ratio='direct_product', trust_region='clip')
  assert (ratio > 1.2).any() and (ratio < 0.8).any()
  for answer in range(8):
    for sign in (1.0, -1.0):
      reward = sign * np.eye(8)[answer]
      got = expected(BEHAVIOR, reward, **RAW, **choices)
      clipped = (sign > 0 and ratio[answer] > 1.2) or (sign < 0 and ratio[answer] < 0.8)
      np.testing.assert_allclose(got, (0.0 if clipped else 1.0) * truth(reward), atol=1e-10)


def test_tapering_overrates_successes_that_became_unlikely_and_underrates_likely_failures():
  ratio = np.asarray(chance(THETA) / chance(BEHAVIOR))
  choices = dict(ratio='direct_product', trust_region='taper')
  for answer in range(8):
    up = expected(BEHAVIOR, np.eye(8)[answer], **RAW, **choices)
    np.testing.assert_allclose(up, truth(np.eye(8)[answer]) / ratio[answer], atol=1e-10)
    down = expected(BEHAVIOR, -np.eye(8)[answer], **RAW, **choices)
    want = truth(-np.eye(8)[answer]) * min(1, 1 / ratio[answer])
    np.testing.assert_allclose(down, want, atol=1e-10)


def divergence(sampler, forward=False):
  """∇ of Σ_t E_prefix KL(π ‖ ref) token by token, or KL(ref ‖ π), prefixes drawn from `sampler`."""
  weight = np.zeros(7)
  for answer in range(8):
    for t in range(3):
      # Half of the answers through a prefix share its next token: count each prefix once.
      prefix = logp(sampler)[answer, :t].sum()
      weight[PREFIX[answer, t]] = float(jnp.exp(prefix))

  def total(t):
    p, r = jax.nn.sigmoid(t), jax.nn.sigmoid(jnp.asarray(REFERENCE))
    a, b = (r, p) if forward else (p, r)
    return (weight * (a * jnp.log(a / b) + (1 - a) * jnp.log((1 - a) / (1 - b)))).sum()

  return jax.grad(total)(jnp.asarray(THETA))


ZERO = np.zeros(8)


@pytest.mark.parametrize(
  'name, forward',
  [('k2', False), ('k3', True), ('k3_straight', False), ('ratio_k1', False), ('ratio_k3', False)],
)
def test_on_policy_each_kl_has_the_gradient_it_is_said_to_have(name, forward):
  got = expected(THETA, ZERO, **RAW, kl=dict(fn=name, coef=1.0))
  np.testing.assert_allclose(got, -divergence(THETA, forward), atol=1e-12)


def test_on_policy_k1_as_a_loss_has_no_gradient():
  np.testing.assert_allclose(
    expected(THETA, ZERO, **RAW, kl=dict(fn='k1', coef=1.0)), 0, atol=1e-12
  )


def test_on_policy_the_square_of_whole_rows_has_the_gradient_of_their_kl():
  """Of KL(π ‖ ref) over answers, which includes that of the prefixes."""
  kl = lambda t: (chance(t) * (logp(t) - logp(REFERENCE)).sum(1)).sum()  # noqa: E731
  got = expected(THETA, ZERO, **RAW, kl=dict(fn='sequence_quadratic', coef=1.0))
  np.testing.assert_allclose(got, -jax.grad(kl)(jnp.asarray(THETA)), atol=1e-12)
  assert np.abs(got + divergence(THETA)).max() > 1e-2


@pytest.mark.parametrize('name', ['k1', 'k2', 'k3', 'k3_straight', 'ratio_k1', 'ratio_k3'])
def test_off_policy_only_the_corrected_kls_keep_their_gradient(name):
  got = expected(BEHAVIOR, ZERO, **RAW, kl=dict(fn=name, coef=1.0))
  gap = np.abs(got + divergence(BEHAVIOR)).max()
  assert gap < 1e-12 if name.startswith('ratio') else gap > 1e-2
