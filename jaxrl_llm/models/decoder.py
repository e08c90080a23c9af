"""One decoder for all model families, parametrized by ModelConfig: flax modules behind pure functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models import activation_sharding, attention, kvcache, linear, moe, quantized, rotary
from jaxrl_llm.models.activation import activate
from jaxrl_llm.models.layer_masks import LayerMasks, layer_kinds, masks_of_kinds
from jaxrl_llm.types import Array, ModelConfig, Params

# The keys and values of one layer, each [rows, K, S, d].
Pair = tuple[kvcache.CacheArray, kvcache.CacheArray]
# One Pair per layer; or, with `remat`, one Pair of arrays [layers, rows, K, S, d].
Cache = list[Pair] | Pair
# Replaces `attention.attend` where rows are causal and no cache is written: `splash.attend`.
Attend = Callable[..., jax.Array]


class Noise(NamedTuple):
  """Noise added to the input of each layer."""

  sigma_L: jax.Array  # standard deviations
  key: jax.Array
  identity_BxQ: jax.Array  # int32, a number for each token, with which its noise is drawn


class Block(nnx.Module):
  """x + attention(norm(x)), then x + mlp(norm(x)); some families norm the output of the two, too or instead."""

  def __init__(
    self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs, adapted: tuple[str, ...] = ()
  ):
    D, F, d = config.width, config.mlp, config.head_dim
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
    if config.experts:
      self.experts = moe.Experts(config, dtype, rngs)
    else:
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
    x = x_BxQxD + (self.attn_post_norm(added) if after else added)
    added, expert_BxQxk = self._feed_forward(self.mlp_norm(x) if before else x, expert_BxQxk)
    return x + (self.mlp_post_norm(added) if after else added), kv, expert_BxQxk

  def _attend(self, h, masks: LayerMasks, shared, cache, at, attend) -> tuple[jax.Array, Pair]:
    c = self.config
    q, k, v = self.q(h), self.k(h), self.v(h)
    if c.qk_norm == 'all':
      q, k = self.q_norm(q), self.k_norm(k)
    q, k, v = (x.reshape(*x.shape[:2], -1, c.head_dim) for x in (q, k, v))
    if c.qk_norm == 'head':
      q, k = self.q_norm(q), self.k_norm(k)
    q, k = rotary.rotate(q, *masks.rope), rotary.rotate(k, *masks.rope)
    # Each device of a row holds all of its keys, and queries them with its part of the tokens.
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
      out = attend(q, kv, shared, masks.prompt_mask, **scores)
    else:
      own = attention.KeyValues(*kv, masks.mask_BxQxS)
      prompt = None if shared is None else attention.KeyValues(*shared, masks.prompt_mask)
      out = attention.attend(q, own, prompt, **scores)
    return self.o(out.reshape(*out.shape[:2], -1)), kv

  def _feed_forward(self, h, expert_BxQxk) -> tuple[jax.Array, jax.Array | None]:
    if self.config.experts:
      return self.experts(h, expert_BxQxk)
    return self.down(activate(self.config, self.gate(h)) * self.up(h)), None


class Decoder(nnx.Module):
  """Embedding, blocks, final norm, and a head that may be the embedding's transpose."""

  def __init__(
    self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs, adapted: tuple[str, ...] = ()
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
def _definition(
  config: ModelConfig, dtype: str, adapted: tuple[str, ...] = ()
) -> tuple[nnx.GraphDef, Params]:
  """The module's structure and its abstract parameters; no array is allocated."""
  model = nnx.eval_shape(lambda: Decoder(config, jnp.dtype(dtype), nnx.Rngs(0), adapted))
  graph, params = nnx.split(model, nnx.Param)
  return graph, nnx.to_pure_dict(params)


def abstract_params(config: ModelConfig) -> Params:
  """The parameter tree as float32 ShapeDtypeStructs; kernels are [in, out]."""
  return _definition(config, 'float32')[1]


def init(config: ModelConfig, seed: int) -> Params:
  """A randomly initialized parameter tree (LeCun-normal kernels, unit norms)."""
  make = jax.jit(lambda: nnx.split(Decoder(config, jnp.float32, nnx.Rngs(seed)), nnx.Param)[1])
  return nnx.to_pure_dict(make())


class _LayerInputs(NamedTuple):
  """Inputs of a block besides x and its masks; of all layers, each field is a list, or stacked for a scan."""

  weights: Params
  prompt: Cache | None  # keys and values of the shared prompt
  cache: Cache | None
  noise: tuple[jax.Array, jax.Array] | None  # standard deviation and key
  expert_BxQxk: Array | None


def apply(
  config: ModelConfig,
  params: Params,
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
  noise: Noise | None = None,
  gather: Callable[[Params], Params] | None = None,
  expert_BxQxNxk: Array | None = None,
  attend: Attend | None = None,
) -> tuple[jax.Array, Cache, jax.Array | None]:
  """Run the blocks: final hidden states [B, Q, D], keys and values per layer, and the experts [B, Q, N, k].

  Without `cache`, S = Q and the returned (k, v) [B, K, Q, d] are those of the tokens. With it, tokens are written from
  slot `at` of S slots on: one number (modulo S) or one per row [B]. The whole cache is returned.
  key_positions: the position of each cached token, for sliding layers. sliding_mask: replaces it where the cache of
  sliding layers holds other columns, all within their window. shared: (cache of P prompts, mask_PxL); row b also
  attends to prompt b // (B / P). remat: recompute each block in the backward pass, in one loop over layers.
  noise: sigma_L[l]·N(0, 1), drawn by token and layer, is added to the input of layer l. gather: lays out one layer's
  weights for use.
  expert: the experts of each token in N layers, in place of the router's choice, or −1; None in a dense model.
  arXiv:2302.13971 (Llama), arXiv:2505.09388 (Qwen3).
  """
  model = _bind(config, params, dtype)
  graphs, weights_L = zip(*map(nnx.split, model.layers), strict=True)
  keys_BxS = positions_BxQ if key_positions_BxS is None else key_positions_BxS
  prompts_L, prompt_mask = (None, None) if shared is None else shared
  Q = tokens_BxQ.shape[1]
  if cache is None:  # decoding with a cache takes one token or a few, and shards rows alone
    tokens_BxQ, positions_BxQ, keys_BxS = (
      _pad_tokens(x, 1) for x in (tokens_BxQ, positions_BxQ, keys_BxS)
    )
    mask_BxQxS = _pad_tokens(mask_BxQxS, 1, 2)
  masks = masks_of_kinds(
    config, positions_BxQ, mask_BxQxS, keys_BxS, prompt_mask, sliding_mask_BxQxS
  )
  identity_BxQ = None if noise is None else _pad_tokens(noise.identity_BxQ, 1)
  block = functools.partial(_block, graphs[0], at, gather, attend, identity_BxQ)
  noise_L = noise and (noise.sigma_L, jax.random.split(noise.key, config.layers))
  layers = _LayerInputs(weights_L, prompts_L, cache, noise_L, _experts_by_layer(expert_BxQxNxk))
  x_BxQxD = _embed(config, model, tokens_BxQ)
  run = _scan_layers if remat else _unroll_layers
  x_BxQxD, kv_L, expert_BxQxNxk = run(config, block, masks, layers, x_BxQxD, Q, dtype)
  return model.norm(x_BxQxD)[:, :Q], kv_L, expert_BxQxNxk


def _bind(config: ModelConfig, params: Params, dtype: str) -> Decoder:
  # The adapted matrices are the same in every layer, which a loop over layers requires.
  adapted = tuple(name for name, part in params['layers'][0].items() if 'a' in part)
  return nnx.merge(_definition(config, dtype, adapted)[0], params)


def _pad_tokens(x: Array, *dimensions: int) -> Array:
  return activation_sharding.pad_to_shards(x, activation_sharding.TOKENS, *dimensions)


def _experts_by_layer(expert_BxQxNxk: Array | None) -> Array | None:
  return None if expert_BxQxNxk is None else jnp.moveaxis(_pad_tokens(expert_BxQxNxk, 1), 2, 0)


def _block(
  graph: nnx.GraphDef,
  at: Array | None,
  gather: Callable[[Params], Params] | None,
  attend: Attend | None,
  identity_BxQ: jax.Array | None,
  x: jax.Array,
  masks: LayerMasks,
  layer: _LayerInputs,
) -> tuple[jax.Array, tuple[Pair, jax.Array | None]]:
  """One layer: x after it, and its (k, v) and experts."""
  x = activation_sharding.constrain(x, activation_sharding.ROWS, activation_sharding.TOKENS)
  weights = layer.weights
  if layer.noise is not None and identity_BxQ is not None:
    sigma, key = layer.noise
    x = x + (sigma * _token_noise(key, identity_BxQ, x.shape[2])).astype(x.dtype)
  if gather is not None:
    weights = nnx.State(gather(nnx.to_pure_dict(weights)))
  module = nnx.merge(graph, weights)
  x, kv, expert = module(x, masks, layer.prompt, layer.cache, at, layer.expert_BxQxk, attend)
  return x, (kv, expert)


def _token_noise(key: jax.Array, identity_BxQ: jax.Array, width: int) -> jax.Array:
  """N(0, 1) [B, Q, width], the same for a token wherever it stands in its batch."""
  draw = lambda identity: jax.random.normal(jax.random.fold_in(key, identity), (width,))  # noqa: E731
  return jax.vmap(jax.vmap(draw))(identity_BxQ)


_Block = Callable[
  [jax.Array, LayerMasks, _LayerInputs], tuple[jax.Array, tuple[Pair, jax.Array | None]]
]


def _scan_layers(
  config: ModelConfig,
  block: _Block,
  masks: list[LayerMasks],
  layers: _LayerInputs,
  x_BxQxD: jax.Array,
  Q: int,
  dtype: str,
) -> tuple[jax.Array, Cache, jax.Array | None]:
  """All layers as one loop that recomputes each block in the backward pass.

  A TPU's compiler takes most of a minute for each block that it compiles, and so compiles one.
  """
  layers = layers._replace(weights=_stack(layers.weights, dtype), cache=None)
  run = jax.checkpoint(_select_masks(masks, block), prevent_cse=False)
  kind_L = jnp.array(layer_kinds(config)[1])
  x_BxQxD, outputs_L = jax.lax.scan(run, x_BxQxD, (kind_L, layers))
  kv_L, expert_L = jax.tree.map(lambda x: x[..., :Q, :], outputs_L)
  return x_BxQxD, kv_L, None if expert_L is None else jnp.moveaxis(expert_L, 0, 2)


def _unroll_layers(
  config: ModelConfig,
  block: _Block,
  masks: list[LayerMasks],
  layers: _LayerInputs,
  x_BxQxD: jax.Array,
  Q: int,
  dtype: str,
) -> tuple[jax.Array, Cache, jax.Array | None]:
  """All layers one after the other, with a cache for each or none."""
  del dtype  # each layer casts its own weights
  kv_L, expert_L = [], []
  for i, kind in enumerate(layer_kinds(config)[1]):
    x_BxQxD, (kv, expert) = block(x_BxQxD, masks[kind], _layer(layers, i))
    kv_L.append(kv if layers.cache is not None else tuple(x[:, :, :Q] for x in kv))
    expert_L.append(expert)
  expert_BxQxNxk = jnp.stack(expert_L, 2)[:, :Q] if config.experts else None
  return x_BxQxD, kv_L, expert_BxQxNxk


def _layer(layers: _LayerInputs, i: int) -> _LayerInputs:
  noise, expert = jax.tree.map(lambda x: x[i], (layers.noise, layers.expert_BxQxk))
  prompt = layers.prompt and layers.prompt[i]
  cache = None if layers.cache is None else layers.cache[i]
  return _LayerInputs(layers.weights[i], prompt, cache, noise, expert)


def _embed(config: ModelConfig, model: Decoder, tokens_BxQ: Array) -> jax.Array:
  x_BxQxD = model.embed(tokens_BxQ)
  if config.embed_scale == 1.0:
    return x_BxQxD
  return x_BxQxD * jnp.asarray(config.embed_scale, x_BxQxD.dtype)


def _select_masks(masks: list[LayerMasks], block: _Block) -> Callable:
  """The block as the body of a scan over (kind of layer, layer), which selects the masks by kind."""
  if len(masks) == 1:
    return lambda x, layer: block(x, masks[0], layer[1])
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *masks)

  def run(x, layer):
    return block(x, jax.tree.map(lambda mask: mask[layer[0]], stacked), layer[1])

  return run


