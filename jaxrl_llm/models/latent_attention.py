"""Attention whose keys and values are projections of one latent vector a token. Cached is the latent alone.

arXiv:2405.04434 (multi-head latent attention).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.distributed import sharding
from jaxrl_llm.models import attention, linear, positions
from jaxrl_llm.models.mixer import CacheArray, Context, LayerCache, Mixer
from jaxrl_llm.types import ModelConfig

# Of the norms of latents, which no config.json states.
_EPSILON = 1e-6


class _Expansion(NamedTuple):
  """One term of the map from a latent to the keys and values of all heads: reduce, then expand per head."""

  reduce_Cxr: jax.Array | None  # None: the identity
  expand_rxHxF: jax.Array
  scale_HxF: jax.Array | None  # of a quantized matrix


class LatentAttention(Mixer):
  """Of C latent features c and a rotated key r: k_h = [U_h c; r], v_h = W_h c, for each of H heads h.

  Without a cache, keys and values are expanded. With one, queries and results are projected instead, by
  q·(U c) = (Uᵀ q)·c and Σ a·(W c) = W (Σ a·c), so that all heads attend to the same few cached features.
  """

  @staticmethod
  def cached_sizes(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Latents, then rotated keys; each of these serves all heads."""
    return (1, config.latent), (1, config.rotary_dim)

  def add_mixer(self, dense: Callable[..., linear.Dense], norm: Callable[..., nnx.RMSNorm]) -> None:
    """q, or q_a and q_b with a latent of queries; kv_a (latent and rotated key), kv_b (expansion), o; norms."""
    c, H = self.config, self.config.heads
    if c.query_latent:
      self.q_a = dense(c.width, c.query_latent, use_bias=c.qkv_bias)
      self.q_a_norm = norm(c.query_latent, epsilon=_EPSILON)
      self.q_b = dense(c.query_latent, H * c.head_dim, use_bias=False)
    else:
      self.q = dense(c.width, H * c.head_dim, use_bias=False)
    self.kv_a = dense(c.width, c.latent + c.rotary_dim, use_bias=c.qkv_bias)
    self.kv_a_norm = norm(c.latent, epsilon=_EPSILON)
    self.kv_b = dense(c.latent, H * (self._plain_dim + c.value_dim), use_bias=False)
    self.o = dense(H * c.value_dim, c.width, use_bias=c.out_bias)

  @property
  def _plain_dim(self) -> int:
    """Features of a head's queries and keys that are not rotated."""
    return self.config.head_dim - self.config.rotary_dim

  @property
  def _scale(self) -> float:
    return self.config.query_scale or self.config.head_dim**-0.5

  def mix(self, h_BxQxD: jax.Array, context: Context) -> tuple[jax.Array, LayerCache]:
    """As `Mixer.mix`."""
    c, (B, Q, _) = self.config, h_BxQxD.shape
    q = self.q_b(self.q_a_norm(self.q_a(h_BxQxD))) if c.query_latent else self.q(h_BxQxD)
    plain, rotated = jnp.split(q.reshape(B, Q, c.heads, c.head_dim), [self._plain_dim], axis=-1)
    rotated = self._rotated(rotated, context)
    latent, key = jnp.split(self.kv_a(h_BxQxD), [c.latent], axis=-1)
    key = self._rotated(key[:, :, None], context)
    # Each device of a row holds the latents of all its tokens.
    new: LayerCache = tuple(
      sharding.constrain(x, sharding.UPDATE_ROWS, (), ())
      for x in (self.kv_a_norm(latent)[:, None], key.swapaxes(1, 2))
    )
    if context.cache is None:
      out = self._attend_expanded(jnp.concatenate([plain, rotated], axis=-1), new, context)
    else:
      new = attention.write_caches(context.cache, new, context.at)
      out = self._attend_latents(plain, rotated, new, context)
    return self.o(out.reshape(B, Q, -1)), new

  def _rotated(self, x_BxQxNxd: jax.Array, context: Context) -> jax.Array:
    return positions.rotate(x_BxQxNxd, *context.masks.rope, pairs=self.config.rotary_pairs)

  def _attend_expanded(self, q_BxQxHxd: jax.Array, own: LayerCache, context: Context) -> jax.Array:
    masks, scale = context.masks, self._scale
    kv = self._expanded(own)
    shared = None if context.shared is None else self._expanded(context.shared)
    if context.attend is not None:
      known = dict(mask_BxQxS=masks.mask_BxQxS, scale=scale)
      return context.attend(q_BxQxHxd, kv, shared, masks.prompt_mask, **known)
    prompt = None if shared is None else attention.KeyValues(*shared, masks.prompt_mask)
    own_keys = attention.KeyValues(*kv, masks.mask_BxQxS)
    return attention.attend(q_BxQxHxd, own_keys, prompt, scale=scale)

  def _expanded(self, cached: LayerCache) -> tuple[jax.Array, jax.Array]:
    """Keys [rows, H, S, head_dim] and values [rows, H, S, value_dim] of a cache."""
    dtype, heads = self.kv_b.dtype, self.config.heads
    latent, key = (_numbers(x, dtype) for x in cached)
    both = self.kv_b(latent[:, 0])
    both = both.reshape(*both.shape[:2], heads, -1).swapaxes(1, 2)
    both = sharding.constrain(both, sharding.UPDATE_ROWS, sharding.FEATURES, ())
    plain, v = jnp.split(both, [self._plain_dim], axis=-1)
    key = jnp.broadcast_to(key, (*plain.shape[:3], key.shape[-1]))
    return jnp.concatenate([plain, key], axis=-1), v

  def _attend_latents(
    self, plain_BxQxHxF: jax.Array, rotated: jax.Array, own: LayerCache, context: Context
  ) -> jax.Array:
    masks, F = context.masks, self._plain_dim
    terms = self._expansions()
    q_BxQxHxC = _total([_projected_queries(plain_BxQxHxF, term, F) for term in terms])

    def keys(cached: LayerCache, mask: jax.Array) -> attention.KeyValues:
      latent, key = cached
      return attention.KeyValues(latent, latent, mask, key)

    shared = None if context.shared is None else keys(context.shared, masks.prompt_mask)
    out_BxQxHxC = attention.attend(
      jnp.concatenate([q_BxQxHxC, rotated], axis=-1),
      keys(own, masks.mask_BxQxS),
      shared,
      scale=self._scale,
    )
    return _total([_projected_values(out_BxQxHxC, term, F) for term in terms])

  def _expansions(self) -> list[_Expansion]:
    """The terms of `kv_b`: its kernel, and its adapter."""
    dtype, heads = self.kv_b.dtype, self.config.heads
    data, scale = linear.read_kernel(self.kv_b.kernel.get_value(), dtype)
    scale_HxF = None if scale is None else scale.reshape(heads, -1)
    terms = [_Expansion(None, data.reshape(len(data), heads, -1), scale_HxF)]
    if hasattr(self.kv_b, 'a'):
      a_Cxr, b_rxN = (x[...].astype(dtype) for x in (self.kv_b.a, self.kv_b.b))
      terms.append(_Expansion(a_Cxr, b_rxN.reshape(len(b_rxN), heads, -1), None))
    return terms


