"""The learning half of the step: coefficients, the gradient slice by slice, and guarded optimizer steps."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm import objective
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import auxiliary_model, demonstration_loss
from jaxrl_llm.learner import inner_steps as outers
from jaxrl_llm.learner.microbatch import (
  by_prompt,
  by_row,
  foreign,
  leverage,
  policy,
  reference,
  rescore,
  scores,
  slices,
)
from jaxrl_llm.learner.step_spec import StepSpec, teacher_spec
from jaxrl_llm.objective import record_checks
from jaxrl_llm.rewards.outcomes import compared
from jaxrl_llm.rollout import correctness_head
from jaxrl_llm.types import Batch, TrainState


@sharding.on_mesh
@jax.named_scope('update')
def update(
  spec: StepSpec, state: TrainState, batch: Batch
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Takes `minibatches` optimizer steps on a batch; an empty batch changes nothing. Source: none."""
  record_checks.batch(batch)
  if spec.layout.mesh.shape['context'] > 1:
    # Only the few numbers of a batch: what is made of them is cut over 'context' token by token.
    rows = NamedSharding(spec.layout.mesh, PartitionSpec(sharding.UPDATE_ROWS))
    batch = jax.lax.with_sharding_constraint(batch, rows)
  learn = lambda: _learn(spec, state, batch)  # noqa: E731
  if not spec.update.skips_empty:
    return learn()
  blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(learn)[1])
  return jax.lax.cond(batch.rollout.length_B.sum() > 0, learn, lambda: (state, blank))


