"""Supervised terms: what a prompt learns from its demonstration, and what is left of its rollouts.

right_P, has_P, step → Plan. `right_P` counts right rollouts, `has_P` is 1 for a prompt with rollouts and a
demonstration, `step` counts optimizer steps. c = on_demo_P · w(Shown) / Σm on demonstrations, Σm over the tokens of
all demonstrations of the minibatch with on_demo_P > 0; the c of a prompt's rollouts are multiplied by on_rollouts_P.
Neither denominator knows of the other's tokens. Every public function here may be named in
`config.objective.sft_loss.fn`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.token_inputs import needs, row_sum


class Plan(NamedTuple):
  """What is decided before the policy is looked at, and how tokens are weighed once it is."""

  on_rollouts_P: jax.Array
  on_demo_P: jax.Array
  weigh: Callable  # Shown → what a token counts


class Shown(NamedTuple):
  """Demonstrations as the policy sees them: no gradients, 0 where the mask is 0."""

  logp_PxT: jax.Array
  behavior_PxT: jax.Array  # of what wrote them: as recorded, or the reference policy's
  mask_PxT: jax.Array


def none(right_P: jax.Array, has_P: jax.Array, step: jax.Array) -> Plan:
  """Rollouts alone. Source: none."""
  del right_P, step
  return Plan(jnp.ones_like(has_P), jnp.zeros_like(has_P), _alike)


@needs('demo')
def likelihood(
  right_P: jax.Array, has_P: jax.Array, step: jax.Array, *, weight: float = 0.1
) -> Plan:
  """RL + weight·SFT, SFT = −Σ log π / Σm over the demonstrations. `weight` is ours. Source: none."""
  del right_P, step
  return Plan(jnp.ones_like(has_P), weight * has_P, _alike)


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
  """(1 − μ)·RL − μ·Σ φ·log π / Σm; φ = p(1 − p), or 1 unless `uncertain`: not the known, not the hopeless tokens.

  μ rises linearly to `high` over `warmup` optimizer steps, then falls as a cosine to `low` over `decay`. Defaults are
  those of CHORD-φ; CHORD-μ has 0.9, 0.05, 0, 200 and φ = 1. Source: arXiv:2508.11408 (CHORD).
  """
  del right_P
  place = jnp.clip((step - warmup) / max(decay, 1), 0.0, 1.0)
  fall = low + (high - low) * (1 + jnp.cos(jnp.pi * place)) / 2
  share = jnp.where(step < warmup, high * step / max(warmup, 1), fall)
  return Plan(
    (1 - share) * jnp.ones_like(has_P), share * has_P, _uncertain if uncertain else _alike
  )


@needs('demo')
def replace(
  right_P: jax.Array, has_P: jax.Array, step: jax.Array, *, gate: int = 0, weight: float = 1.0
) -> Plan:
  """A prompt with at most `gate` right rollouts learns from its demonstration instead, `weight`·SFT.

  One without a demonstration goes on with its rollouts. Rollouts that do not count stay in RL's denominator. The
  official code has weight 1, and 0.3 for a model of 1.5B. Source: arXiv:2509.04419 (HPT).
  """
  del step
  lost_P = jnp.where(right_P <= gate, has_P, 0)
  return Plan(1 - lost_P, weight * lost_P, _alike)


@needs('demo')
def one_token_rollouts(
  right_P: jax.Array, has_P: jax.Array, step: jax.Array, *, beta: float = -0.1
) -> Plan:
  """w = (1 − beta)·p on demonstrations alone: OTR with infinitely many samples at each position.

  A sampled token is worth 1 where it is the demonstrated one and `beta` elsewhere; the policy gradient's mean is this.
  Rollouts count for nothing. `beta` from memory. Source: arXiv:2509.26313 (OTR).
  """
  del right_P, step
  return Plan(jnp.zeros_like(has_P), has_P, functools.partial(_sampled, beta=beta))


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

  How much the rest of a demonstration is still what the policy would say; the variant for tokens. π_b is what wrote
  it, where its log-probs are recorded, else the reference policy. Rollouts count for nothing. Formula and numbers from
  third-party notes. Source: arXiv:2602.01058 (PEAR).
  """
  del right_P, step
  weigh = functools.partial(_suffix, discount=discount, low=low, high=high, least=least, most=most)
  return Plan(jnp.zeros_like(has_P), has_P, weigh)


def _alike(shown: Shown) -> jax.Array:
  return jnp.ones_like(shown.logp_PxT)


def _uncertain(shown: Shown) -> jax.Array:
  p = jnp.exp(shown.logp_PxT)
  return p * (1 - p)


def _sampled(shown: Shown, *, beta: float) -> jax.Array:
  return (1 - beta) * jnp.exp(shown.logp_PxT)


def _suffix(
  shown: Shown, *, discount: float, low: float, high: float, least: float, most: float
) -> jax.Array:
  gap = jnp.clip(shown.logp_PxT - shown.behavior_PxT, low, high) + jnp.log(discount)
  gap = jnp.where(shown.mask_PxT > 0, gap, 0.0)
  after = row_sum(gap, shown.mask_PxT) - jnp.cumsum(gap, axis=1)
  return jnp.clip(jnp.exp(after), least, most)
