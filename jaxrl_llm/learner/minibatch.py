"""A minibatch: targets, the gradient of the rows that are learned, and one guarded optimizer step."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm import objective
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import demonstration_loss, teacher_spans, vocabulary_terms
from jaxrl_llm.learner.leverage import row_leverage
from jaxrl_llm.learner.microbatch import (
  Microbatch,
  PackedBatch,
  accumulate,
  all_log_probs,
  pack,
  packed_log_probs,
  policy_weights,
  reference_weights,
)
from jaxrl_llm.learner.slice_sums import accumulate_sums
from jaxrl_llm.learner.step_spec import StepSpec, solution_spec, teacher_spec
from jaxrl_llm.models import logprob
from jaxrl_llm.rewards.outcomes import compared
from jaxrl_llm.types import Batch, Metrics, Params, TrainState

TRAINED_TOKENS = 'training/trained_tokens'
_TERMS = ('divergence', 'score_centering')
_SUMS = (*objective.SUMS, 'entropy', 'tokens', 'probs_diff', 'probs_diff_max')


class MinibatchInputs(NamedTuple):
  """Per-minibatch values computed before the first optimizer step of a batch."""

  began: jax.Array  # optimizer steps taken before the batch
  old: jax.Array | None = None  # log-probabilities [B, T] of the old policy
  signal: jax.Array | None = None  # [B, T], of the auxiliary model
  turn: jax.Array | None = None  # the only turn to learn; None: all of a row
  multiplier: jax.Array | None = None  # [B], factor on the advantages of that turn


class Gradient(NamedTuple):
  """Gradients of what the loss trains."""

  params: Params
  log_sigma_L: jax.Array | None  # of the activation noise


def minibatch_step(
  spec: StepSpec, state: TrainState, batch: Batch, inputs: MinibatchInputs
) -> tuple[TrainState, Metrics]:
  """One optimizer step, skipped where gradient or log-probs are not finite or the minibatch has no tokens."""
  method, target = spec.objective.method, minibatch_targets(spec, state, batch, inputs)
  demonstrations, minibatch_sums, scale, demo_metrics = None, {}, None, {}
  if method.needs_demo:
    target, demonstrations = demonstration_loss.plan(spec, state, batch, target)
  bonus = spec.objective.entropy_bonus
  if bonus is not None:
    coef = bonus.coefficient(state.entropy_bonus)
    target = target._replace(entropy_weight_BxT=coef * target.weight_BxT)
  divergence = spec.objective.divergence
  if divergence is not None:
    target = target._replace(advantage_BxT=divergence.reward_weight * target.advantage_BxT)
  if method.reads_minibatch:
    target, minibatch_sums, scale = _prepare(spec, state, batch, target)
  learned_B = learned_rows(spec, batch, target)
  grads, sums = gradient(spec, state, pack(spec, batch, learned_B), target)
  sums |= minibatch_sums
  if demonstrations is not None:
    params_grad, demo_metrics = demonstration_loss.add_gradient(
      spec, state, batch, demonstrations, grads.params
    )
    grads = grads._replace(params=params_grad)
  norm = optax.tree.norm(grads.params)
  # Rows that are left out have no gradient; their log-probs show weights that are not finite.
  sampled_BxT = objective.sampled_mask(batch.rollout) > 0
  usable = jnp.isfinite(norm)
  usable &= (jnp.isfinite(batch.rollout.logp_BxT) | ~sampled_BxT).all()
  if grads.log_sigma_L is not None:
    usable &= jnp.isfinite(grads.log_sigma_L).all()
  skip = lambda: state._replace(skipped=jnp.where(usable, state.skipped, state.skipped + 1))  # noqa: E731
  state, update_norm = jax.lax.cond(
    usable & (batch.rollout.length_B.sum() > 0),
    lambda: _apply(spec, state, grads, scale),
    lambda: (skip(), jnp.float32(0)),
  )
  metrics = _metrics(spec, state, batch, target, learned_B, sums, norm) | demo_metrics
  metrics['actor/update_norm'] = update_norm
  if (term := _vocabulary_term(spec)) is not None:
    metrics[f'actor/{term}'] = sums[term]
  if method.batch_stages.reward_kl is not None:
    metrics['critic/reward_kl'] = objective.mean_reward_penalty(method, batch, target)
  if scale is not None:
    metrics['actor/lr'] *= scale
  if bonus is not None:
    metrics['actor/entropy_coef'] = jnp.float32(bonus.coefficient(state.entropy_bonus))
    learned = bonus.observe(state.entropy_bonus, metrics['actor/entropy'], sums['tokens'] > 0)
    state = state._replace(entropy_bonus=learned)
  if spec.update.activation_noise is not None:
    metrics['actor/noise_sigma'] = jnp.exp(state.activation_noise.log_sigma_L).mean()
  return state, metrics


def minibatch_targets(
  spec: StepSpec, state: TrainState, batch: Batch, inputs: MinibatchInputs
) -> objective.Targets:
  """Advantages and denominators of a minibatch, and the inputs that its method needs besides."""
  method, leverage_B = spec.objective.method, None
  if method.needs_norms:
    leverage_B = row_leverage(spec, state.params, batch, state.base)
  policies = objective.OtherPolicies(inputs.old)
  if method.batch_stages.reward_kl is not None:
    packed = pack(spec, batch).without_routes()
    reference_BxT, *_ = all_log_probs(spec, reference_weights(state), packed)
    policies = policies._replace(reference_BxT=reference_BxT)
  group, slots = spec.layout.group, spec.layout.slots_per_prompt
  target = objective.targets(method, batch, group, inputs.signal, leverage_B, slots, policies)
  if method.needs_versions:
    version_BxT = batch.rollout.version_BxT
    target = target.with_arrays(
      age_BxT=state.step - version_BxT,
      batch_steps_BxT=jnp.broadcast_to(state.step - inputs.began, version_BxT.shape),
    )
  if method.needs_step:
    target = target.with_arrays(step_B=jnp.broadcast_to(state.step, batch.rollout.length_B.shape))
  if spec.objective.score_centering is not None:
    top_id_BxTxK, top_logp_BxTxK = batch.rollout.top_id_BxTxK, batch.rollout.top_logp_BxTxK
    target = target.with_arrays(top_id_BxTxK=top_id_BxTxK, top_logp_BxTxK=top_logp_BxTxK)
  if inputs.turn is not None and inputs.multiplier is not None:
    target = objective.turn_targets(method, target, batch.rollout, inputs.turn, inputs.multiplier)
  return target


def learned_rows(spec: StepSpec, batch: Batch, target: objective.Targets) -> jax.Array:
  """Rows whose coefficients may differ from 0: bool [B].

  An advantage of 0 gives a coefficient of 0 unless the method has a KL penalty or changes advantages later. A loop of
  inner steps observes the entropy of all rows; an entropy bonus or a divergence from a teacher learns from them.
  """
  real_B = batch.rollout.length_B > 0
  terms = spec.update.inner_steps, target.entropy_weight_BxT, spec.objective.divergence
  if any(term is not None for term in terms):
    return real_B
  if target.c_BxT is not None:
    return real_B & (target.c_BxT != 0).any(1)
  if spec.objective.method.learns_without_advantage:
    return real_B
  counts_BxT = (target.mask_BxT > 0) & (target.weight_BxT != 0)
  return real_B & (counts_BxT & (target.advantage_BxT != 0)).any(1)


def _prepare(
  spec: StepSpec, state: TrainState, batch: Batch, target: objective.Targets
) -> tuple[objective.Targets, Metrics, jax.Array | None]:
  """Forward passes over the minibatch before its gradient → targets, complete sums, a factor on the learning rate.

  They serve the log-probs of other policies, and methods whose coefficients depend on all rows of the minibatch.
  """
  method = spec.objective.method
  # A method whose coefficients depend on all rows reads those without an advantage, too; a teacher gives advantages.
  everything = method.needs_rows or method.needs_teacher or method.needs_solution
  packed = pack(spec, batch, None if everything else learned_rows(spec, batch, target))
  if 'reference' in method.needs and target.policies.reference_BxT is None:
    logp_BxT, *_ = all_log_probs(spec, reference_weights(state), packed.without_routes())
    target = target.with_arrays(reference_BxT=logp_BxT)
  if method.needs_average:
    average = policy_weights(spec, state.base, state.average)
    target = target.with_arrays(old_BxT=all_log_probs(spec, average, packed)[0])
  if method.token_stages.distillation is not None:
    target = _distilled(spec, state, batch, packed, target)
  if not method.needs_rows:
    return target, {}, None
  noise = _noise(spec, state, state.activation_noise and state.activation_noise.log_sigma_L)
  weights = policy_weights(spec, state.base, state.params)
  top, collision = _confidence_top_k(method), method.needs_collision
  logp_BxT, entropy_BxT, *others = all_log_probs(
    spec, weights, packed, noise, top=top, collision=collision
  )
  statistics = {'collision_BxT': others.pop()} if collision else {}
  c_BxT, sums = objective.coefficients(method, target, logp_BxT, entropy_BxT, *others, **statistics)
  scale = None
  if method.token_stages.lr_scale is not None:
    scale = objective.learning_rate_scale(method, target, logp_BxT)
  return target._replace(c_BxT=c_BxT), sums, scale


def _distilled(
  spec: StepSpec, state: TrainState, batch: Batch, packed: PackedBatch, target: objective.Targets
) -> objective.Targets:
  """Targets with the advantages that a teacher gives."""
  method = spec.objective.method
  if method.needs_spans:
    return teacher_spans.distill(spec, state, batch, target)
  if method.needs_solution:
    logp_BxT = _log_probs_with_solutions(spec, state, batch)
  else:
    logp_BxT, *_ = all_log_probs(teacher_spec(spec), state.teacher, packed.without_routes())
  return objective.distill(method, target.with_arrays(teacher_BxT=logp_BxT))


def _log_probs_with_solutions(spec: StepSpec, state: TrainState, batch: Batch) -> jax.Array:
  """Log-probs [B, T] of the reference model behind prompts with a solution; 0 in rows without one."""
  assert batch.solutions is not None
  tokens_BxL, length_B = batch.solutions
  # Each row has a prompt of its own.
  prompts = batch.prompts._replace(tokens_PxL=tokens_BxL, length_P=length_B)
  own = solution_spec(spec)
  packed = pack(own, batch._replace(prompts=prompts), length_B > 0).without_routes()
  return all_log_probs(own, reference_weights(state), packed)[0]


def gradient(
  spec: StepSpec, state: TrainState, packed: PackedBatch, target: objective.Targets
) -> tuple[Gradient, Metrics]:
  """The gradient of the loss and its sums, microbatch by microbatch; sums named *_max are maxima."""
  noise = state.activation_noise
  trained = Gradient(state.params, None if noise is None else noise.log_sigma_L)
  mesh, rules = spec.layout.mesh, spec.layout.rules

  def add(total, microbatch, target):
    term = None
    if _vocabulary_term(spec) is not None:
      term = vocabulary_terms.term(spec, state, microbatch, target)

    def loss(trained: Gradient):
      weights = policy_weights(spec, state.base, trained.params)
      noise = _noise(spec, state, trained.log_sigma_L)
      return microbatch_loss(spec, weights, microbatch, target, noise, term)

    grads, sums = jax.grad(loss, has_aux=True)(trained)
    summed = {
      k: jnp.maximum(v, sums[k]) if k.endswith('_max') else v + sums[k] for k, v in total[1].items()
    }
    return jax.tree.map(jnp.add, total[0], sharding.keep_layout(grads, mesh, rules)), summed

  zeros = sharding.keep_layout(jax.tree.map(jnp.zeros_like, trained), mesh, rules)
  over_rows = accumulate_sums if spec.layout.slices > 1 else accumulate
  names = _SUMS if (name := _vocabulary_term(spec)) is None else (*_SUMS, name)
  return over_rows(spec, packed, target, add, (zeros, {k: jnp.float32(0) for k in names}))


def microbatch_loss(
  spec: StepSpec,
  params: Params,
  microbatch: Microbatch,
  target: objective.Targets,
  noise: tuple[jax.Array, jax.Array] | None = None,
  term: logprob.VocabularyTerm | None = None,
) -> tuple[jax.Array, Metrics]:
  """−Σ c·log π of a microbatch, with every denominator inside c, and sums for the metrics.

  `target` holds the rows of the microbatch, in the places of its layout.
  """
  method = spec.objective.method
  top = 0 if target.c_BxT is not None else _confidence_top_k(method)
  has_bonus = target.entropy_weight_BxT is not None
  scores = packed_log_probs(
    spec, params, microbatch, noise, top, entropy_gradient=has_bonus, term=term
  )
  term_ZxU = None
  if term is not None:
    *scores, term_ZxU = scores
  frozen = jax.lax.stop_gradient(scores)
  logp_BxT, entropy_BxT, *others = map(microbatch.to_rows, frozen)
  if target.c_BxT is None:
    c_BxT, sums = objective.coefficients(method, target, logp_BxT, entropy_BxT, *others)
  else:
    c_BxT, sums = target.c_BxT, {name: jnp.float32(0) for name in objective.SUMS}
  real_BxT = microbatch.is_real
  if target.sampled_BxT is not None:
    real_BxT &= target.sampled_BxT > 0
  logp_BxT = jnp.where(real_BxT, logp_BxT, 0.0)
  behavior_BxT = target.behavior_BxT
  if target.replayed_B is not None:
    behavior_BxT = objective.behavior_log_probs(target.replayed_B, behavior_BxT, logp_BxT)
  gap_BxT = jnp.where(real_BxT, jnp.abs(jnp.exp(logp_BxT) - jnp.exp(behavior_BxT)), 0.0)
  sums |= {
    'entropy': jnp.where(real_BxT, entropy_BxT, 0.0).sum(),
    'tokens': real_BxT.sum().astype(jnp.float32),
    'probs_diff': gap_BxT.sum(),
    'probs_diff_max': gap_BxT.max(),
  }
  loss = _weighted_sum(microbatch.to_tokens(c_BxT), scores[0])
  if target.entropy_weight_BxT is not None:
    loss += _weighted_sum(microbatch.to_tokens(target.entropy_weight_BxT), scores[1])
  if (name := _vocabulary_term(spec)) is not None:
    assert term_ZxU is not None
    sums[name] = -_weighted_sum(microbatch.to_tokens(target.weight_BxT), term_ZxU)
    loss += sums[name]
  return loss, jax.lax.stop_gradient(sums)


def _vocabulary_term(spec: StepSpec) -> str | None:
  """The stage, and key in sums and metrics, of the term of the loss over the vocabulary; None without one."""
  return next((x for x in _TERMS if getattr(spec.objective, x) is not None), None)


def _weighted_sum(weight_ZxU: jax.Array, x_ZxU: jax.Array) -> jax.Array:
  """−Σ weight·x over the tokens of nonzero weight: x may be infinite elsewhere."""
  return -jnp.where(weight_ZxU == 0, 0.0, weight_ZxU * x_ZxU).sum()


def _confidence_top_k(method: objective.Method) -> int:
  return objective.CONFIDENCE_TOP_K if method.needs_confidence else 0


def _noise(
  spec: StepSpec, state: TrainState, log_sigma_L: jax.Array | None
) -> tuple[jax.Array, jax.Array] | None:
  """Standard deviations, and a key by seed and step: a repeated update draws the same noise."""
  if spec.update.activation_noise is None or log_sigma_L is None:
    return None
  return jnp.exp(log_sigma_L), jax.random.fold_in(jax.random.key(state.seed), state.step)


@jax.named_scope('optimizer')
def _apply(
  spec: StepSpec, state: TrainState, grads: Gradient, scale: jax.Array | None
) -> tuple[TrainState, jax.Array]:
  """The state after one optimizer step, and the norm of the change of the weights."""
  noise = spec.update.activation_noise
  if noise is not None and grads.log_sigma_L is not None:
    state = state._replace(activation_noise=noise.learn(state.activation_noise, grads.log_sigma_L))
  updates, opt_state = spec.update.optimizer.update(grads.params, state.opt_state, state.params)
  if scale is not None:
    updates = jax.tree.map(lambda x: x * scale, updates)
  params = optax.apply_updates(state.params, updates)
  refresh = spec.objective.refresh
  if refresh is not None:
    reference = refresh.after_step(state.step + 1, state.reference, params)
    state = state._replace(reference=reference)
  if spec.objective.average_decay is not None:
    state = state._replace(average=_averaged(spec.objective.average_decay, state, params))
  state = state._replace(
    params=params,
    opt_state=opt_state,
    step=state.step + 1,
    skipped=jnp.zeros_like(state.skipped),
  )
  return state, optax.tree.norm(updates)


def _averaged(decay: float, state: TrainState, params: Params) -> Params:
  """The mean of all weights so far, those of i optimizer steps ago with weight decay^i."""
  # 1 / Σ decay^i over the weights so far: one for each of `step` steps, this one and the start.
  weights = state.step.astype(jnp.float32) + 2
  share = (1 - decay) / -jnp.expm1(weights * math.log(decay)) if decay else 1.0
  return jax.tree.map(lambda mean, x: x + (1 - share) * (mean - x), state.average, params)


def _metrics(
  spec: StepSpec,
  state: TrainState,
  batch: Batch,
  target: objective.Targets,
  learned_B: jax.Array,
  sums: Metrics,
  norm: jax.Array,
) -> Metrics:
  """Metrics of the update. Means over tokens are over those of learned rows, advantages over all rows.

  So are the sums of a method whose coefficients depend on all rows.
  """
  tokens = jnp.maximum(sums['tokens'], 1)
  in_loss_BxT = target.mask_BxT > 0
  counted = jnp.maximum(in_loss_BxT.sum(), 1)
  if spec.objective.method.needs_rows:
    learned = counted
  else:
    learned = jnp.maximum((in_loss_BxT & learned_B[:, None]).sum(), 1)
  groups = objective.group_rows(batch.prompts, spec.layout.group, spec.layout.slots_per_prompt)
  mixed_B = objective.mixed_group_mask(
    compared(spec.objective.method, batch), batch.rollout.length_B, groups
  )
  # Advantages are those of the loss, so that an error in a mask or denominator is visible in the log.
  return {
    'actor/pg_loss': sums['pg_loss'],
    'actor/pg_clipfrac': sums['clipped'] / learned,
    'actor/ppo_kl': sums['kl'] / learned,
    'actor/kl_loss': sums['kl_loss'],
    'actor/rejected_frac': sums['rejected'] / learned,
    'actor/entropy': sums['entropy'] / tokens,
    'actor/grad_norm': norm,
    'actor/lr': spec.update.schedule(jnp.maximum(state.step - 1, 0)),
    'actor/skipped_updates': state.skipped.astype(jnp.float32),
    'critic/advantages/mean': (target.advantage_BxT * target.mask_BxT).sum() / counted,
    'critic/advantages/max': target.advantage_BxT.max(),
    'critic/advantages/min': target.advantage_BxT.min(),
    'training/rollout_probs_diff_mean': sums['probs_diff'] / tokens,
    'training/rollout_probs_diff_max': sums['probs_diff_max'],
    TRAINED_TOKENS: sums['tokens'],
    'training/batch_tokens': objective.sampled_mask(batch.rollout).sum(),
    'frac_reward_zero_std': 1 - mixed_B.mean(),
  }
