"""Log-ratios of the policy to the one that sampled. logp_BxT, behaviour_BxT, mask_BxT → log_ratio_BxT.

Every public function here may be named in `config.objective.ratio.fn`. Inputs carry no gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def token(logp_BxT: jax.Array, behaviour_BxT: jax.Array, mask_BxT: jax.Array) -> jax.Array:
  """log r = log π − log π_b for each token. Source: arXiv:1707.06347 (PPO)."""
  return jnp.where(mask_BxT > 0, logp_BxT - behaviour_BxT, 0.0)


def one(logp_BxT: jax.Array, behaviour_BxT: jax.Array, mask_BxT: jax.Array) -> jax.Array:
  """log r = 0: no correction, as in REINFORCE. Source: none."""
  del behaviour_BxT, mask_BxT
  return jnp.zeros_like(logp_BxT)
