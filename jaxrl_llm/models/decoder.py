"""One decoder for all model families, parametrized by ModelConfig: flax modules behind pure functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.distributed import sharding
from jaxrl_llm.models import attention, exact, linear
from jaxrl_llm.models.block import Block, block_class
from jaxrl_llm.models.layer_loops import LayerInputs, scan_layers, unroll_layers
from jaxrl_llm.models.mixer import Attend, Cache, Context, LayerCache, RowStates
from jaxrl_llm.models.positions import LayerMasks, masks_of_kinds
from jaxrl_llm.types import Array, ModelConfig, Params, Structure


class Noise(NamedTuple):
  """Noise added to the input of each layer."""

  sigma_L: jax.Array  # standard deviations
  key: jax.Array
  identity_BxQ: jax.Array  # int32, a number for each token, with which its noise is drawn


class Decoder(nnx.Module):
  """Embedding, blocks, final norm, and a head that may be the embedding's transpose.

  `kinds`: of the blocks; by default those of the config.
  """

  def __init__(
    self,
    config: ModelConfig,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
    adapted: tuple[str, ...] = (),
    kinds: Sequence[Structure] | None = None,
  ):
    self.embed = nnx.Embed(
      config.vocab,
      config.width,
      dtype=dtype,
      embedding_init=nnx.initializers.normal(config.width**-0.5),
      rngs=rngs,
    )
    blocks = [
      block_class(config, kind)(config, dtype, rngs, adapted, kind)
      for kind in (config.structures if kinds is None else kinds)
    ]
    self.layers = nnx.List(blocks)
    norm = exact.RMSNorm if config.is_exact else nnx.RMSNorm
    self.norm = norm(config.width, epsilon=config.norm_eps, dtype=dtype, rngs=rngs)
    if not config.tied:
      self.head = nnx.Linear(config.width, config.vocab, use_bias=False, dtype=dtype, rngs=rngs)
    if p := config.layer_input:
      self.layer_embed = nnx.Embed(
        config.layer_input_vocab,
        config.layers * p,
        dtype=dtype,
        embedding_init=nnx.initializers.normal(p**-0.5),
        rngs=rngs,
      )
      self.layer_proj = linear.Dense(
        config.width,
        config.layers * p,
        use_bias=False,
        dtype=dtype,
        param_dtype=jnp.float32,
        rngs=rngs,
      )
      self.layer_proj_norm = nnx.RMSNorm(p, epsilon=config.norm_eps, dtype=dtype, rngs=rngs)


def cached_sizes(config: ModelConfig) -> list[tuple[tuple[int, int], ...]]:
  """Of each layer, (K, d) of each array [rows, K, S, d] that it caches; () of layers without such arrays."""
  layers = zip(config.structures, config.slides, strict=True)
  return [block_class(config, k).cached_sizes(config.of_layers(slides)) for k, slides in layers]


def read_sizes(config: ModelConfig) -> list[tuple[tuple[int, int], ...]]:
  """`cached_sizes` of the layer whose cache each layer reads: its own or that of another."""
  cached = cached_sizes(config)
  source_L = map(config.source, range(config.layers))
  return [cached[i if source is None else source] for i, source in enumerate(source_L)]


def empty_states(config: ModelConfig, rows: int) -> list[RowStates | None]:
  """The states of `rows` rows before their first token; None for layers that cache tokens."""
  return [block_class(config, kind).empty_states(config, rows) for kind in config.structures]


@functools.lru_cache(maxsize=32)
def _definition(
  config: ModelConfig, dtype: str, adapted: tuple[str, ...] = ()
) -> tuple[nnx.GraphDef, Params]:
  """The module's structure and its abstract parameters; no array is allocated."""

  # A block of a kind is traced once for all its layers: drawing keys takes time by the square of what is traced.
  @functools.cache
  def block(kind: Structure) -> Block:
    make = block_class(config, kind)
    return nnx.eval_shape(lambda: make(config, jnp.dtype(dtype), nnx.Rngs(0), adapted, kind))

  model = nnx.eval_shape(lambda: Decoder(config, jnp.dtype(dtype), nnx.Rngs(0), kinds=()))
  model.layers = nnx.List([nnx.clone(block(kind)) for kind in config.structures])
  graph, params = nnx.split(model, nnx.Param)
  return graph, nnx.to_pure_dict(params)


