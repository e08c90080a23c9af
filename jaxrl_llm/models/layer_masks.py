"""What a layer sees: its rotary tables and masks, of which a model has one kind or a few."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models import rotary
from jaxrl_llm.types import Array, ModelConfig


class LayerMasks(NamedTuple):
  """Of all layers of one kind."""

  rope: tuple[jax.Array, jax.Array]  # cosine and sine [B, Q, d / 2]
  mask_BxQxS: jax.Array
  prompt_mask: (
    jax.Array | None
  )  # of keys that a group shares: [P, L], or [P, G, Q, L] where a window slides


def layer_kinds(config: ModelConfig) -> tuple[list[tuple[bool, bool]], tuple[int, ...]]:
  """The kinds of layer that the model has, as (slides, is rotated), and which of them each layer is. Source: none."""
  plain_L = config.unrotated or (False,) * config.layers
  each_L = [(slides, not plain) for slides, plain in zip(config.slides, plain_L, strict=True)]
  found = sorted(set(each_L))
  return found, tuple(map(found.index, each_L))


def masks_of_kinds(
  config: ModelConfig,
  positions_BxQ: Array,
  mask_BxQxS: Array,
  key_positions_BxS: Array,
  prompt_mask_PxL: Array | None,
  sliding_mask_BxQxS: Array | None = None,
) -> list[LayerMasks]:
  """One of each kind. A sliding layer's query at position i sees position j where i − j < window.

  Prompts are right-padded: a shared key's position is its column. `sliding_mask` stands for mask and window where
  sliding layers keep keys of their own number.
  Source: arXiv:2310.06825 (Mistral's window), arXiv:2503.19786 (Gemma 3: sliding layers with their own rotation).
  """

  def near(positions, keys):
    return positions[..., :, None] - keys[..., None, :] < config.window

  def sight(slides: bool, rotated: bool) -> LayerMasks:
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
        prompt = prompt & near(positions_PxGxQ, jnp.arange(L)[None, None])
    if slides and sliding_mask_BxQxS is not None:
      mask = sliding_mask_BxQxS
    elif slides:
      mask = mask & near(positions_BxQ, key_positions_BxS)
    return LayerMasks(rope, mask, prompt)

  return [sight(*kind) for kind in layer_kinds(config)[0]]
