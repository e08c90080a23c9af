"""Divergences of the policy from a teacher, over the vocabulary: the loss has a term Σ w·D of its own.

A public function, named in `config.objective.divergence.fn`, returns None or settings. w is the denominator of the
policy term, D compares the distributions of a token by policy and teacher (`config.objective.teacher`), at the
temperature of sampling. Its gradient goes through all logits of the policy. All rows with tokens are learned, those
with an advantage of 0 included. With `top_k`, D compares the teacher's K likeliest tokens and one bucket of all others;
0 compares the whole vocabulary. Advantages from rewards are multiplied by `reward_weight`: 0 is distillation alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.types import UserError


class Divergence(NamedTuple):
  """Settings of the term."""

  fn: Callable[[jax.Array, jax.Array], jax.Array]  # log-probs [..., K] of policy and teacher → […]
  top_k: int
  reward_weight: float

  def between(self, logp: jax.Array, teacher_logp: jax.Array) -> jax.Array:
    """D in nats, from log-probs [..., V] → […]; the teacher has no gradient."""
    teacher_logp = jax.lax.stop_gradient(teacher_logp)
    if 0 < self.top_k < logp.shape[-1]:
      ids = jax.lax.top_k(teacher_logp, self.top_k)[1]
      logp, teacher_logp = _buckets(logp, ids), _buckets(teacher_logp, ids)
    return self.fn(logp, teacher_logp)


def none() -> None:
  """No term."""
  return None


def forward_kl(*, top_k: int = 0, reward_weight: float = 0.0) -> Divergence:
  """D = Σ_v π_T·(log π_T − log π). arXiv:2306.13649 (GKD), the limit of its divergence for β → 0.

  Raises UserError for settings out of range, as the other functions do.
  """
  return _checked(_forward_kl, top_k, reward_weight)


def reverse_kl(*, top_k: int = 0, reward_weight: float = 0.0) -> Divergence:
  """D = Σ_v π·(log π − log π_T). arXiv:2306.13649 (GKD), the limit of its divergence for β → 1.

  On the policy's own tokens its gradient, the prefix held fixed, is the mean of that of
  `config.objective.distillation.fn=on_policy`, without the variance of the sampled token.
  """
  return _checked(_reverse_kl, top_k, reward_weight)


def jensen_shannon(*, beta: float = 0.5, top_k: int = 0, reward_weight: float = 0.0) -> Divergence:
  """D = β·KL(π_T ‖ M) + (1 − β)·KL(π ‖ M), M = β·π_T + (1 − β)·π. arXiv:2306.13649 (GKD).

  D is bounded by the entropy of β, at most log 2.
  """
  _check(
    0 < beta < 1, f'beta={beta} must be above 0 and below 1; the ends are forward_kl, reverse_kl'
  )
  return _checked(functools.partial(_jensen_shannon, beta=beta), top_k, reward_weight)


def _forward_kl(logp: jax.Array, teacher_logp: jax.Array) -> jax.Array:
  return (jnp.exp(teacher_logp) * (teacher_logp - logp)).sum(-1)


def _reverse_kl(logp: jax.Array, teacher_logp: jax.Array) -> jax.Array:
  return _forward_kl(teacher_logp, logp)


def _jensen_shannon(logp: jax.Array, teacher_logp: jax.Array, *, beta: float) -> jax.Array:
  mixture = jnp.logaddexp(logp + jnp.log1p(-beta), teacher_logp + jnp.log(beta))
  return beta * _forward_kl(mixture, teacher_logp) + (1 - beta) * _forward_kl(mixture, logp)


def _buckets(logp: jax.Array, ids: jax.Array) -> jax.Array:
  """Log-probs [..., V] of the tokens `ids` [..., K] and of all others together, [..., K + 1]."""
  V, K = logp.shape[-1], ids.shape[-1]
  flat, ids = logp.reshape(-1, V), ids.reshape(-1, K)
  chosen = jnp.take_along_axis(flat, ids, axis=-1)
  is_chosen = jax.vmap(lambda row, ids: row.at[ids].set(True))(jnp.zeros(flat.shape, bool), ids)
  # A sum, and not 1 − Σ π of the chosen tokens, which rounds to 0 where they have nearly all of the probability.
  rest = jax.nn.logsumexp(jnp.where(is_chosen, -jnp.inf, flat), axis=-1, keepdims=True)
  return jnp.concatenate([chosen, rest], axis=-1).reshape(*logp.shape[:-1], K + 1)


def _checked(
  fn: Callable[[jax.Array, jax.Array], jax.Array], top_k: int, reward_weight: float
) -> Divergence:
  _check(top_k >= 0, f'top_k={top_k} must be at least 0, which compares the whole vocabulary')
  _check(
    reward_weight >= 0, f'reward_weight={reward_weight} must be at least 0, for the term alone'
  )
  return Divergence(fn, top_k, reward_weight)


def _check(valid: bool, problem: str) -> None:
  if not valid:
    raise UserError(f'config.objective.divergence.{problem}.')
