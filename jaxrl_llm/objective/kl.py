"""KL penalties as per-token coefficients: tokens → (c_BxT, value_BxT), c = −∂(coef·value)/∂log π.

The term is added to the policy term, with the same denominator or that of `config.objective.kl_aggregation`. Neither
importance corrections nor trust regions apply to it. d = log π_ref − log π, v = π/π_b. The estimators agree in
expectation as values but not as gradients: for samples from π, k1 has gradient 0, k3 that of KL(ref ‖ π), and k2, v·k1
and v·k3 that of KL(π ‖ ref). Every public function may be named in `config.objective.kl.fn`. Detached.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.token_inputs import (
  Tokens,
  batch_mean,
  centered_product,
  default_aggregation,
  exp,
  needs,
  present,
  requires,
  row_sum,
)


def none() -> None:
  """No penalty."""


@needs('reference')
def k1(tokens: Tokens, *, coef: float = 0.001) -> tuple[jax.Array, jax.Array]:
  """Value −d, c = −coef: as a loss it lowers all sampled tokens alike (Schulman's k1)."""
  return jnp.full_like(tokens.logp_BxT, -coef), -_gap(tokens)


@needs('reference')
def k2(tokens: Tokens, *, coef: float = 0.001) -> tuple[jax.Array, jax.Array]:
  """Value d²/2, c = coef·d (Schulman's k2)."""
  d = _gap(tokens)
  return coef * d, d**2 / 2


@needs('reference')
def k3(tokens: Tokens, *, coef: float = 0.001) -> tuple[jax.Array, jax.Array]:
  """Value e^d − d − 1, c = −coef·(1 − e^d). arXiv:2402.03300 (GRPO)."""
  d = _gap(tokens)
  return coef * (exp(d) - 1), exp(d) - d - 1


@needs('reference')
def k3_straight(tokens: Tokens, *, coef: float = 0.001) -> tuple[jax.Array, jax.Array]:
  """The value of k3 with the gradient of k2 (verl's 'k3+')."""
  return k2(tokens, coef=coef)[0], k3(tokens)[1]


@needs('reference')
def ratio_k1(tokens: Tokens, *, coef: float = 0.001) -> tuple[jax.Array, jax.Array]:
  """Value −v·d, c = coef·v·(d − 1): unbiased for off-policy tokens."""
  v, d = _ratio(tokens), _gap(tokens)
  return coef * v * (d - 1), -v * d


@needs('reference')
def ratio_k3(tokens: Tokens, *, coef: float = 0.001) -> tuple[jax.Array, jax.Array]:
  """Value v·(e^d − d − 1), c = coef·v·d: unbiased in value and gradient. arXiv:2512.02556 (DeepSeek-V3.2)."""
  v, d = _ratio(tokens), _gap(tokens)
  return coef * v * d, v * (exp(d) - d - 1)


@needs('reference', 'old', 'step')
@requires('one of its two policies is the policy before the batch', old_policy=('auto', 'before'))
def receding(
  tokens: Tokens,
  *,
  coef: float = 0.001,
  wait: int = 50,
  every: int = 10,
  fall: float = 0.1,
  least: float = 0.5,
) -> tuple[jax.Array, jax.Array]:
  """Value λ·k3(ref) + (1 − λ)·k3(old), λ = max(1 − fall·⌈max(t − wait, 0) / every⌉, least): c is that of each k3.

  The reference moves from the first weights to those before the batch; t counts optimizer steps. λ and its numbers are
  from third-party notes; that each term is a k3, and `coef`, are ours. arXiv:2507.06892 (ReMix).
  """
  late_Bx1 = jnp.maximum(present(tokens.steps.step_B) - wait, 0)[:, None]
  share = jnp.maximum(1 - fall * -(-late_Bx1 // every), least)
  first, before = _gap(tokens), tokens.old_BxT - tokens.logp_BxT
  c = share * (exp(first) - 1) + (1 - share) * (exp(before) - 1)
  value = share * (exp(first) - first - 1) + (1 - share) * (exp(before) - before - 1)
  return coef * c, value


def quadratic(tokens: Tokens, *, coef: float = 0.1) -> tuple[jax.Array, jax.Array]:
  """Value (log π − log π_old)²/2, without a reference policy. arXiv:2501.12599 (Kimi k1.5)."""
  moved = tokens.logp_BxT - tokens.old_BxT
  return -coef * moved, moved**2 / 2


@needs('reference')
def sequence_quadratic(tokens: Tokens, *, coef: float = 0.001) -> tuple[jax.Array, jax.Array]:
  """Value D²/2 of a row, D = Σ_t (log π − log π_ref), in equal parts at its tokens; c = −coef·D at each.

  With coef = β₂ and an unclipped A of the whole row this is least squares, (A − β₂·D)² / (2·β₂). arXiv:2505.20686
  (A*-PO).
  """
  return _squared_row(tokens, -_gap(tokens), coef)


def sequence_quadratic_old(tokens: Tokens, *, coef: float = 0.001) -> tuple[jax.Array, jax.Array]:
  """`sequence_quadratic` with D = Σ_t (log π − log π_old): the policy that sampled is the reference.

  Formula from third-party notes. arXiv:2602.19362 (OAPL), arXiv:2603.05218 (KARL).
  """
  return _squared_row(tokens, tokens.logp_BxT - tokens.old_BxT, coef)


def _squared_row(tokens: Tokens, moved_BxT: jax.Array, coef: float) -> tuple[jax.Array, jax.Array]:
  moved_Bx1 = row_sum(moved_BxT, tokens.mask_BxT)
  length_Bx1 = jnp.maximum(tokens.mask_BxT.sum(1, keepdims=True), 1)
  shared = jnp.ones_like(tokens.logp_BxT)
  return -coef * moved_Bx1 * shared, moved_Bx1**2 / 2 / length_Bx1 * shared


@needs('rows')
@requires('the penalized tokens replace those of a clip', trust_region=('none',), ratio=('token',))
def covariance(
  tokens: Tokens, *, coef: float = 1.0, share: float = 0.0002
) -> tuple[jax.Array, jax.Array]:
  """Value |log π − log π_old| for the `share` of tokens with the largest covariance of A and log π.

  arXiv:2505.22617 (KL-Cov).
  """
  masked_in = tokens.mask_BxT > 0
  ordered = jnp.sort(jnp.where(masked_in, centered_product(tokens), -jnp.inf).ravel())[::-1]
  count = jnp.maximum(jnp.floor(share * masked_in.sum()).astype(int), 1)
  edge = ordered[jnp.clip(count - 1, 0, ordered.size - 1)]
  chosen = masked_in & (centered_product(tokens) >= edge)
  moved = jnp.where(chosen, tokens.logp_BxT - tokens.old_BxT, 0.0)
  return -coef * jnp.sign(moved), jnp.abs(moved)


@default_aggregation('token_mean')
@needs('rows')
def hinge(
  tokens: Tokens, *, coef: float = 1000.0, delta: float = 1e-4
) -> tuple[jax.Array, jax.Array]:
  """Value sg(max(coef·(K − delta), 0))·K / coef, K = mean of log π_old − log π: 0 until K > delta.

  K is a mean over tokens, whatever `config.objective.aggregation` is. arXiv:2510.04474 (DRPO).
  """
  drift = tokens.old_BxT - tokens.logp_BxT
  force = jnp.maximum(coef * (batch_mean(drift, tokens.mask_BxT) - delta), 0.0)
  return jnp.ones_like(drift) * force, force / coef * drift


def _gap(tokens: Tokens) -> jax.Array:
  return present(tokens.reference_BxT) - tokens.logp_BxT


def _ratio(tokens: Tokens) -> jax.Array:
  return exp(tokens.logp_BxT - tokens.behavior_BxT)
