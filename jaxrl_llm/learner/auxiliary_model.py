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
from jaxrl_llm.learner.step_spec import Program
from jaxrl_llm.objective.auxiliary_loss import Lesson
from jaxrl_llm.objective.token_inputs import batch_mean
from jaxrl_llm.types import Batch, TrainState


class State(NamedTuple):
  """What of a companion outlives a step."""

  params: Any  # {'decoder': …}, and for a critic {'value': {'kernel': [D], 'bias': []}}
  opt_state: Any


def init(program: Program, params: Any) -> State | None:
  """A copy of the policy, for a critic with a head that says 0; None where the method has no companion.

  Source: none.
  """
  companion = program.method.auxiliary_model
  if companion is None:
    return None
  own = dict(decoder=jax.tree.map(jnp.copy, params))
  if companion.gives == 'values':
    own['value'] = dict(kernel=jnp.zeros(program.model.width), bias=jnp.zeros(()))
  return State(own, program.companion_optimizer.init(own))


def run(
  program: Program, state: TrainState, minibatches: Batch
) -> tuple[State, jax.Array, dict[str, jax.Array]]:
  """Teaches the companion every minibatch [U, …] once → its state, what it gives [U, B, T], numbers [U] for the log.

  A critic gives what it said before it learned from any of them, the others what they say after.
  Source: arXiv:1707.06347 (PPO), arXiv:2502.01456 (PRIME).
  """
  companion = program.method.auxiliary_model
  base = _base(program, state, minibatches)

  def give(params):
    def score(piece):
      batch = by_row(piece[0])
      return companion.signal(outputs(program, params, batch), _lesson(program, batch, piece[1]))

    return jax.lax.map(score, (minibatches, base))

  def learn(own, known):
    def teach(own, piece):
      batch = by_row(piece[0])
      return _learn(program, own, batch, _lesson(program, batch, *piece[1:]))

    return jax.lax.scan(teach, own, (minibatches, base, known))

  if companion.gives == 'values':
    signal = give(state.companion.params)
    own, told = learn(state.companion, signal)
  else:
    own, told = learn(state.companion, None)
    signal = give(own.params)
  return own, signal, told


def outputs(program: Program, params: Any, batch: Batch) -> jax.Array:
  """Values, or log-probabilities, [B, T] of a minibatch, slice by slice, without a gradient. Source: none."""
  frozen = jax.lax.stop_gradient(params)
  prompts, tokens, *_ = slices(program, batch, None)
  return joined(program, jax.lax.map(lambda x: _output(program, frozen, *x), (prompts, tokens)))


def _output(program: Program, params: Any, prompts, tokens_BxT: jax.Array) -> jax.Array:
  if program.method.auxiliary_model.gives == 'process':
    return rescore(program, params['decoder'], prompts, tokens_BxT)[0]
  hidden_BxTxD = hidden(program, params['decoder'], prompts, tokens_BxT).astype(jnp.float32)
  return hidden_BxTxD @ params['value']['kernel'] + params['value']['bias']


def _base(program: Program, state: TrainState, minibatches: Batch) -> jax.Array | None:
  """Log-probabilities [U, B, T] that the companion's own are compared with."""
  if program.method.auxiliary_model.base == 'reference':
    first = reference(state)
    score = lambda x: scores(program, first, foreign(by_row(x)))[0]  # noqa: E731
    return jax.lax.map(score, minibatches)
  if program.method.auxiliary_model.base == 'behavior':
    return jax.lax.map(lambda x: by_row(x).rollout.logp_BxT, minibatches)
  return None


def _lesson(
  program: Program, batch: Batch, base: jax.Array | None, old: jax.Array | None = None
) -> Lesson:
  """What one minibatch teaches; with `old` values, the returns that they should have been."""
  mask_BxT = objective.said(batch.rollout)
  exists_B = (batch.rollout.length_B > 0).astype(jnp.float32)
  lesson = Lesson(
    mask_BxT=mask_BxT,
    weight_BxT=mask_BxT / jnp.maximum(mask_BxT.sum(), 1),
    weight_B=exists_B / jnp.maximum(exists_B.sum(), 1),
    correct_B=batch.correct_B,
    base_BxT=base,
    old_BxT=old,
  )
  if old is None:
    return lesson
  target = objective.targets(program.method, batch, program.generate.rollouts, old)
  return lesson._replace(return_BxT=target.return_BxT)


def _learn(
  program: Program, own: State, batch: Batch, lesson: Lesson
) -> tuple[State, dict[str, jax.Array]]:
  """Sums the gradient over slices, then takes one guarded optimizer step."""
  companion, rollouts = program.method.auxiliary_model, program.generate.rollouts
  whole = {}
  if companion.whole:
    slope = jax.grad(companion.loss, has_aux=True)
    c_BxT, whole = slope(outputs(program, own.params, batch), lesson, rollouts)
    lesson = lesson._replace(c_BxT=c_BxT)

  def slice_loss(params, prompts, tokens_BxT, length_B, lesson):
    del length_B
    output_BxT = _output(program, params, prompts, tokens_BxT)
    if lesson.c_BxT is None:
      return companion.loss(output_BxT, lesson, rollouts)
    return jnp.where(lesson.mask_BxT > 0, lesson.c_BxT * output_BxT, 0.0).sum(), {}

  def accumulate(total, piece):
    return jax.tree.map(
      jnp.add, total, jax.grad(slice_loss, has_aux=True)(own.params, *piece)
    ), None

  sums = {} if companion.whole else companion.loss(lesson.mask_BxT, lesson, rollouts)[1]
  zeros = jax.tree.map(jnp.zeros_like, (own.params, sums))
  (grads, sums), _ = jax.lax.scan(accumulate, zeros, slices(program, batch, lesson))
  norm = optax.tree.norm(grads)
  own = jax.lax.cond(
    jnp.isfinite(norm) & (batch.rollout.length_B.sum() > 0),
    lambda: _apply(program, own, grads),
    lambda: own,
  )
  return own, sums | whole | _told(lesson, norm)


def _apply(program: Program, own: State, grads: Any) -> State:
  updates, opt_state = program.companion_optimizer.update(grads, own.opt_state, own.params)
  return State(optax.apply_updates(own.params, updates), opt_state)


def _told(lesson: Lesson, norm: jax.Array) -> dict[str, jax.Array]:
  if lesson.return_BxT is None:
    return {'companion/grad_norm': norm}
  mean = lambda x: batch_mean(x, lesson.mask_BxT)  # noqa: E731
  variance = lambda x: mean((x - mean(x)) ** 2)  # noqa: E731
  left = variance(lesson.return_BxT - lesson.old_BxT)
  return {
    'critic/grad_norm': norm,
    'critic/vf_explained_var': 1 - left / (variance(lesson.return_BxT) + 1e-5),
    'critic/values/mean': mean(lesson.old_BxT),
    'critic/returns/mean': mean(lesson.return_BxT),
  }
