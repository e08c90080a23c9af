"""The schedule and what weight decay touches."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.config import loading as configs
from jaxrl_llm.learner.optimizer import make_optimizer
from jaxrl_llm.types import UserError


def settings(**changes):
  c = configs.default().optimizer
  c.update(changes)
  return c


@pytest.mark.parametrize(
  'changes, rates',
  [
    (dict(decay='constant'), [1, 1, 1, 1, 1]),
    (dict(decay='linear'), [1, 0.75, 0.5, 0.25, 0]),
    (dict(decay='cosine'), [1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0]),
    (dict(decay='linear', warmup_steps=2), [0.5, 1, 1, 0.5, 0]),
  ],
)
def test_schedules(changes, rates):
  _, schedule = make_optimizer(settings(learning_rate=1.0, **changes), 4)
  np.testing.assert_allclose([schedule(i) for i in range(5)], rates, atol=1e-6)


def test_an_unknown_decay_lists_the_known_ones():
  with pytest.raises(UserError, match='constant, cosine, linear'):
    make_optimizer(settings(decay='exponential'), 4)


def test_the_gradient_is_clipped_by_its_global_norm_and_only_matrices_decay():
  optimizer, _ = make_optimizer(
    settings(learning_rate=0.1, weight_decay=0.5, clip_norm=1.0, b1=0.0, b2=0.0, eps=1e3), 4
  )
  params = dict(kernel=jnp.ones((2, 2)), scale=jnp.ones(2))
  grads = dict(kernel=jnp.full((2, 2), 30.0), scale=jnp.full(2, 40.0))
  updates, _ = optimizer.update(grads, optimizer.init(params), params)
  norm = float(optax.tree.norm(grads))
  # With eps far above the gradient, Adam's step is gradient / eps: clipping shows in its size.
  np.testing.assert_allclose(updates['scale'], -0.1 * 40 / norm / 1e3, rtol=1e-2)
  np.testing.assert_allclose(updates['kernel'], -0.1 * (30 / norm / 1e3 + 0.5), rtol=1e-2)
