"""Policy-gradient losses: targets of a batch, then one coefficient per token.

Targets are groups, advantages and denominators, computed before the policy is evaluated. The gradient of every method
is that of −Σ sg(c)·log π.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.objective import record_checks, replayed_log_probs, self_imitation, token_spans
from jaxrl_llm.objective.method_spec import Method
from jaxrl_llm.objective.token_inputs import (
  CreditInputs,
  StepCounts,
  Tokens,
  needs_of,
  present,
  sampled_mask,
)
from jaxrl_llm.rewards.outcomes import SAME, compared
from jaxrl_llm.types import Array, Batch, Prompts, Rollout

SUMS = ('pg_loss', 'clipped', 'rejected', 'kl', 'kl_loss')  # keys of the sums of `coefficients`


class Groups(NamedTuple):
  """Indices between rows [B] and groups [P, parts·G]. A group is at the index of its prompt's first slot."""

  rollouts: int  # G, rows of a slot
  first_P: Array | None  # int32, the first slot of a slot's prompt; None: the slot itself
  part_P: Array | None  # int32, the number of a slot among those of its prompt
  parts: int = 1  # largest number of slots of one prompt

  def gather(self, x_B: Array) -> Array:
    """Rows as groups [P, parts·G]; 0 for absent slots and for slots that belong to an earlier group."""
    x_PxG = x_B.reshape(-1, self.rollouts)
    if self.first_P is None:
      return x_PxG
    P = x_PxG.shape[0]
    blank = jnp.zeros((P, self.parts, self.rollouts), x_PxG.dtype)
    return blank.at[self.first_P, self.part_P].set(x_PxG).reshape(P, -1)

  def scatter(self, x_PxN: jax.Array) -> jax.Array:
    """The inverse of `gather`: values of groups as rows [B]; N = 1 repeats a value for all rows."""
    if x_PxN.shape[1] == 1:
      x_P = x_PxN[:, 0] if self.first_P is None else x_PxN[self.first_P, 0]
      return jnp.repeat(x_P, self.rollouts)
    if self.first_P is None:
      return x_PxN.reshape(-1)
    x = x_PxN.reshape(-1, self.parts, self.rollouts)
    return x[self.first_P, self.part_P].reshape(-1)

  def numbers(self, rows: int) -> jax.Array:
    """The number of each row's group, int32 [B], below P."""
    slot_B = jnp.arange(rows, dtype=jnp.int32) // self.rollouts
    return slot_B if self.first_P is None else self.first_P[slot_B]


def group_rows(prompts: Prompts, rollouts: int, parts: int = 1) -> Groups:
  """Groups of slots with equal `index_P`; `part_P` numbers the slots of a prompt from 0 to parts − 1."""
  if parts == 1:
    return Groups(rollouts, None, None)
  same_PxP = prompts.index_P[:, None] == prompts.index_P[None]
  return Groups(rollouts, jnp.argmax(same_PxP, axis=1).astype(jnp.int32), prompts.part_P, parts)


class OtherPolicies(NamedTuple):
  """Log-probs of the batch under other policies than the one that is trained."""

  old_BxT: jax.Array | None = None  # None: the behavior log-probs
  reference_BxT: jax.Array | None = None  # None: no reference policy
  teacher_BxT: jax.Array | None = None  # None: no teacher
  # int32, the sampler's likeliest tokens, and their log-probs under it; None: not recorded
  top_id_BxTxK: Array | None = None
  top_logp_BxTxK: Array | None = None


