"""Reward shaping by length in tokens: reward_B, length_B, max_tokens → reward_B.

Every public function here may be named in `config.objective.shape.fn`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def none(reward_B: jax.Array, length_B: jax.Array, max_tokens: int) -> jax.Array:
  """R as graded. Source: none."""
  del length_B, max_tokens
  return reward_B


def overlong(
  reward_B: jax.Array,
  length_B: jax.Array,
  max_tokens: int,
  *,
  buffer_tokens: int,
  factor: float = 1.0,
) -> jax.Array:
  """R + min(−(|y| − (T − buffer)) / buffer · factor, 0), lengths in tokens.

  Nothing until T − buffer, then linear down to −factor at T. Source: arXiv:2503.14476 (DAPO, eq. 13).
  """
  over_B = (length_B - (max_tokens - buffer_tokens)) / buffer_tokens
  return reward_B - factor * jnp.clip(over_B, 0.0, None)
