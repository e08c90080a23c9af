"""KV cache arrays: float32, bfloat16, or int8 with one scale per token and head."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Int8(NamedTuple):
  """x ≈ data · scale, rounded to nearest, scale = max|x| / 127 over the head's dimension."""

  data: jax.Array  # int8 [rows, K, S, d]
  scale: jax.Array  # float32 [rows, K, S]


CacheArray = jax.Array | Int8


def pack(x: jax.Array, dtype: str) -> CacheArray:
  """x [rows, K, S, d] in the cache's format; the error of int8 is at most max|x| / 254 per number."""
  if dtype != 'int8':
    return x.astype(dtype)
  x = x.astype(jnp.float32)
  scale = jnp.abs(x).max(-1) / 127
  data = jnp.round(x / jnp.where(scale > 0, scale, 1)[..., None])
  return Int8(data.astype(jnp.int8), scale)


def zeros(shape: tuple[int, ...], dtype: str) -> CacheArray:
  """An empty cache of `shape` [rows, K, S, d]."""
  return pack(jnp.zeros(shape, jnp.float32 if dtype == 'int8' else dtype), dtype)


def write(cache: CacheArray, new: jax.Array, at: jax.Array) -> CacheArray:
  """The cache with `new` [rows, K, Q, d] written from column `at` on: one number (modulo S) or one per row."""
  packed = pack(new, 'int8' if isinstance(cache, Int8) else cache.dtype.name)
  update = jax.lax.dynamic_update_slice_in_dim
  if jnp.ndim(at) == 0:
    return jax.tree.map(lambda old, x: update(old, x, at % old.shape[2], 2), cache, packed)
  update_rows = jax.vmap(lambda old, x, a: update(old, x, a, 1))
  return jax.tree.map(lambda old, x: update_rows(old, x, at), cache, packed)


def write_all(
  cache: tuple[CacheArray, ...], new: tuple[CacheArray, ...], at: jax.Array
) -> tuple[CacheArray, ...]:
  """`write` for each array of a layer."""
  return tuple(write(old, x, at) for old, x in zip(cache, new, strict=True))


def read(cache: CacheArray, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array | None]:
  """(numbers in `dtype` [rows, K, S, d], scale [rows, K, S] or None).

  The caller multiplies scores or weights by the scale, so that no dequantized copy of the cache is made.
  """
  if isinstance(cache, Int8):
    return cache.data.astype(dtype), cache.scale
  return cache, None