def abstract_params(config: ModelConfig) -> Params:
  """The parameter tree as float32 ShapeDtypeStructs; kernels are [in, out]."""
  return _definition(config, 'float32')[1]


def init(config: ModelConfig, seed: int) -> Params:
  """A randomly initialized parameter tree (LeCun-normal kernels, unit norms)."""
  make = jax.jit(lambda: nnx.split(Decoder(config, jnp.float32, nnx.Rngs(seed)), nnx.Param)[1])
  return nnx.to_pure_dict(make())


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
  shown: Sequence[int] = (),
) -> tuple[jax.Array, Cache, jax.Array | None]:
  """Run the blocks: final hidden states [B, Q, D], the cache of each layer, and the experts [B, Q, N, k].

  Without `cache`, S = Q and the returned one [B, K, Q, d] is that of the tokens. With it, tokens are written from
  slot `at` of S slots on: one number (modulo S) or one per row [B]. The whole cache is returned.
  key_positions: the position of each cached token, for sliding layers. sliding_mask: replaces it where the cache of
  sliding layers holds other columns, all within their window. shared: (cache of P prompts, mask_PxL); row b also
  attends to prompt b // (B / P). remat: recompute each block in the backward pass, in one loop over layers. noise:
  sigma_L[l]·N(0, 1), drawn by token and layer, is added to the input of layer l. gather: lays out a layer's weights.
  expert: the experts of each token in N layers, in place of the router's choice, or −1; None in a dense model. shown:
  layers, whose outputs [B, Q, n·D] replace those of the final norm. arXiv:2302.13971 (Llama), arXiv:2505.09388 (Qwen3).
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
  rest = at, gather, attend, None if noise is None else _pad_tokens(noise.identity_BxQ, 1)
  # Layers of one structure share a function, so that it is traced and differentiated once; the compiler inlines it.
  # It would lose a kernel's shard_map: in a shared function, that does not know the axes that are manual around it.
  block = functools.cache(
    lambda graph: jax.jit(functools.partial(_block, graph, *rest), inline=attend is not None)
  )
  blocks = [block(graph) for graph in graphs]
  noise_L = noise and (noise.sigma_L, jax.random.split(noise.key, config.layers))
  experts = _experts_by_layer(expert_BxQxNxk)
  x_BxQxD = _embed(config, model, tokens_BxQ)
  inputs = _inputs_by_layer(config, model, tokens_BxQ, x_BxQxD)
  layers = LayerInputs(weights_L, prompts_L, cache, noise_L, experts, inputs)
  run = scan_layers if remat else unroll_layers
  x_BxQxD, kv_L, expert_BxQxNxk = run(config, blocks, masks, layers, x_BxQxD, Q, dtype, shown)
  last_BxQxD = x_BxQxD if shown else model.norm(x_BxQxD)
  return last_BxQxD[:, :Q], kv_L, expert_BxQxNxk


def _bind(config: ModelConfig, params: Params, dtype: str) -> Decoder:
  # The adapted matrices are the same in every layer, which a loop over layers requires.
  adapted = tuple(name for name, part in params['layers'][0].items() if 'a' in part)
  return nnx.merge(_definition(config, dtype, adapted)[0], params)


def _pad_tokens(x: Array, *dimensions: int) -> Array:
  return sharding.pad_to_shards(x, sharding.TOKENS, *dimensions)


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
  layer: LayerInputs,
) -> tuple[jax.Array, tuple[LayerCache, jax.Array | None]]:
  """One layer: x after it, its cache, and the experts of its tokens."""
  x = sharding.constrain(x, sharding.UPDATE_ROWS, sharding.TOKENS)
  weights = layer.weights
  if layer.noise is not None and identity_BxQ is not None:
    sigma, key = layer.noise
    x = x + (sigma * _token_noise(key, identity_BxQ, x.shape[2])).astype(x.dtype)
  if gather is not None:
    weights = nnx.State(gather(nnx.to_pure_dict(weights)))
  context = Context(masks, layer.prompt, layer.cache, at, attend, layer.source)
  x, cached, expert = nnx.merge(graph, weights)(x, context, layer.expert_BxQxk, layer.own_BxQxp)
  return x, (cached, expert)


def _token_noise(key: jax.Array, identity_BxQ: jax.Array, width: int) -> jax.Array:
  """N(0, 1) [B, Q, width], the same for a token wherever it stands in its batch."""
  draw = lambda identity: jax.random.normal(jax.random.fold_in(key, identity), (width,))  # noqa: E731
  return jax.vmap(jax.vmap(draw))(identity_BxQ)


def _embed(config: ModelConfig, model: Decoder, tokens_BxQ: Array) -> jax.Array:
  x, scale = model.embed(tokens_BxQ), config.embed_scale
  return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)


def _inputs_by_layer(
  config: ModelConfig, model: Decoder, tokens_BxQ: Array, x_BxQxD: jax.Array
) -> jax.Array | None:
  """[N, B, Q, p] of N layers: (norm(W·x / √D) + √p · the token's row of a table) / √2; None without such inputs."""
  if not (p := config.layer_input):
    return None
  by_layer = lambda x: x.reshape(*x.shape[:2], config.layers, p)  # noqa: E731
  table = by_layer(model.layer_embed(tokens_BxQ))
  projected = model.layer_proj_norm(by_layer(model.layer_proj(x_BxQxD) * config.width**-0.5))
  inputs_BxQxNxp = (projected + table * p**0.5) * 2**-0.5
  constrained = sharding.constrain(inputs_BxQxNxp, sharding.UPDATE_ROWS, sharding.TOKENS)
  return jnp.moveaxis(constrained, 2, 0)


def embed(params: Params, tokens: Array, dtype: str) -> jax.Array:
  """The embeddings [..., D] of tokens [...], without the scale that some models apply."""
  return params['embed']['embedding'][tokens].astype(dtype)


@jax.named_scope('head')
def head(
  config: ModelConfig,
  params: Params,
  hidden: jax.Array,
  dtype: str = 'float32',
  rounded: Params | None = None,
) -> jax.Array:
  """Logits [..., V] of hidden states [..., D], in float32 at least.

  rounded: `params` in `dtype`, rounded once before a loop. The gradient is that of `params`, as of
  `linear.rounded_product`.
  """
  if rounded is not None:
    logits = linear.rounded_product(
      hidden.astype(dtype), head_kernel(config, params), head_kernel(config, rounded), config.tied
    )
  else:
    data, scale = linear.read_kernel(head_kernel(config, params), dtype)
    spec = '...d,vd->...v' if config.tied else '...d,dv->...v'
    options = dict(preferred_element_type=jnp.promote_types(dtype, jnp.float32))
    product = exact.einsum if config.is_exact else jnp.einsum
    logits = linear.apply_scale(product(spec, hidden.astype(dtype), data, **options), scale)
  logits = logits if config.logit_scale == 1.0 else logits * config.logit_scale
  return attention.capped(logits, config.logit_cap)


def head_kernel(config: ModelConfig, params: Params) -> linear.Kernel:
  """[V, D] of a tied model, else [D, V]."""
  return params['embed']['embedding'] if config.tied else params['head']['kernel']


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


def encode_prefix(
  model: ModelConfig, params: Params, tokens_1xN: jax.Array, dtype: str
) -> tuple[Cache, jax.Array] | None:
  """The cache of the tokens and its mask [1, N], for rows that share them; None where there are no tokens."""
  if not tokens_1xN.shape[1]:
    return None
  positions_1xN, all_1xN = jnp.arange(tokens_1xN.shape[1])[None], jnp.ones(tokens_1xN.shape, bool)
  _, cache, _ = apply(model, params, tokens_1xN, positions_1xN, causal(all_1xN), dtype=dtype)
  return cache, all_1xN
