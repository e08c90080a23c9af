"""The nonlinearity of a gated MLP, by its name in ModelConfig."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxrl_llm.types import ModelConfig

ACTIVATIONS = {
  'silu': jax.nn.silu,
  'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True),
}


def activate(config: ModelConfig, gate: jax.Array) -> jax.Array:
  """silu(x) = x·σ(x), gelu in its tanh form, or gpt-oss's x·σ(αx) of x ≤ limit. arXiv:2002.05202 (gated variants)."""
  if config.activation != 'clamped_swiglu':
    return ACTIVATIONS[config.activation](gate)
  gate = jnp.minimum(gate, config.gate_limit)
  return gate * jax.nn.sigmoid(config.gate_gain * gate)


def multiplier(config: ModelConfig, up: jax.Array) -> jax.Array:
  """The factor of an activated gate: up, in gpt-oss clipped to ±limit and increased by 1."""
  if config.activation != 'clamped_swiglu':
    return up
  return jnp.clip(up, -config.gate_limit, config.gate_limit) + 1
