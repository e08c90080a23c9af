"""Parts of methods for jobs that a step does not run yet: demonstrations, teachers, turns.

Pure functions of arrays, each with its proving identity in tests/objective/test_pieces.py. None of them is a choice of
a config. A coefficient array here stands for the loss −Σ sg(c)·log π, like those of `compose.coefficients`; terms of
different kinds are added with their own denominators, so that one never dilutes another.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.tokens import row_mean, row_sum


def chord(logp_BxT: jax.Array, mask_BxT: jax.Array) -> jax.Array:
  """c = p(1 − p) / Σm on demonstrations: not the known, not the hopeless tokens. Source: arXiv:2508.11408 (CHORD)."""
  p = jnp.where(mask_BxT > 0, jnp.exp(logp_BxT), 0.0)
  return p * (1 - p) * mask_BxT / jnp.maximum(mask_BxT.sum(), 1)


def chord_share(
  step: jax.Array, *, warmup: int, decay: int, high: float = 0.9, low: float = 0.05
) -> jax.Array:
  """μ: linear to `high` over `warmup` steps, then a cosine to `low` over `decay`. Source: arXiv:2508.11408 (CHORD).

  The loss is (1 − μ)·RL + μ·demonstrations, see `mixed_terms`; the two ends are our defaults.
  """
  up = high * jnp.minimum(step / max(warmup, 1), 1.0)
  place = jnp.clip((step - warmup) / max(decay, 1), 0.0, 1.0)
  return jnp.where(step < warmup, up, low + (high - low) * (1 + jnp.cos(jnp.pi * place)) / 2)


def mixed_terms(rl_BxT: jax.Array, demo_BxT: jax.Array, share: jax.Array) -> jax.Array:
  """c = (1 − share)·c_RL + share·c_demo, each with its own denominator in it. Source: arXiv:2508.11408 (CHORD)."""
  return (1 - share) * rl_BxT + share * demo_BxT


def hpt_learns(correct_PxG: jax.Array, *, gate: int = 0) -> tuple[jax.Array, jax.Array]:
  """(RL_P, SFT_P), 0 or 1: a prompt with at most `gate` right answers learns from its demonstration instead.

  Source: arXiv:2509.04419 (HPT).
  """
  lost = (correct_PxG > 0.5).sum(1) <= gate
  return jnp.where(lost, 0.0, 1.0), jnp.where(lost, 1.0, 0.0)


def one_token_rollouts(
  logp_BxT: jax.Array, mask_BxT: jax.Array, *, beta: float = -0.1
) -> jax.Array:
  """c = (1 − beta)·p / Σm on demonstrations: OTR with infinitely many samples at each position.

  A sampled token is worth 1 where it is the demonstrated one and `beta` elsewhere; the policy gradient's mean is
  this. `beta` from memory. Source: arXiv:2509.26313 (OTR).
  """
  p = jnp.where(mask_BxT > 0, jnp.exp(logp_BxT), 0.0)
  return (1 - beta) * p * mask_BxT / jnp.maximum(mask_BxT.sum(), 1)


def pear(
  logp_BxT: jax.Array,
  behaviour_BxT: jax.Array,
  mask_BxT: jax.Array,
  *,
  discount: float = 0.999,
  low: float = -0.08,
  high: float = 0.3,
  least: float = 0.1,
  most: float = 10.0,
) -> jax.Array:
  """c = clip(G, least, most) / Σm, G_t = discount^{|y|−1−t}·Π_{j>t} e^{clip(log π/π_b, low, high)}.

  How much the rest of a demonstration is still what the policy would say. From third-party notes.
  Source: none (PEAR).
  """
  step = jnp.clip(jnp.where(mask_BxT > 0, logp_BxT - behaviour_BxT, 0.0), low, high)
  step = jnp.where(mask_BxT > 0, step + jnp.log(discount), 0.0)
  after = row_sum(step, mask_BxT) - jnp.cumsum(step, axis=1)
  return jnp.clip(jnp.exp(after), least, most) * mask_BxT / jnp.maximum(mask_BxT.sum(), 1)


def distilled(
  old_BxT: jax.Array, teacher_BxT: jax.Array, base_BxT: jax.Array, *, scale: float = 1.25
) -> jax.Array:
  """A = scale·(log π_T − log π_base) − (log π_old − log π_base), per token; scale 1 is log π_T/π_old.

  Source: arXiv:2602.12125 (G-OPD).
  """
  return scale * (teacher_BxT - base_BxT) - (old_BxT - base_BxT)


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
