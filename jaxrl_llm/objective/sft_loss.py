"""Supervised terms: the weight of a prompt's demonstration, and that of its rollouts.

right_P, has_P, step → Plan. `right_P` counts right rollouts, `has_P` is 1 for a prompt with rollouts and a
demonstration, `step` counts optimizer steps. Demonstrations have c = demo_weight_P · w(DemonstrationTokens) / Σm, where
Σm counts the tokens of all demonstrations of the minibatch with demo_weight_P > 0. The coefficients of a prompt's
rollouts are multiplied by rollout_weight_P. The two denominators are independent. Every public function may be named in
`config.objective.sft_loss.fn`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.token_inputs import needs, row_sum


class DemonstrationTokens(NamedTuple):
  """Log-probs of demonstrations: no gradients, 0 where the mask is 0."""

  logp_PxT: jax.Array
  behavior_PxT: jax.Array  # of the policy that wrote them: as recorded, or of the reference policy
  mask_PxT: jax.Array


TokenWeight: TypeAlias = Callable[[DemonstrationTokens], jax.Array]


class Plan(NamedTuple):
  """Weights of rollouts and demonstrations, and the function that weighs tokens of demonstrations."""

  rollout_weight_P: jax.Array
  demo_weight_P: jax.Array
  token_weight: TokenWeight


def none() -> None:
  """Rollouts alone."""


@needs('demo')
def likelihood(
  right_P: jax.Array, has_P: jax.Array, step: jax.Array, *, weight: float = 0.1
) -> Plan:
  """RL + weight·SFT, SFT = −Σ log π / Σm over the demonstrations. The default of `weight` is ours."""
  del right_P, step
  return Plan(jnp.ones_like(has_P), weight * has_P, _uniform)


@needs('demo')
def chord(
  right_P: jax.Array,
  has_P: jax.Array,
  step: jax.Array,
  *,
  high: float = 0.1,
  low: float = 0.1,
  warmup: int = 0,
  decay: int = 0,
  uncertain: bool = True,
) -> Plan:
  """(1 − μ)·RL − μ·Σ φ·log π / Σm; φ = p(1 − p), or 1 unless `uncertain`. arXiv:2508.11408 (CHORD).

  p(1 − p) is small for tokens that the policy has learned and for tokens far from it. μ rises linearly to `high` over
  `warmup` optimizer steps, then falls as a cosine to `low` over `decay`. Defaults are those of CHORD-φ; CHORD-μ has
  0.9, 0.05, 0, 200 and φ = 1.
  """
  del right_P
  place = jnp.clip((step - warmup) / decay, 0.0, 1.0) if decay else 1.0
  fall = low + (high - low) * (1 + jnp.cos(jnp.pi * place)) / 2
  share = jnp.where(step < warmup, high * step / max(warmup, 1), fall)
  return Plan(
    (1 - share) * jnp.ones_like(has_P), share * has_P, _uncertainty if uncertain else _uniform
  )


@needs('demo')
def replace(
  right_P: jax.Array, has_P: jax.Array, step: jax.Array, *, gate: int = 0, weight: float = 1.0
) -> Plan:
  """`weight`·SFT instead of RL for prompts with at most `gate` right rollouts. arXiv:2509.04419 (HPT).

  A prompt without a demonstration keeps its rollouts. Replaced rollouts stay in RL's denominator. The official code
  has weight 1, and 0.3 for a model of 1.5B.
  """
  del step
  replaced_P = jnp.where(right_P <= gate, has_P, 0)
  return Plan(1 - replaced_P, weight * replaced_P, _uniform)


@needs('demo')
def one_token_rollouts(
  right_P: jax.Array, has_P: jax.Array, step: jax.Array, *, beta: float = -0.1
) -> Plan:
  """w = (1 − beta)·p on demonstrations alone: OTR with infinitely many samples a position. arXiv:2509.26313 (OTR).

  The reward of a sampled token is 1 where it is the demonstrated one and `beta` elsewhere; w is the mean of that policy
  gradient. Rollouts have weight 0. `beta` from memory.
  """
  del right_P, step
  return Plan(jnp.zeros_like(has_P), has_P, functools.partial(_sampled_token, beta=beta))


@needs('demo', 'demo_reference')
def suffix_weighted(
  right_P: jax.Array,
  has_P: jax.Array,
  step: jax.Array,
  *,
  discount: float = 0.999,
  low: float = -0.08,
  high: float = 0.3,
  least: float = 0.1,
  most: float = 10.0,
) -> Plan:
  """w = clip(G, least, most), G_t = discount^{|y|−1−t}·Π_{j>t} e^{clip(log π/π_b, low, high)}, on demonstrations alone.

  The weight of a token is the importance ratio of the tokens after it; this is the paper's variant for tokens. π_b is
  the policy that wrote a demonstration where its log-probs are recorded, else the reference policy. Rollouts have
  weight 0. Formula and numbers from third-party notes. arXiv:2602.01058 (PEAR).
  """
  del right_P, step
  weigh = functools.partial(
    _suffix_ratio, discount=discount, low=low, high=high, least=least, most=most
  )
  return Plan(jnp.zeros_like(has_P), has_P, weigh)


def _uniform(demo: DemonstrationTokens) -> jax.Array:
  return jnp.ones_like(demo.logp_PxT)


def _uncertainty(demo: DemonstrationTokens) -> jax.Array:
  p = jnp.exp(demo.logp_PxT)
  return p * (1 - p)


def _sampled_token(demo: DemonstrationTokens, *, beta: float) -> jax.Array:
  return (1 - beta) * jnp.exp(demo.logp_PxT)


def _suffix_ratio(
  demo: DemonstrationTokens, *, discount: float, low: float, high: float, least: float, most: float
) -> jax.Array:
  gap = jnp.clip(demo.logp_PxT - demo.behavior_PxT, low, high) + jnp.log(discount)
  gap = jnp.where(demo.mask_PxT > 0, gap, 0.0)
  after = row_sum(gap, demo.mask_PxT) - jnp.cumsum(gap, axis=1)
  return jnp.clip(jnp.exp(after), least, most)
