"""One layer of a decoder: attention, then a dense MLP or a mixture of experts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.distributed import sharding
from jaxrl_llm.models import attention, linear, moe, positions
from jaxrl_llm.models.linear import activate, multiplier
from jaxrl_llm.models.positions import LayerMasks
from jaxrl_llm.types import Array, ModelConfig

# The keys and values of one layer, each [rows, K, S, d].
Pair = tuple[attention.CacheArray, attention.CacheArray]
# One Pair per layer; or, with `remat`, one Pair of arrays [layers, rows, K, S, d].
Cache = list[Pair] | Pair
# Replaces `attention.attend` where rows are causal and no cache is written: `splash.attend`.
Attend = Callable[..., jax.Array]


class Sinks(nnx.Module):
  """A score per head that takes part in the softmax without a value: attention to nothing. arXiv:2309.17453."""

  def __init__(self, heads: int):
    self.score = nnx.Param(jnp.zeros(heads))


class Block(nnx.Module):
  """x + attention(norm(x)), then x + mlp(norm(x)); some families norm the output of the two, too or instead."""

  def __init__(
    self,
    config: ModelConfig,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
    adapted: tuple[str, ...] = (),
    has_experts: bool = False,
  ):
    D, d = config.width, config.head_dim
    dense = functools.partial(linear.Dense, dtype=dtype, param_dtype=jnp.float32, rngs=rngs)
    norm = functools.partial(nnx.RMSNorm, epsilon=config.norm_eps, dtype=dtype, rngs=rngs)
    self.config = config
    # The order matters: the random draw of a parameter depends on the number of parameters before it.
    if config.norms != 'after':
      self.attn_norm = norm(D)
    self.q = dense(D, config.heads * d, use_bias=config.qkv_bias)
    self.k = dense(D, config.kv_heads * d, use_bias=config.qkv_bias)
    self.v = dense(D, config.kv_heads * d, use_bias=config.qkv_bias)
    self.o = dense(config.heads * d, D, use_bias=config.out_bias)
    if config.qk_norm:
      heads = (1, 1) if config.qk_norm == 'head' else (config.heads, config.kv_heads)
      self.q_norm, self.k_norm = (norm(n * d) for n in heads)
    if config.norms != 'after':
      self.mlp_norm = norm(D)
    if config.norms != 'before':
      self.attn_post_norm, self.mlp_post_norm = norm(D), norm(D)
    if config.sinks:
      self.sinks = Sinks(config.heads)
    if has_experts:
      self.experts = moe.Experts(config, dtype, rngs)
      if S := config.shared_mlp:
        self.shared_gate, self.shared_up = dense(D, S, use_bias=False), dense(D, S, use_bias=False)
        self.shared_down = dense(S, D, use_bias=False)
        if config.shared_gate:
          self.shared_router = dense(D, 1, use_bias=False)
    else:
      F = config.dense_mlp or config.mlp
      self.gate = dense(D, F, use_bias=config.mlp_bias)
      self.up = dense(D, F, use_bias=config.mlp_bias)
      self.down = dense(F, D, use_bias=config.mlp_bias)
    for name in adapted:
      getattr(self, name).adapt()

  def __call__(
    self,
    x_BxQxD: jax.Array,
    masks: LayerMasks,
    shared: Pair | None = None,
    cache: Pair | None = None,
    at: Array | None = None,
    expert_BxQxk: Array | None = None,
    attend: Attend | None = None,
  ) -> tuple[jax.Array, Pair, jax.Array | None]:
    """Returns x_BxQxD, the layer's (k, v) and the experts of each token.

    (k, v) are those of x, or the cache with x written from slot `at` on.
    """
    before, after = self.config.norms != 'after', self.config.norms != 'before'
    added, kv = self._attend(
      self.attn_norm(x_BxQxD) if before else x_BxQxD, masks, shared, cache, at, attend
    )
    x = x_BxQxD + self._scaled(self.attn_post_norm(added) if after else added)
    added, expert_BxQxk = self._feed_forward(self.mlp_norm(x) if before else x, expert_BxQxk)
    return x + self._scaled(self.mlp_post_norm(added) if after else added), kv, expert_BxQxk

  def _scaled(self, added: jax.Array) -> jax.Array:
    scale = self.config.residual_scale
    return added if scale == 1.0 else added * jnp.asarray(scale, added.dtype)

  def _attend(self, h, masks: LayerMasks, shared, cache, at, attend) -> tuple[jax.Array, Pair]:
    c = self.config
    q, k, v = self.q(h), self.k(h), self.v(h)
    if c.qk_norm == 'all':
      q, k = self.q_norm(q), self.k_norm(k)
    q, k, v = (x.reshape(*x.shape[:2], -1, c.head_dim) for x in (q, k, v))
    if c.qk_norm == 'head':
      q, k = self.q_norm(q), self.k_norm(k)
    q, k = positions.rotate(q, *masks.rope), positions.rotate(k, *masks.rope)
    if masks.query_factor_BxQ is not None:
      q = q * masks.query_factor_BxQ[..., None, None].astype(q.dtype)
    # Each device of a row holds all of its keys, and queries them with its part of the tokens.
    kv = tuple(
      sharding.constrain(x.swapaxes(1, 2), sharding.UPDATE_ROWS, sharding.FEATURES, ())
      for x in (k, v)
    )
    if cache is not None:
      kv = tuple(attention.write_cache(old, new, at) for old, new in zip(cache, kv, strict=True))
    scores = dict(scale=c.query_scale, cap=c.attention_cap)
    if c.sinks:
      scores['sink_H'] = self.sinks.score[...]
    if attend is not None:
      out = attend(q, kv, shared, masks.prompt_mask, **scores)
    else:
      own = attention.KeyValues(*kv, masks.mask_BxQxS)
      prompt = None if shared is None else attention.KeyValues(*shared, masks.prompt_mask)
      out = attention.attend(q, own, prompt, **scores)
    return self.o(out.reshape(*out.shape[:2], -1)), kv

  def _feed_forward(self, h, expert_BxQxk) -> tuple[jax.Array, jax.Array | None]:
    c = self.config
    if not hasattr(self, 'experts'):
      return self.down(activate(c, self.gate(h)) * multiplier(c, self.up(h))), None
    out, expert_BxQxk = self.experts(h, expert_BxQxk)
    if c.shared_mlp:
      hidden = activate(c, self.shared_gate(h)) * multiplier(c, self.shared_up(h))
      shared = self.shared_down(hidden)
      out += jax.nn.sigmoid(self.shared_router(h)) * shared if c.shared_gate else shared
    return out, expert_BxQxk
