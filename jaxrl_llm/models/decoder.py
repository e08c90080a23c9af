"""One decoder for all families, told apart by ModelConfig: flax modules inside, pure functions at the border."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models import activation_sharding, attention, kvcache, linear, moe, quantized, rotary
from jaxrl_llm.models.activation import activate
from jaxrl_llm.models.layer_masks import LayerMasks, layer_kinds, masks_of_kinds
from jaxrl_llm.types import Array, ModelConfig

# One (k, v) per layer, each [rows, K, S, d]; or, of `remat`, one pair of [layers, rows, K, S, d].
Pair = tuple[kvcache.CacheArray, kvcache.CacheArray]
Cache = list[Pair] | Pair


class Block(nnx.Module):
  """x + attention(norm(x)), then x + mlp(norm(x)); some families also or only norm what is added."""

  def __init__(
    self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs, adapted: tuple[str, ...] = ()
  ):
    D, F, d = config.width, config.mlp, config.head_dim
    dense = functools.partial(linear.Dense, dtype=dtype, param_dtype=jnp.float32, rngs=rngs)
    norm = functools.partial(nnx.RMSNorm, epsilon=config.norm_eps, dtype=dtype, rngs=rngs)
    self.config = config
    # In this order: what is drawn at random hangs on how many were made before.
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
    if config.experts:
      self.experts = moe.Experts(config, dtype, rngs)
    else:
      self.gate = dense(D, F, use_bias=config.mlp_bias)
      self.up = dense(D, F, use_bias=config.mlp_bias)
      self.down = dense(F, D, use_bias=config.mlp_bias)
    for name in adapted:
      getattr(self, name).adapt()

  def __call__(
    self, x_BxQxD, sight: LayerMasks, shared=None, cache=None, at=None, expert_BxQxk=None, attend=None
  ):
    """Returns x_BxQxD, this layer's (k, v): those of x, or the cache with x written at slot `at`, and the experts."""
    before, after = self.config.norms != 'after', self.config.norms != 'before'
    added, kv = self._attend(
      self.attn_norm(x_BxQxD) if before else x_BxQxD, sight, shared, cache, at, attend
    )
    x = x_BxQxD + (self.attn_post_norm(added) if after else added)
    added, chosen = self._feed(self.mlp_norm(x) if before else x, expert_BxQxk)
    return x + (self.mlp_post_norm(added) if after else added), kv, chosen

  def _attend(self, h, sight: LayerMasks, shared, cache, at, attend):
    c = self.config
    q, k, v = self.q(h), self.k(h), self.v(h)
    if c.qk_norm == 'all':
      q, k = self.q_norm(q), self.k_norm(k)
    q, k, v = (x.reshape(*x.shape[:2], -1, c.head_dim) for x in (q, k, v))
    if c.qk_norm == 'head':
      q, k = self.q_norm(q), self.k_norm(k)
    q, k = rotary.rotate(q, *sight.rope), rotary.rotate(k, *sight.rope)
    # Keys whole on every device of a row: each looks at them with its own tokens.
    kv = tuple(
      activation_sharding.constrain(
        x.swapaxes(1, 2), activation_sharding.ROWS, activation_sharding.FEATURES, ()
      )
      for x in (k, v)
    )
    if cache is not None:
      kv = tuple(kvcache.write(old, new, at) for old, new in zip(cache, kv, strict=True))
    scores = dict(scale=c.query_scale, cap=c.attention_cap)
    if attend is not None:
      out = attend(q, kv, shared, sight.prompt_mask, **scores)
    else:
      own = attention.KeyValues(*kv, sight.mask_BxQxS)
      prompt = None if shared is None else attention.KeyValues(*shared, sight.prompt_mask)
      out = attention.attend(q, own, prompt, **scores)
    return self.o(out.reshape(*out.shape[:2], -1)), kv

  def _feed(self, h, expert_BxQxk):
    if self.config.experts:
      return self.experts(h, expert_BxQxk)
    return self.down(activate(self.config, self.gate(h)) * self.up(h)), None


class Decoder(nnx.Module):
  """Embedding, blocks, final norm, and a head that may be the embedding's transpose."""

  def __init__(
    self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs, adapted: tuple[str, ...] = ()
  ):
    self.embed = nnx.Embed(
      config.vocab,
      config.width,
      dtype=dtype,
      embedding_init=nnx.initializers.normal(config.width**-0.5),
      rngs=rngs,
    )
    self.layers = nnx.List([Block(config, dtype, rngs, adapted) for _ in range(config.layers)])
    self.norm = nnx.RMSNorm(config.width, epsilon=config.norm_eps, dtype=dtype, rngs=rngs)
    if not config.tied:
      self.head = nnx.Linear(config.width, config.vocab, use_bias=False, dtype=dtype, rngs=rngs)


