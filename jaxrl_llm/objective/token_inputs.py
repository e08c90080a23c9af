"""What the stages look at when they weigh a token, and the sums that several of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.types import Rollout

TOP = 5  # a confidence is the mean of so many of the largest probabilities
LOG_CAP = 20.0  # exp of more overflows nothing but helps nobody; applied to detached values only


class Tokens(NamedTuple):
  """Log-probabilities and what is known of each token: no gradients, and 0 where the mask is 0.

  Three policies: `logp` of the one that learns, `old` of the one that the trust region is around,
  `behavior` of the one that sampled. Which policy `old` is, stage `proximal` says.
  """

  logp_BxT: jax.Array
  old_BxT: jax.Array
  behavior_BxT: jax.Array
  mask_BxT: jax.Array  # float, 1 for tokens that count
  advantage_BxT: jax.Array
  correct_B: jax.Array  # 1 where the answer was right, before any shaping
  group_B: jax.Array  # int32, which prompt a row answers
  reference_BxT: jax.Array | None = None  # of a frozen policy; None: there is none
  teacher_BxT: jax.Array | None = None  # of another model; None: there is none
  entropy_BxT: jax.Array | None = None  # nats
  # mean of the `TOP` largest probabilities; None: nobody asks
  confidence_BxT: jax.Array | None = None
  age_BxT: jax.Array | None = None  # optimizer steps since the token was sampled
  moved_BxT: jax.Array | None = None  # of them, those taken on this batch
  step_B: jax.Array | None = None  # optimizer steps taken, of all rows the same; None: nobody asks
  clipped_BxT: jax.Array | None = (
    None  # bool, tokens whose weight the trust region sets to 0; the emphasis alone sees it
  )


class Graded(NamedTuple):
  """What is known of a batch before the policy is looked at, for the credit of its tokens: no gradients."""

  advantage_Bx1: jax.Array  # of the row
  mask_BxT: jax.Array  # float, 1 for real tokens, all-equal groups included
  group_B: jax.Array
  values_BxT: jax.Array | None = None  # what a critic said before the batch was learned
  process_BxT: jax.Array | None = None  # a companion's reward for each token
  # int32 from 0 up, which turn of its row a token is of; None: the row is one
  turn_BxT: jax.Array | None = None
  paid_BxT: jax.Array | None = None  # by an environment, at the last token of a turn
  state_BxT: jax.Array | None = None  # int32, names what a turn began from


def said(rollout: Rollout) -> jax.Array:
  """1 for the tokens that the policy sampled, 0 for padding and for what an environment gave: [B, T]. Source: none."""
  T = rollout.tokens_BxT.shape[1]
  real_BxT = jnp.arange(T)[None] < rollout.length_B[:, None]
  if rollout.turns is not None:
    real_BxT &= rollout.turns.number_BxT >= 0
  return real_BxT.astype(jnp.float32)


def needs(*what: str) -> Callable:
  """Marks a function with what it cannot do without, so that a step prepares it. Source: none.

  'old': log-probs of the weights before the update, or with 'average' those of averaged weights; 'rows': those of
  all rows of the minibatch at once, so that coefficients cannot be worked out slice by slice; 'reference': a frozen
  policy; 'versions': the ages of tokens; 'norms': the gradient's norm of each row; 'values': of a critic; 'process':
  a companion's reward for each token; 'teacher': another model; 'demo': a demonstration of each prompt;
  'demo_reference': what the frozen policy says of those; 'confidence': the mean of the largest probabilities;
  'contexts': which strategy a row's question was given; 'step': optimizer steps taken;
  'parts': each of several rewards.
  """

  def mark(fn: Callable) -> Callable:
    fn.needs = frozenset(what)
    return fn

  return mark


class Clause(NamedTuple):
  """What a function requires of one other stage."""

  stage: str  # of config.objective
  allowed: tuple[str, ...]  # functions there that it goes with
  why: str
  between: dict[str, tuple[float, float]]  # settings there with the bounds that they must be within


def requires(
  why: str, between: dict[str, tuple[float, float]] | None = None, **allowed: tuple[str, ...]
) -> Callable:
  """Declares that a function goes with `allowed` functions of other stages alone, and why; see `contracts`.

  `between` bounds settings of those stages. May be stacked, once for each reason.
  """

  def mark(fn: Callable) -> Callable:
    own = tuple(Clause(stage, names, why, between or {}) for stage, names in allowed.items())
    fn.requires = own + getattr(fn, 'requires', ())
    return fn

  return mark


def exp(log_ratio: jax.Array) -> jax.Array:
  """e^x with x held within ±20: only for values without a gradient. Source: none."""
  return jnp.exp(jnp.clip(log_ratio, -LOG_CAP, LOG_CAP))


def row_sum(x_BxT: jax.Array, mask_BxT: jax.Array) -> jax.Array:
  """Σ_t m·x as [B, 1]; x may be anything where the mask is 0. Source: none."""
  return jnp.where(mask_BxT > 0, x_BxT * mask_BxT, 0.0).sum(1, keepdims=True)


def row_mean(x_BxT: jax.Array, mask_BxT: jax.Array) -> jax.Array:
  """Σ_t m·x / |y| as [B, 1]; 0 for an empty row. Source: none."""
  return row_sum(x_BxT, mask_BxT) / jnp.maximum(mask_BxT.sum(1, keepdims=True), 1)


def batch_mean(x_BxT: jax.Array, mask_BxT: jax.Array) -> jax.Array:
  """Σ m·x / Σm over all rows. Source: none."""
  return row_sum(x_BxT, mask_BxT).sum() / jnp.maximum(mask_BxT.sum(), 1)


def group_sum(x_B: jax.Array, group_B: jax.Array) -> jax.Array:
  """The sum over each row's own group, as [B]; groups are numbered below B. Source: none."""
  return jax.ops.segment_sum(x_B, group_B, num_segments=group_B.shape[0])[group_B]


