"""The learning half of the step: a batch in minibatches, each with one optimizer step or a loop of several."""

from __future__ import annotations

import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm import objective
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import auxiliary_model
from jaxrl_llm.learner.inner_steps import LastTurnFirst, SlowFast
from jaxrl_llm.learner.microbatch import (
  all_log_probs,
  by_prompt,
  by_row,
  pack,
  policy_weights,
)
from jaxrl_llm.learner.minibatch import TRAINED_TOKENS, MinibatchInputs, minibatch_step
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.learner.train_draft_head import train_draft_head
from jaxrl_llm.objective import record_checks
from jaxrl_llm.rollout import correctness_head
from jaxrl_llm.rollout.draft_head import DraftHeadState
from jaxrl_llm.rollout.length_head import LengthHeadState
from jaxrl_llm.types import Batch, Metrics, TrainState

Tree = TypeVar('Tree')


@sharding.on_mesh
@jax.named_scope('update')
def update(spec: StepSpec, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
  """Takes the optimizer steps of a batch.

  With `skips_empty`, a batch without tokens returns the state as it is and zeros as metrics.
  """
  record_checks.batch(batch)
  if spec.layout.mesh.shape['context'] > 1:
    # The arrays of a batch are small. Activations, which are large, are cut over 'context' by token.
    rows = NamedSharding(spec.layout.mesh, PartitionSpec(sharding.UPDATE_ROWS))
    batch = jax.lax.with_sharding_constraint(batch, rows)
  learn = lambda: _learn(spec, state, batch)  # noqa: E731
  if not spec.update.skips_empty:
    return learn()
  blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(learn)[1])
  return jax.lax.cond(batch.rollout.length_B.sum() > 0, learn, lambda: (state, blank))


