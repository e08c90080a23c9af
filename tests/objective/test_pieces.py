"""Each piece against its definition: an enumeration, a limit, or the loss that it came from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_table import data

from jaxrl_llm.objective import advantage, pieces


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


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


def test_areal_interpolates_between_what_sampled_and_what_learns():
  d = data()
  old = lambda proximal, version, now: pieces.interpolated_old(  # noqa: E731
    d.x, d.behaviour, np.full(d.x.shape, version), proximal, now
  )
  np.testing.assert_allclose(old(2, 2, 5), d.behaviour)
  np.testing.assert_allclose(old(5, 2, 5), d.x)
  np.testing.assert_allclose(old(3, 2, 4), (d.x + d.behaviour) / 2)
  np.testing.assert_allclose(old(5, 5, 5), d.behaviour)
