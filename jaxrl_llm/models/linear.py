"""Linear layers: kernels that may be quantized, LoRA adapters, and the nonlinearities of gated MLPs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.distributed import sharding
from jaxrl_llm.models import blockwise, exact
from jaxrl_llm.types import ModelConfig, Params

ACTIVATIONS = {
  'silu': jax.nn.silu,
  'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True),
}


def activate(config: ModelConfig, gate: jax.Array) -> jax.Array:
  """silu(x) = x·σ(x), gelu in its tanh form, or gpt-oss's x·σ(αx) of x ≤ limit. arXiv:2002.05202 (gated variants)."""
  if config.activation != 'clamped_swiglu':
    return ACTIVATIONS[config.activation](gate)
  gate = jnp.minimum(gate, config.gate_limit)
  return gate * jax.nn.sigmoid(config.gate_gain * gate)


def multiplier(config: ModelConfig, up: jax.Array) -> jax.Array:
  """The factor of an activated gate: up, in gpt-oss clipped to ±limit and increased by 1."""
  if config.activation != 'clamped_swiglu':
    return up
  return jnp.clip(up, -config.gate_limit, config.gate_limit) + 1


@jax.custom_vjp
def product(x: jax.Array, kernel_DxF: jax.Array) -> jax.Array:
  """x[..., D] · kernel → [..., F]; ∂kernel = xᵀ·g over all leading axes at once.

  JAX's own rule computes gᵀ·x. On CPUs, XLA then materializes gᵀ column by column, fused with the nonlinearity
  before it: a third of the time of a feed-forward block's backward pass.
  """
  return jnp.matmul(x, kernel_DxF)


def _forward(x, kernel_DxF):
  return product(x, kernel_DxF), (x, kernel_DxF)


def _backward(saved, g):
  x, kernel_DxF = saved
  D, F = kernel_DxF.shape
  # Flattening rows and tokens would gather tokens that are sharded over devices.
  if sharding.axes_that_divide(sharding.TOKENS):
    leading = list(range(x.ndim - 1))
    return jnp.matmul(g, kernel_DxF.T), jnp.tensordot(x, g, (leading, leading))
  return jnp.matmul(g, kernel_DxF.T), jnp.matmul(x.reshape(-1, D).T, g.reshape(-1, F))


product.defvjp(_forward, _backward)


@jax.custom_vjp
def exact_product(x: jax.Array, kernel_DxF: jax.Array) -> jax.Array:
  """`product` with float32 sums that are rounded once, so that no bit depends on the number of rows."""
  return exact.matmul(x, kernel_DxF)


def _exact_forward(x, kernel_DxF):
  return exact_product(x, kernel_DxF), (x, kernel_DxF)


exact_product.defvjp(_exact_forward, _backward)


class Dense(nnx.Linear):
  """y = x·W + bias in `dtype`; the scale of a quantized W multiplies the product.

  An adapter adds (x·A)·B. The frozen W then needs no gradient.
  """

  product = staticmethod(product)

  def adapt(self) -> None:
    """Add the parameters A [D, r] and B [r, F]; arrays of any rank r fit. arXiv:2106.09685 (LoRA)."""
    self.a = nnx.Param(jnp.zeros((self.in_features, 1)))
    self.b = nnx.Param(jnp.zeros((1, self.out_features)))

  def __call__(self, x: jax.Array) -> jax.Array:
    x = x.astype(self.dtype)
    if isinstance(kernel := self.kernel.get_value(), blockwise.Blockwise):
      y = blockwise.product(x, kernel)
    else:
      data, scale = read_kernel(kernel, self.dtype)
      y = apply_scale(self.product(x, data), scale)
    if self.use_bias:
      y = y + self.bias[...].astype(self.dtype).reshape((1,) * (y.ndim - 1) + (-1,))
    if not hasattr(self, 'a'):
      return y
    a_Dxr, b_rxF = (v[...].astype(self.dtype) for v in (self.a, self.b))
    return y + self.product(self.product(x, a_Dxr), b_rxF)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def rounded_product(
  x: jax.Array, kernel: jax.Array, rounded: jax.Array, transposed: bool
) -> jax.Array:
  """x[..., D] · kernel [D, F] → float32 [..., F], with `rounded` in the place of the kernel; `transposed`: [F, D].

  Backward, the gradient of the result is rounded to the dtype of x, so that both products are in it, and add in
  float32: JAX's own rule would multiply in float32, at half the speed or less. `rounded` has no gradient.
  """
  del kernel
  spec = '...d,fd->...f' if transposed else '...d,df->...f'
  return jnp.einsum(spec, x, rounded, preferred_element_type=jnp.float32)


def _rounded_forward(x, kernel, rounded, transposed):
  empty = jnp.zeros((0,), kernel.dtype)  # only its dtype is needed
  return rounded_product(x, kernel, rounded, transposed), (x, empty, rounded)


def _rounded_backward(transposed, saved, slope):
  x, empty, rounded = saved
  slope = slope.astype(x.dtype)
  multiply = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  of_x = multiply('...f,fd->...d' if transposed else '...f,df->...d', slope, rounded)
  x_NxD, slope_NxF = x.reshape(-1, x.shape[-1]), slope.reshape(-1, slope.shape[-1])
  of_kernel = multiply('nd,nf->fd' if transposed else 'nd,nf->df', x_NxD, slope_NxF)
  return of_x.astype(x.dtype), of_kernel.astype(empty.dtype), None


rounded_product.defvjp(_rounded_forward, _rounded_backward)


