"""Frozen kernels in int8 or NF4 with a scale for each block of inputs. arXiv:2305.14314 (QLoRA).

A kernel is quantized on the host. Where it is multiplied, in the forward pass and again in the backward pass, it is
unpacked, so that no unpacked copy is kept.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.types import Params, UserError

DTYPES = ('int8', 'nf4')
BLOCK = 64  # inputs with one scale, as in the paper
_SMALLEST_BLOCK = 16  # with fewer, scales take more than half as much as the numbers of NF4
# Quantiles of N(0, 1), 8 of either sign with 0 among them, divided by the largest: the paper's appendix E.
_NEGATIVE = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453)
_NEAR_ZERO = (-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0)
_POSITIVE = (0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224)
_LARGE = (0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
CODE = np.array((*_NEGATIVE, *_NEAR_ZERO, *_POSITIVE, *_LARGE), np.float32)


class Blockwise(NamedTuple):
  """kernel [D, F] ≈ number · scale of its block of inputs, scale = max|kernel| over the block / the largest number."""

  # int8 [D, F], or uint8 [D / 2, F] of two indices into CODE: the first half of a block in the high bits, the second in
  # the low ones. Two neighbors in a byte would have to be interleaved again, which a TPU cannot do within a product.
  data: jax.Array
  scale: jax.Array  # float32 [D / block, F]

  @property
  def shape(self) -> tuple[int, int]:
    """(D, F) of the kernel."""
    rows, columns = self.data.shape
    return (rows * 2 if self.data.dtype == jnp.uint8 else rows), columns


def is_blockwise(x: object) -> bool:
  """Whether x is a quantized kernel, as `is_leaf` of jax.tree takes it."""
  return isinstance(x, Blockwise)


def quantize(kernel: np.ndarray | jax.ShapeDtypeStruct, dtype: str) -> Blockwise:
  """A kernel on the host as int8 or nf4, or the shapes of it; blocks of zeros get scale 1.

  int8 rounds half to even. NF4 takes the nearest number of CODE.
  """
  D, F = kernel.shape
  block = math.gcd(D, BLOCK)
  packed_shape = (D, F) if dtype == 'int8' else (D // 2, F)
  if isinstance(kernel, jax.ShapeDtypeStruct):
    data_type = np.int8 if dtype == 'int8' else np.uint8
    data = jax.ShapeDtypeStruct(packed_shape, data_type)
    scale = jax.ShapeDtypeStruct((D // block, F), np.float32)
    return Blockwise(data, scale)  # pyright: ignore[reportArgumentType]
  x_NxbxF = np.asarray(kernel, np.float32).reshape(-1, block, F)
  largest_NxF = np.abs(x_NxbxF).max(1)
  scale_NxF = np.where(largest_NxF == 0, np.float32(1), largest_NxF)
  if dtype == 'int8':
    scale_NxF = np.where(largest_NxF == 0, np.float32(1), largest_NxF / np.float32(127))
    data = np.rint(x_NxbxF / scale_NxF[:, None]).astype(np.int8)
  else:
    middle = (CODE[1:] + CODE[:-1]) / 2
    index = np.searchsorted(middle, (x_NxbxF / scale_NxF[:, None]).ravel()).astype(np.uint8)
    index = index.reshape(-1, 2, block // 2, F)
    data = index[:, 0] << 4 | index[:, 1]
  return Blockwise(data.reshape(packed_shape), scale_NxF)  # pyright: ignore[reportArgumentType]


def dequantize(kernel: Blockwise, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
  """The kernel [D, F], computed in float32 and rounded to `dtype`."""
  kernel = Blockwise(*map(jnp.asarray, kernel))
  D, F = kernel.shape
  N = kernel.scale.shape[0]
  parts = [part.reshape(N, -1, F) for part in _unpack(kernel, dtype)]
  return jnp.concatenate(parts, 1).reshape(D, F)


def _unpack(kernel: Blockwise, dtype: jax.typing.DTypeLike) -> list[jax.Array]:
  """The rows of the kernel in the order of `data`: all [D, F] of int8, or the two halves [D / 2, F] of all blocks."""
  data, scale_NxF = kernel
  N, F = scale_NxF.shape
  if data.dtype == jnp.int8:
    numbers = [data.astype(jnp.float32)]
  else:
    numbers = [_look_up(data >> 4), _look_up(data & 15)]
  scaled = (x.reshape(N, -1, F) * scale_NxF[:, None] for x in numbers)
  return [x.reshape(-1, F).astype(dtype) for x in scaled]


def _look_up(index: jax.Array) -> jax.Array:
  """Numbers of CODE, by a tree of selections: a gather is slow on TPUs and is not fused into a product."""
  values = [jnp.full(index.shape, x) for x in CODE]
  for bit in range(4):
    is_odd = (index >> bit & 1).astype(bool)
    values = [jnp.where(is_odd, b, a) for a, b in zip(values[::2], values[1::2], strict=True)]
  return values[0]


@jax.custom_vjp
def product(x: jax.Array, kernel: Blockwise) -> jax.Array:
  """x[..., D] · kernel → [..., F] in the dtype of x; the kernel is frozen and gets no gradient."""
  parts = _unpack_late(x, kernel)
  N = kernel.scale.shape[0]
  x_NxHxh = x.reshape(*x.shape[:-1], N, len(parts), -1)
  halves = (x_NxHxh[..., i, :].reshape(*x.shape[:-1], -1) for i in range(len(parts)))
  return sum(jnp.matmul(half, part) for half, part in zip(halves, parts, strict=True))


def _unpack_late(x: jax.Array, kernel: Blockwise) -> list[jax.Array]:
  """`_unpack` in the dtype of x. The barrier ties it to x, so that no compiler may move it out of a decode loop."""
  kernel, _ = jax.lax.optimization_barrier((kernel, x))
  return _unpack(kernel, x.dtype)


def _forward(x, kernel):
  return product(x, kernel), kernel


def _backward(kernel, g):
  N = kernel.scale.shape[0]
  halves = [jnp.matmul(g, part.T) for part in _unpack_late(g, kernel)]
  halves = [half.reshape(*g.shape[:-1], N, -1) for half in halves]
  slope = jnp.concatenate(halves, -1).reshape(*g.shape[:-1], kernel.shape[0])
  zero = Blockwise(np.zeros(kernel.data.shape, jax.dtypes.float0), jnp.zeros_like(kernel.scale))
  return slope, zero


product.defvjp(_forward, _backward)


def quantize_params(params: Params, dtype: str, others: str) -> Params:
  """A frozen base on the host, leaf by leaf: kernels of layers as int8 or nf4, other matrices in the dtype `others`.

  Embedding and head are such others. Vectors stay as they are. Raises UserError for kernels without whole blocks.
  """

  def leaf(path, x):
    names = [str(entry.key) for entry in path]
    if names[0] == 'layers' and names[-1] == 'kernel':
      if math.gcd(x.shape[0], BLOCK) < _SMALLEST_BLOCK:
        raise UserError(
          f'config.lora.base_dtype={dtype!r} has a scale for each block of inputs, and {names[-2]!r} has '
          f'{x.shape[0]} inputs, no multiple of {_SMALLEST_BLOCK}; set it to auto.'
        )
      return quantize(x, dtype)
    if isinstance(x, jax.ShapeDtypeStruct):
      return jax.ShapeDtypeStruct(x.shape, others if len(x.shape) > 1 else x.dtype)
    x = np.asarray(x)
    return x.astype(jnp.dtype(others)) if x.ndim > 1 else x

  return jax.tree_util.tree_map_with_path(leaf, params)