def _learn(spec: StepSpec, state: TrainState, batch: Batch):
  U, method, carried = spec.update.minibatches, spec.objective.method, state.carried
  state = state._replace(carried=())  # caches stay out of the loops below, which would hand them on
  minibatches = jax.tree.map(
    lambda x: x.reshape(x.shape[0] // U, U, *x.shape[1:]).swapaxes(0, 1), by_prompt(spec, batch)
  )
  known = Known(began=state.step)
  # Of all minibatches, before the first of them moves the weights.
  needs_old, replays = method.needs_old and not method.needs_average, _rescores(spec, batch)
  if needs_old or replays:
    weights = policy(spec, state.base, state.params)
    score = lambda x: scores(spec, weights, by_row(x))[0]  # noqa: E731
    before = jax.lax.map(score, minibatches)
    if needs_old:
      known = known._replace(old=before)
    if replays:
      before = before.reshape(minibatches.rollout.logp_BxT.shape)
      minibatches = objective.fill_replayed_log_probs(minibatches, before)
  told = {}
  if method.auxiliary_model is not None:
    beside, signal, told = auxiliary_model.run(spec, state, minibatches)
    state, known = state._replace(auxiliary_model=beside), known._replace(signal=signal)
  known = known._replace(began=jnp.broadcast_to(known.began, (U,)))
  state, metrics = jax.lax.scan(
    lambda state, piece: _steps(spec, state, by_row(piece[0]), piece[1]),
    state,
    (minibatches, known),
  )
  metrics |= told
  if spec.rollout.pruning is not None and spec.rollout.pruning.learning_rate:
    state = state._replace(correctness_head=_judged(spec, state, batch))
  metrics = {k: v.max() if k.endswith('_max') else v.mean() for k, v in metrics.items()}
  return state._replace(carried=carried), metrics


def _rescores(spec: StepSpec, batch: Batch) -> bool:
  """Whether replayed rows must be scored at the start: a lone step works their old log-probs out by itself."""
  lone = spec.update.minibatches == 1 and spec.update.inner_steps is None
  return batch.replayed_B is not None and (not lone or spec.objective.method.needs_norms)


class Known(NamedTuple):
  """What is worked out of a minibatch before the first of a batch moves the weights."""

  began: jax.Array  # optimizer steps taken before the batch
  old: jax.Array | None = None  # log-probabilities [B, T]
  signal: jax.Array | None = None  # of the auxiliary model, [B, T]
  turn: jax.Array | None = None  # the one that is learned now; None: all of a row at once
  multiplier: jax.Array | None = None  # [B], what that turn's advantages count


def _judged(spec: StepSpec, state: TrainState, batch: Batch) -> correctness_head.CorrectnessHead:
  """The judge of half-said rollouts, taught by how these ended."""
  real_B = (batch.rollout.length_B > 0).astype(jnp.float32)
  return correctness_head.train(
    state.correctness_head,
    batch.rollout.feature_BxF,
    batch.correct_B,
    real_B * batch.rollout.weight_B,
    spec.rollout.pruning.learning_rate,
  )


def _steps(spec: StepSpec, state: TrainState, batch: Batch, known: Known):
  """All that is done with a minibatch: one optimizer step, or those of the loop around them."""
  if spec.update.inner_steps is None:
    return _minibatch(spec, state, batch, known)
  loop = _turn_by_turn if isinstance(spec.update.inner_steps, outers.LastTurnFirst) else _slow_fast
  return loop(spec, state, batch, known)


def _turn_by_turn(spec: StepSpec, state: TrainState, batch: Batch, known: Known):
  """A step for every turn, the last one first; the old policy of each is the one that it begins with."""
  number_BxT = batch.rollout.turns.number_BxT
  last = number_BxT.max()  # −1 where nothing was said

  def step(state, turn, multiplier_B, logp_BxT):
    asked = known._replace(turn=turn, multiplier=multiplier_B, old=logp_BxT)
    return _minibatch(spec, state, batch, asked)

  def body(index, carry):
    state, multiplier_B, before_BxT, told = carry
    turn = last - index
    logp_BxT = scores(spec, policy(spec, state.base, state.params), batch)[0]
    # By what the step before has made of the turn that it learned.
    learned_BxT = (number_BxT == turn + 1).astype(logp_BxT.dtype)
    multiplier_B = spec.update.inner_steps.multiplier(
      multiplier_B, logp_BxT, before_BxT, learned_BxT
    )
    state, metrics = step(state, turn, multiplier_B, logp_BxT)
    return state, multiplier_B, logp_BxT, _added(told, metrics)

  begun = jnp.ones(number_BxT.shape[0], jnp.float32), jnp.zeros_like(batch.rollout.logp_BxT)
  shapes = jax.eval_shape(step, state, last, *begun)[1]
  carry = state, *begun, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  state, _, _, told = jax.lax.fori_loop(0, last + 1, body, carry)
  tokens = jnp.maximum(told[_TOKENS], 1)
  told = {k: v if k == _TOKENS or k.endswith('_max') else v / tokens for k, v in told.items()}
  return state, told | {'actor/turns': (last + 1).astype(jnp.float32)}


def _added(told: dict, metrics: dict) -> dict:
  """Numbers of one more step of a turn, each weighed by its tokens."""
  weighed = {k: v if k == _TOKENS else v * metrics[_TOKENS] for k, v in metrics.items()}
  return {
    k: jnp.maximum(told[k], metrics[k]) if k.endswith('_max') else told[k] + v
    for k, v in weighed.items()
  }


def _slow_fast(spec: StepSpec, state: TrainState, batch: Batch, known: Known):
  """SFPO: K inner steps, interpolate toward the start, one outer step."""
  step = lambda state: _minibatch(spec, state, batch, known)  # noqa: E731
  outer, start, seen = spec.update.inner_steps, state.params, state.inner_steps
  fast = outer.steps(seen)

  def body(index, carry):  # one body for fast and slow steps, so that it is compiled once
    state, _ = carry
    back = lambda: outer.reposition(start, state.params)  # noqa: E731
    state = state._replace(params=jax.lax.cond(index == fast, back, lambda: state.params))
    return step(state)

  blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(step, state)[1])
  state, metrics = jax.lax.fori_loop(0, fast + 1, body, (state, blank))
  real = batch.rollout.length_B.sum() > 0
  seen = outer.observe(seen, metrics['actor/entropy'], real)  # of the outer step, as all metrics
  metrics['actor/fast_steps'] = fast.astype(jnp.float32)
  return state._replace(inner_steps=seen), metrics


