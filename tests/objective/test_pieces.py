"""Each piece against its definition: an enumeration, a limit, or the loss that it came from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_table import data, tok

from jaxrl_llm.objective import advantage, pieces


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def test_chord_weighs_most_at_one_half_and_is_the_gradient_of_its_loss():
  d = data()
  c = pieces.chord(d.x, d.mask)
  loss = lambda x: -(tok(d) * np.exp(d.x) * (1 - np.exp(d.x)) * x).sum()  # noqa: E731
  np.testing.assert_allclose(c, -jax.grad(loss)(jnp.asarray(d.x)), atol=1e-12)
  p = jnp.linspace(0.01, 0.99, 99)[None]
  assert float(p[0, jnp.argmax(pieces.chord(jnp.log(p), jnp.ones_like(p)))]) == pytest.approx(0.5)


def test_chord_goes_from_one_kind_of_learning_to_the_other():
  rl, demo = jnp.ones((2, 3)), 7 * jnp.ones((2, 3))
  assert (pieces.mixed_terms(rl, demo, 0.0) == rl).all()
  assert (pieces.mixed_terms(rl, demo, 1.0) == demo).all()
  share = lambda step: float(  # noqa: E731
    pieces.chord_share(step, warmup=10, decay=20, high=0.8, low=0.2)
  )
  assert [share(s) for s in (0, 5, 10, 20, 30, 99)] == pytest.approx([0, 0.4, 0.8, 0.5, 0.2, 0.2])


def test_hpt_learns_from_demonstrations_or_by_trial_never_both():
  correct = jnp.array([[0.0] * 8, [1] + [0] * 7, [1] * 8])
  for gate, lost in ((-1, [0, 0, 0]), (0, [1, 0, 0]), (1, [1, 1, 0]), (8, [1, 1, 1])):
    rl, sft = pieces.hpt_learns(correct, gate=gate)
    assert sft.tolist() == lost and (rl + sft == 1).all()


@pytest.mark.parametrize('beta', [0.0, -0.1, 0.5])
def test_one_token_rollouts_are_the_mean_over_all_tokens_that_could_be_drawn(beta):
  """Σ_v p_v·R_v·∇log p_v over a vocabulary of five, against c·∇log p_y."""
  z = jnp.asarray(np.random.default_rng(0).normal(size=5))
  reward = np.where(np.arange(5) == 2, 1.0, beta)
  p = jax.nn.softmax(z)
  exact = jax.grad(lambda z: (p * reward * jax.nn.log_softmax(z)).sum())(z)
  logp, slope = jax.value_and_grad(lambda z: jax.nn.log_softmax(z)[2])(z)
  c = pieces.one_token_rollouts(logp[None, None], jnp.ones((1, 1)), beta=beta)[0, 0]
  np.testing.assert_allclose(c * slope, exact, atol=1e-12)


def test_pear_is_supervised_learning_without_ratios_and_a_suffix_product_with_them():
  d = data()
  plain = pieces.pear(d.x, d.behaviour, d.mask, low=0.0, high=0.0, discount=1.0)
  np.testing.assert_allclose(plain, tok(d), atol=1e-12)
  c = np.asarray(pieces.pear(d.x, d.behaviour, d.mask, least=0.9, most=1.3))
  for b, n in enumerate(d.length):
    for t in range(n):
      delta = np.exp(np.clip(d.x[b, t + 1 : n] - d.behaviour[b, t + 1 : n], -0.08, 0.3))
      want = np.clip(0.999 ** (n - 1 - t) * delta.prod(), 0.9, 1.3) / d.mask.sum()
      np.testing.assert_allclose(c[b, t], want, rtol=1e-10)
  assert (c[d.mask == 0] == 0).all()


def test_distillation_with_scale_1_forgets_the_base_and_has_the_reverse_kl_gradient():
  d = data()
  one = pieces.distilled(d.old, d.reference, d.behaviour, scale=1.0)
  np.testing.assert_allclose(one, d.reference - d.old, atol=1e-12)
  z, teacher = (jnp.asarray(x) for x in np.random.default_rng(1).normal(size=(2, 5)))
  lp, lt = jax.nn.log_softmax(z), jax.nn.log_softmax(teacher)
  a = pieces.distilled(lp, lt, 0 * lp, scale=1.0)
  got = jax.grad(lambda z: (jnp.exp(lp) * a * jax.nn.log_softmax(z)).sum())(z)
  kl = lambda z: (jax.nn.softmax(z) * (jax.nn.log_softmax(z) - lt)).sum()  # noqa: E731
  np.testing.assert_allclose(got, -jax.grad(kl)(z), atol=1e-12)


def test_returns_are_discounted_sums_of_what_is_left():
  got = pieces.discounted(jnp.array([[1.0, 2, 4, 9]]), jnp.array([[1.0, 1, 1, 0]]), discount=0.5)
  np.testing.assert_allclose(got, [[3, 4, 4, 0]])


def test_gigpo_compares_steps_from_the_same_state_and_else_adds_nothing():
  value, mask = jnp.array([[1.0, 5], [3, 7], [9, 9]]), jnp.ones((3, 2))
  group = jnp.array([0, 0, 1])
  apart = pieces.step_advantage(value, jnp.arange(6).reshape(3, 2), group, mask)
  assert (apart == 0).all()  # all states distinct: the episode's advantage alone, GRPO
  anchor = jnp.array([[4, 1], [4, 2], [4, 2]])  # the third row has another prompt
  got = pieces.step_advantage(value, anchor, group, mask)
  np.testing.assert_allclose(got, [[-(0.5**0.5), 0], [0.5**0.5, 0], [0, 0]], atol=1e-5)
  whole = pieces.step_advantage(value, jnp.zeros((3, 2), int), group, mask.at[:, 1].set(0))
  want = advantage.group_normalized(jnp.array([[1.0, 3.0]]), jnp.ones((1, 2)))
  np.testing.assert_allclose(whole[:2, 0], want[0], atol=1e-9)


def test_see_upo_multiplies_within_its_bounds_and_not_at_all_where_nothing_moved():
  d = data()
  ones = jnp.ones(len(d.length))
  np.testing.assert_allclose(pieces.turn_multiplier(ones, d.x, d.x, d.mask), 1)
  m = pieces.turn_multiplier(ones, d.x, d.x - 0.1, d.mask)
  np.testing.assert_allclose(m, np.exp(0.1))
  for _ in range(5):
    m = pieces.turn_multiplier(m, d.x, d.behaviour, d.mask)
    assert (m >= 0.8).all() and (m <= 1.2).all()
  assert m.min() < m.max()
