"""What positions decide: rotary embedding with Hugging Face's scaling variants, and masks per kind of layer."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import exact
from jaxrl_llm.types import Array, JsonObject, ModelConfig, UserError

SCALINGS = ('default', 'linear', 'llama3', 'yarn', 'longrope', 'proportional')
# Hugging Face's rope_scaling; the factors of longrope are tuples.
Scaling = JsonObject


def frequencies(config: ModelConfig, sliding: bool = False) -> tuple[np.ndarray, float]:
  """Inverse frequencies [rotary_dim / 2] in float64, in radians per token, and the factor on cosine and sine.

  θ_i = base^(−2i/d), then stretched by `rope_scaling`, except in sliding layers with a base of their own. Powers in
  float32 would depend on the kind of CPU. Raises UserError for an unknown scaling. arXiv:2104.09864 (rotary),
  arXiv:2309.00071 (yarn).
  """
  has_own_base = sliding and config.sliding_rope_theta > 0
  scaling = {} if has_own_base else dict(config.rope_scaling)
  kind = scaling.get('rope_type', scaling.get('type', 'default'))
  dim = config.rotary_dim or config.head_dim
  base = config.sliding_rope_theta if has_own_base else config.rope_theta
  inverse = base ** (-np.arange(0, dim, 2) / dim)
  if kind == 'default':
    return inverse, 1.0
  if kind == 'linear':
    return inverse / scaling['factor'], 1.0
  if kind == 'llama3':
    return _llama3(inverse, scaling), 1.0
  if kind == 'yarn':
    return _yarn(inverse, scaling, config)
  if kind == 'longrope':
    return _longrope(inverse, scaling, config)
  if kind == 'proportional':  # later features are not rotated
    rotated = int(scaling.get('partial_rotary_factor', 1.0) * dim // 2)
    inverse = np.where(np.arange(dim // 2) < rotated, inverse, 0.0)
    return inverse / scaling.get('factor', 1.0), 1.0
  raise UserError(f'rope_scaling type {kind!r} is unknown; supported: {", ".join(SCALINGS)}.')


def _llama3(inverse: np.ndarray, scaling: Scaling) -> np.ndarray:
  """Divides low frequencies by `factor`, keeps high ones, and blends between the two."""
  low, high = scaling['low_freq_factor'], scaling['high_freq_factor']
  span = scaling['original_max_position_embeddings']
  wavelength = 2 * math.pi / inverse
  blend = (span / wavelength - low) / (high - low)
  between = (1 - blend) * inverse / scaling['factor'] + blend * inverse
  scaled = np.where(wavelength > span / low, inverse / scaling['factor'], inverse)
  medium = (wavelength <= span / low) & (wavelength >= span / high)
  return np.where(medium, between, scaled)


def _yarn(inverse: np.ndarray, scaling: Scaling, config: ModelConfig) -> tuple[np.ndarray, float]:
  """Interpolates slow dimensions, keeps fast ones, and sharpens attention by a factor."""
  factor, base = scaling['factor'], config.rope_theta
  dim = config.rotary_dim or config.head_dim
  span = scaling.get('original_max_position_embeddings') or config.max_tokens

  def mscale(value, weight=1.0):
    return 1.0 if value <= 1 else 0.1 * weight * math.log(value) + 1.0

  attention = scaling.get('attention_factor')
  if attention is None:
    weight, weight_all = scaling.get('mscale'), scaling.get('mscale_all_dim')
    has_both = weight and weight_all
    attention = mscale(factor, weight) / mscale(factor, weight_all) if has_both else mscale(factor)

  def dimension(rotations):  # that rotates so many times over the original context
    return dim * math.log(span / (rotations * 2 * math.pi)) / (2 * math.log(base))

  first, last = dimension(scaling.get('beta_fast') or 32), dimension(scaling.get('beta_slow') or 1)
  if scaling.get('truncate', True):
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, dim - 1)
  width = max(last - first, 0.001)
  ramp = np.clip((np.arange(dim // 2) - first) / width, 0, 1)
  return inverse / factor * ramp + inverse * (1 - ramp), float(attention)


def _longrope(
  inverse: np.ndarray, scaling: Scaling, config: ModelConfig
) -> tuple[np.ndarray, float]:
  """Divides each frequency by a factor of its own; see `for_context`. arXiv:2402.13753 (LongRoPE)."""
  factor, span = scaling['factor'], scaling['original_max_position_embeddings']
  stretch = scaling['long_factor' if config.max_tokens > span else 'short_factor']
  if len(stretch) != len(inverse):
    raise UserError(
      f'rope_scaling has {len(stretch)} longrope factors for {len(inverse)} frequencies; fetch it again.'
    )
  attention = scaling.get('attention_factor')
  if attention is None:
    attention = math.sqrt(1 + math.log(factor) / math.log(span)) if factor > 1 else 1.0
  return inverse / np.asarray(stretch), float(attention)


def for_context(config: ModelConfig, tokens: int) -> ModelConfig:
  """The model for rows of up to `tokens` tokens: longrope has other frequencies for all positions of long rows.

  They are chosen once, for all rows of a run: chosen by the length of each row, they would not agree with keys that
  were cached while the row was short.
  """
  scaling = dict(config.rope_scaling)
  if 'long_tokens' not in scaling or tokens <= config.max_tokens:
    return config
  return dataclasses.replace(config, max_tokens=scaling['long_tokens'])


def tables(
  config: ModelConfig, positions_BxQ: Array, sliding: bool = False
) -> tuple[jax.Array, jax.Array]:
  """Cosine and sine [B, Q, rotary_dim / 2] in float32 at `positions_BxQ`. arXiv:2104.09864."""
  inverse, factor = frequencies(config.of_layers(sliding), sliding)
  inverse = jnp.asarray(inverse, jnp.float32)
  angle = positions_BxQ[..., None].astype(jnp.float32) * inverse[None, None, :]
  tables = jnp.cos(angle) * factor, jnp.sin(angle) * factor
  return tuple(map(exact.round_factors, tables)) if config.is_exact else tables


def rotate(
  x_BxQxNxd: jax.Array, cos_BxQxh: jax.Array, sin_BxQxh: jax.Array, pairs: bool = False
) -> jax.Array:
  """(a, b) → (a·cos − b·sin, b·cos + a·sin) with a, b the two halves of the rotated features. arXiv:2104.09864.

  With `pairs`, a and b are neighbors; the result has all of a first. Products of rotated queries and keys are the same.
  """
  if pairs:
    x_BxQxNxd = jnp.concatenate([x_BxQxNxd[..., 0::2], x_BxQxNxd[..., 1::2]], axis=-1)
  rotated = 2 * cos_BxQxh.shape[-1]
  if rotated < x_BxQxNxd.shape[-1]:
    first, rest = x_BxQxNxd[..., :rotated], x_BxQxNxd[..., rotated:]
    return jnp.concatenate([rotate(first, cos_BxQxh, sin_BxQxh), rest], axis=-1)
  a, b = jnp.split(x_BxQxNxd.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos_BxQxh[:, :, None, :], sin_BxQxh[:, :, None, :]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BxQxNxd.dtype)


class LayerMasks(NamedTuple):
  """Rotary tables and masks that all layers of one kind share."""

  rope: tuple[jax.Array, jax.Array]  # cosine and sine [B, Q, d / 2]
  mask_BxQxS: jax.Array
  # Of the keys that a group shares: [P, L], or [P, G, Q, L] where a window slides.
  prompt_mask: jax.Array | None
  query_factor_BxQ: jax.Array | None = None  # on rotated queries
  # bool []: whether rotated queries and keys are normed; None: in no layer
  is_normed: jax.Array | None = None
  # whether a window slides over columns that are one token each; None: there is no window, or the mask alone says which
  slides: bool | jax.Array | None = None


def layer_kinds(config: ModelConfig) -> tuple[list[tuple[bool, bool]], tuple[int, ...]]:
  """The kinds of layer in a model, as (slides, is rotated), and the index of each layer's kind."""
  plain_L = config.unrotated or (False,) * config.layers
  kind_L = [(slides, not plain) for slides, plain in zip(config.slides, plain_L, strict=True)]
  kinds = sorted(set(kind_L))
  return kinds, tuple(map(kinds.index, kind_L))


