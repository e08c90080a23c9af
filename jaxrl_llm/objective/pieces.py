"""Parts of methods for jobs that a step does not run yet: turns, process rewards, other weights.

Pure functions of arrays, each with its proving identity in tests/objective/test_pieces.py. None of them is a choice of
a config. A coefficient array here stands for the loss −Σ sg(c)·log π, like those of `compose.coefficients`; terms of
different kinds are added with their own denominators, so that one never dilutes another.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.tokens import group_sum, row_mean, row_sum


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


def implicit_reward(
  model_BxT: jax.Array, reference_BxT: jax.Array, mask_BxT: jax.Array, *, beta: float = 0.05
) -> jax.Array:
  """q = beta·(log π_φ − log π_ref) per token. Source: arXiv:2502.01456 (PRIME)."""
  return jnp.where(mask_BxT > 0, beta * (model_BxT - reference_BxT), 0.0)


def implicit_loss(reward_BxT: jax.Array, correct_B: jax.Array) -> jax.Array:
  """Mean cross-entropy of σ(Σ_t q) and right or wrong, by which φ is trained. Source: arXiv:2502.01456 (PRIME)."""
  total = reward_BxT.sum(1)
  return -jnp.where(correct_B > 0.5, jax.nn.log_sigmoid(total), jax.nn.log_sigmoid(-total)).mean()


def process_advantage(
  process_BxT: jax.Array,
  outcome_B: jax.Array,
  mask_BxT: jax.Array,
  group_B: jax.Array,
  *,
  process: float = 1.0,
  outcome: float = 5.0,
) -> jax.Array:
  """Σ_{j≥t} of process·(q_j − mean of the others) and, at the last token, outcome·(R − mean of the others).

  The mean for q is over the other rows' means per token. Whitening comes after. Source: arXiv:2502.01456 (PRIME).
  """
  exists = (mask_BxT.sum(1) > 0).astype(process_BxT.dtype)
  others = jnp.maximum(group_sum(exists, group_B) - 1, 1)
  own = row_mean(process_BxT, mask_BxT)[:, 0] * exists
  base = (group_sum(own, group_B) - own) / others
  score = outcome_B * exists
  gain = (score - (group_sum(score, group_B) - score) / others) * exists
  step = process * (process_BxT - base[:, None]) * mask_BxT
  ahead = row_sum(step, mask_BxT) - jnp.cumsum(step, axis=1) + step
  return (ahead + outcome * gain[:, None]) * mask_BxT


def optimal_baseline(
  reward_PxG: jax.Array, weight_PxG: jax.Array, norm_PxG: jax.Array
) -> jax.Array:
  """b_g = Σw²n²R / Σw²n²: of least variance for row weights w and gradient norms n. Source: arXiv:2602.17616 (VCPO)."""
  square = (weight_PxG * norm_PxG) ** 2
  top = (square * reward_PxG).sum(1, keepdims=True)
  return top / jnp.maximum(square.sum(1, keepdims=True), 1e-30)


def interpolated_old(
  logp_BxT: jax.Array,
  behaviour_BxT: jax.Array,
  version_BxT: jax.Array,
  proximal: jax.Array,
  now: jax.Array,
) -> jax.Array:
  """log π_old ≈ log π_b + α·(log π − log π_b), α = (proximal − version)/(now − version): no forward pass.

  Versions count optimizer steps; tokens of the present version have α = 0. Source: arXiv:2505.24298 (AReaL).
  """
  age = now - version_BxT
  alpha = jnp.where(age > 0, (proximal - version_BxT) / jnp.maximum(age, 1), 0.0)
  return behaviour_BxT + jnp.clip(alpha, 0.0, 1.0) * (logp_BxT - behaviour_BxT)
