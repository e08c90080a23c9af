"""Parts of methods for jobs that a step does not run yet: demonstrations, teachers, turns, process rewards.

Pure functions of arrays, each with its proving identity in tests/objective/test_pieces.py. None of them is a choice of
a config. A coefficient array here stands for the loss −Σ sg(c)·log π, like those of `compose.coefficients`; terms of
different kinds are added with their own denominators, so that one never dilutes another.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.tokens import group_sum, row_mean, row_sum


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


def decoupled(parts_PxGxK: jax.Array, weight_K: jax.Array, *, eps: float = 1e-4) -> jax.Array:
  """A = z_batch(Σ_k w_k·z_group(R_k)), z(x) = (x − mean) / (std + eps), std unbiased: [P, G].

  Rewards of several parts, each of its own scale: sums of them that are equal need not have equal advantages. With one
  part, equal groups apart, it is GRPO up to a constant. The form of the code in TRL and verl.
  Source: arXiv:2601.05242 (GDPO).
  """
  total_PxG = _standard(parts_PxGxK, 1, eps) @ weight_K
  return _standard(total_PxG.reshape(-1), 0, eps).reshape(total_PxG.shape)


def nudged(
  reward_PxG: jax.Array, context_PxG: jax.Array, *, between: float = 1.1, eps: float = 1e-6
) -> jax.Array:
  """A = z_group((R − mean_c) + between·(mean_c − mean_g)), mean_c over the group's rows of the same context.

  `context_PxG` ≥ 0 says which strategy a prompt was given, −1 that it was dropped: there A = R − mean_g before
  z_group. between = 1 is GRPO. Source: arXiv:2605.15726 (NudgeRL).
  """
  alike = (context_PxG[:, :, None] == context_PxG[:, None]).astype(reward_PxG.dtype)
  own = (alike * reward_PxG[:, None]).sum(2) / alike.sum(2)
  mean = reward_PxG.mean(1, keepdims=True)
  apart = (reward_PxG - own) + between * (own - mean)
  return _standard(jnp.where(context_PxG >= 0, apart, reward_PxG - mean), 1, eps)


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
