"""From rewards to one coefficient per token: every method here has the gradient of −Σ sg(c)·log π."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.config.stages import pick
from jaxrl_llm.objective import (
  advantage,
  advantage_modulation,
  aggregation,
  auxiliary_loss,
  contracts,
  credit_assignment,
  denominators,
  distillation,
  importance_correction,
  kl,
  lr_scale,
  old_policy,
  ratio,
  record_checks,
  replayed_log_probs,
  reward_shaping,
  sft_loss,
  token_weighting,
  trust_region,
)
from jaxrl_llm.objective.grouping import Groups, groups
from jaxrl_llm.objective.token_inputs import CreditInputs, Tokens, said
from jaxrl_llm.rewards.outcomes import SAME, compared
from jaxrl_llm.types import Batch, Rollout, UserError

# Stages of `config.objective` whose functions may require others beside them, and where these functions are.
STAGES = dict(
  reward_shaping=reward_shaping,
  advantage=advantage,
  credit_assignment=credit_assignment,
  auxiliary_model=auxiliary_loss,
  importance_correction=importance_correction,
  old_policy=old_policy,
  ratio=ratio,
  advantage_modulation=advantage_modulation,
  trust_region=trust_region,
  token_weighting=token_weighting,
  aggregation=aggregation,
  kl=kl,
  lr_scale=lr_scale,
  distillation=distillation,
  sft_loss=sft_loss,
)


class Method(NamedTuple):
  """A method is a choice of small functions and two switches, and perhaps of a second model."""

  reward_shaping: Callable
  advantage: Callable
  credit_assignment: Callable
  importance_correction: Callable
  old_policy: Callable
  ratio: Callable
  advantage_modulation: Callable
  trust_region: Callable
  token_weighting: Callable
  aggregation: Callable
  kl: Callable
  kl_aggregation: Callable | None  # None: the KL term has the denominators of the policy term
  lr_scale: Callable
  distillation: Callable
  sft_loss: Callable
  mask_zero_variance: bool  # all-equal groups: out of the mask and out of every denominator
  weigh_rows: bool  # rows kept by chance count 1 / their probability; denominators count them once
  auxiliary_model: auxiliary_loss.AuxiliaryModel | None  # None: the policy learns alone
  # of the rewards that a row's reward is the sum of; None: all 1
  weight_K: tuple[float, ...] | None = None

  def denominators(self, mask_BxT: jax.Array, group_B: jax.Array, rollout: Rollout):
    """`weight_BxT` and `kl_weight_BxT` of `Targets`."""
    weight_B = rollout.weight_B if self.weigh_rows else None
    return denominators.weights(self.aggregation, self.kl_aggregation, mask_BxT, group_B, weight_B)

  @property
  def needs(self) -> frozenset[str]:
    """What the chosen functions cannot do without; see `tokens.needs`."""
    others = (fn for fn in self if callable(fn) and fn is not self.old_policy)
    asked = frozenset().union(*(getattr(fn.func, 'needs', ()) for fn in others))
    if self.old_policy.func is not old_policy.auto:
      asked -= {'old'}  # it says itself whose log-probs are the old ones
    return asked | getattr(self.old_policy.func, 'needs', frozenset())

  @property
  def needs_old(self) -> bool:
    """Log-probs of the weights before the first minibatch, over the whole batch; or of averaged ones."""
    return 'old' in self.needs

  @property
  def needs_average(self) -> bool:
    """An average of the weights over the optimizer's steps: whose log-probs the old ones are."""
    return 'average' in self.needs

  @property
  def needs_versions(self) -> bool:
    """How many optimizer steps ago each token was sampled."""
    return 'versions' in self.needs

  @property
  def needs_step(self) -> bool:
    """How many optimizer steps were taken."""
    return 'step' in self.needs

  @property
  def needs_norms(self) -> bool:
    """How hard each row pulls at the weights: a pass with a gradient, row by row."""
    return 'norms' in self.needs

  @property
  def needs_contexts(self) -> bool:
    """Which strategy each row's question was given."""
    return 'contexts' in self.needs

  @property
  def needs_rows(self) -> bool:
    """Coefficients depend on all rows of a minibatch: they are worked out before its gradient."""
    return 'rows' in self.needs

  @property
  def needs_parts(self) -> bool:
    """Each of several rewards, and not their sum."""
    return 'parts' in self.needs

  @property
  def needs_confidence(self) -> bool:
    """The mean of the largest probabilities of each token."""
    return 'confidence' in self.needs

  @property
  def needs_reference(self) -> bool:
    """A frozen policy: for a KL form, for demonstrations, or for a companion to be compared with."""
    beside = '' if self.auxiliary_model is None else self.auxiliary_model.base
    return bool({'reference', 'demo_reference'} & (self.needs | {beside}))

  @property
  def needs_teacher(self) -> bool:
    """Log-probs of another model."""
    return 'teacher' in self.needs

  @property
  def needs_demo(self) -> bool:
    """A demonstration of each prompt in the batch."""
    return 'demo' in self.needs

  @property
  def needs_prepass(self) -> bool:
    """A forward pass without gradient, before that with one."""
    return self.needs_old or self.needs_rows


