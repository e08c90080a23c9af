"""The one compiled program of a step: learn from the rollouts just graded, then sample with the new weights."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jaxrl_llm import objective, shard
from jaxrl_llm.generate import engine, sampling, speculate
from jaxrl_llm.models import completion, decoder, logprob
from jaxrl_llm.program import Program
from jaxrl_llm.types import Batch, Prompts, Rollout, TrainState

# A donated batch frees its rollouts; its prompts have no output of their shape to live on in, which jax reports.
warnings.filterwarnings('ignore', message='Some donated buffers were not usable')


def step(
  program: Program,
  state: TrainState,
  batch: Batch,
  prompts: Prompts,
  begun: Rollout | None = None,
  draft: Rollout | None = None,
  cap: jax.Array | None = None,
) -> tuple[TrainState, Rollout, dict[str, jax.Array]]:
  """One step: update on `batch`, then G rollouts of each of `prompts` with the new weights.

  `begun` holds rollouts of these prompts that earlier steps left unfinished, `draft` answers from an
  earlier visit for rows that begin, `cap` the most tokens a row may take now (at most T). Source: none.
  """
  state, metrics = update(program, state, batch)
  rollout, sampled = generate(program, state.params, prompts, state.step, begun, draft, cap)
  return state, rollout, metrics | sampled


def generate(
  program: Program,
  params: Any,
  prompts: Prompts,
  version: jax.Array,
  begun: Rollout | None = None,
  draft: Rollout | None = None,
  cap: jax.Array | None = None,
) -> tuple[Rollout, dict[str, jax.Array]]:
  """Lays the weights out for decoding, once, and samples; each shard of rows runs its own loop.

  What verification keeps of `draft` is where rows begin that hold nothing in `begun`.

  Source: none.
  """
  params = jax.tree.map(lambda x: x.astype(program.generate.dtype), params)
  params = jax.lax.with_sharding_constraint(params, shard.decode_layout(params, program.mesh))
  metrics = {}
  if program.same_noise:
    prompts = prompts._replace(born_P=jnp.zeros_like(prompts.born_P))
  if draft is not None:
    begun, kept = _verify(program, params, prompts, draft, begun, version)
    metrics['generate/draft_tokens_kept'] = kept
  shards = shard.rows_shards(program.mesh)
  lockstep = shard.ROWS if program.lockstep and shards > 1 else ()
  spec = program.generate._replace(slots=program.generate.slots // shards, lockstep=lockstep)
  cap = jnp.int32(spec.max_tokens if cap is None else cap)

  def local(params, version, cap, prompts, begun):
    key = jax.random.key(program.seed)
    rollout, rounds = engine.generate(
      program.model, params, prompts, key, version, spec, begun=begun, cap=cap
    )
    return rollout, rounds[None]

  rows, whole = PartitionSpec(shard.ROWS), PartitionSpec()
  rollout, rounds = jax.shard_map(
    local,
    mesh=program.mesh,
    in_specs=(whole, whole, whole, rows, rows),
    out_specs=rows,
    axis_names=set(shard.ROWS),
    check_vma=False,
  )(params, version, cap, prompts, begun)
  metrics['generate/rounds'] = rounds.max().astype(jnp.float32)
  return rollout, metrics


_VERDICT = 2**31 - 1  # folded into the key: a verdict's noise is none of the sampler's


def _verify(program: Program, params: Any, prompts: Prompts, draft, begun, version):
  """One forward pass over the drafts → the rows to continue, and how many draft tokens they keep."""
  T, G = draft.tokens_BxT.shape[1], program.generate.rollouts
  key = jax.random.key(program.seed)

  def uniforms(key):
    keys_B = sampling.row_keys(key, prompts.born_P, prompts.index_P, G)
    return jax.vmap(lambda t: sampling.uniforms(keys_B, t), out_axes=1)(jnp.arange(T))

  stays_BxT, logp_BxT = logprob.over_logits(
    lambda *columns: program.verify(*columns, program.generate.temperature),
    program.model,
    params,
    completion.hidden(
      program.model, params, prompts, draft.tokens_BxT, dtype=program.generate.dtype
    ),
    draft.tokens_BxT,
    draft.logp_BxT,
    uniforms(jax.random.fold_in(key, _VERDICT)),
    uniforms(key),
    chunk_tokens=program.head_chunk_tokens,
    dtype=program.generate.dtype,
  )
  cut = speculate.cut(draft, stays_BxT, logp_BxT, version)
  if begun is not None:
    held_B = begun.length_B > 0
    pick = lambda old, new: jnp.where(held_B.reshape(-1, *[1] * (new.ndim - 1)), old, new)  # noqa: E731
    cut = jax.tree.map(pick, begun, cut)
    return cut, jnp.where(held_B, 0, cut.length_B).sum().astype(jnp.float32)
  return cut, cut.length_B.sum().astype(jnp.float32)


def update(
  program: Program, state: TrainState, batch: Batch
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Takes `minibatches` optimizer steps on a batch; an empty batch changes nothing. Source: none."""
  U = program.minibatches
  minibatches = jax.tree.map(
    lambda x: x.reshape(x.shape[0] // U, U, *x.shape[1:]).swapaxes(0, 1), _by_prompt(program, batch)
  )
  old = None
  if program.method.needs_old:  # of all minibatches, before the first of them moves the weights
    score = lambda x: _scores(program, state.params, _by_row(program, x))[0]  # noqa: E731
    old = jax.lax.map(score, minibatches)
  state, metrics = jax.lax.scan(
    lambda state, piece: _minibatch(program, state, _by_row(program, piece[0]), piece[1]),
    state,
    (minibatches, old),
  )
  return state, {k: v.max() if k.endswith('_max') else v.mean() for k, v in metrics.items()}


def _minibatch(program: Program, state: TrainState, batch: Batch, old: jax.Array | None):
  """Sums the gradient over slices, then takes one guarded optimizer step."""
  target = objective.targets(program.method, batch, program.generate.rollouts)._replace(old_BxT=old)
  target, whole, scale = _prepared(program, state, batch, target)

  def accumulate(carry, piece):
    grads, sums = jax.grad(_slice_loss, argnums=1, has_aux=True)(program, state.params, *piece)
    summed = {
      k: jnp.maximum(v, sums[k]) if k.endswith('_max') else v + sums[k] for k, v in carry[1].items()
    }
    return (jax.tree.map(jnp.add, carry[0], grads), summed), None

  zeros = jax.tree.map(jnp.zeros_like, state.params), {k: jnp.float32(0) for k in _SUMS}
  (grads, sums), _ = jax.lax.scan(accumulate, zeros, _slices(program, batch, target))
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
    target = target._replace(reference_BxT=_scores(program, state.reference, batch)[0])
  if not method.needs_rows:
    return target, {}, jnp.float32(1)
  logp_BxT, entropy_BxT = _scores(program, state.params, batch)
  c_BxT, sums = objective.coefficients(method, target, logp_BxT, entropy_BxT)
  scale = objective.scale(method, target, logp_BxT)
  return target._replace(c_BxT=c_BxT), sums, scale


def _scores(program: Program, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
  """Log-probabilities and entropies [B, T] of a minibatch, slice by slice, without a gradient."""

  def score(piece):
    prompts, tokens_BxT = piece
    return rescore(program, jax.lax.stop_gradient(params), prompts, tokens_BxT)

  prompts, tokens, *_ = _slices(program, batch, None)
  p, g = program.slice_groups, program.slice_rollouts
  whole = lambda x: x.reshape(-1, p, g, x.shape[-1]).swapaxes(0, 1).reshape(-1, x.shape[-1])  # noqa: E731
  return jax.tree.map(whole, jax.lax.map(score, (prompts, tokens)))


_SUMS = (*objective.SUMS, 'entropy', 'tokens', 'probs_diff', 'probs_diff_max')


def _slice_loss(program: Program, params: Any, prompts, tokens_BxT, length_B, target):
  """−Σ c·log π of one slice, with every denominator already inside c."""
  logp_BxT, entropy_BxT = rescore(program, params, prompts, tokens_BxT)
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
  return Batch(prompts, *jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rest))


def _slices(program: Program, batch: Batch, target: objective.Targets):
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


def init_state(program: Program, params: Any) -> TrainState:
  """A TrainState on the mesh, from parameters anywhere. Source: none."""
  params = jax.device_put(params, shard.layout(params, program.mesh))
  make = functools.partial(_fresh, program)
  shardings = shard.layout(jax.eval_shape(make, params), program.mesh)
  return jax.jit(make, out_shardings=shardings)(params)


def _fresh(program: Program, params: Any) -> TrainState:
  reference = jax.tree.map(jnp.copy, params) if program.method.needs_reference else None
  return TrainState(params, program.optimizer.init(params), jnp.int32(0), jnp.int32(0), reference)


def abstract_state(program: Program) -> TrainState:
  """The shapes and shardings of `init_state`, nothing allocated. Source: none."""
  shapes = jax.eval_shape(
    functools.partial(_fresh, program), decoder.abstract_params(program.model)
  )
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    shard.layout(shapes, program.mesh),
  )


