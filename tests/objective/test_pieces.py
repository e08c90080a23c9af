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


def test_implicit_rewards_sum_to_the_log_ratio_and_train_towards_the_outcome():
  d = data()
  q = pieces.implicit_reward(d.x, d.reference, d.mask, beta=0.05)
  want = 0.05 * ((d.x - d.reference) * d.mask).sum(1)
  np.testing.assert_allclose(q.sum(1), want, atol=1e-12)
  zero = jnp.zeros_like(q)
  assert float(pieces.implicit_loss(zero, d.correct)) == pytest.approx(np.log(2))
  slope = jax.grad(pieces.implicit_loss)(zero, d.correct)
  assert ((slope[:, 0] < 0) == (d.correct == 1)).all()


def test_prime_without_process_is_leave_one_out_and_with_it_what_is_still_to_come():
  d = data()
  q = np.asarray(pieces.implicit_reward(d.x, d.reference, d.mask))
  plain = pieces.process_advantage(q, d.reward, d.mask, d.group, process=0.0, outcome=1.0)
  loo = advantage.leave_one_out(d.reward.reshape(4, 4), jnp.ones((4, 4))).reshape(-1, 1)
  np.testing.assert_allclose(plain, loo * d.mask, atol=1e-12)
  got = np.asarray(pieces.process_advantage(q, d.reward, d.mask, d.group))
  for b, n in enumerate(d.length):
    others = [o for o in range(len(d.length)) if o // 4 == b // 4 and o != b]
    base = np.mean([q[o, : d.length[o]].mean() for o in others])
    gain = d.reward[b] - d.reward[others].mean()
    want = np.cumsum((q[b, :n] - base)[::-1])[::-1] + 5 * gain
    np.testing.assert_allclose(got[b, :n], want, atol=1e-12)


def test_the_optimal_baseline_is_least_in_variance_and_for_equal_norms_the_mean():
  r = np.random.default_rng(2)
  reward, weight = r.random((1, 6)), r.uniform(0.5, 2, (1, 6))
  gradient = r.normal(size=(6, 3))
  norm = np.linalg.norm(gradient, axis=1)[None]
  b = float(pieces.optimal_baseline(reward, weight, norm)[0, 0])
  spread = lambda b: ((weight[0] * (reward[0] - b))[:, None] ** 2 * gradient**2).sum()  # noqa: E731
  assert all(spread(b) < spread(b + step) for step in (-1e-3, 1e-3))
  same = pieces.optimal_baseline(reward, np.ones((1, 6)), np.full((1, 6), 3.0))
  np.testing.assert_allclose(same, reward.mean())


def standard(x, axis=-1):
  x = np.asarray(x)
  return (x - x.mean(axis, keepdims=True)) / x.std(axis, ddof=1, keepdims=True)


def test_gdpo_of_one_part_is_grpo_up_to_a_constant_and_of_two_tells_equal_sums_apart():
  reward = np.random.default_rng(0).random((3, 4))
  one = np.asarray(pieces.decoupled(reward[..., None], np.ones(1), eps=0.0))
  np.testing.assert_allclose(one, standard(standard(reward).ravel()).reshape(3, 4), atol=1e-12)
  parts = np.array([[[1.0, 0], [0, 1], [0, 0], [0, 0], [0, 1]]])  # the second is given twice
  got = np.asarray(pieces.decoupled(parts, np.array([1.0, 1.0]), eps=0.0))[0]
  want = standard(standard(parts[0, :, 0]) + standard(parts[0, :, 1]))
  np.testing.assert_allclose(got, want, atol=1e-12)
  assert got[0] - got[1] > 0.3  # whose sum is 1, both
  far = np.asarray(pieces.decoupled(parts * np.array([1.0, 50.0]), np.ones(2), eps=0.0))[0]
  np.testing.assert_allclose(far, got, atol=1e-12)


def test_nudge_rl_without_a_surplus_between_contexts_is_grpo_and_with_one_favours_the_better():
  reward = np.random.default_rng(0).random((2, 6))
  context = np.array([[0, 0, 0, 1, 1, -1]] * 2)
  plain = np.asarray(pieces.nudged(reward, context, between=1.0, eps=0.0))
  np.testing.assert_allclose(plain, standard(reward), atol=1e-12)
  dropped = pieces.nudged(reward, np.full((2, 6), -1), between=9.0, eps=0.0)
  np.testing.assert_allclose(dropped, standard(reward), atol=1e-12)
  for g in range(2):
    raw = reward[g] - reward[g].mean()
    for c in (0, 1):
      rows = context[g] == c
      raw[rows] = reward[g, rows] - reward[g, rows].mean()
      raw[rows] += 2 * (reward[g, rows].mean() - reward[g].mean())
    got = np.asarray(pieces.nudged(reward, context, between=2.0, eps=0.0))[g]
    np.testing.assert_allclose(got, standard(raw), atol=1e-12)


def test_noisy_grpo_of_constant_noise_is_grpo_and_of_equal_rewards_is_the_noise():
  reward = np.random.default_rng(0).random((2, 4))
  noise = np.array([[0.0, 0.3, 0.6, 0.9]] * 2)
  flat = np.asarray(pieces.noisy_posterior(reward, np.full((2, 4), 0.5), eps=1e-12))
  np.testing.assert_allclose(flat, standard(reward), atol=1e-9)
  alike = np.asarray(pieces.noisy_posterior(np.ones((2, 4)), noise, eps=1e-12))
  np.testing.assert_allclose(alike, standard(1 - noise), atol=1e-9)
  # The gain is that of the formula, within [0, 1].
  var = reward.var(1, ddof=1, keepdims=True)
  p = 0.01 / (var + 0.01)
  k = p / (0.1 + p)
  assert ((k > 0) & (k < 1)).all()
  want = standard((1 - k) * standard(reward) + k * standard(1 - noise))
  got = pieces.noisy_posterior(reward, noise, eps=1e-12)
  np.testing.assert_allclose(got, want, atol=1e-9)


def test_areal_interpolates_between_what_sampled_and_what_learns():
  d = data()
  old = lambda proximal, version, now: pieces.interpolated_old(  # noqa: E731
    d.x, d.behaviour, np.full(d.x.shape, version), proximal, now
  )
  np.testing.assert_allclose(old(2, 2, 5), d.behaviour)
  np.testing.assert_allclose(old(5, 2, 5), d.x)
  np.testing.assert_allclose(old(3, 2, 4), (d.x + d.behaviour) / 2)
  np.testing.assert_allclose(old(5, 5, 5), d.behaviour)
