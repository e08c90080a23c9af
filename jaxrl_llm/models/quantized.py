"""Quantized kernels: int8 or float8 numbers with one scale per output channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.types import Params


class Quantized(NamedTuple):
  """kernel ≈ data · scale, scale = max|kernel| over a channel's inputs / the largest number of the dtype."""

  # [..., D, F], int8 or float8. With the straight-through estimator, the same values in the compute dtype.
  data: jax.Array
  scale: jax.Array  # float32 [..., F]


Kernel = jax.Array | Quantized

_LARGEST = dict(int8=127.0, float8_e4m3fn=448.0)


def needs_scale(dtype: str) -> bool:
  """Whether kernels of this dtype carry a scale."""
  return dtype in _LARGEST


def pack(kernel: jax.Array, dtype: str) -> Kernel:
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


def read(kernel: Kernel, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array | None]:
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
  experts), embeddings, norms and biases are not.
  """
  return _map_kernels(params, lambda x: pack(x, kernels), lambda x: x.astype(others))


def straight_through(params: Params, kernels: str, dtype: str) -> Params:
  """Parameters with the values of `quantize_params` and plain gradients: ∂/∂kernel = ∂/∂(data · scale).

  One precision for sampling and learning, reconstructed from the abstract and third-party notes. The method rounds
  weights in blocks, and activations; this function rounds weights alone, by channel. arXiv:2601.14243 (Jet-RL),
  arXiv:1308.3432 (straight-through).
  """

  def with_gradient(kernel):
    fixed = jax.lax.stop_gradient(pack(kernel, kernels))
    if not isinstance(fixed, Quantized):
      return pack(kernel, kernels)
    # Its value is exactly zero, however sums are rounded; its gradient is that of a plain kernel.
    difference = (kernel - jax.lax.stop_gradient(kernel)) / fixed.scale[..., None, :]
    return Quantized(fixed.data.astype(dtype) + difference.astype(dtype), fixed.scale)

  return _map_kernels(params, with_gradient, lambda x: x)


def _map_kernels(
  params: Params,
  for_kernel: Callable[[jax.Array], Kernel],
  for_other: Callable[[jax.Array], jax.Array],
) -> Params:
  def apply(path, x):
    *_, module, name = (str(entry.key) for entry in path)
    return for_kernel(x) if name == 'kernel' and not module.endswith('router') else for_other(x)

  return jax.tree_util.tree_map_with_path(apply, params)
