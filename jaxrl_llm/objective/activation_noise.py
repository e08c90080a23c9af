"""Noise in the hidden states of the update's forward pass, for `config.objective.activation_noise.fn`.

A public function returns None or settings. The decoder adds the noise; the train state holds the scale of each layer.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.types import UserError


class Noise(NamedTuple):
  """Learned parameters of the noise."""

  log_sigma_L: jax.Array  # log standard deviation, one for each of L layers
  opt_state: Any


class Layers(NamedTuple):
  """Settings of `layerwise`."""

  sigma: float
  learning_rate: float

  def fresh(self, layers: int) -> Noise:
    """Initial parameters: log σ of every layer, and the state of its optimizer."""
    log_sigma_L = jnp.full(layers, math.log(self.sigma), jnp.float32)
    return Noise(log_sigma_L, optax.adam(self.learning_rate).init(log_sigma_L))

  def learn(self, noise: Noise, grad_L: jax.Array) -> Noise:
    """One step of a separate Adam, without the schedule and the norm clipping of the weights."""
    step_L, opt_state = optax.adam(self.learning_rate).update(grad_L, noise.opt_state)
    return Noise(noise.log_sigma_L + jnp.asarray(step_L), opt_state)


def none() -> None:
  """No noise."""
  return None


def layerwise(*, sigma: float = 1e-6, learning_rate: float = 5e-4) -> Layers:
  """x_l ← x_l + σ_l·N(0, 1) before layer l, log σ_l learned with the policy's own loss from `sigma` on.

  The ratio's numerator and the gradient see the noise; the sampler, the old policy and the reference policy do not.
  (seed, step, token) determine the noise. In bfloat16 a σ far below the last digit of the hidden states has no
  effect. Raises UserError for settings out of range. arXiv:2603.19470 (ALP).
  """
  where = 'config.objective.activation_noise'
  if sigma <= 0:
    raise UserError(
      f'{where}.sigma={sigma} must be above 0, as its logarithm is learned; fn=none adds no noise.'
    )
  if learning_rate < 0:
    raise UserError(f'{where}.learning_rate={learning_rate} must not be below 0; 0 keeps sigma.')
  return Layers(sigma, learning_rate)
