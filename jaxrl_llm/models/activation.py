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


def gated(config: ModelConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
  """act(gate)·up, with silu(x) = x·σ(x), gelu in its tanh form, or gpt-oss's clamped variant. arXiv:2002.05202."""
  if config.activation != 'clamped_swiglu':
    return ACTIVATIONS[config.activation](gate) * up
  gate = jnp.minimum(gate, config.gate_limit)
  up = jnp.clip(up, -config.gate_limit, config.gate_limit)
  return gate * jax.nn.sigmoid(config.gate_gain * gate) * (up + 1)
