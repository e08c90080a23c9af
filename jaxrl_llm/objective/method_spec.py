"""A method: one function for each stage of `config.objective`, and the inputs that they need."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeAlias, cast

import jax

from jaxrl_llm.config.schema import ObjectiveConfig
from jaxrl_llm.config.stages import active, choices, pick
from jaxrl_llm.objective import (
  advantage,
  advantage_modulation,
  aggregation,
  auxiliary_loss,
  contracts,
  credit_assignment,
  distillation,
  importance_correction,
  kl,
  kl_scale,
  lr_scale,
  old_policy,
  ratio,
  reward_kl,
  reward_shaping,
  sft_loss,
  token_weighting,
  trust_region,
)
from jaxrl_llm.objective.token_inputs import needs_of
from jaxrl_llm.types import Rollout, UserError

# Stages of `config.objective` that choose a function, and the modules of these functions.
STAGES = dict(
  reward_shaping=reward_shaping,
  reward_kl=reward_kl,
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
  kl_scale=kl_scale,
  lr_scale=lr_scale,
  distillation=distillation,
  sft_loss=sft_loss,
)
_ALWAYS_ON = ('advantage', 'aggregation', 'ratio', 'trust_region')

Pair: TypeAlias = tuple[jax.Array, jax.Array]


class BatchStages(NamedTuple):
  """Stages that run on rewards and lengths, before the policy is evaluated; None: the stage is off."""

  reward_shaping: functools.partial[jax.Array] | None
  reward_kl: functools.partial[jax.Array] | None
  advantage: functools.partial[jax.Array]
  credit_assignment: functools.partial[tuple[jax.Array, jax.Array | None]] | None
  aggregation: functools.partial[jax.Array]
  kl_aggregation: functools.partial[jax.Array] | None  # None: as `aggregation`
  kl_scale: functools.partial[jax.Array] | None
  sft_loss: functools.partial[sft_loss.Plan] | None


class TokenStages(NamedTuple):
  """Stages that run on log-probs of tokens; None: the stage is off."""

  old_policy: functools.partial[jax.Array] | None
  distillation: functools.partial[jax.Array] | None
  advantage_modulation: functools.partial[jax.Array] | None
  importance_correction: functools.partial[Pair] | None
  ratio: functools.partial[jax.Array]
  trust_region: functools.partial[Pair]
  token_weighting: functools.partial[jax.Array] | None
  kl: functools.partial[Pair] | None
  lr_scale: functools.partial[jax.Array] | None


class Method(NamedTuple):
  """A policy-gradient method: a function for each stage, and what the update must prepare for them."""

  batch_stages: BatchStages
  token_stages: TokenStages
  needs: frozenset[str]  # inputs of the chosen functions, see `token_inputs.needs`
  mask_zero_variance: bool  # zero-variance groups leave the mask and every denominator
  weigh_rows: bool  # rows kept at random count 1 / their probability; denominators count them once
  auxiliary_model: auxiliary_loss.AuxiliaryModel | None  # None: only the policy is trained
  weight_K: tuple[float, ...] | None = None  # of the K rewards in their sum; None: all 1

  def denominators(self, mask_BxT: jax.Array, group_B: jax.Array, rollout: Rollout) -> Weights:
    """`weight_BxT` and `kl_weight_BxT` of `Targets`."""
    stages, T = self.batch_stages, mask_BxT.shape[1]
    weight_BxT, kl_weight_BxT = stages.aggregation(mask_BxT, T, group_B), None
    if stages.kl_aggregation is not None:
      kl_weight_BxT = stages.kl_aggregation(mask_BxT, T, group_B)
    if self.weigh_rows:
      weight_Bx1 = rollout.weight_B[:, None]
      weight_BxT *= weight_Bx1
      kl_weight_BxT = None if kl_weight_BxT is None else kl_weight_BxT * weight_Bx1
    return weight_BxT, kl_weight_BxT

  @property
  def learns_without_advantage(self) -> bool:
    """Rows with advantage 0 may have coefficients other than 0: there is a KL penalty."""
    return self.token_stages.kl is not None

  @property
  def needs_old(self) -> bool:
    """Log-probs of the weights before the first minibatch over the whole batch, or of averaged weights."""
    return 'old' in self.needs

  @property
  def needs_average(self) -> bool:
    """An average of the weights over optimizer steps, as the old policy."""
    return 'average' in self.needs

  @property
  def needs_versions(self) -> bool:
    """The number of optimizer steps since each token was sampled."""
    return 'versions' in self.needs

  @property
  def needs_step(self) -> bool:
    """The number of optimizer steps taken."""
    return 'step' in self.needs

  @property
  def needs_norms(self) -> bool:
    """The gradient norm of each row: a backward pass row by row."""
    return 'norms' in self.needs

  @property
  def needs_contexts(self) -> bool:
    """The strategy in each row's prompt."""
    return 'contexts' in self.needs

  @property
  def needs_rows(self) -> bool:
    """Coefficients depend on all rows of a minibatch: they are computed before its gradient."""
    return 'rows' in self.needs

  @property
  def reads_minibatch(self) -> bool:
    """Forward passes over a minibatch come before its gradient, of this policy or of frozen or averaged weights."""
    frozen = 'reference' in self.needs or self.needs_teacher or self.needs_solution
    return self.needs_rows or self.needs_average or frozen

  @property
  def needs_parts(self) -> bool:
    """Each of several rewards instead of their sum."""
    return 'parts' in self.needs

  @property
  def needs_confidence(self) -> bool:
    """The mean of the largest probabilities of each token."""
    return 'confidence' in self.needs

  @property
  def needs_collision(self) -> bool:
    """The sum of squared probabilities of each token."""
    return 'collision' in self.needs

  @property
  def needs_greedy(self) -> bool:
    """The first row of each group is sampled greedily, and leaves the loss."""
    return 'greedy' in self.needs

  @property
  def needs_reference(self) -> bool:
    """A frozen policy: for a KL penalty, for demonstrations, or as the base of an auxiliary model."""
    base = '' if self.auxiliary_model is None else self.auxiliary_model.base
    kinds = {'reference', 'demo_reference', 'reward_reference', 'solution'}
    return bool(kinds & (self.needs | {base}))

  @property
  def needs_teacher(self) -> bool:
    """Log-probs of another model."""
    return 'teacher' in self.needs

  @property
  def needs_spans(self) -> bool:
    """The teacher's log-probs are of spans of text; tokens outside of spans leave the loss."""
    return 'spans' in self.needs

  @property
  def needs_solution(self) -> bool:
    """Log-probs of the reference model, which reads a solution in the prompt; rows without one leave the loss."""
    return 'solution' in self.needs

  @property
  def needs_demo(self) -> bool:
    """A demonstration of each prompt in the batch."""
    return 'demo' in self.needs


