"""Score centering by enumeration: every token of a small vocabulary, with the probability that the sampler draws it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_table import settings

from jaxrl_llm import objective
from jaxrl_llm.config.centered_scores import OF_A_TOKEN
from jaxrl_llm.objective import score_centering, trust_region
from jaxrl_llm.objective.token_inputs import Tokens
from jaxrl_llm.types import UserError

V = 6
_R = np.random.default_rng(5)
POLICY, REWARD = _R.normal(size=(2, V))
SAMPLER = POLICY + np.array(
  [0.1, -0.1, 0.9, -0.8, 0.0, -0.5]
)  # ratios within usual bounds, and beyond on both sides

NARROW = dict(cap=dict(most=1.5), cap_above=dict(high=0.3))


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def stages(ratio='one', **trust):
  return objective.method(settings(ratio=ratio, trust_region=trust or 'none')).token_stages


def log_softmax(x):
  return jax.nn.log_softmax(jnp.asarray(x))


def drawn(chosen, advantage_V, sampler=SAMPLER, policy=POLICY):
  """E over tokens from the sampler of W·A·∇log π: the policy term, with an advantage for each token."""
  logp, b = log_softmax(policy)[None], log_softmax(sampler)[None]
  none_B = jnp.zeros(1)
  tokens = Tokens(logp, b, b, jnp.ones((1, V)), jnp.asarray(advantage_V)[None], none_B, none_B)
  weight_V = chosen.trust_region(chosen.ratio(tokens), tokens)[0][0]
  c_V = jnp.exp(b[0]) * weight_V * jnp.asarray(advantage_V)
  return np.asarray(jax.grad(lambda x: (c_V * log_softmax(x)).sum())(jnp.asarray(policy)))


def subtracted(chosen, advantage, count=V, sampler=SAMPLER, policy=POLICY):
  """The gradient of the term, for the `count` likeliest tokens of the sampler."""
  b, ids = jax.lax.top_k(log_softmax(sampler), count)

  def term(x):
    advantage_1x1 = jnp.full((1, 1), advantage)
    return score_centering.mean_score(
      chosen, log_softmax(x)[None, None], ids[None, None], b[None, None], advantage_1x1
    ).sum()

  return np.asarray(jax.grad(term)(jnp.asarray(policy)))


def like_policy_in_the_tail(count):
  """A sampler with the policy's distribution over all but its own `count` likeliest tokens."""
  p = np.exp(log_softmax(POLICY))
  head = np.argsort(-p)[:count][::-1]
  q = p * 0.5
  q[head] = p[head[::-1]]
  return np.log(q / q.sum())


@pytest.mark.parametrize('advantage', [-0.7, 1.3])
@pytest.mark.parametrize('ratio', ['one', 'direct'])
@pytest.mark.parametrize('fn', OF_A_TOKEN)
def test_an_advantage_that_all_tokens_share_moves_nothing(fn, ratio, advantage):
  chosen = stages(ratio, fn=fn, **NARROW.get(fn, {}))
  drift = drawn(chosen, np.full(V, advantage))
  np.testing.assert_allclose(drift, subtracted(chosen, advantage), atol=1e-12)
  # The mean of v·∇log π is that of ∇log π under the policy.
  cancels = ratio == 'direct' and fn == 'none'
  assert (np.abs(drift).max() > 1e-2) != cancels


@pytest.mark.parametrize('settings', [dict(), dict(ratio='direct', fn='cap', most=1.1)])
@pytest.mark.parametrize('count', [1, 3, 4])
def test_a_tail_like_the_policys_needs_no_record(count, settings):
  chosen, sampler = stages(**settings), like_policy_in_the_tail(count)
  own = np.argsort(-np.asarray(sampler))[:count]
  assert {*own} == {*np.argsort(-POLICY)[:count]}
  drift = drawn(chosen, np.full(V, 0.8), sampler)
  np.testing.assert_allclose(drift, subtracted(chosen, 0.8, count, sampler), atol=1e-12)
  assert np.abs(drift).max() > 1e-3
  assert np.abs(drift - subtracted(chosen, 0.8, count)).max() > 1e-2


@pytest.mark.parametrize('count', range(1, V + 1))
@pytest.mark.parametrize('ratio', ['one', 'direct'])
def test_a_sampler_that_is_the_policy_has_no_term(ratio, count):
  np.testing.assert_allclose(subtracted(stages(ratio), 1.7, count, POLICY), 0, atol=1e-15)


def test_what_is_left_is_the_covariance_of_reward_and_score():
  """E(R − b)·(s − E s), which depends on no baseline b, and without the term on each."""
  q = np.exp(log_softmax(SAMPLER))
  score = np.asarray(jax.jacobian(log_softmax)(jnp.asarray(POLICY)))
  want = (q * REWARD) @ (score - q @ score)
  chosen = stages()
  for baseline in (0.0, 0.4, 3.0):
    # The term of a drawn token has its advantage: its mean is that of the mean advantage.
    mean = float((q * (REWARD - baseline)).sum())
    got = drawn(chosen, REWARD - baseline) - subtracted(chosen, mean)
    np.testing.assert_allclose(got, want, atol=1e-12)
  assert np.abs(drawn(chosen, REWARD) - want).max() > 1e-2


@pytest.mark.parametrize('fn', OF_A_TOKEN)
def test_weights_of_a_token_need_its_ratio_and_advantage_alone(fn):
  """`OF_A_TOKEN`: the weight of a token is the same whatever the others are."""
  r = np.random.default_rng(1)
  logp, b, advantage = r.normal(size=(3, 2, 8))
  none_B = np.zeros(2)
  weigh = getattr(trust_region, fn)

  def weights(rows, columns):
    cut = [jnp.asarray(x[rows, columns]) for x in (logp, b, b, np.ones((2, 8)), advantage)]
    tokens = Tokens(*cut, none_B[rows], none_B[rows])
    return np.asarray(weigh(tokens.logp_BxT - tokens.behavior_BxT, tokens)[0])

  whole = weights(slice(None), slice(None))
  np.testing.assert_array_equal(whole[1:, 3:5], weights(slice(1, 2), slice(3, 5)))


def test_no_recorded_token_is_refused():
  with pytest.raises(UserError, match='score_centering.tokens=0 must be at least 1'):
    score_centering.top_k(tokens=0)
