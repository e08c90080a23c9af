"""A hash of weights that does not depend on how they are sharded."""

from __future__ import annotations

import hashlib
import math

import jax
import jax.numpy as jnp

from jaxrl_llm.distributed import sharding
from jaxrl_llm.types import Params

_WORD = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def fingerprint(params: Params) -> str:
  """16 hexadecimal digits of a tree's names, shapes, types and bits; the same for every sharding."""
  digest = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    total = int(sharding.fetch(_bit_sum(leaf)))
    digest.update(f'{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype} {total}\n'.encode())
  return digest.hexdigest()[:16]


@jax.jit
def _bit_sum(x: jax.Array) -> jax.Array:
  """Σ mix(bits ⊕ position) mod 2³²: integers, so that the order of the sum does not matter.

  The mix is murmur3's finalizer: a plain weighted sum would miss sign changes in an even number of positions.
  """
  is_integer = jnp.issubdtype(x.dtype, jnp.integer)
  bits = x if is_integer else jax.lax.bitcast_convert_type(x, _WORD[x.dtype.itemsize])
  position = jnp.zeros(x.shape, jnp.uint32)
  for axis in range(x.ndim):
    stride = jnp.uint32(math.prod(x.shape[axis + 1 :]) % 2**32)
    position += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * stride
  mixed = bits.astype(jnp.uint32) ^ (position * jnp.uint32(0x9E3779B9))
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
  return (mixed ^ (mixed >> 16)).sum(dtype=jnp.uint32)
