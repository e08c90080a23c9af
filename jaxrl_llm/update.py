"""The learning half of the step: coefficients, the gradient slice by slice, and guarded optimizer steps."""

from __future__ import annotations

import math
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
  U = program.minibatches
  minibatches = jax.tree.map(
    lambda x: x.reshape(x.shape[0] // U, U, *x.shape[1:]).swapaxes(0, 1), _by_prompt(program, batch)
  )
  old, method, began = None, program.method, state.step
  # Of all minibatches, before the first of them moves the weights.
  if method.needs_old and not method.needs_average:
    score = lambda x: scores(program, state.params, _by_row(program, x))[0]  # noqa: E731
    old = jax.lax.map(score, minibatches)
  state, metrics = jax.lax.scan(
    lambda state, piece: _steps(program, state, _by_row(program, piece[0]), piece[1], began),
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


def _steps(program: Program, state: TrainState, batch: Batch, old: jax.Array | None, began):
  """All that is done with a minibatch: one optimizer step, or those of the loop around them."""
  step = lambda state: _minibatch(program, state, batch, old, began)  # noqa: E731
  outer, start, seen = program.outer, state.params, state.outer
  if outer is None:
    return step(state)
  fast = outer.steps(seen)

  def body(index, carry):  # one body for fast and slow steps, so that it is compiled once
    state, _, entropy = carry
    back = lambda: outer.reposition(start, state.params)  # noqa: E731
    state = state._replace(params=jax.lax.cond(index == fast, back, lambda: state.params))
    state, metrics = step(state)
    return state, metrics, jnp.where(index == 0, metrics['actor/entropy'], entropy)

  blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(step, state)[1])
  carry = state, blank, jnp.float32(0)
  state, metrics, entropy = jax.lax.fori_loop(0, fast + 1, body, carry)
  seen = outer.observe(seen, entropy, batch.rollout.length_B.sum() > 0)
  metrics['actor/fast_steps'] = fast.astype(jnp.float32)
  return state._replace(outer=seen), metrics


def _minibatch(
  program: Program, state: TrainState, batch: Batch, old: jax.Array | None, began: jax.Array
):
  """Sums the gradient over slices, then takes one guarded optimizer step. `began`: `step` before the batch."""
  rollouts, pull_B = program.generate.rollouts, None
  if program.method.needs_norms:
    pull_B = leverage(program, state.params, batch)
  target = objective.targets(program.method, batch, rollouts, pull_B)._replace(old_BxT=old)
  if program.method.needs_versions:
    version_BxT = batch.rollout.version_BxT
    target = target._replace(
      age_BxT=state.step - version_BxT,
      moved_BxT=jnp.broadcast_to(state.step - began, version_BxT.shape),
    )
  key_M = _noise_keys(program, state, batch)
  target, whole, scale = _prepared(program, state, batch, target, key_M)
  # Noise is learnt with the weights; None, and of no cost, where there is none.
  learnt = state.params, state.noise and state.noise.log_sigma_L

  def accumulate(carry, piece):
    piece, key = piece
    loss = lambda learnt: slice_loss(program, learnt[0], *piece, noise=_noise(learnt[1], key))  # noqa: E731
    grads, sums = jax.grad(loss, has_aux=True)(learnt)
    summed = {
      k: jnp.maximum(v, sums[k]) if k.endswith('_max') else v + sums[k] for k, v in carry[1].items()
    }
    return (jax.tree.map(jnp.add, carry[0], grads), summed), None

  zeros = jax.tree.map(jnp.zeros_like, learnt), {k: jnp.float32(0) for k in _SUMS}
  (grads, sums), _ = jax.lax.scan(accumulate, zeros, (slices(program, batch, target), key_M))
  sums |= whole
  norm = optax.tree.norm(grads[0])
  usable = jnp.isfinite(norm)
  if program.perturb is not None:
    usable &= jnp.isfinite(grads[1]).all()
  state = jax.lax.cond(
    usable & (batch.rollout.length_B.sum() > 0),
    lambda: _apply(program, state, grads, scale),
    lambda: state._replace(skipped=jnp.where(usable, state.skipped, state.skipped + 1)),
  )
  metrics = _metrics(program, state, batch, target, sums, norm)
  metrics['actor/lr'] *= scale
  if program.perturb is not None:
    metrics['actor/noise_sigma'] = jnp.exp(state.noise.log_sigma_L).mean()
  return state, metrics


def _apply(program: Program, state: TrainState, grads: Any, scale: jax.Array) -> TrainState:
  grads, noise_grad = grads
  if program.perturb is not None:
    state = state._replace(noise=program.perturb.learn(state.noise, noise_grad))
  updates, opt_state = program.optimizer.update(grads, state.opt_state, state.params)
  updates = jax.tree.map(lambda x: x * scale, updates)
  params = optax.apply_updates(state.params, updates)
  if program.method.needs_average:
    state = state._replace(average=_averaged(program, state, params))
  return state._replace(
    params=params,
    opt_state=opt_state,
    step=state.step + 1,
    skipped=jnp.zeros_like(state.skipped),
  )


def _averaged(program: Program, state: TrainState, params: Any) -> Any:
  """The average with one more step in it, of weights decay^0 for the newest, decay^1 for the one before, …"""
  decay = program.method.proximal.keywords['decay']
  # 1 / Σ decay^i over the weights so far: `step` of them before this one, and those at the start.
  weights = state.step.astype(jnp.float32) + 2
  share = (1 - decay) / -jnp.expm1(weights * math.log(decay)) if decay else 1.0
  return jax.tree.map(lambda mean, x: x + (1 - share) * (mean - x), state.average, params)


def _noise_keys(program: Program, state: TrainState, batch: Batch) -> jax.Array | None:
  """One key for each slice, by seed and step: an update that is repeated meets the same noise."""
  if program.perturb is None:
    return None
  key = jax.random.fold_in(jax.random.key(program.seed), state.step)
  rows = program.slice_groups * program.slice_rollouts
  return jax.random.split(key, batch.rollout.length_B.shape[0] // rows)


def _noise(log_sigma_L: jax.Array | None, key: jax.Array | None):
  return None if key is None else (jnp.exp(log_sigma_L), key)


def _prepared(program: Program, state: TrainState, batch: Batch, target: objective.Targets, key_M):
  """What the gradient's slices cannot work out → targets, sums already complete, a learning rate's factor."""
  method = program.method
  if method.needs_reference:
    target = target._replace(reference_BxT=scores(program, state.reference, batch)[0])
  if method.needs_average:
    target = target._replace(old_BxT=scores(program, state.average, batch)[0])
  if not method.needs_rows:
    return target, {}, jnp.float32(1)
  sigma_L = None if key_M is None else jnp.exp(state.noise.log_sigma_L)
  logp_BxT, entropy_BxT = scores(program, state.params, batch, sigma_L, key_M)
  c_BxT, sums = objective.coefficients(method, target, logp_BxT, entropy_BxT)
  scale = objective.scale(method, target, logp_BxT)
  return target._replace(c_BxT=c_BxT), sums, scale


def scores(
  program: Program, params: Any, batch: Batch, sigma_L=None, key_M=None
) -> tuple[jax.Array, jax.Array]:
  """Log-probabilities and entropies [B, T] of a minibatch, slice by slice, without a gradient."""

  def score(piece):
    prompts, tokens_BxT, key = piece
    noise = None if key is None else (sigma_L, key)
    return rescore(program, jax.lax.stop_gradient(params), prompts, tokens_BxT, noise)

  prompts, tokens, *_ = slices(program, batch, None)
  p, g = program.slice_groups, program.slice_rollouts
  whole = lambda x: x.reshape(-1, p, g, x.shape[-1]).swapaxes(0, 1).reshape(-1, x.shape[-1])  # noqa: E731
  return jax.tree.map(whole, jax.lax.map(score, (prompts, tokens, key_M)))


def leverage(program: Program, params: Any, batch: Batch) -> jax.Array:
  """log(w·n) of each row [B]: w = π/π_b of its answer, n = ‖∇ log π(answer)‖; −∞ where there is none.

  Row after row, and of each gradient its norm alone is kept: the memory of one gradient, the time of a pass of rows
  alone. Rows that lie on several devices are still taken one at a time. Source: arXiv:2602.17616 (VCPO).
  """
  repeats = batch.rollout.length_B.shape[0] // batch.prompts.length_P.shape[0]
  prompts = jax.tree.map(lambda x: jnp.repeat(x, repeats, axis=0), batch.prompts)
  rollout = batch.rollout

  def pull(row):
    prompt, tokens_T, behaviour_T, length = row
    real_T = jnp.arange(tokens_T.shape[0]) < length

    def answer(params):
      logp_1xT, _ = rescore(
        program, params, jax.tree.map(lambda x: x[None], prompt), tokens_T[None]
      )
      return jnp.where(real_T, logp_1xT[0], 0.0).sum()

    logp, grads = jax.value_and_grad(answer)(params)
    log_w = logp - jnp.where(real_T, behaviour_T, 0.0).sum()
    return log_w + jnp.log(optax.tree.norm(grads))

  rows = prompts, rollout.tokens_BxT, rollout.logp_BxT, rollout.length_B
  return jax.lax.map(pull, rows)


_SUMS = (*objective.SUMS, 'entropy', 'tokens', 'probs_diff', 'probs_diff_max')


def slice_loss(program: Program, params: Any, prompts, tokens_BxT, length_B, target, noise=None):
  """−Σ c·log π of one slice, with every denominator already inside c."""
  logp_BxT, entropy_BxT = rescore(program, params, prompts, tokens_BxT, noise)
  if target.c_BxT is None:
    c_BxT, sums = objective.coefficients(program.method, target, logp_BxT, entropy_BxT)
  else:
    c_BxT, sums = target.c_BxT, dict.fromkeys(objective.SUMS, jnp.float32(0))
  real_BxT = jnp.arange(tokens_BxT.shape[1])[None] < length_B[:, None]
  logp_BxT = jnp.where(real_BxT, logp_BxT, 0.0)
  gap_BxT = jnp.where(real_BxT, jnp.abs(jnp.exp(logp_BxT) - jnp.exp(target.behaviour_BxT)), 0.0)
  sums |= {
    'entropy': jnp.where(real_BxT, entropy_BxT, 0.0).sum(),
    'tokens': real_BxT.sum().astype(jnp.float32),
    'probs_diff': gap_BxT.sum(),
    'probs_diff_max': gap_BxT.max(),
  }
  return -(c_BxT * logp_BxT).sum(), jax.lax.stop_gradient(sums)


def rescore(
  program: Program, params: Any, prompts: Prompts, tokens_BxT: jax.Array, noise=None
) -> tuple[jax.Array, jax.Array]:
  """Log-probability and entropy [B, T] of completions; each prompt is encoded once for its rows.

  Same gradient as a repeated prompt, B / P times fewer prompt tokens. `noise`: see `decoder.apply`. Source: none.
  """
  dtype, remat = program.generate.dtype, program.remat
  return logprob.token_logp(
    program.model,
    params,
    completion.hidden(
      program.model, params, prompts, tokens_BxT, dtype=dtype, remat=remat, noise=noise
    ),
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