class Targets(NamedTuple):
  """Everything that the coefficients depend on besides the policy. Every array leads with B."""

  mask_BxT: jax.Array  # float32, tokens in the loss
  advantage_BxT: jax.Array
  weight_BxT: jax.Array  # 1 / denominator where the mask is 1
  behavior_BxT: Array  # log-probabilities recorded at sampling
  correct_B: Array
  group_B: jax.Array  # int32
  kl_weight_BxT: jax.Array | None = None  # 1 / denominator of the KL term; None: `weight_BxT`
  policies: OtherPolicies = OtherPolicies()
  c_BxT: jax.Array | None = None  # coefficients; None: not computed yet
  return_BxT: jax.Array | None = None  # regression target of a critic; None: there is no critic
  sampled_BxT: jax.Array | None = None  # 1 where the policy sampled; None: in all of a row
  steps: StepCounts = StepCounts()
  replayed_B: Array | None = None  # 1 for rows without old log-probs; None: all rows have them
  entropy_weight_BxT: jax.Array | None = None  # coefficient of each token's entropy; None: no bonus
  imitation_B: Array | None = (
    None  # above 0 for rows of the self-imitation term; None: no such term
  )

  def with_arrays(self, **arrays: jax.Array | None) -> Targets:
    """A copy with new arrays, by field name, those of `policies` and `steps` included."""
    policies = {name: arrays.pop(name) for name in OtherPolicies._fields if name in arrays}
    steps = {name: arrays.pop(name) for name in StepCounts._fields if name in arrays}
    replaced = self._replace(
      policies=self.policies._replace(**policies), steps=self.steps._replace(**steps)
    )
    return replaced._replace(**arrays)


def targets(
  method: Method,
  batch: Batch,
  rollouts: int,
  signal_BxT: jax.Array | None = None,
  leverage_B: jax.Array | None = None,
  parts: int = 1,
  policies: OtherPolicies | None = None,
) -> Targets:
  """Advantages and denominators of a whole minibatch at once.

  `signal_BxT` is the output of the method's auxiliary model, `leverage_B` for a method that `needs_norms`, `parts` the
  most slots of a prompt, whose rows are one group. `policies` are known already, for a KL penalty in the reward.

  Scores before reward shaping decide which groups have zero variance (`types.Batch`). Denominators count what the mask
  leaves. The weight of a row, 1 / the probability that it was kept, multiplies its coefficients and no denominator.
  """
  record_checks.batch(batch, types=False)
  policies = OtherPolicies() if policies is None else policies
  (B, T), dtype = batch.rollout.tokens_BxT.shape, jnp.result_type(batch.reward_B)
  mask_BxT = sampled_BxT = sampled_mask(batch.rollout).astype(dtype)
  turns, length_B = batch.rollout.turns, batch.rollout.length_B
  if turns is not None:  # environment tokens do not count as length
    length_B = sampled_BxT.sum(1).astype(length_B.dtype)
  groups = group_rows(batch.prompts, rollouts, parts)
  gather, group_B = groups.gather, groups.numbers(B)
  stages, reward_PxG = method.batch_stages, gather(batch.reward_B)
  if stages.reward_shaping is not None:
    reward_PxG = stages.reward_shaping(reward_PxG, gather(batch.correct_B), gather(length_B), T)
  penalty_BxT = _reward_penalty(method, batch, policies, sampled_BxT)
  if penalty_BxT is not None and stages.credit_assignment is None:
    reward_PxG -= gather(penalty_BxT.sum(1))
  extra = _extra_inputs(method, batch, gather, leverage_B)
  advantage_PxG = stages.advantage(reward_PxG, gather(length_B.astype(dtype)), **extra)
  if method.needs_greedy:
    mask_BxT = mask_BxT * (jnp.arange(B) % rollouts > 0)[:, None]
  if method.token_stages.distillation is not None:
    mask_BxT = _read_by_teacher(batch, mask_BxT)
  if method.mask_zero_variance:
    mask_BxT = mask_BxT * mixed_group_mask(compared(method, batch), length_B, groups)[:, None]
  weight_BxT, kl_weight_BxT = _denominators(method, batch, mask_BxT, group_B, groups)
  advantage_BxT, return_BxT = groups.scatter(advantage_PxG)[:, None], None
  if stages.credit_assignment is not None:
    inputs = CreditInputs(advantage_BxT, sampled_BxT, group_B, penalty_BxT=penalty_BxT)
    inputs = _of_tokens(inputs, method, batch.rollout, signal_BxT)
    advantage_BxT, return_BxT = stages.credit_assignment(inputs)
  target = Targets(
    mask_BxT=mask_BxT,
    advantage_BxT=advantage_BxT * mask_BxT,
    weight_BxT=weight_BxT,
    kl_weight_BxT=kl_weight_BxT,
    behavior_BxT=batch.rollout.logp_BxT,
    correct_B=batch.correct_B,
    group_B=group_B,
    return_BxT=return_BxT,
    policies=policies,
    replayed_B=batch.replayed_B,
    sampled_BxT=None if turns is None else sampled_BxT,
  )
  return target if batch.imitation_B is None else _with_imitation(method, batch, target)


