"""Trust regions as weights: log_ratio_BxT, advantage_BxT → (weight_BxT, surrogate_BxT).

`weight` is what multiplies A·∇log π; `surrogate` is the value that the paper writes, kept for the log alone.
Every public function here may be named in `config.objective.trust.fn`. Inputs carry no gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_LOG_CAP = 20.0  # exp of more overflows nothing but helps nobody; applied to detached values only


def none(log_ratio_BxT: jax.Array, advantage_BxT: jax.Array) -> tuple[jax.Array, jax.Array]:
  """W = r, surrogate r·A. Source: none."""
  ratio = _ratio(log_ratio_BxT)
  return ratio, ratio * advantage_BxT


def clip(
  log_ratio_BxT: jax.Array, advantage_BxT: jax.Array, *, low: float = 0.2, high: float = 0.2
) -> tuple[jax.Array, jax.Array]:
  """min(r·A, clip(r, 1−low, 1+high)·A), so W = r where it moves, 0 where it is clipped.

  W = 0 where (A > 0 and r > 1+high) or (A < 0 and r < 1−low). Source: arXiv:1707.06347 (PPO),
  arXiv:2503.14476 (DAPO: low 0.2, high 0.28).
  """
  ratio = _ratio(log_ratio_BxT)
  up = (advantage_BxT > 0) & (ratio > 1 + high)
  down = (advantage_BxT < 0) & (ratio < 1 - low)
  clipped = jnp.clip(ratio, 1 - low, 1 + high) * advantage_BxT
  surrogate = jnp.minimum(ratio * advantage_BxT, clipped)
  return jnp.where(up | down, 0.0, ratio), surrogate


def _ratio(log_ratio: jax.Array) -> jax.Array:
  return jnp.exp(jnp.clip(log_ratio, -_LOG_CAP, _LOG_CAP))
