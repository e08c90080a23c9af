"""Bounds on the ratio that trust regions share, and the tokens beyond them on the harmful side.

Log-ratios, ratios, advantages and weights are [B, T]; bounds are numbers or arrays that broadcast to it.
"""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.token_inputs import Tokens, exp

Pair: TypeAlias = tuple[jax.Array, jax.Array]  # weight_BxT, surrogate_BxT
Bound: TypeAlias = float | jax.Array


def clip(log_ratio: jax.Array, advantage: jax.Array, low: Bound, high: Bound) -> Pair:
  """PPO's clip with bounds on r itself."""
  ratio = exp(log_ratio)
  up = (advantage > 0) & (ratio > high)
  down = (advantage < 0) & (ratio < low)
  clipped = jnp.clip(ratio, low, high) * advantage
  surrogate = jnp.minimum(ratio * advantage, clipped)
  return jnp.where(up | down, 0.0, ratio), surrogate


def dual(
  weight: jax.Array, surrogate: jax.Array, ratio: jax.Array, advantage: jax.Array, most: float
) -> Pair:
  """A clip's weight and surrogate with an upper bound on r where A < 0."""
  far = (advantage < 0) & (ratio > most)
  surrogate = jnp.where(advantage < 0, jnp.maximum(surrogate, most * advantage), surrogate)
  return jnp.where(far, 0.0, weight), surrogate


def detached(weight: jax.Array, tokens: Tokens) -> Pair:
  """A weight through which no gradient flows, and its surrogate."""
  return weight, weight * tokens.advantage_BxT * tokens.logp_BxT


def kept(keep: jax.Array, log_ratio: jax.Array, tokens: Tokens, corrected: bool) -> Pair:
  """The weight of kept tokens, r or 1, and its surrogate."""
  weight = jnp.where(keep, exp(log_ratio) if corrected else 1.0, 0.0)
  return detached(weight, tokens)


def within(ratio: jax.Array, low: Bound, high: Bound) -> jax.Array:
  """True where low ≤ r ≤ high."""
  return (ratio >= low) & (ratio <= high)


def one_side(ratio: jax.Array, advantage: jax.Array, low: Bound, high: Bound) -> jax.Array:
  """False where r > high and A > 0 or r < low and A < 0, else True."""
  return ~beyond(ratio > high, ratio < low, advantage)


def beyond(up: jax.Array, down: jax.Array, advantage: jax.Array) -> jax.Array:
  """`up` where A > 0, `down` where A < 0."""
  return (up & (advantage > 0)) | (down & (advantage < 0))


def harmful(log_ratio: jax.Array, tokens: Tokens) -> Pair:
  """(log r)², and True for tokens with A > 0 and r > 1, or A < 0 and r < 1."""
  moved_on = beyond(log_ratio > 0, log_ratio < 0, tokens.advantage_BxT)
  return log_ratio**2, moved_on & (tokens.mask_BxT > 0)