def _total(parts: list[jax.Array]) -> jax.Array:
  return functools.reduce(jnp.add, parts)


def _projected_queries(q_BxQxHxF: jax.Array, term: _Expansion, plain: int) -> jax.Array:
  """[B, Q, H, C]: queries of latents, from those of expanded keys."""
  if term.scale_HxF is not None:
    q_BxQxHxF = linear.apply_scale(q_BxQxHxF, term.scale_HxF[:, :plain])
  out = jnp.einsum('bqhf,rhf->bqhr', q_BxQxHxF, term.expand_rxHxF[..., :plain])
  return out if term.reduce_Cxr is None else jnp.einsum('bqhr,cr->bqhc', out, term.reduce_Cxr)


def _projected_values(x_BxQxHxC: jax.Array, term: _Expansion, plain: int) -> jax.Array:
  """[B, Q, H, value_dim]: sums of values, from sums of latents."""
  if term.reduce_Cxr is not None:
    x_BxQxHxC = jnp.einsum('bqhc,cr->bqhr', x_BxQxHxC, term.reduce_Cxr)
  out = jnp.einsum('bqhr,rhf->bqhf', x_BxQxHxC, term.expand_rxHxF[..., plain:])
  return linear.apply_scale(out, None if term.scale_HxF is None else term.scale_HxF[:, plain:])


def _numbers(cached: CacheArray, dtype: jnp.dtype) -> jax.Array:
  data, scale = attention.read_cache(cached, dtype)
  return data if scale is None else data * scale[..., None].astype(dtype)
