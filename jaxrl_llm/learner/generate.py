"""The sampling half of the step: which decode loop runs, with what it begins, on every shard of the rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import lora
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.models import logprob, quantized, shared_prompt_forward
from jaxrl_llm.objective import record_checks
from jaxrl_llm.rollout import (
  carried_kv,
  early_exit,
  exit_signals,
  ngram_drafts,
  pruned_decode,
  ring_decode,
  sampling,
  tree_decode,
)
from jaxrl_llm.rollout.decode_records import DecodeInputs
from jaxrl_llm.types import STOPPED, TRUNCATED, UNFINISHED, Prompts, Rollout, TrainState, UserError


@jax.named_scope('generate')
@sharding.on_mesh
def generate(
  spec: StepSpec,
  state: TrainState,
  prompts: Prompts,
  begun: Rollout | None = None,
  draft: Rollout | None = None,
  cap: jax.Array | None = None,
) -> tuple[Rollout, dict[str, jax.Array], tuple]:
  """Rounds the weights and lays them out for decoding, once, and samples; each shard of rows runs its own loop.

  What verification keeps of `draft` is where rows begin that hold nothing in `begun`. Trees take neither:
  UserError. Last comes the new `state.carried`: the oldest is used up, that of this call is added.
  Source: none.
  """
  record_checks.prompts(prompts)
  for rows in (begun, draft):
    if rows is not None:
      record_checks.rollout(rows)
  if spec.rollout.tree is not None and (begun is not None or draft is not None):
    raise UserError(
      "config.rollout.tree grows whole groups from their prompts: give no begun and no draft, or set fn='none'."
    )
  params, metrics = _laid_out(spec, state), {}
  cap = jnp.int32(spec.rollout.decode.max_tokens if cap is None else cap)
  if draft is not None:
    begun, metrics['generate/draft_tokens_kept'] = _verify(
      spec, params, prompts, draft, begun, state, cap
    )
  kept = state.carried[0] if state.carried else None

  def local(params, judge, seed, version, cap, prompts, begun, kept):
    if kept is not None:
      kept = carried_kv.reorder(kept, prompts, spec.rollout.decode.rollouts)
    rollout, rounds, left, counts = _decode(
      spec, params, judge, seed, version, cap, prompts, begun, kept
    )
    return rollout, rounds[None], left, {k: v[None] for k, v in counts.items()}

  rows, whole = PartitionSpec(sharding.ROWS), PartitionSpec()
  rollout, rounds, left, counts = jax.shard_map(
    local,
    mesh=spec.layout.mesh,
    in_specs=(
      sharding.expert_specs(params, spec.layout.mesh, spec.layout.rules),
      *[whole] * 4,
      *[rows] * 3,
    ),
    out_specs=rows,
    axis_names=set(sharding.ROWS),
    check_vma=False,
  )(params, state.correctness_head, state.seed, state.step, cap, prompts, begun, kept)
  if spec.rollout.drafts.records_noise:
    rollout = rollout._replace(noise_BxT=_noise(prompts, rollout, begun))
  metrics['generate/rounds'] = rounds.max().astype(jnp.float32)
  metrics |= {f'generate/{k}': v.sum().astype(jnp.float32) for k, v in counts.items()}
  return rollout, metrics, (*state.carried[1:], left) if state.carried else ()


@sharding.on_mesh
def predict_success(
  spec: StepSpec, state: TrainState, prompts: Prompts, rollout: Rollout
) -> jax.Array:
  """p_B, what the judge of `config.rollout.pruning` gives each row for being right, after its first tokens.

  Source: arXiv:2603.24840 (ARRoL).
  """
  told, dtype = spec.rollout.pruning, spec.model.dtype
  local = lambda params, judge, prompts, rollout: pruned_decode.predict_success(  # noqa: E731
    spec.model.config, params, judge, prompts, rollout, dtype, told
  )[0]
  rows, whole, params = PartitionSpec(sharding.ROWS), PartitionSpec(), _laid_out(spec, state)
  return jax.shard_map(
    local,
    mesh=spec.layout.mesh,
    in_specs=(
      sharding.expert_specs(params, spec.layout.mesh, spec.layout.rules),
      whole,
      rows,
      rows,
    ),
    out_specs=rows,
    axis_names=set(sharding.ROWS),
    check_vma=False,
  )(params, state.correctness_head, prompts, rollout)


def _laid_out(spec: StepSpec, state: TrainState) -> Any:
  """The weights as they are sampled with."""
  params = state.params
  if state.base is not None:
    params = lora.sampled(state.base, params, spec.model.lora.alpha, spec.model.dtype)
  params = quantized.quantize_params(params, spec.model.weights_dtype, spec.model.dtype)
  return jax.lax.with_sharding_constraint(
    params, sharding.decode_layout(params, spec.layout.mesh, spec.layout.rules)
  )


def _decode(spec: StepSpec, params: Any, judge: Any, seed, version, cap, prompts, begun, kept):
  """One shard's loop → its rows, the iterations it took, what it hands on, and numbers that add up over shards."""
  shards = sharding.rows_shards(spec.layout.mesh)
  lockstep = sharding.ROWS if spec.rollout.lockstep and shards > 1 else ()
  decode = spec.rollout.decode._replace(
    slots=spec.rollout.decode.slots // shards, lockstep=lockstep
  )
  inputs = DecodeInputs(
    params, prompts, jax.random.key(seed), version, continued=begun, cap=cap, carried=kept
  )
  model = spec.model.config
  counts, left, held = {}, None, 0 if begun is None else begun.length_B.sum()
  if spec.rollout.pruning is not None:
    rollout, rounds, tokens = pruned_decode.generate(
      model, decode, inputs, judge, spec.rollout.pruning
    )
    return rollout, rounds, None, dict(tokens=tokens)
  if spec.rollout.tree is not None:
    share = spec.rollout.tree.share(prompts.born_P)
    rollout, rounds, grown = tree_decode.generate(
      model, decode, inputs, spec.rollout.tree, share=share
    )
    counts = {f'tree_{k}': v for k, v in tree_decode.counts(grown).items()}
  elif spec.rollout.drafts.ngram is not None:
    rollout, rounds, drafts = ngram_drafts.generate(
      model, decode, inputs, spec.rollout.drafts.ngram
    )
    counts = {f'ngram_{k}': v for k, v in drafts._asdict().items()}
  elif kept is not None:
    rollout, rounds, left = ring_decode.resume(model, decode, inputs)
    counts = dict(carried_tokens=kept.cached_B.sum())
  else:
    rollout, rounds = ring_decode.generate(model, decode, inputs)
  return rollout, rounds, left, counts | dict(tokens=rollout.length_B.sum() - held)