def _denominators(
  method: Method, batch: Batch, mask_BxT: jax.Array, group_B: jax.Array, groups: Groups
) -> tuple[jax.Array, jax.Array | None]:
  """`weight_BxT` and `kl_weight_BxT` of `Targets`."""
  weight_BxT, kl_weight_BxT = method.denominators(mask_BxT, group_B, batch.rollout)
  if method.batch_stages.kl_scale is None:
    return weight_BxT, kl_weight_BxT
  context_PxN, context_P = None, batch.prompts.context_P
  if context_P is not None:
    context_PxN = groups.gather(jnp.repeat(context_P, groups.rollouts))
  scale_PxN = method.batch_stages.kl_scale(
    groups.gather(batch.correct_B), groups.gather(batch.rollout.length_B), context_PxN
  )
  kl_weight_BxT = weight_BxT if kl_weight_BxT is None else kl_weight_BxT
  return weight_BxT, kl_weight_BxT * groups.scatter(scale_PxN)[:, None]


def _read_by_teacher(batch: Batch, mask_BxT: jax.Array) -> jax.Array:
  """The mask without rows that have no solution, and without tokens outside of spans."""
  if batch.solutions is not None:
    mask_BxT = mask_BxT * (batch.solutions.length_B > 0)[:, None]
  if batch.teacher_tokens is not None:
    mask_BxT = mask_BxT * (batch.teacher_tokens.own_span_BxT >= 0)
  return mask_BxT


def mean_reward_penalty(method: Method, batch: Batch, target: Targets) -> jax.Array:
  """The mean over sampled tokens of the KL penalty in the reward: []."""
  mask_BxT = sampled_mask(batch.rollout)
  penalty_BxT = present(_reward_penalty(method, batch, target.policies, mask_BxT))
  return penalty_BxT.sum() / jnp.maximum(mask_BxT.sum(), 1)


def _reward_penalty(
  method: Method, batch: Batch, policies: OtherPolicies, mask_BxT: jax.Array
) -> jax.Array | None:
  """The KL penalty of each sampled token; None without one."""
  penalize = method.batch_stages.reward_kl
  if penalize is None:
    return None
  old_BxT = batch.rollout.logp_BxT if policies.old_BxT is None else policies.old_BxT
  return jnp.where(mask_BxT > 0, penalize(old_BxT, present(policies.reference_BxT)), 0.0)


def _of_tokens(
  inputs: CreditInputs, method: Method, rollout: Rollout, signal_BxT: jax.Array | None
) -> CreditInputs:
  """The inputs with tokens, turns and the signal of the auxiliary model."""
  inputs, turns = inputs._replace(tokens_BxT=rollout.tokens_BxT), rollout.turns
  if turns is not None:
    inputs = inputs._replace(
      turn_BxT=jnp.maximum(turns.number_BxT, 0),
      turn_reward_BxT=turns.reward_BxT,
      state_BxT=turns.state_BxT,
    )
  if method.auxiliary_model is not None:
    inputs = inputs._replace(**{f'{method.auxiliary_model.signal_kind}_BxT': signal_BxT})
  return inputs


