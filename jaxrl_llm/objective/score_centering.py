"""Score centering: a term of the loss that subtracts the mean score under the sampler from that of a sampled token.

A public function, named in `config.objective.score_centering.fn`, returns None or settings. The policy term of a token
is W(r, A)·A·∇log π. Over tokens from a sampler q ≠ π its mean is not 0 even where A is the same for all of them:
A·Σ_v q·W·∇log π, a drift that every update repeats. The term subtracts this mean, at the denominator of the policy
term. W is that of the stages `ratio` and `trust_region`, applied to each token of the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.method_spec import TokenStages
from jaxrl_llm.objective.token_inputs import Tokens
from jaxrl_llm.types import UserError

LEAST_TAIL = (
  1e-6  # probability of all other tokens together, at least; that of the implementation in vime
)


class ScoreCentering(NamedTuple):
  """Settings of the term."""

  top_k: int


def none() -> None:
  """No term."""
  return None


def top_k(*, tokens: int = 128) -> ScoreCentering:
  """Mean score by the sampler's K = `tokens` likeliest tokens H, Σ_H (q·W − α·π)·∇log π, which sampling records.

  Outside of H the sampler is modeled as ρ·π, with ρ = (1 − Σ_H q) / (1 − Σ_H π), whose weighted mean score is that of
  H with α = ρ·W(1/ρ) and the other sign. With K = V it is exact; with π = q it is 0. Records take 8·K bytes a token.
  arXiv:2609.20807 (equations 9, 12 and 14). Raises UserError for tokens below 1.
  """
  if tokens < 1:
    raise UserError(f'config.objective.score_centering.tokens={tokens} must be at least 1.')
  return ScoreCentering(tokens)


def mean_score(
  stages: TokenStages,
  logp_BxTxV: jax.Array,
  id_BxTxK: jax.Array,
  sampler_BxTxK: jax.Array,
  advantage_BxT: jax.Array,
) -> jax.Array:
  """A·Σ_H sg(q·W − α·π)·log π [B, T], whose gradient is A times the mean score; to be added to the loss.

  `sampler_BxTxK` are the sampler's log-probs of the tokens `id_BxTxK`, normalized over the whole vocabulary.
  """
  head_BxTxK = jnp.take_along_axis(logp_BxTxV, id_BxTxK, axis=-1)
  policy, sampler = (_with_tail(x) for x in (jax.lax.stop_gradient(head_BxTxK), sampler_BxTxK))
  weighted = jnp.exp(sampler) * _weight(stages, policy, sampler, advantage_BxT)
  alpha_BxTx1 = weighted[..., -1:] / jnp.exp(policy[..., -1:])
  residual_BxTxK = weighted[..., :-1] - alpha_BxTx1 * jnp.exp(policy[..., :-1])
  return advantage_BxT * (residual_BxTxK * head_BxTxK).sum(-1)


def _with_tail(head_BxTxK: jax.Array) -> jax.Array:
  """Log-probs of the tokens, and of all others together: [B, T, K + 1]."""
  tail_BxTx1 = 1 - jnp.exp(head_BxTxK).sum(-1, keepdims=True)
  return jnp.concatenate([head_BxTxK, jnp.log(jnp.maximum(tail_BxTx1, LEAST_TAIL))], axis=-1)


def _weight(
  stages: TokenStages, policy: jax.Array, sampler: jax.Array, advantage_BxT: jax.Array
) -> jax.Array:
  """W of each token [B, T, K + 1], as if it had been drawn."""
  rows_B = jnp.zeros(len(policy), jnp.int32)
  tokens = Tokens(
    logp_BxT=policy,
    old_BxT=sampler,
    behavior_BxT=sampler,
    mask_BxT=jnp.ones_like(policy),
    advantage_BxT=jnp.broadcast_to(advantage_BxT[..., None], policy.shape),
    correct_B=rows_B,
    group_B=rows_B,
  )
  return stages.trust_region(stages.ratio(tokens), tokens)[0]