_VERDICT = 2**31 - 1  # folded into the key: a verdict's noise is none of the sampler's


def _verify(spec: StepSpec, params: Any, prompts: Prompts, draft, begun, state: TrainState, cap):
  """One forward pass over the drafts → the rows to continue, and how many draft tokens they keep."""
  T, G = draft.tokens_BxT.shape[1], spec.rollout.decode.rollouts
  key, exit_rule = jax.random.key(state.seed), spec.rollout.decode.exit_rule
  looks_at = exit_rule is not early_exit.none

  verdict_B = sampling.row_keys(jax.random.fold_in(key, _VERDICT), prompts, G)
  verdict_BxT = jax.vmap(lambda t: sampling.uniforms(verdict_B, t), out_axes=1)(jnp.arange(T))
  noise_BxT = jnp.zeros_like(verdict_BxT)
  if spec.rollout.drafts.records_noise:
    noise_BxT = sampling.redraw(key, prompts, G, draft.noise_BxT)

  def judged(logits, *columns):
    drawn = spec.rollout.drafts.verify(logits, *columns, spec.rollout.decode.temperature)
    return *drawn, *(exit_signals.token_signals(logits) if looks_at else ())

  token_BxT, logp_BxT, *signals = logprob.over_logits(
    judged,
    spec.model.config,
    params,
    shared_prompt_forward.hidden(
      spec.model.config, params, prompts, draft.tokens_BxT, dtype=spec.model.dtype
    ),
    draft.tokens_BxT,
    draft.logp_BxT,
    verdict_BxT,
    noise_BxT,
    chunk_tokens=spec.model.head_chunk_tokens,
    dtype=spec.model.dtype,
  )
  cut, stays_B = _cut(draft, token_BxT, logp_BxT, state.step, spec.rollout.decode.end_ids, cap)
  if looks_at:
    keys_B = sampling.row_keys(key, prompts, G)
    cut = cut._replace(
      memory_BxM=jnp.zeros((len(cut.length_B), early_exit.MEMORY_SIZE), jnp.float32)
    )
    cap_B = jnp.broadcast_to(cap, cut.length_B.shape)
    cut = _blanked(exit_signals.replay_rule(exit_rule, cut, *signals, cap_B, keys_B))
  stays_B = jnp.minimum(stays_B, cut.length_B)
  if begun is not None:
    held_B = begun.length_B > 0
    pick = lambda old, new: jnp.where(held_B.reshape(-1, *[1] * (new.ndim - 1)), old, new)  # noqa: E731
    cut = jax.tree.map(pick, begun, cut)
    stays_B = jnp.where(held_B, 0, stays_B)
  return cut, stays_B.sum().astype(jnp.float32)