class Targets(NamedTuple):
  """What a batch asks of the policy, before the policy is looked at. Every array leads with B."""

  mask_BxT: jax.Array  # float32, tokens that count
  advantage_BxT: jax.Array
  weight_BxT: jax.Array  # 1 / denominator where the mask is 1
  behavior_BxT: jax.Array  # log-probabilities recorded at sampling
  correct_B: jax.Array
  group_B: jax.Array  # int32
  kl_weight_BxT: jax.Array | None = None  # 1 / denominator of the KL term; None: `weight_BxT`
  old_BxT: jax.Array | None = None  # None: the behavior's
  reference_BxT: jax.Array | None = None  # None: no reference policy
  teacher_BxT: jax.Array | None = None  # None: no teacher
  c_BxT: jax.Array | None = None  # None: not worked out yet
  return_BxT: jax.Array | None = None  # what a critic should have said; None: there is no critic
  sampled_BxT: jax.Array | None = None  # 1 where the policy sampled; None: in all of a row
  # int32, optimizer steps since a token was sampled; None: nobody asks
  age_BxT: jax.Array | None = None
  batch_steps_BxT: jax.Array | None = None  # int32, of them, those taken on this batch
  step_B: jax.Array | None = None  # int32, optimizer steps taken; None: nobody asks
  replayed_B: jax.Array | None = None  # 1 for rows without old log-probs; None: all have some
  # [B, T, N, k], where each of N layers sends a token; None: where its router likes best
  expert_BxTxNxk: jax.Array | None = None


def method(config: Any) -> Method:
  """Reads `config.objective`. Raises UserError for a name or keyword that does not exist, for functions that do not go
  with each other (`contracts`), and for a credit without the companion that it needs or a companion that nobody
  asks."""
  policy = config.zero_variance['fn']
  if policy not in ('keep', 'mask'):
    raise UserError(
      f'config.objective.zero_variance.fn={policy!r} is unknown; choose one of: keep, mask.'
    )
  beside = _companion(config)
  _check_proximal(config)
  chosen = {
    stage: pick(module, config[stage], f'objective.{stage}') for stage, module in STAGES.items()
  }
  contracts.check(config, STAGES)
  return Method(
    **chosen | dict(auxiliary_model=beside),
    kl_aggregation=denominators.of_kl(config),
    mask_zero_variance=policy == 'mask',
    weigh_rows=config.weigh_rows,
  )


def _companion(config: Any) -> auxiliary_loss.AuxiliaryModel | None:
  """The second model, if the credit of tokens needs one and it is the right one."""
  made = pick(auxiliary_loss, config.auxiliary_model, 'objective.auxiliary_model')()
  asked = getattr(
    pick(credit_assignment, config.credit_assignment, 'objective.credit_assignment').func,
    'needs',
    frozenset(),
  )
  if made is None and not asked:
    return None
  told = f'config.objective.auxiliary_model.fn={config.auxiliary_model["fn"]!r}'
  if made is not None and not made.learning_rate > 0:
    raise UserError(f'{told}: its learning_rate={made.learning_rate!r} must be above 0.')
  fits = dict(values='critic', process='outcome or preference', nothing='none')
  need = next(iter(asked), 'nothing')
  if made is None or made.gives != need:
    raise UserError(
      f'config.objective.credit_assignment.fn={config.credit_assignment["fn"]!r} asks a companion for {need} and {told} gives '
      f'{"nothing" if made is None else made.gives}; set auxiliary_model.fn to {fits[need]}.'
    )
  return made


def _check_proximal(config: Any) -> None:
  decay = pick(old_policy, config.old_policy, 'objective.old_policy').keywords.get('decay', 0.0)
  if config.old_policy['fn'] == 'average' and not 0 <= decay < 1:
    raise UserError(
      f'config.objective.old_policy.decay={decay!r} must be from 0 to 1, 1 not included.'
    )


