"""The second model beside the policy: it begins as a copy of it, gives a number for each token, and learns."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm import objective
from jaxrl_llm.learner.microbatch import (
  by_row,
  foreign,
  hidden,
  joined,
  reference,
  rescore,
  scores,
  slices,
)
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.objective.auxiliary_loss import AuxiliaryTargets
from jaxrl_llm.objective.token_inputs import batch_mean
from jaxrl_llm.types import Batch, TrainState


class State(NamedTuple):
  """What of a auxiliary model outlives a step."""

  params: Any  # {'decoder': …}, and for a critic {'value': {'kernel': [D], 'bias': []}}
  opt_state: Any


def init(spec: StepSpec, params: Any) -> State | None:
  """A copy of the policy, for a critic with a head that says 0; None where the method has no auxiliary.

  Source: none.
  """
  auxiliary = spec.objective.method.auxiliary_model
  if auxiliary is None:
    return None
  own = dict(decoder=jax.tree.map(jnp.copy, params))
  if auxiliary.signal_kind == 'values':
    own['value'] = dict(kernel=jnp.zeros(spec.model.config.width), bias=jnp.zeros(()))
  return State(own, spec.objective.auxiliary_optimizer.init(own))


def run(
  spec: StepSpec, state: TrainState, minibatches: Batch
) -> tuple[State, jax.Array, dict[str, jax.Array]]:
  """Teaches the auxiliary model every minibatch [U, …] once → its state, what it gives [U, B, T], numbers [U] for the log.

  A critic gives what it said before it learned from any of them, the others what they say after.
  Source: arXiv:1707.06347 (PPO), arXiv:2502.01456 (PRIME).
  """
  auxiliary = spec.objective.method.auxiliary_model
  base = _base(spec, state, minibatches)

  def give(params):
    def score(piece):
      batch = by_row(piece[0])
      return auxiliary.signal(outputs(spec, params, batch), _targets(spec, batch, piece[1]))

    return jax.lax.map(score, (minibatches, base))

  def learn(own, known):
    def teach(own, piece):
      batch = by_row(piece[0])
      return _learn(spec, own, batch, _targets(spec, batch, *piece[1:]))

    return jax.lax.scan(teach, own, (minibatches, base, known))

  if auxiliary.signal_kind == 'values':
    signal = give(state.auxiliary_model.params)
    own, told = learn(state.auxiliary_model, signal)
  else:
    own, told = learn(state.auxiliary_model, None)
    signal = give(own.params)
  return own, signal, told


def outputs(spec: StepSpec, params: Any, batch: Batch) -> jax.Array:
  """Values, or log-probabilities, [B, T] of a minibatch, slice by slice, without a gradient. Source: none."""
  frozen = jax.lax.stop_gradient(params)
  prompts, tokens, *_ = slices(spec, batch, None)
  return joined(spec, jax.lax.map(lambda x: _output(spec, frozen, *x), (prompts, tokens)))


def _output(spec: StepSpec, params: Any, prompts, tokens_BxT: jax.Array) -> jax.Array:
  if spec.objective.method.auxiliary_model.signal_kind == 'process':
    return rescore(spec, params['decoder'], prompts, tokens_BxT)[0]
  hidden_BxTxD = hidden(spec, params['decoder'], prompts, tokens_BxT).astype(jnp.float32)
  return hidden_BxTxD @ params['value']['kernel'] + params['value']['bias']


def _base(spec: StepSpec, state: TrainState, minibatches: Batch) -> jax.Array | None:
  """Log-probabilities [U, B, T] that the auxiliary model's own are compared with."""
  if spec.objective.method.auxiliary_model.base == 'reference':
    first = reference(state)
    score = lambda x: scores(spec, first, foreign(by_row(x)))[0]  # noqa: E731
    return jax.lax.map(score, minibatches)
  if spec.objective.method.auxiliary_model.base == 'behavior':
    return jax.lax.map(lambda x: by_row(x).rollout.logp_BxT, minibatches)
  return None


def _targets(
  spec: StepSpec, batch: Batch, base: jax.Array | None, old: jax.Array | None = None
) -> AuxiliaryTargets:
  """What one minibatch teaches; with `old` values, the returns that they should have been."""
  mask_BxT = objective.sampled_mask(batch.rollout)
  exists_B = (batch.rollout.length_B > 0).astype(jnp.float32)
  targets = AuxiliaryTargets(
    mask_BxT=mask_BxT,
    weight_BxT=mask_BxT / jnp.maximum(mask_BxT.sum(), 1),
    weight_B=exists_B / jnp.maximum(exists_B.sum(), 1),
    correct_B=batch.correct_B,
    base_BxT=base,
    old_BxT=old,
  )
  if old is None:
    return targets
  target = objective.targets(spec.objective.method, batch, spec.layout.group, old)
  return targets._replace(return_BxT=target.return_BxT)


def _learn(
  spec: StepSpec, own: State, batch: Batch, targets: AuxiliaryTargets
) -> tuple[State, dict[str, jax.Array]]:
  """Sums the gradient over slices, then takes one guarded optimizer step."""
  auxiliary, rollouts = spec.objective.method.auxiliary_model, spec.layout.group
  whole = {}
  if auxiliary.compares_rows:
    slope = jax.grad(auxiliary.loss, has_aux=True)
    c_BxT, whole = slope(outputs(spec, own.params, batch), targets, rollouts)
    targets = targets._replace(c_BxT=c_BxT)

  def slice_loss(params, prompts, tokens_BxT, length_B, targets):
    del length_B
    output_BxT = _output(spec, params, prompts, tokens_BxT)
    if targets.c_BxT is None:
      return auxiliary.loss(output_BxT, targets, rollouts)
    return jnp.where(targets.mask_BxT > 0, targets.c_BxT * output_BxT, 0.0).sum(), {}

  def accumulate(total, piece):
    return jax.tree.map(
      jnp.add, total, jax.grad(slice_loss, has_aux=True)(own.params, *piece)
    ), None

  sums = {} if auxiliary.compares_rows else auxiliary.loss(targets.mask_BxT, targets, rollouts)[1]
  zeros = jax.tree.map(jnp.zeros_like, (own.params, sums))
  (grads, sums), _ = jax.lax.scan(accumulate, zeros, slices(spec, batch, targets))
  norm = optax.tree.norm(grads)
  own = jax.lax.cond(
    jnp.isfinite(norm) & (batch.rollout.length_B.sum() > 0),
    lambda: _apply(spec, own, grads),
    lambda: own,
  )
  return own, sums | whole | _told(targets, norm)


def _apply(spec: StepSpec, own: State, grads: Any) -> State:
  updates, opt_state = spec.objective.auxiliary_optimizer.update(grads, own.opt_state, own.params)
  return State(optax.apply_updates(own.params, updates), opt_state)


def _told(targets: AuxiliaryTargets, norm: jax.Array) -> dict[str, jax.Array]:
  if targets.return_BxT is None:
    return {'companion/grad_norm': norm}
  mean = lambda x: batch_mean(x, targets.mask_BxT)  # noqa: E731
  variance = lambda x: mean((x - mean(x)) ** 2)  # noqa: E731
  left = variance(targets.return_BxT - targets.old_BxT)
  return {
    'critic/grad_norm': norm,
    'critic/vf_explained_var': 1 - left / (variance(targets.return_BxT) + 1e-5),
    'critic/values/mean': mean(targets.old_BxT),
    'critic/returns/mean': mean(targets.return_BxT),
  }
