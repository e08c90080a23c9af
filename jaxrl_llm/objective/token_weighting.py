"""Weights of tokens: tokens → multiplier_BxT of the policy term.

The multiplier applies after the trust region. It changes neither the sign of A, nor which tokens are clipped, nor the
denominator. Every public function may be named in `config.objective.token_weighting.fn`. Detached.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.token_inputs import (
  Tokens,
  batch_mean,
  centered_product,
  group_sum,
  needs,
  present,
  row_mean,
)


def none() -> None:
  """1 for every token."""


@needs('rows', 'entropy')
def uncertain(tokens: Tokens, *, mastered: float = 0.99, entropy: float = 0.2) -> jax.Array:
  """0 for tokens of right answers with π ≥ mastered, only while the batch's mean entropy < entropy (nats).

  Dynamic masking of well-mastered positive tokens. arXiv:2507.19766 (UloRL).
  """
  likely = (jnp.exp(tokens.logp_BxT) >= mastered) & (tokens.correct_B[:, None] > 0.5)
  low = batch_mean(present(tokens.entropy_BxT), tokens.mask_BxT) < entropy
  return jnp.where(likely & low, 0.0, 1.0)


@needs('rows', 'entropy')
def forking(tokens: Tokens, *, share: float = 0.2) -> jax.Array:
  """1 for the `share` of tokens with the highest entropy in the batch, else 0. arXiv:2506.01939 (80/20)."""
  masked_in, entropy_BxT = tokens.mask_BxT > 0, present(tokens.entropy_BxT)
  ordered = jnp.sort(jnp.where(masked_in, entropy_BxT, -jnp.inf).ravel())[::-1]
  count = jnp.ceil(share * masked_in.sum()).astype(int)
  edge = ordered[jnp.clip(count - 1, 0, ordered.size - 1)]
  return jnp.where(masked_in & (entropy_BxT >= edge), 1.0, 0.0)


@needs('rows')
def covariance_clip(
  tokens: Tokens, *, share: float = 0.0002, low: float = 1.0, high: float = 5.0
) -> jax.Array:
  """1 − min(max(⌊share·n⌋, 1) / #band, 1) for tokens whose (A − Ā)(log π − mean log π) is within low and high, else 1.

  Tokens that the trust region clips are not in the band. Clip-Cov drops ⌊share·n⌋ random tokens of the band; here each
  token of the band has the mean weight of that draw. arXiv:2505.22617 (Clip-Cov).
  """
  covariance = centered_product(tokens)
  band = (
    (tokens.mask_BxT > 0) & (covariance > low) & (covariance < high) & ~present(tokens.clipped_BxT)
  )
  # The product may fall below a whole number by rounding.
  dropped = jnp.maximum(jnp.floor(share * tokens.mask_BxT.sum() + 1e-4), 1)
  return jnp.where(band, 1 - jnp.minimum(dropped / jnp.maximum(band.sum(), 1), 1.0), 1.0)


@needs('rows')
def covariance_clip_by_term(
  tokens: Tokens,
  *,
  share: float = 0.0002,
  low: float = 1.0,
  high: float = 5.0,
  replayed_share: float = 0.02,
  replayed_low: float = 1.0,
  replayed_high: float = 40.0,
) -> jax.Array:
  """`covariance_clip` of sampled rows, and of the rows of the self-imitation term with a share and band of their own.

  Means and counts are over the tokens of a term. arXiv:2509.22601 (SPEAR).
  """
  if tokens.imitation_B is None:
    return covariance_clip(tokens, share=share, low=low, high=high)
  imitated = (tokens.imitation_B > 0)[:, None]
  sampled = tokens._replace(mask_BxT=jnp.where(imitated, 0.0, tokens.mask_BxT))
  replayed = tokens._replace(mask_BxT=jnp.where(imitated, tokens.mask_BxT, 0.0))
  # Each is 1 outside of its term.
  weight = covariance_clip(sampled, share=share, low=low, high=high)
  return weight * covariance_clip(
    replayed, share=replayed_share, low=replayed_low, high=replayed_high
  )


@needs('rows')
def sharpen(tokens: Tokens, *, strength: float = 1.0, most: float = 1.0) -> jax.Array:
  """(A + min(max(λ(1 − η), 0), κ·A)) / A for right answers, η = e^{s − mean_g s}, s = mean log π.

  A bonus for unlikely right answers, at most κ = `most` times A; λ = `strength`. From third-party notes; another
  re-implementation bounds by |A|. arXiv:2510.06672 (XRPO).
  """
  score = row_mean(tokens.logp_BxT, tokens.mask_BxT)[:, 0]
  exists = (tokens.mask_BxT.sum(1) > 0).astype(score.dtype)
  mean = group_sum(score * exists, tokens.group_B)
  mean = mean / jnp.maximum(group_sum(exists, tokens.group_B), 1)
  novelty = jnp.maximum(strength * (1 - jnp.exp(score - mean)), 0.0)[:, None]
  advantage = tokens.advantage_BxT
  up = (advantage > 0) & (tokens.correct_B[:, None] > 0.5)
  bonus = jnp.minimum(novelty, most * advantage)
  return jnp.where(up, 1 + bonus / jnp.where(up, advantage, 1.0), 1.0)
