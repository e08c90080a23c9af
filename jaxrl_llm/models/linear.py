"""The matrix product of every linear layer, with its weight gradient written in the layout that XLA wants."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models import spans


@jax.custom_vjp
def product(x: jax.Array, kernel_DxF: jax.Array) -> jax.Array:
  """x[..., D] · kernel → [..., F]; ∂kernel = xᵀ·g over all leading axes at once.

  The derived rule asks for gᵀ·x, and on a CPU XLA then writes out gᵀ, column by column, together with
  the nonlinearity before it: that was a third of a feed-forward block's backward pass. Source: none.
  """
  return jnp.matmul(x, kernel_DxF)


def _forward(x, kernel_DxF):
  return product(x, kernel_DxF), (x, kernel_DxF)


def _backward(saved, g):
  x, kernel_DxF = saved
  D, F = kernel_DxF.shape
  if spans.dividing(spans.TOKENS):  # tokens that lie on several devices must not be laid end to end
    leading = list(range(x.ndim - 1))
    return jnp.matmul(g, kernel_DxF.T), jnp.tensordot(x, g, (leading, leading))
  return jnp.matmul(g, kernel_DxF.T), jnp.matmul(x.reshape(-1, D).T, g.reshape(-1, F))


product.defvjp(_forward, _backward)


def dot_general(x: jax.Array, kernel_DxF: jax.Array, dims: Any, **_: Any) -> jax.Array:
  """`product` in the shape of `jax.lax.dot_general`, as `nnx.Linear` calls it. Source: none."""
  return product(x, kernel_DxF)
