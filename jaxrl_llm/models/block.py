"""One layer of a decoder: a mixer of tokens, then a dense MLP or a mixture of experts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models import exact, linear, moe
from jaxrl_llm.models.attention import ReadingAttention, SelfAttention
from jaxrl_llm.models.gated_delta import GatedDelta
from jaxrl_llm.models.latent_attention import LatentAttention
from jaxrl_llm.models.linear import activate, multiplier
from jaxrl_llm.models.mixer import Context, LayerCache, Mixer
from jaxrl_llm.types import Array, ModelConfig, Structure


class LayerScale(nnx.Module):
  """A number that multiplies the result of a layer. It comes with the files and stays as it is."""

  def __init__(self):
    self.value = nnx.Param(jnp.ones(1))

  def __call__(self, x_BxQxD: jax.Array) -> jax.Array:
    value_1 = jax.lax.stop_gradient(self.value[...])
    return x_BxQxD * value_1[None, None].astype(x_BxQxD.dtype)


class Block(Mixer):
  """x + mix(norm(x)), then x + mlp(norm(x)); some families norm the output of the two, too or instead."""

  def __init__(
    self,
    config: ModelConfig,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
    adapted: tuple[str, ...],
    kind: Structure,
  ):
    self.config = config = config.of_layers(slides=not kind.is_global)
    D = config.width
    layer = linear.ExactDense if config.is_exact else linear.Dense
    dense = functools.partial(layer, dtype=dtype, param_dtype=jnp.float32, rngs=rngs)
    norm_class = exact.RMSNorm if config.is_exact else nnx.RMSNorm
    norm = functools.partial(norm_class, epsilon=config.norm_eps, dtype=dtype, rngs=rngs)
    # The order matters: the random draw of a parameter depends on the number of parameters before it.
    if config.norms != 'after':
      self.attn_norm = norm(D)
    self.add_mixer(dense, norm)
    if config.norms != 'after':
      self.mlp_norm = norm(D)
    if config.norms != 'before':
      self.attn_post_norm, self.mlp_post_norm = norm(D), norm(D)
      if config.layer_scales:
        self.layer_scale = LayerScale()
    factor = 1 if kind.source is None else config.kv_reader_mlp
    if kind.has_experts:
      self.experts = moe.Experts(config, dtype, rngs)
      if S := config.shared_mlp * factor:
        self.shared_gate, self.shared_up = dense(D, S, use_bias=False), dense(D, S, use_bias=False)
        self.shared_down = dense(S, D, use_bias=False)
        if config.shared_gate:
          self.shared_router = dense(D, 1, use_bias=False)
        if config.expert_norms:
          self.shared_post_norm = norm(D)
    else:
      F = (config.dense_mlp or config.mlp) * factor
      self.gate = dense(D, F, use_bias=config.mlp_bias)
      self.up = dense(D, F, use_bias=config.mlp_bias)
      self.down = dense(F, D, use_bias=config.mlp_bias)
    if p := config.layer_input:
      self.input_gate, self.input_down = dense(D, p, use_bias=False), dense(p, D, use_bias=False)
      self.input_norm = norm(D)
    for name in adapted:
      getattr(self, name).adapt()

  def __call__(
    self,
    x_BxQxD: jax.Array,
    context: Context,
    expert_BxQxk: Array | None = None,
    input_BxQxp: Array | None = None,
  ) -> tuple[jax.Array, LayerCache, jax.Array | None]:
    """Returns x_BxQxD, the layer's cache (see `mix`), and the experts of each token. input: of this layer."""
    before, after = self.config.norms != 'after', self.config.norms != 'before'
    added, cached = self.mix(self.attn_norm(x_BxQxD) if before else x_BxQxD, context)
    x = x_BxQxD + self._scaled(self.attn_post_norm(added) if after else added)
    added, expert_BxQxk = self._feed_forward(self.mlp_norm(x) if before else x, x, expert_BxQxk)
    x = x + self._scaled(self.mlp_post_norm(added) if after else added)
    if input_BxQxp is not None:
      gate = activate(self.config, self.input_gate(x))
      x = x + self.input_norm(self.input_down(gate * input_BxQxp))
    return self.layer_scale(x) if self.config.layer_scales else x, cached, expert_BxQxk

  def _scaled(self, added: jax.Array) -> jax.Array:
    scale = self.config.residual_scale
    return added if scale == 1.0 else added * jnp.asarray(scale, added.dtype)

  def _feed_forward(self, h, x, expert_BxQxk) -> tuple[jax.Array, jax.Array | None]:
    """Of the normed h; experts with norms of their own read x, from which h was made."""
    c = self.config
    if not hasattr(self, 'experts'):
      return self.down(activate(c, self.gate(h)) * multiplier(c, self.up(h))), None
    out, expert_BxQxk = self.experts(x if c.expert_norms else h, expert_BxQxk)
    if c.shared_mlp:
      hidden = activate(c, self.shared_gate(h)) * multiplier(c, self.shared_up(h))
      shared = self.shared_down(hidden)
      if c.expert_norms:
        shared = self.shared_post_norm(shared)
      out += jax.nn.sigmoid(self.shared_router(h)) * shared if c.shared_gate else shared
    return out, expert_BxQxk


class AttentionBlock(SelfAttention, Block):
  """A layer with attention to keys and values of each token."""


class ReadingBlock(ReadingAttention, Block):
  """A layer with attention to keys and values of an earlier layer."""


class LatentBlock(LatentAttention, Block):
  """A layer with attention to latents."""


class DeltaBlock(GatedDelta, Block):
  """A recurrent layer."""


def block_class(config: ModelConfig, kind: Structure) -> type[Block]:
  """The class of the layers of a kind."""
  if kind.is_recurrent:
    return DeltaBlock
  if kind.source is not None:
    return ReadingBlock
  return LatentBlock if config.latent else AttentionBlock