Weights: TypeAlias = tuple[jax.Array, jax.Array | None]


def method(config: ObjectiveConfig) -> Method:
  """Reads `config.objective`.

  Raises UserError for an unknown function or setting, for functions that may not be combined (`contracts`), and for a
  credit assignment without its auxiliary model, or an auxiliary model without a use.
  """
  policy = config.zero_variance['fn']
  if policy not in ('keep', 'mask'):
    raise UserError(
      f'config.objective.zero_variance.fn={policy!r} is unknown; choose one of: keep, mask.'
    )
  auxiliary_model = _auxiliary_model(config)
  _check_old_policy(config)
  stages = {name: _stage(config, name) for name in STAGES}
  contracts.check(config, STAGES)
  called: dict[str, Any] = {n: s if n in _ALWAYS_ON else active(s) for n, s in stages.items()}
  called['kl_aggregation'] = stages['kl_aggregation'] = _kl_aggregation(config)
  return Method(
    batch_stages=BatchStages(**{name: called[name] for name in BatchStages._fields}),
    token_stages=TokenStages(**{name: called[name] for name in TokenStages._fields}),
    needs=_needs(stages),
    mask_zero_variance=policy == 'mask',
    weigh_rows=config.weigh_rows,
    auxiliary_model=auxiliary_model,
  )


def _stage(config: ObjectiveConfig, name: str) -> Any:
  return pick(STAGES[name], config[name], f'objective.{name}')


def _kl_aggregation(config: ObjectiveConfig) -> functools.partial[jax.Array] | None:
  """The function of `config.kl_aggregation`; None where the KL term has the denominator of the policy term.

  `auto` is what the KL function declares with `token_inputs.default_aggregation`.
  """
  name, valid = config.kl_aggregation['fn'], choices(aggregation)
  if name != 'auto' and name not in valid:
    raise UserError(
      f'config.objective.kl_aggregation.fn={name!r} is unknown; choose one of: auto, {", ".join(sorted(valid))}.'
    )
  if name != 'auto':
    return pick(aggregation, config.kl_aggregation, 'objective.kl_aggregation')
  default: str | None = getattr(_stage(config, 'kl').func, 'default_aggregation', None)
  return None if default is None else functools.partial(getattr(aggregation, default))


def _needs(stages: dict[str, functools.partial]) -> frozenset[str]:
  """The inputs of all stages; any old policy but `auto` declares for itself whether log-probs are recomputed."""
  others = (fn for name, fn in stages.items() if name not in ('old_policy', 'auxiliary_model'))
  needed = frozenset[str]().union(*(needs_of(fn) for fn in others if fn is not None))
  if stages['old_policy'].func is not old_policy.auto:
    needed -= {'old'}
  return needed | needs_of(stages['old_policy'])


def _auxiliary_model(config: ObjectiveConfig) -> auxiliary_loss.AuxiliaryModel | None:
  """The second model, if credit assignment needs one and it returns the right signal."""
  model = cast('auxiliary_loss.AuxiliaryModel | None', _stage(config, 'auxiliary_model')())
  needed = needs_of(_stage(config, 'credit_assignment'))
  if model is None and not needed:
    return None
  setting = f'config.objective.auxiliary_model.fn={config.auxiliary_model["fn"]!r}'
  if model is not None and not model.learning_rate > 0:
    raise UserError(f'{setting}: its learning_rate={model.learning_rate!r} must be above 0.')
  fits = dict(values='critic', process='outcome (or preference)', deviation='flow', nothing='none')
  need = next(iter(needed), 'nothing')
  if model is None or model.signal_kind != need:
    raise UserError(
      f'config.objective.credit_assignment.fn={config.credit_assignment["fn"]!r} needs {need} of an auxiliary model, '
      f'and {setting} returns {"nothing" if model is None else model.signal_kind}; '
      f'set --config.objective.auxiliary_model.fn={fits[need]}.'
    )
  return model


def _check_old_policy(config: ObjectiveConfig) -> None:
  decay = _stage(config, 'old_policy').keywords.get('decay', 0.0)
  if config.old_policy['fn'] == 'average' and not 0 <= decay < 1:
    raise UserError(f'config.objective.old_policy.decay={decay!r} must be at least 0 and below 1.')