def _stack(weights_L: Sequence[Params], dtype: str) -> Params:
  """One tree of arrays [layers, …], with matrices cast to the dtype of their products."""
  is_quantized = lambda x: isinstance(x, quantized.Quantized)  # noqa: E731
  cast = lambda x: x if is_quantized(x) or x.ndim == 1 else x.astype(dtype)  # noqa: E731
  weights_L = jax.tree.map(cast, weights_L, is_leaf=is_quantized)
  return jax.tree.map(lambda *x_L: jnp.stack(x_L), *weights_L)


@jax.named_scope('head')
def head(
  config: ModelConfig, params: Params, hidden: jax.Array, dtype: str = 'float32'
) -> jax.Array:
  """Logits [..., V] in float32 of hidden states [..., D]."""
  if config.tied:
    kernel, spec = params['embed']['embedding'], '...d,vd->...v'
  else:
    kernel, spec = params['head']['kernel'], '...d,dv->...v'
  scale = None
  if isinstance(kernel, quantized.Quantized):
    kernel, scale = quantized.read(kernel, dtype)
  logits = jnp.einsum(
    spec, hidden.astype(dtype), kernel.astype(dtype), preferred_element_type=jnp.float32
  )
  if scale is not None:
    logits = quantized.apply_scale(logits, scale)
  cap = config.logit_cap
  return cap * jnp.tanh(logits / cap) if cap else logits


def forward(
  config: ModelConfig, params: Params, tokens_BxS: Array, mask_BxS: Array, dtype: str = 'float32'
) -> jax.Array:
  """Logits [B, S, V] of whole sequences, padded on either side where `mask_BxS` is False."""
  mask_BxS = jnp.asarray(mask_BxS, bool)
  positions_BxS = jnp.maximum(jnp.cumsum(mask_BxS, axis=1) - 1, 0)
  hidden, *_ = apply(config, params, tokens_BxS, positions_BxS, causal(mask_BxS), dtype=dtype)
  return head(config, params, hidden, dtype)


def causal(mask_BxS: Array) -> jax.Array:
  """mask[b, q, s]: s ≤ q and token s is not padding."""
  S = mask_BxS.shape[1]
  return jnp.tril(jnp.ones((S, S), bool))[None] & mask_BxS[:, None, :]
