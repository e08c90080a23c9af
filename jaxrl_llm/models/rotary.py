"""Rotary position embedding with Hugging Face's scaling variants."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.types import Array, JsonObject, ModelConfig, UserError

SCALINGS = ('default', 'linear', 'llama3', 'yarn', 'longrope')
# Hugging Face's rope_scaling; the factors of longrope are tuples.
Scaling = JsonObject


def frequencies(config: ModelConfig, sliding: bool = False) -> tuple[np.ndarray, float]:
  """Inverse frequencies [rotary_dim / 2], in radians per token, and the factor on cosine and sine.

  θ_i = base^(−2i/d), then stretched by `rope_scaling`, except in sliding layers with a base of their own. Raises
  UserError for an unknown scaling. arXiv:2104.09864 (rotary), arXiv:2309.00071 (yarn).
  """
  has_own_base = sliding and config.sliding_rope_theta > 0
  scaling = {} if has_own_base else dict(config.rope_scaling)
  kind = scaling.get('rope_type', scaling.get('type', 'default'))
  dim = config.rotary_dim or config.head_dim
  exponent = np.arange(0, dim, 2, dtype=np.float32) / dim
  base = config.sliding_rope_theta if has_own_base else config.rope_theta
  inverse = (1.0 / (base**exponent)).astype(np.float32)
  if kind == 'default':
    return inverse, 1.0
  if kind == 'linear':
    return inverse / np.float32(scaling['factor']), 1.0
  if kind == 'llama3':
    return _llama3(inverse, scaling), 1.0
  if kind == 'yarn':
    return _yarn(inverse, scaling, config)
  if kind == 'longrope':
    return _longrope(inverse, scaling, config)
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
  return np.where(medium, between, scaled).astype(np.float32)


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
  ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - first) / width, 0, 1)
  return (inverse / factor * ramp + inverse * (1 - ramp)).astype(np.float32), float(attention)


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
  return inverse / np.asarray(stretch, np.float32), float(attention)


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
  inverse, factor = frequencies(config, sliding)
  angle = positions_BxQ[..., None].astype(jnp.float32) * jnp.asarray(inverse)[None, None, :]
  return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(x_BxQxNxd: jax.Array, cos_BxQxh: jax.Array, sin_BxQxh: jax.Array) -> jax.Array:
  """(a, b) → (a·cos − b·sin, b·cos + a·sin) with a, b the two halves of the rotated features. arXiv:2104.09864."""
  rotated = 2 * cos_BxQxh.shape[-1]
  if rotated < x_BxQxNxd.shape[-1]:
    first, rest = x_BxQxNxd[..., :rotated], x_BxQxNxd[..., rotated:]
    return jnp.concatenate([rotate(first, cos_BxQxh, sin_BxQxh), rest], axis=-1)
  a, b = jnp.split(x_BxQxNxd.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos_BxQxh[:, :, None, :], sin_BxQxh[:, :, None, :]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BxQxNxd.dtype)