class ExactDense(Dense):
  """A layer whose results do not depend on the number of rows."""

  product = staticmethod(exact_product)


class Quantized(NamedTuple):
  """kernel ≈ data · scale, scale = max|kernel| over a channel's inputs / the largest number of the dtype."""

  # [..., D, F], int8 or float8. With the straight-through estimator, the same values in the compute dtype.
  data: jax.Array
  scale: jax.Array  # float32 [..., F]


Kernel = jax.Array | Quantized

# Decays of recurrent layers multiply over all tokens of a row; the update has them in float32, too.
_PRECISE = ('log_rate', 'rate_bias')
_LARGEST = dict(int8=127.0, float8_e4m3fn=448.0)


def needs_scale(dtype: str) -> bool:
  """Whether kernels of this dtype carry a scale."""
  return dtype in _LARGEST


def quantize(kernel: jax.Array, dtype: str) -> Kernel:
  """kernel [..., D, F] in the given dtype; the error of int8 is at most scale / 2 per number.

  A channel of zeros gets scale 1, because gradients are divided by the scale.
  """
  if not needs_scale(dtype):
    return kernel.astype(dtype)
  kernel = kernel.astype(jnp.float32)
  largest = jnp.abs(kernel).max(-2)
  scale = jnp.where(largest <= 1e-30, 1.0, largest / _LARGEST[dtype])
  data = kernel / scale[..., None, :]
  data = jnp.round(data) if dtype == 'int8' else data
  return Quantized(data.astype(dtype), scale)


def cast(weights: Params, dtype: str) -> Params:
  """Weights with matrices in the dtype of their products; vectors and quantized kernels stay."""
  is_quantized = lambda x: isinstance(x, Quantized | blockwise.Blockwise)  # noqa: E731
  change = lambda x: x if is_quantized(x) or x.ndim == 1 else x.astype(dtype)  # noqa: E731
  return jax.tree.map(change, weights, is_leaf=is_quantized)


def read_kernel(kernel: Kernel, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array | None]:
  """(numbers in `dtype` [..., D, F], scale [..., F] or None).

  The caller scales the product (`apply_scale`), so that no dequantized copy of the kernel is needed. XLA for TPUs
  converts numbers as it reads them. On CPUs it converts every kernel once before a loop, which saves no memory.
  """
  if isinstance(kernel, Quantized):
    return kernel.data.astype(dtype), kernel.scale
  return kernel.astype(dtype), None


def apply_scale(product: jax.Array, scale: jax.Array | None) -> jax.Array:
  """(x · data) · scale in the dtype of the product [..., F]; the product itself for a scale of None."""
  if scale is None:
    return product
  scale = scale.reshape((1,) * (product.ndim - scale.ndim) + scale.shape)
  return (product * scale).astype(product.dtype)


def quantize_params(params: Params, kernels: str, others: str) -> Params:
  """Parameters as the sampler reads them: kernels in the dtype `kernels`, all other arrays in `others`.

  Kernels are those of attention, feed-forward layers, experts and an untied head. Routers (whose few numbers choose
  experts), embeddings, norms and biases are not. Rates of decay stay as they are.
  """
  return _map_kernels(params, lambda x: quantize(x, kernels), others)


def for_decoding(params: Params, kernels: str, others: str) -> Params:
  """`quantize_params`, or everything in one dtype where both are equal; a frozen quantized base stays as it is."""
  if kernels != others:
    return quantize_params(params, kernels, others)
  is_frozen = lambda x: isinstance(x, blockwise.Blockwise)  # noqa: E731
  return jax.tree.map(lambda x: x if is_frozen(x) else x.astype(others), params, is_leaf=is_frozen)


def straight_through(params: Params, kernels: str, dtype: str) -> Params:
  """Parameters with the values of `quantize_params` and plain gradients: ∂/∂kernel = ∂/∂(data · scale).

  One precision for sampling and learning, reconstructed from the abstract and third-party notes. The method rounds
  weights in blocks, and activations; this function rounds weights alone, by channel. arXiv:2601.14243 (Jet-RL),
  arXiv:1308.3432 (straight-through).
  """

  def with_gradient(kernel):
    fixed = jax.lax.stop_gradient(quantize(kernel, kernels))
    if not isinstance(fixed, Quantized):
      return quantize(kernel, kernels)
    # Its value is exactly zero, however sums are rounded; its gradient is that of a plain kernel.
    difference = (kernel - jax.lax.stop_gradient(kernel)) / fixed.scale[..., None, :]
    return Quantized(fixed.data.astype(dtype) + difference.astype(dtype), fixed.scale)

  return _map_kernels(params, with_gradient)


def _map_kernels(
  params: Params, for_kernel: Callable[[jax.Array], Kernel], others: str = ''
) -> Params:
  """Kernels as `for_kernel` returns them; other arrays in the dtype `others`, if there is one."""

  def apply(path, x):
    *_, module, name = (str(entry.key) for entry in path)
    if name == 'kernel' and not module.endswith('router'):
      return for_kernel(x)
    return x.astype(others) if others and name not in _PRECISE else x

  return jax.tree_util.tree_map_with_path(apply, params)


def matrices(params: Params) -> Params:
  """True for the parameters that weight decay applies to, in a tree like `params`: all but norms, biases and scores."""
  return jax.tree_util.tree_map_with_path(is_matrix, params)


def is_matrix(path: tuple, x: jax.Array) -> bool:
  """Whether the parameter at `path` is a matrix or a stack of them; the biases of all experts are one array [E, F]."""
  return x.ndim > 1 and not (path and getattr(path[-1], 'key', '') == 'bias')