@functools.lru_cache(maxsize=32)
def _definition(config: ModelConfig, dtype: str, adapted: tuple[str, ...] = ()):
  """The module's structure and its abstract parameters, made without allocating anything."""
  model = nnx.eval_shape(lambda: Decoder(config, jnp.dtype(dtype), nnx.Rngs(0), adapted))
  graph, params = nnx.split(model, nnx.Param)
  return graph, nnx.to_pure_dict(params)


def abstract_params(config: ModelConfig) -> Any:
  """The parameter tree as float32 ShapeDtypeStructs; kernels are [in, out]. Source: none."""
  return _definition(config, 'float32')[1]


def init(config: ModelConfig, seed: int) -> Any:
  """A parameter tree drawn at random (LeCun-normal kernels, unit norms). Source: none."""
  make = jax.jit(lambda: nnx.split(Decoder(config, jnp.float32, nnx.Rngs(seed)), nnx.Param)[1])
  return nnx.to_pure_dict(make())


def apply(
  config: ModelConfig,
  params: Any,
  tokens_BxQ: Array,
  positions_BxQ: Array,
  mask_BxQxS: Array,
  *,
  shared: tuple[Cache, Array] | None = None,
  cache: Cache | None = None,
  at: Array | None = None,
  key_positions_BxS: Array | None = None,
  sliding_mask_BxQxS: Array | None = None,
  dtype: str = 'float32',
  remat: bool = False,
  noise: tuple[Array, Array] | None = None,
  gather: Callable[[Any], Any] | None = None,
  expert_BxQxNxk: Array | None = None,
  attend: Callable[..., jax.Array] | None = None,
) -> tuple[jax.Array, Cache, jax.Array | None]:
  """Runs the blocks: final hidden states [B, Q, D], per layer the keys and values, and the experts [B, Q, N, k].

  Without `cache`, S = Q and the returned (k, v) [B, K, Q, d] are those of the tokens. With it, the tokens
  are written from slot `at` of S slots on, one number (modulo S) or one per row [B], and the whole cache comes back;
  sliding layers then ask `key_positions` of what it holds, or have a cache of other columns, all within their window,
  of which `sliding_mask` says what is seen.
  `shared` is (cache of P prompts, mask_PxL): row b also sees prompt b // (B / P). `remat` recomputes each
  block in the backward pass, and runs all blocks as one loop: its cache, and the `shared` it takes, is a
  pair of arrays [layers, …]. `noise` is (sigma_L, key): sigma_L[l]·N(0, 1) is added to what layer l is given.
  `gather` lays the weights of one layer out for use, where they are kept in more parts. `expert` says which experts
  of each of N layers a token goes to, in place of what their routers like best; a dense model has none. `attend`
  stands for `attention.attend` where rows are causal and no cache is written, as `splash.attend`.
  Source: arXiv:2302.13971 (Llama), arXiv:2505.09388 (Qwen3).
  """
  # In every layer the same ones, or no loop could run over them.
  adapted = tuple(name for name, part in params['layers'][0].items() if 'a' in part)
  model = nnx.merge(_definition(config, dtype, adapted)[0], params)
  graphs, weights_L = zip(*map(nnx.split, model.layers), strict=True)
  keys_BxS = positions_BxQ if key_positions_BxS is None else key_positions_BxS
  prompts_L, prompt_mask = (None, None) if shared is None else shared
  Q = tokens_BxQ.shape[1]
  if cache is None:  # else it is one token or a few, and rows alone are cut
    wide = lambda x, *axes: activation_sharding.pad_to_shards(x, activation_sharding.TOKENS, *axes)  # noqa: E731
    tokens_BxQ, positions_BxQ, keys_BxS = (
      wide(x, 1) for x in (tokens_BxQ, positions_BxQ, keys_BxS)
    )
    mask_BxQxS = wide(mask_BxQxS, 1, 2)
  masks = dict(
    mask_BxQxS=mask_BxQxS, prompt_mask_PxL=prompt_mask, sliding_mask_BxQxS=sliding_mask_BxQxS
  )
  found = masks_of_kinds(config, positions_BxQ, key_positions_BxS=keys_BxS, **masks)
  kind_L = layer_kinds(config)[1]

  def block(x, sight, layer):
    weights, prompt, own, loud, expert = layer
    x = activation_sharding.constrain(x, activation_sharding.ROWS, activation_sharding.TOKENS)
    if loud is not None:
      sigma, key = loud
      drawn = jax.random.normal(key, (len(x), Q, x.shape[2]))
      x = x + (sigma * activation_sharding.pad_to_shards(drawn, activation_sharding.TOKENS, 1)).astype(
        x.dtype
      )
    if gather is not None:
      weights = nnx.State(gather(nnx.to_pure_dict(weights)))
    x, *told = nnx.merge(graphs[0], weights)(x, sight, prompt, own, at, expert, attend)
    return x, tuple(told)

  loud_L = noise and (noise[0], jax.random.split(noise[1], config.layers))
  expert_L = None
  if expert_BxQxNxk is not None:
    expert_L = jnp.moveaxis(
      activation_sharding.pad_to_shards(expert_BxQxNxk, activation_sharding.TOKENS, 1), 2, 0
    )
  x_BxQxD, kv_L, chosen_L = _embedded(config, model, tokens_BxQ), [], []
  if remat:
    # Once a block, not once a layer: a TPU's compiler takes the better part of a minute for each.
    layers = _stacked(weights_L, dtype), prompts_L, None, loud_L, expert_L
    run = jax.checkpoint(_any_of(found, block), prevent_cse=False)
    x_BxQxD, told_L = jax.lax.scan(run, x_BxQxD, (jnp.array(kind_L), layers))
    kv_L, chosen_L = jax.tree.map(lambda x: x[..., :Q, :], told_L)
    chosen = None if chosen_L is None else jnp.moveaxis(chosen_L, 0, 2)
    return model.norm(x_BxQxD)[:, :Q], kv_L, chosen
  for i, weights in enumerate(weights_L):
    own = None if cache is None else cache[i]
    loud, expert = jax.tree.map(lambda x: x[i], (loud_L, expert_L))  # noqa: B023
    layer = weights, prompts_L and prompts_L[i], own, loud, expert
    x_BxQxD, (kv, chosen) = block(x_BxQxD, found[kind_L[i]], layer)
    kv_L.append(kv if cache is not None else tuple(x[:, :, :Q] for x in kv))
    chosen_L.append(chosen)
  chosen = jnp.stack(chosen_L, 2)[:, :Q] if config.experts else None
  return model.norm(x_BxQxD)[:, :Q], kv_L, chosen


