"""Rotary tables and attention masks per kind of layer. A model has one kind of layer or a few."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models import rotary
from jaxrl_llm.types import Array, ModelConfig


class LayerMasks(NamedTuple):
  """Rotary tables and masks that all layers of one kind share."""

  rope: tuple[jax.Array, jax.Array]  # cosine and sine [B, Q, d / 2]
  mask_BxQxS: jax.Array
  # Of the keys that a group shares: [P, L], or [P, G, Q, L] where a window slides.
  prompt_mask: jax.Array | None
  query_factor_BxQ: jax.Array | None = None  # on rotated queries


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
  """The masks of each kind of layer. In a sliding layer, position i attends to j where i − j < window.

  Prompts are right-padded: the position of a shared key is its column. `sliding_mask` replaces mask and window where
  the caches of sliding layers have columns of their own.
  arXiv:2310.06825 (Mistral's window), arXiv:2503.19786 (Gemma 3: sliding layers with their own rotation).
  """

  def in_window(positions, keys):
    return positions[..., :, None] - keys[..., None, :] < config.window

  def masks(slides: bool, rotated: bool) -> LayerMasks:
    rope = rotary.tables(config, positions_BxQ, sliding=slides)
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
    return LayerMasks(rope, mask, prompt, query_factor_BxQ)

  query_factor_BxQ = _query_factor(config, positions_BxQ)
  return [masks(*kind) for kind in layer_kinds(config)[0]]


def _query_factor(config: ModelConfig, positions_BxQ: Array) -> jax.Array | None:
  """1 + b·ln(1 + ⌊position / span⌋), which keeps attention sharp over long contexts; None for b = 0."""
  if not config.position_scale:
    return None
  spans_BxQ = jnp.floor(positions_BxQ.astype(jnp.float32) / config.position_span)
  return 1.0 + config.position_scale * jnp.log1p(spans_BxQ)
