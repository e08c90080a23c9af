"""Attention whose keys and values are projections of each token. Cached are both."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models import activation_sharding, attention, kvcache, linear, rotary
from jaxrl_llm.models.mixer import Context, LayerCache, Mixer
from jaxrl_llm.types import ModelConfig


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
    self.v = dense(c.width, c.kv_heads * d, use_bias=c.qkv_bias)
    self.o = dense(c.heads * d, c.width, use_bias=c.out_bias)
    if c.qk_norm:
      heads = (1, 1) if c.qk_norm == 'head' else (c.heads, c.kv_heads)
      self.q_norm, self.k_norm = (norm(n * d) for n in heads)
    if c.sinks:
      self.sinks = Sinks(c.heads)

  def mix(self, h_BxQxD: jax.Array, context: Context) -> tuple[jax.Array, LayerCache]:
    """As `Mixer.mix`."""
    c, masks, h = self.config, context.masks, h_BxQxD
    q, k, v = self.q(h), self.k(h), self.v(h)
    if c.qk_norm == 'all':
      q, k = self.q_norm(q), self.k_norm(k)
    q, k, v = (x.reshape(*x.shape[:2], -1, c.head_dim) for x in (q, k, v))
    if c.qk_norm == 'head':
      q, k = self.q_norm(q), self.k_norm(k)
    q, k = rotary.rotate(q, *masks.rope), rotary.rotate(k, *masks.rope)
    if masks.query_factor_BxQ is not None:
      q = q * masks.query_factor_BxQ[..., None, None].astype(q.dtype)
    # Each device of a row holds all of its keys, and queries them with its part of the tokens.
    kv: LayerCache = tuple(
      activation_sharding.constrain(
        x.swapaxes(1, 2), activation_sharding.ROWS, activation_sharding.FEATURES, ()
      )
      for x in (k, v)
    )
    if context.cache is not None:
      kv = kvcache.write_all(context.cache, kv, context.at)
    scores = dict(scale=c.query_scale, cap=c.attention_cap)
    if c.sinks:
      scores['sink_H'] = self.sinks.score[...]
    if context.attend is not None:
      out = context.attend(q, kv, context.shared, masks.prompt_mask, **scores)
    else:
      own = attention.KeyValues(*kv, masks.mask_BxQxS)
      prompt = None
      if context.shared is not None:
        prompt = attention.KeyValues(*context.shared, masks.prompt_mask)
      out = attention.attend(q, own, prompt, **scores)
    return self.o(out.reshape(*out.shape[:2], -1)), kv
