"""Sums whose bits depend neither on other rows nor on masked columns between a row's own (`ModelConfig.is_exact`).

XLA's CPU kernels for products of bfloat16 with sums in float32 add pairs of neighboring columns, one after the other,
for any number of rows above 1. So a sum over the keys of a row has the same bits wherever they lie, if their order
is the same, the first of them has an even column, and all columns between have weight 0. Columns beyond 2,048 are
summed apart. The compiler must round where the model says so: `xla_allow_excess_precision` is off.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.types import ModelConfig

ALIGNMENT = 2  # columns that a kernel adds at once
MOST_COLUMNS = 2048  # that a kernel adds one after the other
BLOCK = 256  # weights of a vocabulary that are added first


@functools.cache
def has_exact_products() -> bool:
  """Whether products of bfloat16 on this device have the same bits for 2 rows as among 128; XLA chooses the kernels."""
  x = jax.random.normal(jax.random.key(0), (128, 192)).astype(jnp.bfloat16)
  product = jax.jit(functools.partial(matmul, dtype=jnp.dtype('float32')))
  return bool((product(x[:2], x.T) == product(x, x.T)[:2]).all())


def inexact_parts(config: ModelConfig) -> tuple[str, ...]:
  """The fields of a model whose parts sum otherwise, or have not been compared."""
  unused = dict(
    experts=0, latent=0, window=0, kv_readers=0, layer_input=0, sinks=False,
    attention_cap=0.0, logit_cap=0.0, logit_scale=1.0,
  )  # fmt: skip
  found = [name for name, value in unused.items() if getattr(config, name) != value]
  found += ['qk_norm'] if config.qk_norm in ('qkv', 'rotated') else []
  return (*found, *(['recurrent_layers'] if config.is_recurrent else []))


def tempered(logits: jax.Array, temperature: float) -> jax.Array:
  """Logits / temperature, rounded before anything is subtracted from them."""
  return logits if temperature == 1 else jax.lax.optimization_barrier(logits / temperature)


def einsum(spec: str, x: jax.Array, kernel: jax.Array, **options: jnp.dtype) -> jax.Array:
  """`jnp.einsum` of rows [..., D] and a kernel; options are its own."""
  if x.size > x.shape[-1]:
    return jnp.einsum(spec, x, kernel, **options)
  # A product with one row is another kernel.
  return jnp.einsum(spec, jnp.repeat(x[None], 2, 0), kernel, **options)[0]


def matmul(x: jax.Array, kernel_DxF: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
  """x[..., D] · kernel → [..., F], rounded once from float32 to `dtype`, by default that of x."""
  y = einsum('...d,df->...f', x, kernel_DxF, preferred_element_type=jnp.float32)
  return y.astype(dtype or x.dtype)


def weigh(
  weight_BxKxQxRxS: jax.Array, v_BxKxSxd: jax.Array, mask_BxQxS: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Σ weights and Σ weights·v over the keys, in float32, both of weights rounded to the dtype of v.

  The keys of a completion, 2 in a mask of int8, are summed apart from the others. Weights of hidden keys are 0 already,
  except in a row without a visible key.
  """
  spec = 'bkqrs,bksd->bkqrd'
  if mask_BxQxS.dtype == bool:
    return weigh_part(weight_BxKxQxRxS, v_BxKxSxd, spec)
  is_own = (mask_BxQxS == 2)[:, None, :, None]
  own = weigh_part(jnp.where(is_own, weight_BxKxQxRxS, 0.0), v_BxKxSxd, spec)
  prompt = weigh_part(jnp.where(is_own, 0.0, weight_BxKxQxRxS), v_BxKxSxd, spec)
  return own[0] + prompt[0], own[1] + prompt[1]


def weigh_part(weight: jax.Array, v: jax.Array, spec: str) -> tuple[jax.Array, jax.Array]:
  """Σ weights [...] and Σ weights·v, by the einsum `spec`, over the keys of one part."""
  value = jnp.einsum(spec, weight.astype(v.dtype), v, preferred_element_type=jnp.float32)
  return _sum_keys(weight, v.dtype.name), value


def _sum_keys(weight: jax.Array, dtype: str) -> jax.Array:
  """Σ over the last axis of weights [..., S] rounded to `dtype`, in the order of their products with values."""

  @jax.custom_jvp
  def total(weight):
    # Without the barrier a product with ones may become a sum in another order.
    ones_Sx2 = jax.lax.optimization_barrier(jnp.ones((weight.shape[-1], 2), dtype))
    return matmul(weight.astype(dtype), ones_Sx2, jnp.dtype('float32'))[..., 0]

  # The gradient is that of unrounded weights.
  total.defjvp(lambda primals, tangents: (total(*primals), tangents[0].sum(-1)))
  return total(weight)


def round_factors(x: jax.Array) -> jax.Array:
  """x rounded to 16 significant bits: its products with bfloat16 are exact, and a compiler may fuse sums of them."""
  return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=15)


class RMSNorm(nnx.RMSNorm):
  """x·scale / √(mean(x²) + ε) in float32, with a sum over features whose order is fixed, rounded once."""

  def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    assert mask is None
    x, scale = x.astype(jnp.float32), self.scale[...].astype(self.dtype).astype(jnp.float32)
    mean = sum_features(x * x) / x.shape[-1]  # squares of bfloat16 are exact in float32
    factor = jax.lax.rsqrt(mean + self.epsilon)[..., None]
    return (x * factor * scale.reshape((1,) * (x.ndim - 1) + (-1,))).astype(self.dtype)


@jax.custom_jvp
def sum_features(x: jax.Array) -> jax.Array:
  """Σ over the last axis as a tree of additions, whose order no compiler changes."""
  while (n := x.shape[-1]) > 1 and n % 2 == 0:
    x = x[..., : n // 2] + x[..., n // 2 :]
  total = x[..., 0]
  for i in range(1, x.shape[-1]):
    total += x[..., i]
  return total


sum_features.defjvp(lambda primals, tangents: (sum_features(*primals), tangents[0].sum(-1)))


@jax.custom_jvp
def partition_and_entropy(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
  """log Σ e^logit and the entropy in nats over the last axis; the entropy has no gradient."""
  top = logits.max(-1)
  shifted = logits - top[..., None]
  total = sum_features(block_sums(jnp.exp(shifted)))
  mean = (jnp.exp(shifted) * shifted).sum(-1) / total
  return top + jnp.log(total), jnp.log(total) - mean


@partition_and_entropy.defjvp
def _partition_jvp(primals, tangents):
  (logits,), (change,) = primals, tangents
  total, entropy = partition_and_entropy(logits)
  slope = (jnp.exp(logits - total[..., None]) * change).sum(-1)
  return (total, entropy), (slope, jnp.zeros_like(entropy))


def block_sums(weight: jax.Array) -> jax.Array:
  """Σ of each block of `BLOCK` weights [..., V], padded with zeros → [..., M]."""
  missing = -weight.shape[-1] % BLOCK
  weight = jnp.pad(weight, [(0, 0)] * (weight.ndim - 1) + [(0, missing)])
  # Without the barrier each step of the tree would compute the exponentials again.
  weight = jax.lax.optimization_barrier(weight)
  return sum_features(weight.reshape(*weight.shape[:-1], -1, BLOCK))