def targets(
  method: Method,
  batch: Batch,
  rollouts: int,
  signal_BxT: jax.Array | None = None,
  leverage_B: jax.Array | None = None,
  parts: int = 1,
) -> Targets:
  """Advantages and denominators, from the whole batch at once. Source: by the functions chosen.

  `signal_BxT` is what the method's companion gives, if it has one.

  Which groups are all-equal is judged by the scores before length shaping (`types.Batch`): a shaped reward
  always differs a little. The denominator counts what is left after masking them. A row's weight (1 / the
  probability that it was kept) multiplies its coefficients, and no denominator. `leverage_B` is for a method that
  `needs_norms`. `parts` is the most slots that one prompt fills: all its rows are one group.
  """
  record_checks.batch(batch, types=False)
  B, T = batch.rollout.tokens_BxT.shape
  dtype = jnp.result_type(batch.reward_B)
  mask_BxT = real_BxT = said(batch.rollout).astype(dtype)
  turns, length_B = batch.rollout.turns, batch.rollout.length_B
  if turns is not None:  # what was given makes no row longer
    length_B = real_BxT.sum(1).astype(length_B.dtype)
  own = groups(batch.prompts, rollouts, parts)
  group, group_B = own.gather, own.numbers(B)
  reward_PxG = method.reward_shaping(
    group(batch.reward_B), group(batch.correct_B), group(length_B), T
  )
  more = _extras(method, batch, group, leverage_B)
  advantage_PxG = method.advantage(reward_PxG, group(length_B.astype(dtype)), **more)
  if method.mask_zero_variance:
    mask_BxT = mask_BxT * mixed(compared(method, batch), length_B, own)[:, None]
  weight_BxT, kl_weight_BxT = method.denominators(mask_BxT, group_B, batch.rollout)
  inputs = CreditInputs(own.scatter(advantage_PxG)[:, None], real_BxT, group_B)
  if turns is not None:
    turn_BxT = jnp.maximum(turns.number_BxT, 0)
    inputs = inputs._replace(
      turn_BxT=turn_BxT, turn_reward_BxT=turns.reward_BxT, state_BxT=turns.state_BxT
    )
  if method.auxiliary_model is not None:
    inputs = inputs._replace(**{f'{method.auxiliary_model.gives}_BxT': signal_BxT})
  advantage_BxT, return_BxT = method.credit_assignment(inputs)
  return Targets(
    mask_BxT=mask_BxT,
    advantage_BxT=advantage_BxT * mask_BxT,
    weight_BxT=weight_BxT,
    kl_weight_BxT=kl_weight_BxT,
    behavior_BxT=batch.rollout.logp_BxT,
    correct_B=batch.correct_B,
    group_B=group_B,
    return_BxT=return_BxT,
    replayed_B=batch.replayed_B,
    sampled_BxT=None if turns is None else real_BxT,
  )


def _extras(
  method: Method, batch: Batch, group: Callable, leverage_B: jax.Array | None
) -> dict[str, jax.Array]:
  """What the advantage needs beside rewards and lengths, by the names of its parameters."""
  needs = getattr(method.advantage.func, 'needs', ())
  more = {}
  if 'norms' in needs:
    more['leverage_PxG'] = group(leverage_B)
  if 'contexts' in needs:
    rollouts = batch.reward_B.shape[0] // batch.prompts.context_P.shape[0]
    more['context_PxG'] = group(jnp.repeat(batch.prompts.context_P, rollouts))
  if 'parts' in needs:
    parts_PxGxK = jax.vmap(group, in_axes=1, out_axes=2)(batch.parts_BxK)
    weight_K = jnp.ones(parts_PxGxK.shape[-1]) if method.weight_K is None else method.weight_K
    more['parts_PxGxK'] = parts_PxGxK
    more['weight_K'] = jnp.asarray(weight_K, jnp.result_type(batch.reward_B))
  return more


def mixed(score_BxK: jax.Array, length_B: jax.Array, own: Groups) -> jax.Array:
  """1 for rows of a group of which any of K scores differs by more than `scores.SAME`, else 0: [B].

  For binary scores: groups that are neither all right nor all wrong, arXiv:2503.14476 (DAPO).
  """
  exists_PxG, mixed_P = own.gather(length_B) > 0, False
  for k in range(score_BxK.shape[1]):
    score_PxG = own.gather(score_BxK[:, k])
    high_P = jnp.where(exists_PxG, score_PxG, -jnp.inf).max(1)
    mixed_P |= high_P - jnp.where(exists_PxG, score_PxG, jnp.inf).min(1) > SAME
  return own.scatter(mixed_P.astype(jnp.float32)[:, None])


