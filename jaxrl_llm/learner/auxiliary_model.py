"""The auxiliary model beside the policy: a copy of it, or a flow of its latents, with a number for each token."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm import objective
from jaxrl_llm.learner.flow_deviation import deviations
from jaxrl_llm.learner.microbatch import (
  Microbatch,
  accumulate,
  all_log_probs,
  by_row,
  pack,
  packed_hidden_states,
  packed_log_probs,
  packed_scores,
  reference_weights,
)
from jaxrl_llm.learner.slice_sums import accumulate_sums
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.models import flow_head
from jaxrl_llm.objective.auxiliary_loss import AuxiliaryModel, AuxiliaryTargets
from jaxrl_llm.objective.token_inputs import batch_mean
from jaxrl_llm.types import Batch, Metrics, Params, TrainState


class State(NamedTuple):
  """The part of an auxiliary model that outlives a step."""

  # {'decoder': …}, and for a critic {'value': {'kernel': [D], 'bias': []}}; of a flow {'flow': …} alone
  params: Params
  opt_state: optax.OptState


def init(spec: StepSpec, params: Params) -> State:
  """A copy of the policy, for a critic with a head of zeros; or a flow's network."""
  auxiliary, optimizer = _auxiliary(spec), spec.objective.auxiliary_optimizer
  assert optimizer is not None
  if auxiliary.flow is not None:
    weights = dict(flow=flow_head.init(spec.model.config.width, auxiliary.flow.depth, spec.seed))
    return State(weights, optimizer.init(weights))
  weights = dict(decoder=jax.tree.map(jnp.copy, params))
  if auxiliary.signal_kind == 'values':
    weights['value'] = dict(kernel=jnp.zeros(spec.model.config.width), bias=jnp.zeros(()))
  return State(weights, optimizer.init(weights))


def run(spec: StepSpec, state: TrainState, minibatches: Batch) -> tuple[State, jax.Array, Metrics]:
  """Trains on every minibatch [U, …] once → (state, signal [U, B, T] for credit assignment, metrics [U]).

  The signal of a critic or a flow is computed before it is trained on any of them, that of other models after.
  arXiv:1707.06347 (PPO), arXiv:2502.01456 (PRIME).
  """
  auxiliary = _auxiliary(spec)
  base = _base_log_probs(spec, state, minibatches)

  def signals(params):
    def signal(minibatch):
      batch = by_row(minibatch[0])
      output_BxT = outputs(spec, state, params, batch)
      return auxiliary.signal(output_BxT, _targets(spec, batch, minibatch[1]))

    return jax.lax.map(signal, (minibatches, base))

  def train(start, old_values):
    def train_minibatch(current, minibatch):
      batch = by_row(minibatch[0])
      return _train_minibatch(spec, state, current, batch, _targets(spec, batch, *minibatch[1:]))

    return jax.lax.scan(train_minibatch, start, (minibatches, base, old_values))

  if auxiliary.signal_is_first:
    signal = signals(state.auxiliary_model.params)
    is_critic = auxiliary.signal_kind == 'values'
    trained, metrics = train(state.auxiliary_model, signal if is_critic else None)
    if auxiliary.flow is not None:
      signal = jnp.where(state.step >= auxiliary.flow.after, signal, 0.0)
  else:
    trained, metrics = train(state.auxiliary_model, None)
    signal = signals(trained.params)
  return trained, signal, metrics


def _auxiliary(spec: StepSpec) -> AuxiliaryModel:
  assert spec.objective.method.auxiliary_model is not None
  return spec.objective.method.auxiliary_model


def outputs(spec: StepSpec, state: TrainState, params: Params, batch: Batch) -> jax.Array:
  """Values, log-probabilities or deviations [B, T] of a minibatch, by microbatch and without a gradient."""
  params = jax.lax.stop_gradient(params)
  packed = pack(spec, batch).without_routes()
  score = lambda microbatch: (_output(spec, state, params, microbatch),)  # noqa: E731
  return packed_scores(spec, packed, score)[0]


def _output(spec: StepSpec, state: TrainState, params: Params, microbatch: Microbatch) -> jax.Array:
  """Values, log-probabilities or deviations [Z, U] of the predicted tokens."""
  auxiliary = _auxiliary(spec)
  if auxiliary.flow is not None:
    return deviations(spec, auxiliary.flow, state, params['flow'], microbatch)
  if auxiliary.signal_kind == 'process':
    return packed_log_probs(spec, params['decoder'], microbatch)[0]
  hidden_ZxUxD = packed_hidden_states(spec, params['decoder'], microbatch).astype(jnp.float32)
  return hidden_ZxUxD @ params['value']['kernel'] + params['value']['bias']