def _noise(prompts: Prompts, rollout: Rollout, begun: Rollout | None) -> jax.Array:
  """Whose noise drew each token: that of a row's own step, but for what it began with."""
  G = len(rollout.length_B) // len(prompts.born_P)
  column_BxT = jnp.arange(rollout.tokens_BxT.shape[1])[None]
  noise_BxT = jnp.broadcast_to(jnp.repeat(prompts.born_P, G)[:, None], rollout.tokens_BxT.shape)
  if begun is not None:
    noise_BxT = jnp.where(column_BxT < begun.length_B[:, None], begun.noise_BxT, noise_BxT)
  return jnp.where(column_BxT < rollout.length_B[:, None], noise_BxT, 0)


def _cut(
  draft: Rollout,
  token_BxT: jax.Array,
  logp_BxT: jax.Array,
  version: jax.Array,
  end_ids: tuple[int, ...],
  cap: jax.Array,
) -> tuple[Rollout, jax.Array]:
  """The drafts up to their first token that does not stay, and what takes its place; how many tokens stay.

  Nothing goes beyond the cap. Whether a row is finished, its last token and the cap of this step decide, and not how
  it ended when it was sampled. arXiv:2509.23232 (SPEC-RL).
  """
  column_BxT = jnp.arange(draft.tokens_BxT.shape[1])[None]
  most_B = jnp.minimum(draft.length_B, cap)
  same_BxT = (token_BxT == draft.tokens_BxT) & (column_BxT < most_B[:, None])
  stays_B = jnp.cumprod(same_BxT, axis=1).sum(1).astype(jnp.int32)
  at_cut_BxT = (column_BxT == stays_B[:, None]) & (column_BxT < most_B[:, None]) & (token_BxT >= 0)
  length_B = stays_B + at_cut_BxT.any(1)
  last_B = jnp.take_along_axis(token_BxT, jnp.maximum(length_B - 1, 0)[:, None], axis=1)[:, 0]
  stopped_B = (length_B > 0) & jnp.isin(last_B, jnp.asarray(end_ids, jnp.int32))
  reason_B = jnp.where(length_B >= cap, TRUNCATED, UNFINISHED)
  rows = Rollout(
    token_BxT,
    logp_BxT,
    length_B,
    jnp.where(stopped_B, STOPPED, reason_B).astype(jnp.int8),
    jnp.full_like(draft.version_BxT, version),
    jnp.ones_like(draft.weight_B),
    draft.feature_BxF,
    noise_BxT=draft.noise_BxT,
  )
  return _blanked(rows), stays_B


def _blanked(rollout: Rollout) -> Rollout:
  """Zeros behind the last token of each row."""
  T = rollout.tokens_BxT.shape[1]
  kept_BxT = jnp.arange(T)[None] < rollout.length_B[:, None]
  blank = lambda x_BxT: jnp.where(kept_BxT, x_BxT, 0).astype(x_BxT.dtype)  # noqa: E731
  return rollout._replace(
    tokens_BxT=blank(rollout.tokens_BxT),
    logp_BxT=blank(rollout.logp_BxT),
    version_BxT=blank(rollout.version_BxT),
  )