def _minibatch(spec: StepSpec, state: TrainState, batch: Batch, known: Known):
  """Sums the gradient over slices, then takes one guarded optimizer step."""
  target = _target(spec, state, batch, known)
  target, taught = demonstration_loss.planned(spec, state, batch, target)
  key_M = _noise_keys(spec, state, batch)
  target, whole, scale = _prepared(spec, state, batch, target, key_M)
  # Noise is learned with the weights; None, and of no cost, where there is none.
  learned = state.params, state.activation_noise and state.activation_noise.log_sigma_L

  def accumulate(carry, piece):
    piece, key = piece

    def loss(learned):
      weights = policy(spec, state.base, learned[0])
      return slice_loss(spec, weights, *piece, noise=_noise(learned[1], key))

    grads, sums = jax.grad(loss, has_aux=True)(learned)
    summed = {
      k: jnp.maximum(v, sums[k]) if k.endswith('_max') else v + sums[k] for k, v in carry[1].items()
    }
    return (jax.tree.map(jnp.add, carry[0], grads), summed), None

  zeros = jax.tree.map(jnp.zeros_like, learned), {k: jnp.float32(0) for k in _SUMS}
  (grads, sums), _ = jax.lax.scan(accumulate, zeros, (slices(spec, batch, target), key_M))
  sums |= whole
  demonstrated, told = demonstration_loss.added(spec, state, batch, taught, grads[0])
  grads = demonstrated, grads[1]
  norm = optax.tree.norm(grads[0])
  usable = jnp.isfinite(norm)
  if spec.update.activation_noise is not None:
    usable &= jnp.isfinite(grads[1]).all()
  skip = lambda: state._replace(skipped=jnp.where(usable, state.skipped, state.skipped + 1))  # noqa: E731
  state, moved = jax.lax.cond(
    usable & (batch.rollout.length_B.sum() > 0),
    lambda: _apply(spec, state, grads, scale),
    lambda: (skip(), jnp.float32(0)),
  )
  metrics = _metrics(spec, state, batch, target, sums, norm) | told
  metrics['actor/update_norm'] = moved
  metrics['actor/lr'] *= scale
  if spec.update.activation_noise is not None:
    metrics['actor/noise_sigma'] = jnp.exp(state.activation_noise.log_sigma_L).mean()
  return state, metrics


def _target(spec: StepSpec, state: TrainState, batch: Batch, known: Known) -> objective.Targets:
  """Advantages and denominators, and what the method asks of the minibatch besides."""
  method, pull_B = spec.objective.method, None
  if method.needs_norms:
    pull_B = leverage(spec, state.params, batch, state.base)
  target = objective.targets(
    method, batch, spec.layout.group, known.signal, pull_B, spec.layout.slots_per_prompt
  )
  target = target.with_arrays(old_BxT=known.old, expert_BxTxNxk=batch.rollout.expert_BxTxNxk)
  if method.needs_versions:
    version_BxT = batch.rollout.version_BxT
    target = target.with_arrays(
      age_BxT=state.step - version_BxT,
      batch_steps_BxT=jnp.broadcast_to(state.step - known.began, version_BxT.shape),
    )
  if method.needs_step:
    target = target.with_arrays(step_B=jnp.broadcast_to(state.step, batch.rollout.length_B.shape))
  if known.turn is not None:
    target = objective.turn_targets(method, target, batch.rollout, known.turn, known.multiplier)
  return target


@jax.named_scope('optimizer')
def _apply(spec: StepSpec, state: TrainState, grads: Any, scale: jax.Array):
  """The state after one optimizer step, and how far the weights went."""
  grads, noise_grad = grads
  if spec.update.activation_noise is not None:
    state = state._replace(
      activation_noise=spec.update.activation_noise.learn(state.activation_noise, noise_grad)
    )
  updates, opt_state = spec.update.optimizer.update(grads, state.opt_state, state.params)
  updates = jax.tree.map(lambda x: x * scale, updates)
  params = optax.apply_updates(state.params, updates)
  if spec.objective.method.needs_average:
    state = state._replace(average=_averaged(spec, state, params))
  state = state._replace(
    params=params,
    opt_state=opt_state,
    step=state.step + 1,
    skipped=jnp.zeros_like(state.skipped),
  )
  return state, optax.tree.norm(updates)


def _averaged(spec: StepSpec, state: TrainState, params: Any) -> Any:
  """The average with one more step in it, of weights decay^0 for the newest, decay^1 for the one before, …"""
  decay = spec.objective.average_decay
  # 1 / Σ decay^i over the weights so far: `step` of them before this one, and those at the start.
  weights = state.step.astype(jnp.float32) + 2
  share = (1 - decay) / -jnp.expm1(weights * math.log(decay)) if decay else 1.0
  return jax.tree.map(lambda mean, x: x + (1 - share) * (mean - x), state.average, params)


