"""Parts of methods for jobs that a step does not run yet: turns.

Pure functions of arrays, each with its proving identity in tests/objective/test_pieces.py. None of them is a choice of
a config. A coefficient array here stands for the loss −Σ sg(c)·log π, like those of `compose.coefficients`; terms of
different kinds are added with their own denominators, so that one never dilutes another.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.tokens import row_mean


def discounted(reward_BxS: jax.Array, mask_BxS: jax.Array, *, discount: float = 0.95) -> jax.Array:
  """Σ_{j≥s} discount^{j−s}·reward_j over the steps of an episode. Source: arXiv:2505.10978 (GiGPO)."""

  def back(total_B, step):
    reward_B, real_B = step
    total_B = jnp.where(real_B > 0, reward_B + discount * total_B, total_B)
    return total_B, jnp.where(real_B > 0, total_B, 0.0)

  start = jnp.zeros_like(reward_BxS[:, 0])
  return jax.lax.scan(back, start, (reward_BxS.T, mask_BxS.T), reverse=True)[1].T


def step_advantage(
  return_BxS: jax.Array,
  anchor_BxS: jax.Array,
  group_B: jax.Array,
  mask_BxS: jax.Array,
  *,
  eps: float = 1e-6,
) -> jax.Array:
  """(return − mean) / (std + eps) among the steps of a prompt that saw the same state (anchor id); alone: 0.

  GiGPO adds it to the episode's advantage with weight 1. Source: arXiv:2505.10978 (GiGPO).
  """
  real = mask_BxS.ravel() > 0
  group = jnp.broadcast_to(group_B[:, None], anchor_BxS.shape).ravel()
  anchor, value = anchor_BxS.ravel(), return_BxS.ravel()
  alike = (group[:, None] == group[None]) & (anchor[:, None] == anchor[None])
  alike = jnp.where(alike & real[:, None] & real[None], 1.0, 0.0)
  n = jnp.maximum(alike.sum(1), 1)
  mean = alike @ value / n
  square = (alike * (value[None] - mean[:, None]) ** 2).sum(1)
  std = jnp.sqrt(square / jnp.maximum(n - 1, 1))
  out = jnp.where(real & (n > 1), (value - mean) / (std + eps), 0.0)
  return out.reshape(return_BxS.shape)


def turn_multiplier(
  multiplier_B: jax.Array,
  logp_BxT: jax.Array,
  before_BxT: jax.Array,
  turn_mask_BxT: jax.Array,
  *,
  eps: float = 0.2,
) -> jax.Array:
  """M ← clip(M·clip(e^{mean(log π_new − log π_before)}, 1±eps), 1±eps) after a turn was learnt.

  Turns are learnt last first, each with its own optimizer pass, and earlier ones count M times.
  Source: none (SeeUPO's code).
  """
  moved = jnp.exp(row_mean(logp_BxT - before_BxT, turn_mask_BxT)[:, 0])
  return jnp.clip(multiplier_B * jnp.clip(moved, 1 - eps, 1 + eps), 1 - eps, 1 + eps)


def noisy_posterior(
  reward_PxG: jax.Array,
  noise_PxG: jax.Array,
  *,
  spread: float = 0.01,
  trust: float = 0.1,
  eps: float = 1e-4,
) -> jax.Array:
  """A = z_group(s + k·(n − s)), s = z_group(R), n = z_group(1 − noise), k = clip(P / (trust + P), 0, 1).

  P = spread / (var_g(R) + spread): the less the rewards of a group tell, the more the noise that its inputs had does.
  Constant noise is GRPO. The official code's, `spread` (p_alpha) and `trust` (r_value) of its 3B script.
  Source: arXiv:2510.21122 (NoisyGRPO).
  """
  prior = spread / (jnp.var(reward_PxG, axis=1, ddof=1, keepdims=True) + spread)
  gain = jnp.clip(prior / (trust + prior), 0.0, 1.0)
  seen, clean = _standard(reward_PxG, 1, eps), _standard(1 - noise_PxG, 1, eps)
  return _standard(seen + gain * (clean - seen), 1, eps)


def _standard(x: jax.Array, axis: int, eps: float) -> jax.Array:
  off = x - x.mean(axis, keepdims=True)
  return off / (jnp.std(x, axis=axis, ddof=1, keepdims=True) + eps)
