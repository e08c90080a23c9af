"""Importance weights for the mismatch between sampler and trainer: tokens → (weight_BxT, keep_BxT).

ρ = π_old / π_b, log ρ = old − behavior. Both are fixed before the update, so that `old` must be recomputed. Dropped
tokens stay in the denominator. With `ratio.fn=direct` the ratio contains ρ already, and its contract excludes both.
Every public function may be named in `config.objective.importance_correction.fn`. Detached.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.token_inputs import (
  LOG_CAP,
  Tokens,
  exp,
  needs,
  row_mean,
  row_sum,
  smallest_within,
)
from jaxrl_llm.types import UserError


def none() -> None:
  """Weight 1, all kept: the sampler is the old policy."""


@needs('old')
def token(tokens: Tokens) -> tuple[jax.Array, jax.Array]:
  """Weight ρ for each token, unbounded: unbiased for one token. arXiv:2110.00641 (decoupled PPO)."""
  return exp(_log_rho(tokens)), jnp.ones_like(tokens.logp_BxT)


@needs('old')
def token_truncate(
  tokens: Tokens, *, low: float = 0.0, high: float = 2.0
) -> tuple[jax.Array, jax.Array]:
  """Weight clip(ρ, low, high) for each token. arXiv:2110.00641 (decoupled PPO).

  Known as TIS (truncated importance sampling), which has no paper of its own; slime's bounds are 0 and 2,
  OpenRLHF's 0.5 and 5.
  """
  return jnp.clip(exp(_log_rho(tokens)), low, high), jnp.ones_like(tokens.logp_BxT)


@needs('old')
def sequence_truncate(
  tokens: Tokens, *, low: float = 0.0, high: float = 5.0
) -> tuple[jax.Array, jax.Array]:
  """Weight clip(Πρ, low, high) for a row: sequence-level TIS of TRL and verl."""
  weight = jnp.clip(exp(row_sum(_log_rho(tokens), tokens.mask_BxT)), low, high)
  return _spread(weight, tokens), jnp.ones_like(tokens.logp_BxT)


@needs('old')
def token_mask(
  tokens: Tokens, *, low: float = 0.5, high: float = 5.0
) -> tuple[jax.Array, jax.Array]:
  """Weight ρ·1[low ≤ ρ ≤ high] for each token: IcePop. arXiv:2510.18855 (Ring-1T).

  The bounds are the frameworks' defaults, not checked against the paper.
  """
  rho = exp(_log_rho(tokens))
  return rho, _within(rho, low, high)


@needs('old')
def sequence_mask(
  tokens: Tokens, *, low: float = 0.0, high: float = 3.0
) -> tuple[jax.Array, jax.Array]:
  """Weight Πρ·1[low ≤ Πρ ≤ high] for a row: MIS, TRL's default."""
  rho = exp(row_sum(_log_rho(tokens), tokens.mask_BxT))
  return _spread(rho, tokens), _spread(_within(rho, low, high), tokens)


@needs('old')
def geometric_mask(
  tokens: Tokens, *, low: float = 0.99, high: float = 1.01
) -> tuple[jax.Array, jax.Array]:
  """Weight ρ for each token of the rows with low ≤ e^{mean log ρ} ≤ high: geometric MIS of verl and SkyRL.

  The bounds are SkyRL's.
  """
  log_rho = _log_rho(tokens)
  keep = _within(exp(row_mean(log_rho, tokens.mask_BxT)), low, high)
  return exp(log_rho), _spread(keep, tokens)


@needs('old')
def token_divergence(
  tokens: Tokens, *, estimator: str = 'k3', most: float = 0.01
) -> tuple[jax.Array, jax.Array]:
  """Weight 1; drops tokens with k(ρ) > `most`: k2 = (log ρ)²/2 or k3 = ρ − 1 − log ρ. verl's 'token_k3'.

  `most` is ours. Raises UserError for another estimator.
  """
  keep = _divergence(tokens, estimator) <= most
  return jnp.ones_like(tokens.logp_BxT), keep.astype(tokens.logp_BxT.dtype)


@needs('old')
def sequence_divergence(
  tokens: Tokens, *, estimator: str = 'k3', reduction: str = 'mean', most: float = 0.01
) -> tuple[jax.Array, jax.Array]:
  """Weight 1; drops rows whose mean, sum or max of k(ρ) is above `most`. verl's 'seq_mean_k3' and its likes.

  The estimators are those of `token_divergence`. The bound on the mean of k3 is that of verl's `decoupled_k3_rs`.
  Raises UserError for another estimator or reduction.
  """
  each, mask_BxT = _divergence(tokens, estimator), tokens.mask_BxT
  reduced = dict(
    mean=row_mean(each, mask_BxT),
    sum=row_sum(each, mask_BxT),
    max=jnp.where(mask_BxT > 0, each, 0.0).max(1, keepdims=True),
  )
  if reduction not in reduced:
    raise UserError(
      f'config.objective.importance_correction.reduction={reduction!r} is unknown; choose one of: mean, sum, max.'
    )
  keep = reduced[reduction] <= most
  return jnp.ones_like(tokens.logp_BxT), _spread(keep.astype(tokens.logp_BxT.dtype), tokens)


def divergent_negatives(tokens: Tokens, *, delta: float = 1e-4) -> tuple[jax.Array, jax.Array]:
  """Weight 1; drops rows with A < 0 and mean(log π_b − log π) > delta: OPSM.

  It compares with the current policy and needs no `old`. `delta` is slime's. arXiv:2512.02556 (DeepSeek-V3.2).
  """
  gap_Bx1 = row_mean(tokens.behavior_BxT - tokens.logp_BxT, tokens.mask_BxT)
  drop = (tokens.advantage_BxT < 0) & (gap_Bx1 > delta)
  return jnp.ones_like(tokens.logp_BxT), jnp.where(drop, 0.0, 1.0)


@needs('old', 'rows')
def second_moment_mask(tokens: Tokens, *, budget: float = 0.04) -> tuple[jax.Array, jax.Array]:
  """Weight 1; drops the largest (log ρ)² until their mean is at most `budget`: M2PO's test on ρ, without signs.

  AReaL's variant, which it attributes to arXiv:2510.01161 (M2PO).
  """
  masked_in = tokens.mask_BxT > 0
  keep = smallest_within(_log_rho(tokens) ** 2, masked_in, budget)
  return jnp.ones_like(tokens.logp_BxT), jnp.where(masked_in & ~keep, 0.0, 1.0)


def _log_rho(tokens: Tokens) -> jax.Array:
  return jnp.where(tokens.mask_BxT > 0, tokens.old_BxT - tokens.behavior_BxT, 0.0)


def _divergence(tokens: Tokens, estimator: str) -> jax.Array:
  log_rho = jnp.clip(_log_rho(tokens), -LOG_CAP, LOG_CAP)
  if estimator == 'k2':
    return log_rho**2 / 2
  if estimator == 'k3':
    return exp(log_rho) - 1 - log_rho
  raise UserError(
    f'config.objective.importance_correction.estimator={estimator!r} is unknown; choose one of: k2, k3.'
  )


def _within(x: jax.Array, low: float, high: float) -> jax.Array:
  return ((x >= low) & (x <= high)).astype(x.dtype)


def _spread(x_Bx1: jax.Array, tokens: Tokens) -> jax.Array:
  return jnp.broadcast_to(x_Bx1, tokens.logp_BxT.shape)
