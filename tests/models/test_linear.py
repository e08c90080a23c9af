"""The gradient rule of linear layers against JAX's derivative."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import linear


@pytest.mark.parametrize('rows', [(5,), (2, 3), (2, 1, 4)])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_gradients_are_those_of_a_plain_product(rows, dtype):
  r = np.random.default_rng(0)
  x, kernel, weight = (r.normal(size=s) for s in ((*rows, 6), (6, 4), (*rows, 4)))
  x, kernel, weight = (jnp.asarray(a, dtype) for a in (x, kernel, weight))

  def loss(product):
    return lambda x, k: (weight * jnp.tanh(product(x, k))).astype(jnp.float32).sum()

  got = jax.value_and_grad(loss(linear.product), (0, 1))(x, kernel)
  want = jax.value_and_grad(loss(jnp.matmul), (0, 1))(x, kernel)
  tolerance = 1e-5 if dtype == 'float32' else 5e-2
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_allclose(
      a.astype(jnp.float32), b.astype(jnp.float32), atol=tolerance, rtol=tolerance
    )