def masks_of_kinds(
  config: ModelConfig,
  positions_BxQ: Array,
  mask_BxQxS: Array,
  key_positions_BxS: Array,
  prompt_mask_PxL: Array | None,
  sliding_mask_BxQxS: Array | None = None,
) -> list[LayerMasks]:
  """The masks of each kind of layer.

  In a sliding layer, position i attends to j where i − j < window; in a chunked one where ⌊i / window⌋ = ⌊j / window⌋.

  Prompts are right-padded: the position of a shared key is its column. `sliding_mask` replaces mask and window where
  the caches of sliding layers have columns of their own.
  arXiv:2310.06825 (Mistral's window), arXiv:2503.19786 (Gemma 3: sliding layers with their own rotation).
  """

  def in_window(positions, keys):
    i, j = positions[..., :, None], keys[..., None, :]
    return i // config.window == j // config.window if config.chunked else i - j < config.window

  def masks(slides: bool, rotated: bool) -> LayerMasks:
    rope = tables(config, positions_BxQ, sliding=slides)
    if not rotated:
      rope = jnp.ones_like(rope[0]), jnp.zeros_like(rope[1])
    mask, prompt = mask_BxQxS, prompt_mask_PxL
    if prompt is not None and config.window:
      P, L = prompt.shape
      positions_PxGxQ = positions_BxQ.reshape(P, -1, positions_BxQ.shape[1])
      G, Q = positions_PxGxQ.shape[1:]
      prompt = jnp.broadcast_to(prompt[:, None, None], (P, G, Q, L))
      if slides:
        prompt = prompt & in_window(positions_PxGxQ, jnp.arange(L)[None, None])
    if slides and sliding_mask_BxQxS is not None:
      mask = sliding_mask_BxQxS
    elif slides:
      mask = mask & in_window(positions_BxQ, key_positions_BxS)
    factor, is_normed = query_factor_BxQ, None
    if config.unrotated_scale and rotated and factor is not None:
      factor = jnp.ones_like(factor)
    if config.qk_norm == 'rotated':
      is_normed = jnp.asarray(rotated)
    has_window = config.window and not config.chunked and sliding_mask_BxQxS is None
    return LayerMasks(rope, mask, prompt, factor, is_normed, slides if has_window else None)

  query_factor_BxQ = _query_factor(config, positions_BxQ)
  return [masks(*kind) for kind in layer_kinds(config)[0]]


def _query_factor(config: ModelConfig, positions_BxQ: Array) -> jax.Array | None:
  """1 + b·ln(1 + ⌊position / span⌋), which keeps attention sharp over long contexts; None for b = 0.

  With `unrotated_scale` positions count from 1. arXiv:2501.19399.
  """
  if not config.position_scale:
    return None
  first = 1 if config.unrotated_scale else 0
  spans_BxQ = jnp.floor((positions_BxQ + first).astype(jnp.float32) / config.position_span)
  return 1.0 + config.position_scale * jnp.log1p(spans_BxQ)