def distilled(method: Method, target: Targets) -> Targets:
  """Advantages of every token, from policies that do not learn. Source: by the functions chosen."""
  old_BxT = target.behavior_BxT if target.old_BxT is None else target.old_BxT
  return target._replace(advantage_BxT=method.distillation(_tokens(method, target, old_BxT)))


SUMS = ('pg_loss', 'clipped', 'rejected', 'kl', 'kl_loss')  # what `coefficients` adds up


def coefficients(
  method: Method,
  target: Targets,
  logp_BxT: jax.Array,
  entropy_BxT: jax.Array | None = None,
  confidence_BxT: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """c = correction · emphasis · W(r, A) · A / denominator + kl / its denominator, detached; and sums for the log.

  The loss is −Σ c·log π. `logp_BxT` may be −inf or anything where the mask is 0. The sums are to be added
  over slices of rows; a method that `needs_rows` takes all of a minibatch at once. Source: by the functions
  chosen.
  """
  record_checks.tokens(target.mask_BxT, logp_BxT, entropy_BxT, confidence_BxT)
  tokens = _tokens(method, target, logp_BxT, entropy_BxT, confidence_BxT)
  tokens = tokens._replace(advantage_BxT=method.advantage_modulation(tokens))
  seen = tokens.mask_BxT > 0
  weight, keep = method.importance_correction(tokens)
  trust_BxT, surrogate_BxT = method.trust_region(method.ratio(tokens), tokens)
  held_back = weight * keep * method.token_weighting(tokens._replace(clipped_BxT=trust_BxT == 0))
  kl_BxT, kl_value_BxT = method.kl(tokens)
  c_BxT = target.weight_BxT * held_back * trust_BxT * tokens.advantage_BxT
  kl_weight_BxT = target.weight_BxT if target.kl_weight_BxT is None else target.kl_weight_BxT
  c_BxT = jnp.where(seen, c_BxT + kl_weight_BxT * kl_BxT, 0.0)
  moved = tokens.advantage_BxT != 0
  sums = {
    'pg_loss': -(target.weight_BxT * held_back * surrogate_BxT).sum(),
    'clipped': (seen & (trust_BxT == 0) & moved).sum().astype(jnp.float32),
    'rejected': (seen & (keep == 0) & moved).sum().astype(jnp.float32),
    'kl': jnp.where(seen, tokens.behavior_BxT - tokens.logp_BxT, 0.0).sum(),
    'kl_loss': jnp.where(seen, kl_weight_BxT * kl_value_BxT, 0.0).sum(),
  }
  return jax.lax.stop_gradient(c_BxT), sums


def scale(method: Method, target: Targets, logp_BxT: jax.Array) -> jax.Array:
  """A factor on the learning rate for this minibatch, all rows at once. Source: by the functions chosen."""
  return method.lr_scale(_tokens(method, target, logp_BxT))


def _tokens(
  method: Method,
  target: Targets,
  logp_BxT: jax.Array,
  entropy_BxT: jax.Array | None = None,
  confidence_BxT: jax.Array | None = None,
) -> Tokens:
  """Everything the stages see, without gradients and without what lies where the mask is 0."""
  seen = target.mask_BxT > 0
  behavior_BxT = replayed_log_probs.behavior_log_probs(target.replayed_B, target.behavior_BxT, logp_BxT)
  old_BxT = target.behavior_BxT if target.old_BxT is None else target.old_BxT
  old_BxT = replayed_log_probs.behavior_log_probs(target.replayed_B, old_BxT, logp_BxT)

  def clean(x):
    return None if x is None else jnp.where(seen, jax.lax.stop_gradient(x), 0.0)

  tokens = Tokens(
    logp_BxT=clean(logp_BxT),
    old_BxT=clean(old_BxT),
    behavior_BxT=clean(behavior_BxT),
    mask_BxT=target.mask_BxT,
    advantage_BxT=target.advantage_BxT,
    correct_B=target.correct_B,
    group_B=target.group_B,
    reference_BxT=clean(target.reference_BxT),
    teacher_BxT=clean(target.teacher_BxT),
    entropy_BxT=clean(entropy_BxT),
    confidence_BxT=clean(confidence_BxT),
    age_BxT=target.age_BxT,
    batch_steps_BxT=target.batch_steps_BxT,
    step_B=target.step_B,
  )
  return tokens._replace(old_BxT=method.old_policy(tokens))
