"""The learning half of the step: coefficients, the gradient slice by slice, and guarded optimizer steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm import objective
from jaxrl_llm.generate import judge
from jaxrl_llm.models import completion, logprob
from jaxrl_llm.program import Program
from jaxrl_llm.types import Batch, Prompts, TrainState


def update(
  program: Program, state: TrainState, batch: Batch
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Takes `minibatches` optimizer steps on a batch; an empty batch changes nothing. Source: none."""
  # Replayed rows are learnt beside the sampled ones of their group: here a group is all of them.
  program = program._replace(generate=program.generate._replace(rollouts=program.group))
  U = program.minibatches
  minibatches = jax.tree.map(
    lambda x: x.reshape(x.shape[0] // U, U, *x.shape[1:]).swapaxes(0, 1), _by_prompt(program, batch)
  )
  old = None
  if program.method.needs_old:  # of all minibatches, before the first of them moves the weights
    score = lambda x: scores(program, state.params, _by_row(program, x))[0]  # noqa: E731
    old = jax.lax.map(score, minibatches)
  state, metrics = jax.lax.scan(
    lambda state, piece: _minibatch(program, state, _by_row(program, piece[0]), piece[1]),
    state,
    (minibatches, old),
  )
  if program.prune is not None and program.prune.learning_rate:
    real_B = (batch.rollout.length_B > 0).astype(jnp.float32)
    learnt = judge.learn(
      state.judge,
      batch.rollout.feature_BxF,
      batch.correct_B,
      real_B * batch.rollout.weight_B,
      program.prune.learning_rate,
    )
    state = state._replace(judge=learnt)
  return state, {k: v.max() if k.endswith('_max') else v.mean() for k, v in metrics.items()}


def _minibatch(program: Program, state: TrainState, batch: Batch, old: jax.Array | None):
  """Sums the gradient over slices, then takes one guarded optimizer step."""
  target = objective.targets(program.method, batch, program.generate.rollouts)._replace(old_BxT=old)
  target, whole, scale = _prepared(program, state, batch, target)

  def accumulate(carry, piece):
    grads, sums = jax.grad(slice_loss, argnums=1, has_aux=True)(program, state.params, *piece)
    summed = {
      k: jnp.maximum(v, sums[k]) if k.endswith('_max') else v + sums[k] for k, v in carry[1].items()
    }
    return (jax.tree.map(jnp.add, carry[0], grads), summed), None

  zeros = jax.tree.map(jnp.zeros_like, state.params), {k: jnp.float32(0) for k in _SUMS}
  (grads, sums), _ = jax.lax.scan(accumulate, zeros, slices(program, batch, target))
  sums |= whole
  norm = optax.tree.norm(grads)
  usable = jnp.isfinite(norm)
  state = jax.lax.cond(
    usable & (batch.rollout.length_B.sum() > 0),
    lambda: _apply(program, state, grads, scale),
    lambda: state._replace(skipped=jnp.where(usable, state.skipped, state.skipped + 1)),
  )
  metrics = _metrics(program, state, batch, target, sums, norm)
  metrics['actor/lr'] *= scale
  return state, metrics


def _apply(program: Program, state: TrainState, grads: Any, scale: jax.Array) -> TrainState:
  updates, opt_state = program.optimizer.update(grads, state.opt_state, state.params)
  updates = jax.tree.map(lambda x: x * scale, updates)
  params = optax.apply_updates(state.params, updates)
  return state._replace(
    params=params,
    opt_state=opt_state,
    step=state.step + 1,
    skipped=jnp.zeros_like(state.skipped),
  )


def _prepared(program: Program, state: TrainState, batch: Batch, target: objective.Targets):
  """What the gradient's slices cannot work out → targets, sums already complete, a learning rate's factor."""
  method = program.method
  if method.needs_reference:
    target = target._replace(reference_BxT=scores(program, state.reference, batch)[0])
  if not method.needs_rows:
    return target, {}, jnp.float32(1)
  logp_BxT, entropy_BxT = scores(program, state.params, batch)
  c_BxT, sums = objective.coefficients(method, target, logp_BxT, entropy_BxT)
  scale = objective.scale(method, target, logp_BxT)
  return target._replace(c_BxT=c_BxT), sums, scale


def scores(program: Program, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
  """Log-probabilities and entropies [B, T] of a minibatch, slice by slice, without a gradient."""

  def score(piece):
    prompts, tokens_BxT = piece
    return rescore(program, jax.lax.stop_gradient(params), prompts, tokens_BxT)

  prompts, tokens, *_ = slices(program, batch, None)
  p, g = program.slice_groups, program.slice_rollouts
  whole = lambda x: x.reshape(-1, p, g, x.shape[-1]).swapaxes(0, 1).reshape(-1, x.shape[-1])  # noqa: E731
  return jax.tree.map(whole, jax.lax.map(score, (prompts, tokens)))


_SUMS = (*objective.SUMS, 'entropy', 'tokens', 'probs_diff', 'probs_diff_max')


def slice_loss(program: Program, params: Any, prompts, tokens_BxT, length_B, target):
  """−Σ c·log π of one slice, with every denominator already inside c."""
  logp_BxT, entropy_BxT = rescore(program, params, prompts, tokens_BxT)
  if target.c_BxT is None:
    c_BxT, sums = objective.coefficients(program.method, target, logp_BxT, entropy_BxT)
  else:
    c_BxT, sums = target.c_BxT, dict.fromkeys(objective.SUMS, jnp.float32(0))
  real_BxT = jnp.arange(tokens_BxT.shape[1])[None] < length_B[:, None]
  logp_BxT = jnp.where(real_BxT, logp_BxT, 0.0)
  behaviour_BxT = objective.behaviour(target, target.behaviour_BxT, logp_BxT)
  gap_BxT = jnp.where(real_BxT, jnp.abs(jnp.exp(logp_BxT) - jnp.exp(behaviour_BxT)), 0.0)
  sums |= {
    'entropy': jnp.where(real_BxT, entropy_BxT, 0.0).sum(),
    'tokens': real_BxT.sum().astype(jnp.float32),
    'probs_diff': gap_BxT.sum(),
    'probs_diff_max': gap_BxT.max(),
  }
  return -(c_BxT * logp_BxT).sum(), jax.lax.stop_gradient(sums)


def rescore(
  program: Program, params: Any, prompts: Prompts, tokens_BxT: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Log-probability and entropy [B, T] of completions; each prompt is encoded once for its rows.

  Same gradient as a repeated prompt, B / P times fewer prompt tokens. Source: none.
  """
  dtype = program.generate.dtype
  return logprob.token_logp(
    program.model,
    params,
    completion.hidden(program.model, params, prompts, tokens_BxT, dtype=dtype, remat=program.remat),
    tokens_BxT,
    temperature=program.generate.temperature,
    chunk_tokens=program.head_chunk_tokens,
    dtype=dtype,
  )


def _by_prompt(program: Program, batch: Batch) -> Batch:
  """Arrays of rows [B, …] as [P, G, …], so that all leaves lead with P."""
  G = program.generate.rollouts
  group = lambda x: x.reshape(x.shape[0] // G, G, *x.shape[1:])  # noqa: E731
  prompts, *rest = batch
  return Batch(prompts, *jax.tree.map(group, rest))


def _by_row(program: Program, batch: Batch) -> Batch:
  prompts, *rest = batch
  row = lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])  # noqa: E731
  return Batch(prompts, *jax.tree.map(row, rest))


def slices(program: Program, batch: Batch, target: objective.Targets):
  """Cuts a minibatch into [M, …] slices of `slice_groups` prompts × `slice_rollouts` rows.

  Slice m takes every M-th group, so that rows stay on the device that holds them.
  """
  p, g = program.slice_groups, program.slice_rollouts
  repeats = program.generate.rollouts // g

  def groups(x):  # [P, …] → [M, p, …], a prompt repeated where its group is cut
    x = jnp.repeat(x, repeats, axis=0)
    return x.reshape(p, x.shape[0] // p, *x.shape[1:]).swapaxes(0, 1)

  def rows(x):  # [B, …] → [M, p·g, …]
    x = x.reshape(p, x.shape[0] // (p * g), g, *x.shape[1:]).swapaxes(0, 1)
    return x.reshape(x.shape[0], p * g, *x.shape[3:])

  rollout = batch.rollout
  return (
    jax.tree.map(groups, batch.prompts),
    rows(rollout.tokens_BxT),
    rows(rollout.length_B),
    jax.tree.map(rows, target),
  )


def _metrics(program: Program, state: TrainState, batch: Batch, target, sums, norm):
  tokens = jnp.maximum(sums['tokens'], 1)
  counted = jnp.maximum((target.mask_BxT > 0).sum(), 1)
  mixed_P = objective.mixed(batch.correct_B, batch.rollout.length_B, program.generate.rollouts)
  # Read off the advantages as the loss sees them: a mask or a denominator gone wrong shows here.
  return {
    'actor/pg_loss': sums['pg_loss'],
    'actor/pg_clipfrac': sums['clipped'] / counted,
    'actor/ppo_kl': sums['kl'] / counted,
    'actor/kl_loss': sums['kl_loss'],
    'actor/rejected_frac': sums['rejected'] / counted,
    'actor/entropy': sums['entropy'] / tokens,
    'actor/grad_norm': norm,
    'actor/lr': program.schedule(jnp.maximum(state.step - 1, 0)),
    'actor/skipped_updates': state.skipped.astype(jnp.float32),
    'critic/advantages/mean': (target.advantage_BxT * target.mask_BxT).sum() / counted,
    'critic/advantages/max': target.advantage_BxT.max(),
    'critic/advantages/min': target.advantage_BxT.min(),
    'training/rollout_probs_diff_mean': sums['probs_diff'] / tokens,
    'training/rollout_probs_diff_max': sums['probs_diff_max'],
    'training/trained_tokens': sums['tokens'],
    'frac_reward_zero_std': 1 - mixed_P.mean(),
  }
