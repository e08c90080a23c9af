"""Advantages: how much better a rollout did than its group. reward_PxG → advantage_PxG.

Every public function here may be named in `config.objective.advantage.fn`. `count_PxG` is 1 for a rollout
that exists and 0 for an empty row; empty rows get 0 and count nowhere.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def group_normalized(
  reward_PxG: jax.Array, count_PxG: jax.Array, *, eps: float = 1e-6
) -> jax.Array:
  """A = (R − mean_g) / (std_g + eps), std unbiased (n − 1). Source: arXiv:2402.03300 (GRPO).

  `eps` is 1e-6 in verl and 1e-4 in TRL.
  """
  centred = group_centered(reward_PxG, count_PxG)
  n_Px1 = count_PxG.sum(1, keepdims=True)
  std = jnp.sqrt((centred**2).sum(1, keepdims=True) / jnp.maximum(n_Px1 - 1, 1))
  return centred / (std + eps)


def group_centered(reward_PxG: jax.Array, count_PxG: jax.Array) -> jax.Array:
  """A = R − mean_g. Source: arXiv:2503.20783 (Dr.GRPO)."""
  n_Px1 = jnp.maximum(count_PxG.sum(1, keepdims=True), 1)
  mean = (reward_PxG * count_PxG).sum(1, keepdims=True) / n_Px1
  return (reward_PxG - mean) * count_PxG


def leave_one_out(reward_PxG: jax.Array, count_PxG: jax.Array) -> jax.Array:
  """A = R − mean of the others = n/(n − 1) · (R − mean_g). Source: arXiv:2402.14740 (RLOO)."""
  n_Px1 = count_PxG.sum(1, keepdims=True)
  return group_centered(reward_PxG, count_PxG) * n_Px1 / jnp.maximum(n_Px1 - 1, 1)


def raw(reward_PxG: jax.Array, count_PxG: jax.Array) -> jax.Array:
  """A = R: REINFORCE without a baseline; with R = 1 it is supervised learning. Source: none."""
  return reward_PxG * count_PxG
