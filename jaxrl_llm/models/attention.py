"""Attention of each row over its own keys and, optionally, over the keys of a prompt that its group shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models import kvcache

# Finite, so that a row with every key masked (padding) yields numbers and not NaN.
MASKED_SCORE = -1e30

# From the reference of the softmax (its largest score) to (Σ weights, Σ weights·v).
_WeightedSum = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
_Numbers = tuple[jax.Array, jax.Array | None]  # of a cached array, and their scale


class KeyValues(NamedTuple):
  """Keys and values of one layer, and their attention mask.

  Own keys: arrays [B, K, S, d], mask [B, Q, S]. Shared keys: arrays [P, K, S, d], mask [P, S] or
  [P, G, Q, S]; row b of B = P * G attends to those of prompt b // G. The order K before S keeps a decode iteration
  free of transposes. Values may have another d than keys.
  """

  k: kvcache.CacheArray
  v: kvcache.CacheArray
  mask: jax.Array
  more_k: kvcache.CacheArray | None = (
    None  # more features of the keys; queries have theirs at the end
  )


@jax.named_scope('attention')
def attend(
  q_BxQxHxd: jax.Array,
  own: KeyValues,
  shared: KeyValues | None = None,
  *,
  scale: float = 0.0,
  cap: float = 0.0,
  sink_H: jax.Array | None = None,
) -> jax.Array:
  """softmax(scale·q·kᵀ)·v with one softmax over own and shared keys → [B, Q, H, d of v].

  A scale of 0 means 1/√d. With a cap, scores s become cap·tanh(s / cap) (arXiv:2408.00118, Gemma 2). Shared keys are
  read once per prompt and not once per row, which saves a factor of G in memory and bandwidth. Scores and softmax are
  float32. A sink is one more score of each head, whose value is 0. arXiv:2402.05099 (shared-prefix decomposition).
  """
  B, Q, H, d = q_BxQxHxd.shape
  P = len(shared.mask) if shared is not None else B
  K = jax.tree.leaves(own.k)[0].shape[1]
  q = q_BxQxHxd.reshape(P, B // P, Q, K, H // K, d) * (scale or d**-0.5)
  parts = [_own(q, own, cap)] + ([] if shared is None else [_shared(q, shared, cap)])
  # Two-part softmax: statistics are [P, G, K, Q, R], far smaller than a concatenation of the scores.
  top = parts[0][0] if shared is None else jnp.maximum(parts[0][0], parts[1][0])
  if sink_H is not None:
    sink = sink_H.astype(jnp.float32).reshape(1, 1, K, 1, H // K)
    top = jnp.maximum(top, sink)
  top = jax.lax.stop_gradient(top)
  total, out = (0.0 if sink_H is None else jnp.exp(sink - top)), 0.0
  for _, weighted_sum in parts:
    weight_sum, value = weighted_sum(top)
    total, out = total + weight_sum, out + value
  out = out / total[..., None]
  out = out.astype(q_BxQxHxd.dtype)  # [P, G, K, Q, R, d]
  return out.transpose(0, 1, 3, 2, 4, 5).reshape(B, Q, H, -1)


def _own(q: jax.Array, keys: KeyValues, cap: float) -> tuple[jax.Array, _WeightedSum]:
  """The largest score of each query, and a function from the softmax's reference to (Σ weights, Σ weights·v)."""
  P, G, Q, K, R, d = q.shape
  # Rows stay one axis next to the cache. If they were split in two, XLA would repeat the cache's update inside its
  # reader, need the old cache beside the new one, and copy it for every token.
  q = q.reshape(P * G, Q, K, R, d)
  k, (v, v_scale) = kvcache.read(keys.k, q.dtype), kvcache.read(keys.v, q.dtype)
  score = _scores('bqkrd,bksd->bkqrs', q, keys, k)
  score = jnp.where(keys.mask[:, None, :, None, :], _capped(score, cap), MASKED_SCORE)
  group = lambda x: x.reshape(P, G, *x.shape[1:])  # noqa: E731

  def weighted_sum(top):
    weight = jnp.exp(score - top.reshape(P * G, *top.shape[2:])[..., None])
    scaled = weight if v_scale is None else weight * v_scale[:, :, None, None]
    value = jnp.einsum(
      'bkqrs,bksd->bkqrd', scaled.astype(q.dtype), v, preferred_element_type=jnp.float32
    )
    return group(weight.sum(-1)), group(value)

  return group(score.max(-1)), weighted_sum


def _shared(q: jax.Array, keys: KeyValues, cap: float) -> tuple[jax.Array, _WeightedSum]:
  """As `_own`, for keys that all G rows of a prompt attend to."""
  k, (v, v_scale) = kvcache.read(keys.k, q.dtype), kvcache.read(keys.v, q.dtype)
  score = _scores('pgqkrd,pksd->pkgqrs', q, keys, k)
  mask = keys.mask[:, None, None] if keys.mask.ndim == 2 else keys.mask
  score = jnp.where(mask[:, None, :, :, None], _capped(score, cap), MASKED_SCORE)

  def weighted_sum(top):
    weight = jnp.exp(score - top.swapaxes(1, 2)[..., None])
    scaled = weight if v_scale is None else weight * v_scale[:, :, None, None, None]
    value = jnp.einsum(
      'pkgqrs,pksd->pkgqrd', scaled.astype(q.dtype), v, preferred_element_type=jnp.float32
    )
    return weight.sum(-1).swapaxes(1, 2), value.swapaxes(1, 2)

  return score.max(-1).swapaxes(1, 2), weighted_sum


def _scores(spec: str, q: jax.Array, keys: KeyValues, k: _Numbers) -> jax.Array:
  """q·k of all features, by the einsum `spec`; k is `keys.k` as `kvcache.read` returns it."""
  if keys.more_k is None:
    return _product(spec, q, k)
  first, last = jnp.split(q, [k[0].shape[-1]], axis=-1)
  return _product(spec, first, k) + _product(spec, last, kvcache.read(keys.more_k, q.dtype))


def _product(spec: str, q: jax.Array, k: _Numbers) -> jax.Array:
  data, scale = k
  score = jnp.einsum(spec, q, data, preferred_element_type=jnp.float32)
  # Scales are [rows, K, S], and scores have axes of queries between K and S.
  return score if scale is None else score * jnp.expand_dims(scale, range(2, score.ndim - 1))


def _capped(score: jax.Array, cap: float) -> jax.Array:
  return cap * jnp.tanh(score / cap) if cap else score