def _noise_keys(spec: StepSpec, state: TrainState, batch: Batch) -> jax.Array | None:
  """One key for each slice, by seed and step: an update that is repeated meets the same noise."""
  if spec.update.activation_noise is None:
    return None
  key = jax.random.fold_in(jax.random.key(state.seed), state.step)
  rows = spec.update.microbatch.prompts * spec.update.microbatch.rollouts
  return jax.random.split(key, batch.rollout.length_B.shape[0] // rows)


def _noise(log_sigma_L: jax.Array | None, key: jax.Array | None):
  return None if key is None else (jnp.exp(log_sigma_L), key)


def _prepared(spec: StepSpec, state: TrainState, batch: Batch, target: objective.Targets, key_M):
  """What the gradient's slices cannot work out → targets, sums already complete, a learning rate's factor."""
  method = spec.objective.method
  if 'reference' in method.needs:
    target = target.with_arrays(reference_BxT=scores(spec, reference(state), foreign(batch))[0])
  if method.needs_average:
    average = policy(spec, state.base, state.average)
    target = target.with_arrays(old_BxT=scores(spec, average, batch)[0])
  if method.needs_teacher:
    target = target.with_arrays(
      teacher_BxT=scores(teacher_spec(spec), state.teacher, foreign(batch))[0]
    )
    target = objective.distill(method, target)
  if not method.needs_rows:
    return target, {}, jnp.float32(1)
  sigma_L = None if key_M is None else jnp.exp(state.activation_noise.log_sigma_L)
  weights = policy(spec, state.base, state.params)
  logp_BxT, *more = scores(spec, weights, batch, sigma_L, key_M, top=_top(method))
  c_BxT, sums = objective.coefficients(method, target, logp_BxT, *more)
  scale = objective.learning_rate_scale(method, target, logp_BxT)
  return target._replace(c_BxT=c_BxT), sums, scale


def _top(method: objective.Method) -> int:
  """How many of the largest probabilities of a token are looked at."""
  return objective.CONFIDENCE_TOP_K if method.needs_confidence else 0


_TOKENS = 'training/trained_tokens'
_SUMS = (*objective.SUMS, 'entropy', 'tokens', 'probs_diff', 'probs_diff_max')


def slice_loss(spec: StepSpec, params: Any, prompts, tokens_BxT, length_B, target, noise=None):
  """−Σ c·log π of one slice, with every denominator already inside c."""
  worked_out = target.c_BxT is not None
  top = 0 if worked_out else _top(spec.objective.method)
  logp_BxT, entropy_BxT, *more = rescore(
    spec, params, prompts, tokens_BxT, noise, top, target.expert_BxTxNxk
  )
  if not worked_out:
    c_BxT, sums = objective.coefficients(
      spec.objective.method, target, logp_BxT, entropy_BxT, *more
    )
  else:
    c_BxT, sums = target.c_BxT, dict.fromkeys(objective.SUMS, jnp.float32(0))
  real_BxT = jnp.arange(tokens_BxT.shape[1])[None] < length_B[:, None]
  if target.sampled_BxT is not None:
    real_BxT &= target.sampled_BxT > 0
  logp_BxT = jnp.where(real_BxT, logp_BxT, 0.0)
  behavior_BxT = objective.behavior_log_probs(target.replayed_B, target.behavior_BxT, logp_BxT)
  gap_BxT = jnp.where(real_BxT, jnp.abs(jnp.exp(logp_BxT) - jnp.exp(behavior_BxT)), 0.0)
  sums |= {
    'entropy': jnp.where(real_BxT, entropy_BxT, 0.0).sum(),
    'tokens': real_BxT.sum().astype(jnp.float32),
    'probs_diff': gap_BxT.sum(),
    'probs_diff_max': gap_BxT.max(),
  }
  return -(c_BxT * logp_BxT).sum(), jax.lax.stop_gradient(sums)


def _metrics(spec: StepSpec, state: TrainState, batch: Batch, target, sums, norm):
  tokens = jnp.maximum(sums['tokens'], 1)
  counted = jnp.maximum((target.mask_BxT > 0).sum(), 1)
  own = objective.group_rows(batch.prompts, spec.layout.group, spec.layout.slots_per_prompt)
  mixed_B = objective.mixed_group_mask(
    compared(spec.objective.method, batch), batch.rollout.length_B, own
  )
  # Read off the advantages as the loss sees them: a mask or a denominator gone wrong shows here.
  return {
    'actor/pg_loss': sums['pg_loss'],
    'actor/pg_clipfrac': sums['clipped'] / counted,
    'actor/ppo_kl': sums['kl'] / counted,
    'actor/kl_loss': sums['kl_loss'],
    'actor/rejected_frac': sums['rejected'] / counted,
    'actor/entropy': sums['entropy'] / tokens,
    'actor/grad_norm': norm,
    'actor/lr': spec.update.schedule(jnp.maximum(state.step - 1, 0)),
    'actor/skipped_updates': state.skipped.astype(jnp.float32),
    'critic/advantages/mean': (target.advantage_BxT * target.mask_BxT).sum() / counted,
    'critic/advantages/max': target.advantage_BxT.max(),
    'critic/advantages/min': target.advantage_BxT.min(),
    'training/rollout_probs_diff_mean': sums['probs_diff'] / tokens,
    'training/rollout_probs_diff_max': sums['probs_diff_max'],
    _TOKENS: sums['tokens'],
    'frac_reward_zero_std': 1 - mixed_B.mean(),
  }
