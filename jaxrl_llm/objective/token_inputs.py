"""Inputs of the token stages, declarations of what a stage needs, and reductions that stages share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxrl_llm.types import Array, Rollout

Function = TypeVar('Function', bound=Callable)
Item = TypeVar('Item')

CONFIDENCE_TOP_K = 5  # the confidence of a token is the mean of its five largest probabilities
LOG_CAP = 20.0  # log-ratios are clamped to ±20 before exp; applied to detached values only


class StepCounts(NamedTuple):
  """Counts of optimizer steps, int32; None: no stage needs them."""

  age_BxT: jax.Array | None = None  # since a token was sampled
  batch_steps_BxT: jax.Array | None = None  # of these, the steps taken on this batch
  step_B: jax.Array | None = None  # since the start of the run, the same for all rows


class Tokens(NamedTuple):
  """Log-probabilities and other statistics of each token: no gradients, and 0 where the mask is 0.

  Three policies: `logp` of the policy that is trained, `old` of the center of the trust region, `behavior` of the
  sampler. The stage `old_policy` chooses `old`.
  """

  logp_BxT: jax.Array
  old_BxT: jax.Array
  behavior_BxT: jax.Array
  mask_BxT: jax.Array  # float, 1 for tokens in the loss
  advantage_BxT: jax.Array
  correct_B: Array  # 1 where the answer was correct, before reward shaping
  group_B: jax.Array  # int32, the number of the row's group
  # None in each array below: no chosen stage needs it
  reference_BxT: jax.Array | None = None  # log-probs of a frozen policy
  teacher_BxT: jax.Array | None = None  # log-probs of a teacher
  entropy_BxT: jax.Array | None = None  # nats
  confidence_BxT: jax.Array | None = None  # mean of the `CONFIDENCE_TOP_K` largest probabilities
  collision_BxT: jax.Array | None = None  # Σ_v π_v² over the vocabulary
  steps: StepCounts = StepCounts()
  clipped_BxT: jax.Array | None = None  # bool, trust-region weight 0; for `token_weighting` alone
  imitation_B: Array | None = (
    None  # above 0 for rows of the self-imitation term; None: no such term
  )


class CreditInputs(NamedTuple):
  """Inputs of credit assignment, known before the policy is evaluated: no gradients."""

  advantage_Bx1: jax.Array  # one per row
  mask_BxT: jax.Array  # float, 1 for sampled tokens, those of zero-variance groups included
  group_B: jax.Array  # int32, the number of the row's group
  values_BxT: jax.Array | None = None  # a critic's values before the update
  process_BxT: jax.Array | None = None  # an auxiliary model's reward for each token
  deviation_BxT: jax.Array | None = None  # of its latent from a flow; counts where `followed`
  turn_BxT: jax.Array | None = None  # int32 from 0, the turn of a token; None: one turn
  turn_reward_BxT: jax.Array | None = None  # environment reward, at the last token of a turn
  state_BxT: jax.Array | None = None  # int32, identifies the observation before the turn
  penalty_BxT: jax.Array | None = None  # to subtract from the reward of a token; None: no penalty
  tokens_BxT: Array | None = None  # int32, environment tokens included


def sampled_mask(rollout: Rollout) -> jax.Array:
  """1 for tokens that the policy sampled, 0 for padding and environment tokens: float32 [B, T]."""
  T = rollout.tokens_BxT.shape[1]
  real_BxT = jnp.arange(T)[None] < rollout.length_B[:, None]
  if rollout.turns is not None:
    real_BxT &= rollout.turns.number_BxT >= 0
  return real_BxT.astype(jnp.float32)


def followed(mask_BxT: jax.Array) -> jax.Array:
  """1 for sampled tokens whose next token is sampled, too: the update reads these, and has their hidden states."""
  return mask_BxT * jnp.pad(mask_BxT[:, 1:], ((0, 0), (0, 1)))


def needs(*names: str) -> Callable[[Function], Function]:
  """Declares the inputs that a stage needs, so that the update prepares them.

  'old': log-probs of the weights before the first minibatch, or with 'average' of averaged weights; 'rows': all rows
  of a minibatch at once, so that coefficients cannot be computed per microbatch; 'entropy': of each token;
  'reference': log-probs of a frozen policy; 'versions': ages of tokens; 'norms': gradient norm of each row; 'values':
  of a critic; 'process': rewards of an auxiliary model; 'deviation': that of latents from a flow; 'teacher':
  log-probs of another model; 'spans': these of spans of text, by another tokenizer; 'solution': those of the frozen
  policy that reads a solution in the prompt; 'demo': a demonstration of each prompt; 'demo_reference': its log-probs
  under the frozen policy; 'reward_reference': those of all rows before advantages; 'confidence': mean of the largest
  probabilities; 'collision': Σ π² over the vocabulary; 'contexts': the strategy in each row's prompt; 'step':
  optimizer steps taken; 'parts': each reward of the sum; 'greedy': the first row of a group is sampled greedily, and
  not learned.
  """

  def mark(fn: Function) -> Function:
    fn.__dict__['needs'] = frozenset(names)
    return fn

  return mark


def needs_of(stage: Callable) -> frozenset[str]:
  """The inputs that a function, or a partial of one, declares with `needs`."""
  declared: frozenset[str] = getattr(getattr(stage, 'func', stage), 'needs', frozenset())
  return declared


def default_aggregation(name: str) -> Callable[[Function], Function]:
  """Declares the function of `aggregation` that a KL term uses under `kl_aggregation.fn=auto`."""

  def mark(fn: Function) -> Function:
    fn.__dict__['default_aggregation'] = name
    return fn

  return mark


class Clause(NamedTuple):
  """A requirement of a function on one other stage."""

  stage: str  # of config.objective
  allowed: tuple[str, ...]  # functions of that stage that may be combined with it
  why: str  # the reason, for the message
  between: Mapping[str, tuple[float, float]]  # settings of that stage with exclusive bounds


def requires(
  why: str, between: Mapping[str, tuple[float, float]] | None = None, **allowed: tuple[str, ...]
) -> Callable[[Function], Function]:
  """Declares that a function is valid with the `allowed` functions of other stages only; see `contracts`.

  `why` is the reason. `between` bounds settings of those stages. Stack the decorator once for each reason.
  """

  def mark(fn: Function) -> Function:
    clauses = tuple(Clause(stage, names, why, between or {}) for stage, names in allowed.items())
    fn.__dict__['requires'] = clauses + getattr(fn, 'requires', ())
    return fn

  return mark


def present(x: Item | None) -> Item:
  """x, which the update prepares for a stage that `needs` it; an AssertionError if it did not."""
  assert x is not None, 'an input of a stage was not prepared'
  return x


def exp(log_ratio: jax.Array) -> jax.Array:
  """e^x with x clamped to ±20: only for values without a gradient."""
  return jnp.exp(jnp.clip(log_ratio, -LOG_CAP, LOG_CAP))


def row_sum(x_BxT: jax.Array, mask_BxT: jax.Array) -> jax.Array:
  """Σ_t m·x as [B, 1]; x may be NaN or infinite where the mask is 0."""
  return jnp.where(mask_BxT > 0, x_BxT * mask_BxT, 0.0).sum(1, keepdims=True)


def row_mean(x_BxT: jax.Array, mask_BxT: jax.Array) -> jax.Array:
  """Σ_t m·x / |y| as [B, 1]; 0 for an empty row."""
  return row_sum(x_BxT, mask_BxT) / jnp.maximum(mask_BxT.sum(1, keepdims=True), 1)


def batch_mean(x_BxT: jax.Array, mask_BxT: jax.Array) -> jax.Array:
  """Σ m·x / Σm over all rows."""
  return row_sum(x_BxT, mask_BxT).sum() / jnp.maximum(mask_BxT.sum(), 1)


def group_sum(x_B: jax.Array, group_B: jax.Array) -> jax.Array:
  """The sum over each row's group, as [B]; groups are numbered below B."""
  return jax.ops.segment_sum(x_B, group_B, num_segments=group_B.shape[0])[group_B]


