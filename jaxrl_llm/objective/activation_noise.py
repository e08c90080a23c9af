"""Noise in the hidden states of the update's forward pass. Named in `config.objective.activation_noise.fn`.

A function here returns None, or settings; the decoder adds the noise, the train state keeps how loud each layer's is.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.types import UserError


class Noise(NamedTuple):
  """What is learned of the noise."""

  log_sigma_L: jax.Array  # of L layers
  opt_state: Any


class Layers(NamedTuple):
  """Settings of `layerwise`."""

  sigma: float
  learning_rate: float

  def fresh(self, layers: int) -> Noise:
    log_sigma_L = jnp.full(layers, math.log(self.sigma), jnp.float32)
    return Noise(log_sigma_L, optax.adam(self.learning_rate).init(log_sigma_L))

  def learn(self, noise: Noise, grad_L: jax.Array) -> Noise:
    """One step of Adam of its own: neither the schedule nor the bound on the norm is that of the weights."""
    step_L, opt_state = optax.adam(self.learning_rate).update(grad_L, noise.opt_state)
    return Noise(noise.log_sigma_L + step_L, opt_state)


def none() -> None:
  """The forward pass as it is. Source: none."""
  return None


def layerwise(*, sigma: float = 1e-6, learning_rate: float = 5e-4) -> Layers:
  """x_l ← x_l + σ_l·N(0, 1) before layer l, log σ_l learned with the policy's own loss from `sigma` on.

  log π of the ratio's numerator, and of the gradient, is that of the noisy weights; what sampled, the old policy and a
  reference are without noise. The same noise for the same (seed, step, slice). In bfloat16 a σ far below the hidden
  states' last digit is rounded away. Raises UserError for settings out of range.
  Source: arXiv:2603.19470 (ALP).
  """
  where = 'config.objective.activation_noise'
  if sigma <= 0:
    raise UserError(
      f'{where}.sigma={sigma} must be above 0, as its logarithm is learned; fn=none adds no noise.'
    )
  if learning_rate < 0:
    raise UserError(f'{where}.learning_rate={learning_rate} must not be below 0; 0 keeps sigma.')
  return Layers(sigma, learning_rate)