def empty_rollout(program: Program) -> Rollout:
  """No tokens in any row: host arrays. Source: none."""
  B, T = program.prompts * program.generate.rollouts, program.generate.max_tokens
  zeros = lambda *shape: np.zeros(shape, np.int32)  # noqa: E731
  return Rollout(
    zeros(B, T), np.zeros((B, T), np.float32), zeros(B), np.zeros(B, np.int8), zeros(B, T)
  )


def empty_batch(program: Program) -> Batch:
  """A batch of no rollouts, to start with: host arrays. Source: none."""
  P, L, B = program.prompts, program.prompt_tokens, program.prompts * program.generate.rollouts
  zeros = lambda *shape: np.zeros(shape, np.int32)  # noqa: E731
  prompts = Prompts(zeros(P, L), zeros(P), zeros(P), zeros(P), np.zeros(P, np.float32))
  return Batch(prompts, empty_rollout(program), np.zeros(B, np.float32), np.zeros(B, np.float32))


def compile_step(program: Program) -> Callable:
  """`step` as one jit: (state, batch, prompts, begun, draft, cap), state and batch donated.

  Source: none.
  """
  state = jax.tree.map(lambda x: x.sharding, abstract_state(program))
  rows, whole = shard.rows(program.mesh), shard.replicated(program.mesh)
  return jax.jit(
    functools.partial(step, program),
    donate_argnums=(0, 1),
    in_shardings=(state, rows, rows, rows, rows, whole),
    out_shardings=(state, rows, whole),
  )


def compile_generate(program: Program) -> Callable:
  """`generate` alone, for evaluation: (params, prompts) → Rollout. Source: none."""
  params = jax.tree.map(lambda x: x.sharding, abstract_state(program).params)
  rows = shard.rows(program.mesh)
  return jax.jit(
    lambda params, prompts: generate(program, params, prompts, jnp.int32(0))[0],
    in_shardings=(params, rows),
    out_shardings=rows,
  )


def compile_update(program: Program) -> Callable:
  """`update` alone, for a supervised warm start: (state, batch), both donated. Source: none."""
  state = jax.tree.map(lambda x: x.sharding, abstract_state(program))
  rows, whole = shard.rows(program.mesh), shard.replicated(program.mesh)
  return jax.jit(
    lambda state, batch: update(program, state, batch),
    donate_argnums=(0, 1),
    in_shardings=(state, rows),
    out_shardings=(state, whole),
  )
