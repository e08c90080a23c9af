"""The nonlinearity of a gated MLP, by its name in ModelConfig."""

from __future__ import annotations

import functools

import jax

from jaxrl_llm.types import ModelConfig

ACTIVATIONS = {
  'silu': jax.nn.silu,
  'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True),
}


def activate(config: ModelConfig, gate: jax.Array) -> jax.Array:
  """silu(x) = x·σ(x), or gelu in its tanh form. arXiv:2002.05202 (gated variants)."""
  return ACTIVATIONS[config.activation](gate)
