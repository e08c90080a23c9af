"""Reward shaping by length in tokens, or by the group: reward_PxG, correct_PxG, length_PxG, max_tokens → reward_PxG.

Inputs are whole groups of a minibatch. `length_PxG` is 0 for an empty row, which does not count; `correct_PxG` is 1
where the answer was correct. Every public function may be named in `config.objective.reward_shaping.fn`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def none() -> None:
  """R unchanged."""


def overlong(
  reward_PxG: jax.Array,
  correct_PxG: jax.Array,
  length_PxG: jax.Array,
  max_tokens: int,
  *,
  buffer_tokens: int,
  factor: float = 1.0,
) -> jax.Array:
  """R + min(−(|y| − (T − buffer)) / buffer · factor, 0), lengths in tokens.

  0 up to T − buffer, then linear down to −factor at T. arXiv:2503.14476 (DAPO, eq. 13).
  """
  del correct_PxG
  over_PxG = (length_PxG - (max_tokens - buffer_tokens)) / buffer_tokens
  return reward_PxG - factor * jnp.clip(over_PxG, 0.0, None)


def overlong_where_solved(
  reward_PxG: jax.Array,
  correct_PxG: jax.Array,
  length_PxG: jax.Array,
  max_tokens: int,
  *,
  buffer_tokens: int,
  power: float = 1.0,
  failure: float = 1.0,
) -> jax.Array:
  """R − w · max((|y| − (T − buffer)) / buffer, 0); s the share of right rows in the group.

  w is s^power for right rows, `failure` for wrong rows and 1 for rows of T tokens, which count as truncated. Right rows
  of prompts with a low success rate may be longer. power = 0 and failure = 1 is `overlong`. The formula is the official
  code's; its configs do not contain `power`, and 1 is ours. arXiv:2604.02007 (Apriel-Reasoner).
  """
  solved_Px1 = _share(correct_PxG, length_PxG)
  weight_PxG = jnp.where(correct_PxG > 0.5, solved_Px1**power, failure)
  weight_PxG = jnp.where(length_PxG >= max_tokens, 1.0, weight_PxG)
  over_PxG = (length_PxG - (max_tokens - buffer_tokens)) / buffer_tokens
  return reward_PxG - weight_PxG * jnp.clip(over_PxG, 0.0, None)


def brief_where_solved(
  reward_PxG: jax.Array,
  correct_PxG: jax.Array,
  length_PxG: jax.Array,
  max_tokens: int,
  *,
  share: float = 0.2,
  factor: float = 0.6,
  eps: float = 1e-4,
) -> jax.Array:
  """R − factor · σ((|y| − mean) / (std + eps)) for right rows of the `share` of groups with most right ones, else R.

  Mean and std (n, not n − 1) are of the lengths of the group's right rows. ⌈share · groups⌉ groups are chosen, and all
  with the same success rate as the last of them, so that the order does not matter. share = 0 is GRPO. From third-party
  notes on the paper, `share` and `factor` from a re-implementation; the abstract mentions only the switch.
  arXiv:2505.18086 (GRPO-λ).
  """
  del max_tokens
  exists_P = (length_PxG > 0).any(1)
  solved_P = jnp.where(exists_P, _share(correct_PxG, length_PxG)[:, 0], -1.0)
  better_P = (solved_P[None] > solved_P[:, None]).sum(1)  # groups with a higher success rate
  # The tolerance keeps rounding of the float32 product from choosing one more group.
  chosen_P = exists_P & (better_P < jnp.ceil(share * exists_P.sum() - 1e-4))
  right_PxG = jnp.where((correct_PxG > 0.5) & (length_PxG > 0), 1.0, 0.0)
  n_Px1 = jnp.maximum(right_PxG.sum(1, keepdims=True), 1)
  off_PxG = length_PxG - (length_PxG * right_PxG).sum(1, keepdims=True) / n_Px1
  std_Px1 = jnp.sqrt((off_PxG**2 * right_PxG).sum(1, keepdims=True) / n_Px1)
  penalty_PxG = factor * jax.nn.sigmoid(off_PxG / (std_Px1 + eps))
  return reward_PxG - jnp.where(chosen_P[:, None] & (right_PxG > 0), penalty_PxG, 0.0)


def best_of_group(
  reward_PxG: jax.Array,
  correct_PxG: jax.Array,
  length_PxG: jax.Array,
  max_tokens: int,
  *,
  wrong: float = 0.0,
  tolerance: float = 1e-6,
) -> jax.Array:
  """1 for rows with the largest R of their group, where that is above `wrong`; 0 for the others; R below `wrong`.

  R grades how good an answer is, `wrong` is the grade of a wrong one and lower ones are those of unreadable answers.
  The best answers that the policy can give now are thus right. Grades within `tolerance` are equal.
  arXiv:2603.03197 (SpeciaRL).
  """
  del correct_PxG, max_tokens
  known_PxG = jnp.where(length_PxG > 0, reward_PxG, -jnp.inf)
  best_Px1 = known_PxG.max(1, keepdims=True)
  chosen_PxG = (known_PxG >= best_Px1 - tolerance) & (best_Px1 > wrong + tolerance)
  unreadable_PxG = reward_PxG < wrong - tolerance
  return jnp.where(unreadable_PxG, reward_PxG, jnp.where(chosen_PxG, 1.0, 0.0))


def length_fitted(
  reward_PxG: jax.Array,
  correct_PxG: jax.Array,
  length_PxG: jax.Array,
  max_tokens: int,
  *,
  degree: int = 2,
  strength: float = 1.0,
  ridge: float = 1e-6,
) -> jax.Array:
  """R − strength · (f(|y|) − mean f), f the polynomial in |y| / max |y| that fits R over the minibatch best.

  Least squares; `ridge` times the number of rows is added to the diagonal of their equations. A reconstruction from
  the abstract and third-party notes: the paper fits a small network on encoded lengths beside a reward model, once, and
  subtracts it while that is trained. arXiv:2505.12843 (FiMi-RM).
  """
  del correct_PxG, max_tokens
  exists_N = jnp.where(length_PxG > 0, 1.0, 0.0).ravel().astype(reward_PxG.dtype)
  x_N = length_PxG.ravel().astype(reward_PxG.dtype) / jnp.maximum(length_PxG.max(), 1)
  powers_Nx1 = x_N[:, None] ** jnp.arange(degree + 1)[None]
  n = jnp.maximum(exists_N.sum(), 1)
  weighed = powers_Nx1 * exists_N[:, None]
  square = weighed.T @ powers_Nx1 + ridge * n * jnp.eye(degree + 1, dtype=reward_PxG.dtype)
  fit_N = powers_Nx1 @ jnp.linalg.solve(square, weighed.T @ reward_PxG.ravel())
  bias_N = (fit_N - (fit_N * exists_N).sum() / n) * exists_N
  return reward_PxG - strength * bias_N.reshape(reward_PxG.shape)


def _share(correct_PxG: jax.Array, length_PxG: jax.Array) -> jax.Array:
  """The share of right rows among those that exist, as [P, 1]."""
  exists_PxG = length_PxG > 0
  right_Px1 = ((correct_PxG > 0.5) & exists_PxG).sum(1, keepdims=True)
  return right_Px1 / jnp.maximum(exists_PxG.sum(1, keepdims=True), 1)
