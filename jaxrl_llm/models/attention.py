"""Attention of each row over its own keys and over those of a prompt that its group shares; caches of both.

Caches are float32, bfloat16, or int8 with one scale per token and head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.distributed import sharding
from jaxrl_llm.models import exact, linear, positions
from jaxrl_llm.models.mixer import (
  Cache,
  CacheArray,
  Context,
  Int8,
  LayerCache,
  Mixer,
  RowStates,
)
from jaxrl_llm.types import ModelConfig

# Finite, so that a row with every key masked (padding) yields numbers and not NaN.
MASKED_SCORE = -1e30
# With more queries than the first number, blocks of at most the second, which is smaller.
_MOST_QUERIES, _BLOCK_QUERIES = 1024, 512

# Keys that a softmax is over: the largest score [P, G, K, Q, R] of each query, and a function from the softmax's
# reference (the largest score of all parts) to (Σ weights, Σ weights·v).
Part = tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, jax.Array]]]
_Numbers = tuple[jax.Array, jax.Array | None]  # of a cached array, and their scale


def pack_cache(x: jax.Array, dtype: str) -> CacheArray:
  """x [rows, K, S, d] in the cache's format; the error of int8 is at most max|x| / 254 per number."""
  if dtype != 'int8':
    return x.astype(dtype)
  x = x.astype(jnp.float32)
  scale = jnp.abs(x).max(-1) / 127
  data = jnp.round(x / jnp.where(scale > 0, scale, 1)[..., None])
  return Int8(data.astype(jnp.int8), scale)


def empty_cache(shape: tuple[int, ...], dtype: str) -> CacheArray:
  """An empty cache of `shape` [rows, K, S, d]."""
  return pack_cache(jnp.zeros(shape, jnp.float32 if dtype == 'int8' else dtype), dtype)


def write_cache(cache: CacheArray, new: jax.Array, at: jax.Array) -> CacheArray:
  """The cache with `new` [rows, K, Q, d] written from column `at` on: one number (modulo S) or one per row."""
  packed = pack_cache(new, 'int8' if isinstance(cache, Int8) else cache.dtype.name)
  update = jax.lax.dynamic_update_slice_in_dim
  if jnp.ndim(at) == 0:
    return jax.tree.map(lambda old, x: update(old, x, at % old.shape[2], 2), cache, packed)
  update_rows = jax.vmap(lambda old, x, a: update(old, x, a, 1))
  return jax.tree.map(lambda old, x: update_rows(old, x, at), cache, packed)


def read_cache(cache: CacheArray, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array | None]:
  """(numbers in `dtype` [rows, K, S, d], scale [rows, K, S] or None).

  The caller multiplies scores or weights by the scale, so that no dequantized copy of the cache is made.
  """
  if isinstance(cache, Int8):
    return cache.data.astype(dtype), cache.scale
  return cache, None


def write_caches(cache: LayerCache, new: LayerCache, at: jax.Array) -> LayerCache:
  """`write_cache` for each array of a layer."""
  return tuple(write_cache(old, x, at) for old, x in zip(cache, new, strict=True))


def map_columns(
  change: Callable[..., LayerCache], cache: Cache, *others: Sequence[object]
) -> list[LayerCache]:
  """`change(layer, …)` of each layer whose cache has columns; recurrent layers as they are.

  `others`: lists of a further argument for each layer.
  """
  return [
    layer if isinstance(layer, RowStates) else change(layer, *more)
    for layer, *more in zip(cast(list[LayerCache], cache), *others, strict=True)
  ]