def _learn(spec: StepSpec, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
  carried = state.carried
  state = state._replace(carried=())  # not a carry of the loops below, which would copy the caches
  minibatches = _in_minibatches(spec, by_prompt(spec, batch))
  inputs = MinibatchInputs(began=state.step)
  minibatches, inputs = _with_first_log_probs(spec, state, batch, minibatches, inputs)
  auxiliary_metrics = {}
  if spec.objective.method.auxiliary_model is not None:
    auxiliary, signal, auxiliary_metrics = auxiliary_model.run(spec, state, minibatches)
    state, inputs = state._replace(auxiliary_model=auxiliary), inputs._replace(signal=signal)
  inputs = inputs._replace(began=jnp.broadcast_to(inputs.began, (spec.update.minibatches,)))
  state, metrics = _passes(spec, state, minibatches, inputs)
  metrics |= auxiliary_metrics
  if state.rollout_head is not None:
    head, errors = _train_rollout_head(spec, state, batch)
    state, metrics = state._replace(rollout_head=head), metrics | errors
  metrics = {k: v.max() if k.endswith('_max') else v.mean() for k, v in metrics.items()}
  return state._replace(carried=carried), metrics


def _in_minibatches(spec: StepSpec, by_prompt: Tree) -> Tree:
  """Arrays [P, …] as [U, P / U, …]: minibatch u takes every U-th prompt, so that rows stay on their device."""
  U = spec.update.minibatches
  return jax.tree.map(
    lambda x: x.reshape(x.shape[0] // U, U, *x.shape[1:]).swapaxes(0, 1), by_prompt
  )


def _passes(
  spec: StepSpec, state: TrainState, minibatches: Batch, inputs: MinibatchInputs
) -> tuple[TrainState, Metrics]:
  """The optimizer steps of all passes over the minibatches [U, …]; metrics are means over passes, or maxima."""

  def one_pass(state, minibatches):
    step = lambda state, minibatch: _steps(spec, state, by_row(minibatch[0]), minibatch[1])  # noqa: E731
    return jax.lax.scan(step, state, minibatches)

  if spec.update.passes == 1:
    return one_pass(state, (minibatches, inputs))
  key = jax.random.fold_in(jax.random.key(state.seed), state.step)

  def shuffled_pass(state, number):
    shuffle = functools.partial(_shuffled, spec, jax.random.fold_in(key, number))
    changed = lambda: shuffle((minibatches, inputs))  # noqa: E731
    return one_pass(state, jax.lax.cond(number > 0, changed, lambda: (minibatches, inputs)))

  state, metrics = jax.lax.scan(shuffled_pass, state, jnp.arange(spec.update.passes))
  return state, {k: v.max(0) if k.endswith('_max') else v.mean(0) for k, v in metrics.items()}


def _shuffled(
  spec: StepSpec, key: jax.Array, minibatches: tuple[Batch, MinibatchInputs]
) -> tuple[Batch, MinibatchInputs]:
  """The prompts in other minibatches, with their rows; arrays lead with [U, P / U], or of rows with [U, B / U]."""
  U = spec.update.minibatches
  if U == 1:
    return minibatches
  P = minibatches[0].prompts.length_P.size
  order_P = jax.random.permutation(key, P)

  def move(x):
    if x.ndim == 1:  # one value for a minibatch, the same in all
      return x
    rows = x.shape[0] * x.shape[1] // P
    return x.reshape(P, rows, *x.shape[2:])[order_P].reshape(x.shape)

  return jax.tree.map(move, minibatches)


def _with_first_log_probs(
  spec: StepSpec, state: TrainState, batch: Batch, minibatches: Batch, inputs: MinibatchInputs
) -> tuple[Batch, MinibatchInputs]:
  """Log-probs of all minibatches before the first optimizer step: of the old policy, and of replayed rows."""
  method = spec.objective.method
  needs_old = method.needs_old and not method.needs_average
  fills_replayed = _fills_replayed(spec, batch)
  if not needs_old and not fills_replayed:
    return minibatches, inputs
  weights = policy_weights(spec, state.base, state.params)
  first = jax.lax.map(
    lambda x: all_log_probs(spec, weights, pack(spec, by_row(x)))[0],
    minibatches,
  )
  if needs_old:
    inputs = inputs._replace(old=first)
  if fills_replayed:
    first = first.reshape(minibatches.rollout.logp_BxT.shape)
    minibatches = objective.fill_replayed_log_probs(minibatches, first)
  return minibatches, inputs


def _fills_replayed(spec: StepSpec, batch: Batch) -> bool:
  """Whether replayed rows need log-probs before the first step; a single step computes them in its own pass."""
  single = spec.update.minibatches == spec.update.passes == 1 and spec.update.inner_steps is None
  return batch.replayed_B is not None and (not single or spec.objective.method.needs_norms)


def _train_rollout_head(
  spec: StepSpec, state: TrainState, batch: Batch
) -> tuple[LengthHeadState | DraftHeadState | correctness_head.CorrectnessHead, Metrics]:
  """The length head, the draft head, or the correctness head where pruning trains one, and metrics."""
  if spec.rollout.drafts.head is not None:
    return train_draft_head(spec, state, batch)
  if spec.rollout.length_head is not None:
    return spec.rollout.length_head.train(state.rollout_head, batch.rollout)
  pruning = spec.rollout.pruning
  if pruning is None or not pruning.learning_rate:
    return state.rollout_head, {}
  real_B = (batch.rollout.length_B > 0).astype(jnp.float32)
  trained = correctness_head.train(
    state.rollout_head,
    batch.rollout.feature_BxF,
    batch.correct_B,
    real_B * batch.rollout.weight_B,
    pruning.learning_rate,
  )
  return trained, {}


def _steps(
  spec: StepSpec, state: TrainState, batch: Batch, inputs: MinibatchInputs
) -> tuple[TrainState, Metrics]:
  """All optimizer steps on a minibatch."""
  loop = spec.update.inner_steps
  if loop is None:
    return minibatch_step(spec, state, batch, inputs)
  if isinstance(loop, LastTurnFirst):
    return _turn_by_turn(spec, loop, state, batch, inputs)
  return _slow_fast(spec, loop, state, batch, inputs)


def _turn_by_turn(
  spec: StepSpec, loop: LastTurnFirst, state: TrainState, batch: Batch, inputs: MinibatchInputs
) -> tuple[TrainState, Metrics]:
  """SeeUPO: a step for every turn, the last turn first. The old policy is that before the turn's step."""
  assert batch.rollout.turns is not None
  number_BxT = batch.rollout.turns.number_BxT
  packed = pack(spec, batch)
  last = number_BxT.max()  # −1 for a batch without tokens

  def step(state, turn, multiplier_B, logp_BxT):
    turn_inputs = inputs._replace(turn=turn, multiplier=multiplier_B, old=logp_BxT)
    return minibatch_step(spec, state, batch, turn_inputs)

  def body(index, carry):
    state, multiplier_B, before_BxT, totals = carry
    turn = last - index
    weights = policy_weights(spec, state.base, state.params)
    logp_BxT = all_log_probs(spec, weights, packed)[0]
    # The step before changed the probability of the turn that it learned.
    learned_BxT = (number_BxT == turn + 1).astype(logp_BxT.dtype)
    multiplier_B = loop.multiplier(multiplier_B, logp_BxT, before_BxT, learned_BxT)
    state, metrics = step(state, turn, multiplier_B, logp_BxT)
    return state, multiplier_B, logp_BxT, _add_by_tokens(totals, metrics)

  begun = jnp.ones(number_BxT.shape[0], jnp.float32), jnp.zeros_like(batch.rollout.logp_BxT)
  shapes = jax.eval_shape(step, state, last, *begun)[1]
  carry = state, *begun, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  state, _, _, totals = jax.lax.fori_loop(0, last + 1, body, carry)
  tokens = jnp.maximum(totals[TRAINED_TOKENS], 1)
  metrics = {
    k: v if k == TRAINED_TOKENS or k.endswith('_max') else v / tokens for k, v in totals.items()
  }
  return state, metrics | {'actor/turns': (last + 1).astype(jnp.float32)}


def _add_by_tokens(totals: Metrics, metrics: Metrics) -> Metrics:
  """Totals with the metrics of one more step, weighted by its tokens; maxima stay maxima."""
  tokens = metrics[TRAINED_TOKENS]
  weighted = {k: v if k == TRAINED_TOKENS else v * tokens for k, v in metrics.items()}
  return {
    k: jnp.maximum(totals[k], metrics[k]) if k.endswith('_max') else totals[k] + v
    for k, v in weighted.items()
  }


def _slow_fast(
  spec: StepSpec, loop: SlowFast, state: TrainState, batch: Batch, inputs: MinibatchInputs
) -> tuple[TrainState, Metrics]:
  """SFPO: K inner steps, interpolate toward the start, one outer step."""
  step = lambda state: minibatch_step(spec, state, batch, inputs)  # noqa: E731
  start, loop_state = state.params, state.inner_steps
  fast = loop.steps(loop_state)

  def body(index, carry):  # one body for inner and outer steps, so that it is compiled once
    state, _ = carry
    back = lambda: loop.reposition(start, state.params)  # noqa: E731
    state = state._replace(params=jax.lax.cond(index == fast, back, lambda: state.params))
    return step(state)

  blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(step, state)[1])
  state, metrics = jax.lax.fori_loop(0, fast + 1, body, (state, blank))
  real = batch.rollout.length_B.sum() > 0
  # Metrics are those of the outer step, and so is the entropy that the loop observes.
  loop_state = loop.observe(loop_state, metrics['actor/entropy'], real)
  metrics['actor/fast_steps'] = fast.astype(jnp.float32)
  return state._replace(inner_steps=loop_state), metrics