def _embedded(config: ModelConfig, model: Any, tokens_BxQ: Array) -> jax.Array:
  x_BxQxD = model.embed(tokens_BxQ)
  if config.embed_scale == 1.0:
    return x_BxQxD
  return x_BxQxD * jnp.asarray(config.embed_scale, x_BxQxD.dtype)


def _any_of(found: list[LayerMasks], block: Any) -> Any:
  """The block as a loop over layers runs it: each says by a number which sight is its own."""
  if len(found) == 1:
    return lambda x, layer: block(x, found[0], layer[1])
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *found)

  def run(x, layer):
    return block(x, jax.tree.map(lambda s: s[layer[0]], stacked), layer[1])

  return run


def _stacked(weights_L: tuple[Any, ...], dtype: str) -> Any:
  """One tree of arrays [layers, …]; matrices already in the type that they are multiplied in."""
  whole = lambda x: isinstance(x, quantized.Quantized)  # noqa: E731
  cast = lambda x: x if whole(x) or x.ndim == 1 else x.astype(dtype)  # noqa: E731
  weights_L = jax.tree.map(cast, weights_L, is_leaf=whole)
  return jax.tree.map(lambda *x_L: jnp.stack(x_L), *weights_L)


@jax.named_scope('head')
def head(config: ModelConfig, params: Any, hidden: jax.Array, dtype: str = 'float32') -> jax.Array:
  """Logits [..., V] in float32 of hidden states [..., D]. Source: none."""
  if config.tied:
    kernel, spec = params['embed']['embedding'], '...d,vd->...v'
  else:
    kernel, spec = params['head']['kernel'], '...d,dv->...v'
  data, scale = quantized.read(kernel, dtype)
  logits = jnp.einsum(spec, hidden.astype(dtype), data, preferred_element_type=jnp.float32)
  logits = quantized.apply_scale(logits, scale)
  cap = config.logit_cap
  return cap * jnp.tanh(logits / cap) if cap else logits


def forward(
  config: ModelConfig, params: Any, tokens_BxS: Array, mask_BxS: Array, dtype: str = 'float32'
) -> jax.Array:
  """Logits [B, S, V] of whole sequences, padded on either side as `mask_BxS` says. Source: none."""
  mask_BxS = jnp.asarray(mask_BxS, bool)
  positions_BxS = jnp.maximum(jnp.cumsum(mask_BxS, axis=1) - 1, 0)
  hidden, *_ = apply(config, params, tokens_BxS, positions_BxS, causal(mask_BxS), dtype=dtype)
  return head(config, params, hidden, dtype)


def causal(mask_BxS: Array) -> jax.Array:
  """mask[b, q, s] = s ≤ q and s is real. Source: none."""
  S = mask_BxS.shape[1]
  return jnp.tril(jnp.ones((S, S), bool))[None] & mask_BxS[:, None, :]
