"""Each piece against its definition: an enumeration, a limit, or the loss that it came from."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxrl_llm.objective import pieces


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def standard(x, axis=-1):
  x = np.asarray(x)
  return (x - x.mean(axis, keepdims=True)) / x.std(axis, ddof=1, keepdims=True)


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