def _base_log_probs(spec: StepSpec, state: TrainState, minibatches: Batch) -> jax.Array | None:
  """Log-probabilities [U, B, T] that those of the auxiliary model are compared with."""
  base = _auxiliary(spec).base
  if base == 'reference':
    weights = reference_weights(state)
    packed = lambda x: pack(spec, by_row(x)).without_routes()  # noqa: E731
    return jax.lax.map(lambda x: all_log_probs(spec, weights, packed(x))[0], minibatches)
  if base == 'behavior':
    return jax.lax.map(lambda x: by_row(x).rollout.logp_BxT, minibatches)
  return None


def _targets(
  spec: StepSpec,
  batch: Batch,
  base_BxT: jax.Array | None,
  old_BxT: jax.Array | None = None,
) -> AuxiliaryTargets:
  """Targets of one minibatch; with old values, the returns that values are regressed on."""
  mask_BxT = objective.sampled_mask(batch.rollout)
  exists_B = (batch.rollout.length_B > 0).astype(jnp.float32)
  targets = AuxiliaryTargets(
    mask_BxT=mask_BxT,
    weight_BxT=mask_BxT / jnp.maximum(mask_BxT.sum(), 1),
    weight_B=exists_B / jnp.maximum(exists_B.sum(), 1),
    correct_B=batch.correct_B,
    base_BxT=base_BxT,
    old_BxT=old_BxT,
  )
  if old_BxT is None:
    return targets
  policy_targets = objective.targets(spec.objective.method, batch, spec.layout.group, old_BxT)
  return targets._replace(return_BxT=policy_targets.return_BxT)


def _train_minibatch(
  spec: StepSpec, state: TrainState, current: State, batch: Batch, targets: AuxiliaryTargets
) -> tuple[State, Metrics]:
  """One optimizer step on the gradient summed over microbatches; skipped where that is not finite."""
  auxiliary, group = _auxiliary(spec), spec.layout.group
  minibatch_sums = {}
  if auxiliary.compares_rows:
    slope = jax.grad(auxiliary.loss, has_aux=True)
    c_BxT, minibatch_sums = slope(outputs(spec, state, current.params, batch), targets, group)
    targets = targets._replace(c_BxT=c_BxT)

  def microbatch_loss(params, microbatch, targets):
    output_BxT = microbatch.to_rows(_output(spec, state, params, microbatch))
    if targets.c_BxT is None:
      return auxiliary.loss(output_BxT, targets, group)
    return jnp.where(targets.mask_BxT > 0, targets.c_BxT * output_BxT, 0.0).sum(), {}

  def add(total, microbatch, targets):
    grads_and_sums = jax.grad(microbatch_loss, has_aux=True)(current.params, microbatch, targets)
    return jax.tree.map(jnp.add, total, grads_and_sums)

  sums = {} if auxiliary.compares_rows else auxiliary.loss(targets.mask_BxT, targets, group)[1]
  zeros = jax.tree.map(jnp.zeros_like, (current.params, sums))
  packed = pack(spec, batch).without_routes()
  over_rows = accumulate_sums if spec.layout.slices > 1 else accumulate
  grads, sums = over_rows(spec, packed, targets, add, zeros)
  norm = optax.tree.norm(grads)
  trained = jax.lax.cond(
    jnp.isfinite(norm) & (batch.rollout.length_B.sum() > 0),
    lambda: _apply(spec, current, grads),
    lambda: current,
  )
  return trained, sums | minibatch_sums | _metrics(targets, norm)


def _apply(spec: StepSpec, current: State, grads: Params) -> State:
  assert spec.objective.auxiliary_optimizer is not None
  updates, opt_state = spec.objective.auxiliary_optimizer.update(
    grads, current.opt_state, current.params
  )
  return State(optax.apply_updates(current.params, updates), opt_state)


def _metrics(targets: AuxiliaryTargets, norm: jax.Array) -> Metrics:
  if targets.return_BxT is None or targets.old_BxT is None:
    return {'companion/grad_norm': norm}
  mean = lambda x: batch_mean(x, targets.mask_BxT)  # noqa: E731
  variance = lambda x: mean((x - mean(x)) ** 2)  # noqa: E731
  residual = variance(targets.return_BxT - targets.old_BxT)
  return {
    'critic/grad_norm': norm,
    'critic/vf_explained_var': 1 - residual / (variance(targets.return_BxT) + 1e-5),
    'critic/values/mean': mean(targets.old_BxT),
    'critic/returns/mean': mean(targets.return_BxT),
  }