def _extra_inputs(
  method: Method,
  batch: Batch,
  gather: Callable[[Array], Array],
  leverage_B: jax.Array | None,
) -> dict[str, Array]:
  """Inputs of the advantage besides rewards and lengths, by the names of its parameters."""
  needs = needs_of(method.batch_stages.advantage)
  extra: dict[str, Array] = {}
  if 'norms' in needs:
    extra['leverage_PxG'] = gather(present(leverage_B))
  if 'contexts' in needs:
    context_P = present(batch.prompts.context_P)
    rollouts = batch.reward_B.shape[0] // context_P.shape[0]
    extra['context_PxG'] = gather(jnp.repeat(context_P, rollouts))
  if 'parts' in needs:
    parts_PxGxK = jax.vmap(gather, in_axes=1, out_axes=2)(present(batch.parts_BxK))
    weight_K = jnp.ones(parts_PxGxK.shape[-1]) if method.weight_K is None else method.weight_K
    extra['parts_PxGxK'] = parts_PxGxK
    extra['weight_K'] = jnp.asarray(weight_K, jnp.result_type(batch.reward_B))
  return extra


def mixed_group_mask(score_BxK: Array, length_B: Array, groups: Groups) -> jax.Array:
  """1 for rows of a group in which any of K scores differs by more than `rewards.outcomes.SAME`, else 0: [B].

  For binary scores: groups with right and wrong rows, arXiv:2503.14476 (DAPO).
  """
  exists_PxG = groups.gather(length_B) > 0
  mixed_P: Array | bool = False
  for k in range(score_BxK.shape[1]):
    score_PxG = groups.gather(score_BxK[:, k])
    high_P = jnp.where(exists_PxG, score_PxG, -jnp.inf).max(1)
    mixed_P |= high_P - jnp.where(exists_PxG, score_PxG, jnp.inf).min(1) > SAME
  return groups.scatter(jnp.asarray(mixed_P).astype(jnp.float32)[:, None])


def _with_imitation(method: Method, batch: Batch, target: Targets) -> Targets:
  advantage_BxT, group_B = target.advantage_BxT, target.group_B
  term = self_imitation.targets(method, batch, target.mask_BxT, advantage_BxT, group_B)
  return target._replace(imitation_B=batch.imitation_B, **term)


def distill(method: Method, target: Targets, span_BxT: Array | None = None) -> Targets:
  """Targets with the advantages that the stage `distillation` computes from frozen policies.

  With `span_BxT`, the number of each token's span, a token has the sum over the tokens of its span.
  """
  tokens = _tokens(method, target, _old_log_probs(target))
  advantage_BxT = present(method.token_stages.distillation)(tokens)
  if span_BxT is not None:
    advantage_BxT = token_spans.summed(advantage_BxT, span_BxT)
  return target._replace(advantage_BxT=advantage_BxT)


