"""Linear layers: kernels plain or quantized, adapters beside them, weight gradients in the layout that XLA wants."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models import activation_sharding, quantized


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
  if activation_sharding.axes_that_divide(
    activation_sharding.TOKENS
  ):  # tokens that lie on several devices must not be laid end to end
    leading = list(range(x.ndim - 1))
    return jnp.matmul(g, kernel_DxF.T), jnp.tensordot(x, g, (leading, leading))
  return jnp.matmul(g, kernel_DxF.T), jnp.matmul(x.reshape(-1, D).T, g.reshape(-1, F))


product.defvjp(_forward, _backward)


class Dense(nnx.Linear):
  """y = x·W + bias in `dtype`; the scale of a quantized W multiplies the product.

  With an adapter + (x·A)·B, so that a frozen W asks for no gradient of its size.
  """

  def adapt(self) -> None:
    """Makes room for A [D, r] and B [r, F]; arrays of any r fit. Source: arXiv:2106.09685 (LoRA)."""
    self.a = nnx.Param(jnp.zeros((self.in_features, 1)))
    self.b = nnx.Param(jnp.zeros((1, self.out_features)))

  def __call__(self, x: jax.Array) -> jax.Array:
    x = x.astype(self.dtype)
    data, scale = quantized.read(self.kernel.get_value(), self.dtype)
    y = quantized.apply_scale(product(x, data), scale)
    if self.use_bias:
      y = y + self.bias[...].astype(self.dtype).reshape((1,) * (y.ndim - 1) + (-1,))
    if not hasattr(self, 'a'):
      return y
    a_Dxr, b_rxF = (v[...].astype(self.dtype) for v in (self.a, self.b))
    return y + product(product(x, a_Dxr), b_rxF)