def smallest_within(x_BxT: jax.Array, chosen_BxT: jax.Array, budget: float) -> jax.Array:
  """The most of the chosen, from the smallest up, whose mean is at most `budget`: bool [B, T].

  Of equal values either all are in or none. Source: none.
  """
  x = jnp.where(chosen_BxT, x_BxT, jnp.inf).ravel()
  ordered = jnp.sort(x)
  mean = jnp.cumsum(jnp.where(jnp.isfinite(ordered), ordered, 0.0)) / (1 + jnp.arange(x.size))
  within = jnp.isfinite(ordered) & (mean <= budget)
  # Means of ever larger values only grow; the last one in may have equals that are out.
  count = within.sum()
  edge = jnp.where(count < x.size, ordered[jnp.minimum(count, x.size - 1)], jnp.inf)
  return chosen_BxT & (x_BxT < edge)


def centered_product(tokens: Tokens) -> jax.Array:
  """(A − Ā)(log π − mean log π), means over all tokens: a token's share of their covariance.

  Source: arXiv:2505.22617 (Clip-Cov, KL-Cov).
  """
  mask_BxT = tokens.mask_BxT
  advantage = tokens.advantage_BxT - batch_mean(tokens.advantage_BxT, mask_BxT)
  logp = tokens.logp_BxT - batch_mean(tokens.logp_BxT, mask_BxT)
  return jnp.where(mask_BxT > 0, advantage * logp, 0.0)


def level_within(x_BxT: jax.Array, chosen_BxT: jax.Array, budget: float) -> jax.Array:
  """The largest h of the chosen x ≥ 0 with Σ min(x, h) < budget·#chosen; 0 if none, ∞ if Σ x ≤ budget·#chosen."""
  ordered = jnp.sort(jnp.where(chosen_BxT, x_BxT, jnp.inf).ravel())
  finite = jnp.isfinite(ordered)
  values = jnp.where(finite, ordered, 0.0)
  count, total = chosen_BxT.sum(), jnp.cumsum(values)
  # Σ min(x, h) for each h: those up to it as they are, the others held at h.
  capped = total + values * jnp.maximum(count - 1 - jnp.arange(ordered.size), 0)
  level = jnp.max(jnp.where(finite & (capped < budget * count), values, 0.0))
  return jnp.where(total[-1] <= budget * count, jnp.inf, level)