def coefficients(
  method: Method,
  target: Targets,
  logp_BxT: Array,
  entropy_BxT: jax.Array | None = None,
  confidence_BxT: jax.Array | None = None,
  collision_BxT: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """c = correction · token weight · W(r, A) · A / denominator + KL coefficient / its denominator, detached.

  Returns c_BxT and sums for the log, with the keys `SUMS`. The loss is −Σ c·log π. `logp_BxT` may be NaN or infinite
  where the mask is 0. The sums add up over microbatches. A method that `needs_rows` needs all rows of a minibatch.
  """
  others = entropy_BxT, confidence_BxT, collision_BxT
  record_checks.tokens(target.mask_BxT, logp_BxT, *others)
  stages = method.token_stages
  tokens = _tokens(method, target, logp_BxT, *others)
  if stages.advantage_modulation is not None:
    tokens = tokens._replace(advantage_BxT=stages.advantage_modulation(tokens))
  masked_in, has_advantage = tokens.mask_BxT > 0, tokens.advantage_BxT != 0
  trust_BxT, surrogate_BxT = stages.trust_region(stages.ratio(tokens), tokens)
  sums, factor = {name: jnp.float32(0) for name in SUMS}, 1.0
  if stages.importance_correction is not None:
    weight, keep = stages.importance_correction(tokens)
    factor = weight * keep
    sums['rejected'] = (masked_in & (keep == 0) & has_advantage).sum().astype(jnp.float32)
  if stages.token_weighting is not None:
    factor *= stages.token_weighting(tokens._replace(clipped_BxT=trust_BxT == 0))
  c_BxT = target.weight_BxT * factor * trust_BxT * tokens.advantage_BxT
  if stages.kl is not None:
    kl_BxT, kl_value_BxT = stages.kl(tokens)
    kl_weight_BxT = target.weight_BxT if target.kl_weight_BxT is None else target.kl_weight_BxT
    c_BxT += kl_weight_BxT * kl_BxT
    sums['kl_loss'] = jnp.where(masked_in, kl_weight_BxT * kl_value_BxT, 0.0).sum()
  sums |= {
    'pg_loss': -(target.weight_BxT * factor * surrogate_BxT).sum(),
    'clipped': (masked_in & (trust_BxT == 0) & has_advantage).sum().astype(jnp.float32),
    'kl': jnp.where(masked_in, tokens.behavior_BxT - tokens.logp_BxT, 0.0).sum(),
  }
  return jax.lax.stop_gradient(jnp.where(masked_in, c_BxT, 0.0)), sums


def learning_rate_scale(method: Method, target: Targets, logp_BxT: jax.Array) -> jax.Array:
  """A factor on the learning rate of a minibatch, from all its rows at once: []."""
  return present(method.token_stages.lr_scale)(_tokens(method, target, logp_BxT))


def _old_log_probs(target: Targets) -> Array:
  old_BxT = target.policies.old_BxT
  return target.behavior_BxT if old_BxT is None else old_BxT


def _tokens(
  method: Method,
  target: Targets,
  logp_BxT: Array,
  entropy_BxT: jax.Array | None = None,
  confidence_BxT: jax.Array | None = None,
  collision_BxT: jax.Array | None = None,
) -> Tokens:
  """Inputs of the token stages: no gradients, and 0 where the mask is 0."""
  masked_in = target.mask_BxT > 0
  behavior_BxT, old_BxT = target.behavior_BxT, _old_log_probs(target)
  if target.replayed_B is not None:
    fill = replayed_log_probs.behavior_log_probs
    behavior_BxT = fill(target.replayed_B, behavior_BxT, logp_BxT)
    old_BxT = fill(target.replayed_B, old_BxT, logp_BxT)

  def masked(x_BxT: Array) -> jax.Array:
    return jnp.where(masked_in, jax.lax.stop_gradient(x_BxT), 0.0)

  def masked_or_none(x_BxT: jax.Array | None) -> jax.Array | None:
    return None if x_BxT is None else masked(x_BxT)

  tokens = Tokens(
    logp_BxT=masked(logp_BxT),
    old_BxT=masked(old_BxT),
    behavior_BxT=masked(behavior_BxT),
    mask_BxT=target.mask_BxT,
    advantage_BxT=target.advantage_BxT,
    correct_B=target.correct_B,
    group_B=target.group_B,
    imitation_B=target.imitation_B,
    reference_BxT=masked_or_none(target.policies.reference_BxT),
    teacher_BxT=masked_or_none(target.policies.teacher_BxT),
    entropy_BxT=masked_or_none(entropy_BxT),
    confidence_BxT=masked_or_none(confidence_BxT),
    collision_BxT=masked_or_none(collision_BxT),
    steps=target.steps,
  )
  if method.token_stages.old_policy is None:
    return tokens
  return tokens._replace(old_BxT=method.token_stages.old_policy(tokens))