def smallest_within(x_BxT: jax.Array, chosen_BxT: jax.Array, budget: float) -> jax.Array:
  """The largest set of chosen tokens with the smallest x and a mean of at most `budget`: bool [B, T].

  Of equal values either all are included or none.
  """
  x = jnp.where(chosen_BxT, x_BxT, jnp.inf).ravel()
  ordered = jnp.sort(x)
  mean = jnp.cumsum(jnp.where(jnp.isfinite(ordered), ordered, 0.0)) / (1 + jnp.arange(x.size))
  within = jnp.isfinite(ordered) & (mean <= budget)
  # The running mean of sorted values increases. Values equal to the first excluded one are excluded.
  count = within.sum()
  edge = jnp.where(count < x.size, ordered[jnp.minimum(count, x.size - 1)], jnp.inf)
  return chosen_BxT & (x_BxT < edge)


def centered_product(tokens: Tokens) -> jax.Array:
  """(A − Ā)(log π − mean log π), means over all tokens: a token's share of their covariance.

  arXiv:2505.22617 (Clip-Cov, KL-Cov).
  """
  mask_BxT = tokens.mask_BxT
  advantage = tokens.advantage_BxT - batch_mean(tokens.advantage_BxT, mask_BxT)
  logp = tokens.logp_BxT - batch_mean(tokens.logp_BxT, mask_BxT)
  return jnp.where(mask_BxT > 0, advantage * logp, 0.0)


def level_within(x_BxT: jax.Array, chosen_BxT: jax.Array, budget: float) -> jax.Array:
  """The largest h among the chosen x ≥ 0 with Σ min(x, h) < budget·n, n the number chosen.

  0 where there is none, ∞ where Σ x ≤ budget·n.
  """
  ordered = jnp.sort(jnp.where(chosen_BxT, x_BxT, jnp.inf).ravel())
  finite = jnp.isfinite(ordered)
  values = jnp.where(finite, ordered, 0.0)
  count, total = chosen_BxT.sum(), jnp.cumsum(values)
  # Σ min(x, h) for each h: values up to h, and h for each of the others.
  capped = total + values * jnp.maximum(count - 1 - jnp.arange(ordered.size), 0)
  level = jnp.max(jnp.where(finite & (capped < budget * count), values, 0.0))
  return jnp.where(total[-1] <= budget * count, jnp.inf, level)
