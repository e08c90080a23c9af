"""Kernels as stored: plain arrays, or int8 or float8 numbers with one scale for each output channel."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Quantized(NamedTuple):
  """kernel ≈ data · scale, scale = max|kernel| over a channel's inputs / the largest number of the type."""

  data: (
    jax.Array
  )  # [..., D, F]: int8, float8, or where it is learned their numbers in the type of compute
  scale: jax.Array  # float32 [..., F]


Kernel = jax.Array | Quantized

_MOST = dict(int8=127.0, float8_e4m3fn=448.0)


def needs_scale(dtype: str) -> bool:
  """Whether numbers of this type need a scale. Source: none."""
  return dtype in _MOST


def pack(kernel: jax.Array, dtype: str) -> Kernel:
  """kernel [..., D, F] as it is stored; int8 errs by at most scale / 2 a number. Source: none.

  A channel of zeros gets the scale 1, so that gradients can be divided by it.
  """
  if not needs_scale(dtype):
    return kernel.astype(dtype)
  kernel = kernel.astype(jnp.float32)
  most = jnp.abs(kernel).max(-2)
  scale = jnp.where(most <= 1e-30, 1.0, most / _MOST[dtype])
  data = kernel / scale[..., None, :]
  data = jnp.round(data) if dtype == 'int8' else data
  return Quantized(data.astype(dtype), scale)


def read(kernel: Kernel, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
  """(numbers in `dtype` [..., D, F], scale [..., F] or None).

  The scale multiplies the product, so that no dequantized copy of the kernel is needed: XLA for TPUs converts numbers
  as it reads them. For CPUs it converts every kernel once, before a loop, so that nothing is saved. Source: none.
  """
  if isinstance(kernel, Quantized):
    return kernel.data.astype(dtype), kernel.scale
  return kernel.astype(dtype), None


def apply_scale(product: jax.Array, scale: jax.Array | None) -> jax.Array:
  """(x · data) · scale in the type of the product [..., F]; of None as it is. Source: none."""
  if scale is None:
    return product
  scale = scale.reshape((1,) * (product.ndim - scale.ndim) + scale.shape)
  return (product * scale).astype(product.dtype)


def quantize_params(params: Any, kernels: str, others: str) -> Any:
  """Parameters as a sampler reads them: kernels in one type, all else in another.

  Kernels are those of attention, feed-forward, experts and an untied head. A router is none: its few numbers choose
  experts. Embeddings, norms and biases are none. Source: none.
  """
  return _each(params, lambda x: pack(x, kernels), lambda x: x.astype(others))


def straight_through(params: Any, kernels: str, dtype: str) -> Any:
  """Parameters that read as `stored` ones and learn as plain ones: ∂/∂kernel = ∂/∂(data · scale).

  One precision for sampling and learning, reconstructed from the abstract and third-party notes: there weights are
  rounded in blocks and activations too, here weights alone by channel. Source: arXiv:2601.14243 (Jet-RL),
  arXiv:1308.3432 (straight-through).
  """

  def learned(kernel):
    fixed = jax.lax.stop_gradient(pack(kernel, kernels))
    if not isinstance(fixed, Quantized):
      return pack(kernel, kernels)
    # Zero in value, whatever the rounding of sums, and a plain kernel's in gradient.
    moved = (kernel - jax.lax.stop_gradient(kernel)) / fixed.scale[..., None, :]
    return Quantized(fixed.data.astype(dtype) + moved.astype(dtype), fixed.scale)

  return _each(params, learned, lambda x: x)


def _each(params: Any, kernel: Any, other: Any) -> Any:
  def at(path, x):
    *_, module, name = (str(entry.key) for entry in path)
    return kernel(x) if name == 'kernel' and module != 'router' else other(x)

  return jax.tree_util.tree_map_with_path(at, params)