def start_rows(
  cache: Cache, prompts: Cache, row_S: jax.Array, rollouts: int, starts_S: jax.Array
) -> list[LayerCache]:
  """The cache of slots where those that `starts_S` marks begin with the rows `row_S`: states are those of the prompt.

  Cached columns need no reset: a row does not attend to those of another. Row b belongs to prompt b // rollouts.
  """

  if not any(isinstance(layer, RowStates) for layer in cache):
    return cast(list[LayerCache], cache)

  def start(old: jax.Array, new_P: jax.Array) -> jax.Array:
    new_S = new_P[jnp.minimum(row_S // rollouts, len(new_P) - 1)]
    return jnp.where(starts_S.reshape(-1, *[1] * (old.ndim - 1)), new_S, old)

  return [
    jax.tree.map(start, layer, prompt) if isinstance(layer, RowStates) else layer
    for layer, prompt in zip(cast(list[LayerCache], cache), prompts, strict=True)
  ]


class KeyValues(NamedTuple):
  """Keys and values of one layer, and their attention mask.

  Own keys: arrays [B, K, S, d], mask [B, Q, S]. Shared keys: arrays [P, K, S, d], mask [P, S] or
  [P, G, Q, S]; row b of B = P * G attends to those of prompt b // G. The order K before S keeps a decode iteration
  free of transposes. Values may have another d than keys.
  """

  k: CacheArray
  v: CacheArray
  mask: jax.Array
  more_k: CacheArray | None = None  # more features of the keys; queries have theirs at the end


@jax.named_scope('attention')
def attend(
  q_BxQxHxd: jax.Array,
  own: KeyValues,
  shared: KeyValues | None = None,
  *,
  scale: float = 0.0,
  cap: float = 0.0,
  sink_H: jax.Array | None = None,
  is_exact: bool = False,
) -> jax.Array:
  """softmax(scale·q·kᵀ)·v with one softmax over own and shared keys → [B, Q, H, d of v].

  A scale of 0 means 1/√d. With a cap, scores s become cap·tanh(s / cap) (arXiv:2408.00118, Gemma 2). Shared keys are
  read once per prompt and not once per row, which saves a factor of G in memory and bandwidth. Scores and softmax are
  float32. A sink is one more score of each head, whose value is 0. arXiv:2402.05099 (shared-prefix decomposition).

  Many queries are taken in blocks, and the gradient computes the scores of a block again: those of all queries, Q·S
  numbers a head, are never in memory. arXiv:2112.05682 (Self-attention does not need O(n²) memory).
  """
  if q_BxQxHxd.shape[1] > _MOST_QUERIES:
    options = dict(scale=scale, cap=cap, sink_H=sink_H, is_exact=is_exact)
    return _attend_blocks(q_BxQxHxd, own, shared, **options)
  B = len(q_BxQxHxd)
  K = jax.tree.leaves(own.k)[0].shape[1]
  Q, H = q_BxQxHxd.shape[1:3]
  if is_exact and Q * H == K:  # a product with one row is another kernel
    q_BxQxHxd, own = jnp.repeat(q_BxQxHxd, 2, 1), own._replace(mask=jnp.repeat(own.mask, 2, 1))
  q = group_queries(q_BxQxHxd, B if shared is None else len(shared.mask), K, scale)
  parts = [_own(q, own, cap, is_exact)]
  parts += [] if shared is None else [shared_part(q, shared, cap, is_exact)]
  return combine(parts, q_BxQxHxd.dtype, sink_H)[:, :Q]


def group_queries(q_BxQxHxd: jax.Array, prompts: int, K: int, scale: float) -> jax.Array:
  """Queries as [P, G, Q, K, R, d], by prompt and key-value head, times `scale` or 1/√d."""
  B, Q, H, d = q_BxQxHxd.shape
  return q_BxQxHxd.reshape(prompts, B // prompts, Q, K, H // K, d) * (scale or d**-0.5)


def combine(parts: Sequence[Part], dtype: jnp.dtype, sink_H: jax.Array | None = None) -> jax.Array:
  """One softmax over the keys of all parts → [B, Q, H, d of v] in `dtype`."""
  # Statistics are [P, G, K, Q, R], far smaller than a concatenation of the scores.
  top = functools.reduce(jnp.maximum, (top for top, _ in parts))
  P, G, K, Q, R = top.shape
  if sink_H is not None:
    sink = sink_H.astype(jnp.float32).reshape(1, 1, K, 1, R)
    top = jnp.maximum(top, sink)
  top = jax.lax.stop_gradient(top)
  total, out = (0.0 if sink_H is None else jnp.exp(sink - top)), 0.0
  for _, weighted_sum in parts:
    weight_sum, value = weighted_sum(top)
    total, out = total + weight_sum, out + value
  out = (out / total[..., None]).astype(dtype)  # [P, G, K, Q, R, d]
  return out.transpose(0, 1, 3, 2, 4, 5).reshape(P * G, Q, K * R, -1)


def _attend_blocks(
  q_BxQxHxd: jax.Array,
  own: KeyValues,
  shared: KeyValues | None,
  **options: float | jax.Array | None,
) -> jax.Array:
  """`attend` for many queries, one block at a time."""
  B, Q = q_BxQxHxd.shape[:2]
  per_query = shared is not None and shared.mask.ndim == 4

  @jax.checkpoint
  def attend_block(inputs):
    q, own_mask, shared_mask = inputs
    prompt = shared._replace(mask=shared_mask) if per_query else shared
    return attend(q, own._replace(mask=own_mask), prompt, **options)

  arrays = q_BxQxHxd, own.mask, shared.mask if per_query else None
  out = jax.lax.map(attend_block, _blocks(arrays, (1, 1, 2), -(-Q // _BLOCK_QUERIES)))
  return jnp.moveaxis(out, 0, 2).reshape(B, -1, *out.shape[3:])[:, :Q]


def _blocks(
  arrays: tuple[jax.Array | None, ...], axes: tuple[int, ...], count: int
) -> tuple[jax.Array | None, ...]:
  """[count, …] of each array: block i holds every `count`-th query from i on, padded with zeros.

  Queries that several devices share out among them stay so: a block of consecutive ones would lie on one device.
  """

  def split(x: jax.Array, axis: int) -> jax.Array:
    missing = [-n % count if i == axis else 0 for i, n in enumerate(x.shape)]
    x = jnp.pad(x, [(0, n) for n in missing])
    x = x.reshape(*x.shape[:axis], -1, count, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis + 1, 0)

  return tuple(None if x is None else split(x, a) for x, a in zip(arrays, axes, strict=True))


def _own(q: jax.Array, keys: KeyValues, cap: float, is_exact: bool = False) -> Part:
  """The part of each row's own keys."""
  P, G, Q, K, R, d = q.shape
  # Rows stay one axis next to the cache. If they were split in two, XLA would repeat the cache's update inside its
  # reader, need the old cache beside the new one, and copy it for every token.
  q = q.reshape(P * G, Q, K, R, d)
  k, (v, v_scale) = read_cache(keys.k, q.dtype), read_cache(keys.v, q.dtype)
  score = _scores('bqkrd,bksd->bkqrs', q, keys, k)
  visible = keys.mask if keys.mask.dtype == bool else keys.mask > 0
  score = jnp.where(visible[:, None, :, None, :], capped(score, cap), MASKED_SCORE)
  group = lambda x: x.reshape(P, G, *x.shape[1:])  # noqa: E731

  def weighted_sum(top):
    weight = jnp.exp(score - top.reshape(P * G, *top.shape[2:])[..., None])
    if is_exact:
      return tuple(map(group, exact.weigh(weight, v, keys.mask)))
    scaled = weight if v_scale is None else weight * v_scale[:, :, None, None]
    value = jnp.einsum(
      'bkqrs,bksd->bkqrd', scaled.astype(q.dtype), v, preferred_element_type=jnp.float32
    )
    return group(weight.sum(-1)), group(value)

  return group(score.max(-1)), weighted_sum


def shared_part(q: jax.Array, keys: KeyValues, cap: float, is_exact: bool = False) -> Part:
  """The part of keys that all G rows of a prompt attend to; q is of `group_queries`."""
  k, (v, v_scale) = read_cache(keys.k, q.dtype), read_cache(keys.v, q.dtype)
  score = _scores('pgqkrd,pksd->pkgqrs', q, keys, k)
  mask = keys.mask[:, None, None] if keys.mask.ndim == 2 else keys.mask
  score = jnp.where(mask[:, None, :, :, None], capped(score, cap), MASKED_SCORE)

  def weighted_sum(top):
    weight = jnp.exp(score - top.swapaxes(1, 2)[..., None])
    if is_exact:
      sums = exact.weigh_part(weight, v, 'pkgqrs,pksd->pkgqrd')
      return tuple(x.swapaxes(1, 2) for x in sums)
    scaled = weight if v_scale is None else weight * v_scale[:, :, None, None, None]
    value = jnp.einsum(
      'pkgqrs,pksd->pkgqrd', scaled.astype(q.dtype), v, preferred_element_type=jnp.float32
    )
    return weight.sum(-1).swapaxes(1, 2), value.swapaxes(1, 2)

  return score.max(-1).swapaxes(1, 2), weighted_sum


def _scores(spec: str, q: jax.Array, keys: KeyValues, k: _Numbers) -> jax.Array:
  """q·k of all features, by the einsum `spec`; k is `keys.k` as `attention.read_cache` returns it."""
  if keys.more_k is None:
    return _product(spec, q, k)
  first, last = jnp.split(q, [k[0].shape[-1]], axis=-1)
  return _product(spec, first, k) + _product(spec, last, read_cache(keys.more_k, q.dtype))


def _product(spec: str, q: jax.Array, k: _Numbers) -> jax.Array:
  data, scale = k
  score = jnp.einsum(spec, q, data, preferred_element_type=jnp.float32)
  # Scales are [rows, K, S], and scores have axes of queries between K and S.
  return score if scale is None else score * jnp.expand_dims(scale, range(2, score.ndim - 1))


def capped(score: jax.Array, cap: float) -> jax.Array:
  """cap·tanh(score / cap), or the score itself for a cap of 0. arXiv:2408.00118 (Gemma 2)."""
  return cap * jnp.tanh(score / cap) if cap else score


class Sinks(nnx.Module):
  """A score per head that takes part in the softmax without a value: attention to nothing. arXiv:2309.17453."""

  def __init__(self, heads: int):
    self.score = nnx.Param(jnp.zeros(heads))


class SelfAttention(Mixer):
  """softmax(q·kᵀ)·v, where several query heads may share a key-value head. arXiv:2305.13245."""

  @staticmethod
  def cached_sizes(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Keys, then values."""
    return ((config.kv_heads, config.head_dim),) * 2

  def add_mixer(self, dense: Callable[..., linear.Dense], norm: Callable[..., nnx.RMSNorm]) -> None:
    """Projections q, k, v, o; norms of queries and keys, and sinks, where the model has them."""
    c, d = self.config, self.config.head_dim
    self.q = dense(c.width, c.heads * d, use_bias=c.qkv_bias)
    self.k = dense(c.width, c.kv_heads * d, use_bias=c.qkv_bias)
    self.v = None if c.key_values else dense(c.width, c.kv_heads * d, use_bias=c.qkv_bias)
    if c.output_gate:
      self.q_gate = dense(c.width, c.heads * d, use_bias=c.qkv_bias)
    self.o = dense(c.heads * d, c.width, use_bias=c.out_bias)
    if c.qk_norm in ('head', 'qkv', 'all'):
      heads = (c.heads, c.kv_heads) if c.qk_norm == 'all' else (1, 1)
      self.q_norm, self.k_norm = (norm(n * d) for n in heads)
    if c.sinks:
      self.sinks = Sinks(c.heads)

  def mix(self, h_BxQxD: jax.Array, context: Context) -> tuple[jax.Array, LayerCache]:
    """As `Mixer.mix`."""
    c, masks, h = self.config, context.masks, h_BxQxD
    q, k = self.q(h), self.k(h)
    v = k if self.v is None else self.v(h)
    if c.qk_norm == 'all':
      q, k = self.q_norm(q), self.k_norm(k)
    q, k, v = (x.reshape(*x.shape[:2], -1, c.head_dim) for x in (q, k, v))
    if c.qk_norm in ('head', 'qkv'):
      q, k = self.q_norm(q), self.k_norm(k)
      v = _normed(v, c.norm_eps) if c.qk_norm == 'qkv' else v
    q, k = (positions.rotate(x, *masks.rope, pairs=c.rotary_pairs) for x in (q, k))
    if masks.is_normed is not None:
      q, k = (jnp.where(masks.is_normed, _normed(x, c.norm_eps), x) for x in (q, k))
    if masks.query_factor_BxQ is not None:
      q = q * masks.query_factor_BxQ[..., None, None].astype(q.dtype)
    # Each device of a row holds all of its keys, and queries them with its part of the tokens.
    kv: LayerCache = tuple(
      sharding.constrain(x.swapaxes(1, 2), sharding.UPDATE_ROWS, sharding.FEATURES, ())
      for x in (k, v)
    )
    if context.cache is not None:
      kv = write_caches(context.cache, kv, context.at)
    return self._attended(h, q, kv, context), kv

  def _attended(
    self, h_BxQxD: jax.Array, q_BxQxHxd: jax.Array, kv: LayerCache, context: Context
  ) -> jax.Array:
    """The output [B, Q, D] of queries that attend to `kv` and to a shared prompt."""
    c, masks, q = self.config, context.masks, q_BxQxHxd
    scores = dict(scale=c.query_scale, cap=c.attention_cap)
    if c.is_exact:
      scores['is_exact'] = True
    if c.sinks:
      scores['sink_H'] = self.sinks.score[...]
    if context.attend is not None:
      if masks.slides is not None:
        scores |= dict(window=c.window, slides=masks.slides)
      scores['mask_BxQxS'] = masks.mask_BxQxS
      out = context.attend(q, kv, context.shared, masks.prompt_mask, **scores)
    else:
      prompt = context.shared and KeyValues(*context.shared, masks.prompt_mask)
      out = attend(q, KeyValues(*kv, masks.mask_BxQxS), prompt, **scores)
    out = out.reshape(*out.shape[:2], -1)
    if c.output_gate:
      out *= jax.nn.sigmoid(self.q_gate(h_BxQxD))
    return self.o(out)


class ReadingAttention(SelfAttention):
  """Attention to the keys and values of an earlier layer. arXiv:2405.12981 (cross-layer attention)."""

  @staticmethod
  def cached_sizes(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """None: it reads the cache of the other layer."""
    del config
    return ()

  def add_mixer(self, dense: Callable[..., linear.Dense], norm: Callable[..., nnx.RMSNorm]) -> None:
    """Projections q and o, and the norm of queries."""
    c, d = self.config, self.config.head_dim
    self.q = dense(c.width, c.heads * d, use_bias=c.qkv_bias)
    self.o = dense(c.heads * d, c.width, use_bias=c.out_bias)
    self.q_norm = norm(d)

  def mix(self, h_BxQxD: jax.Array, context: Context) -> tuple[jax.Array, LayerCache]:
    """As `Mixer.mix`; the cache is ()."""
    assert context.source is not None
    B, Q, _ = h_BxQxD.shape
    q = self.q_norm(self.q(h_BxQxD).reshape(B, Q, -1, self.config.head_dim))
    q = positions.rotate(q, *context.masks.rope)
    return self._attended(h_BxQxD, q, context.source, context), ()


def _normed(x_BxQxNxd: jax.Array, epsilon: float) -> jax.Array:
  x = x_BxQxNxd.astype(jnp.float32)
  return (x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + epsilon)).astype(x_BxQxNxd.dtype)
