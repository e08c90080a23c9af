"""Rows in slots: the parts that all decode loops share. Assigns rows to slots, records tokens, ends rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp

from jaxrl_llm.models import attention, decoder, moe, shared_prompt_forward
from jaxrl_llm.rollout import early_exit, queue_order, sampling
from jaxrl_llm.rollout.decode_records import DecodeInputs, DecodeSettings, LoopConstants, LoopState
from jaxrl_llm.types import (
  STOPPED,
  TRUNCATED,
  UNFINISHED,
  Array,
  ModelConfig,
  Rollout,
)

# Rows of [V] logits: with a large vocabulary all B of them would not fit in memory.
_FIRST_TOKENS_AT_ONCE = 64
# (constants, rows, indices of their last tokens, rollout) → the cache of the slots' rows
Encode = Callable[[LoopConstants, jax.Array, jax.Array, Rollout], decoder.Cache]


def prepare(
  model: ModelConfig, settings: DecodeSettings, inputs: DecodeInputs
) -> tuple[LoopConstants, Rollout, jax.Array]:
  """Everything before a loop: its constants, each row with its first token, and the logits [P, V] of that token."""
  prompts = jax.tree.map(jnp.asarray, inputs.prompts)
  B, T = prompts.tokens_PxL.shape[0] * settings.rollouts, settings.max_tokens
  cache, hidden_PxD = shared_prompt_forward.prefill(
    model, inputs.params, prompts, settings.dtype, inputs.prefix_tokens
  )
  logits_PxV = decoder.head(model, inputs.params, hidden_PxD, settings.dtype)
  rollout = jax.tree.map(jnp.asarray, inputs.continued)
  if rollout is None:
    rollout = empty_rollout(B, T, expert_shape(model) if settings.records.experts else None)
  if settings.exit_rule is not None and rollout.memory_BxM is None:
    rollout = rollout._replace(memory_BxM=jnp.zeros((B, early_exit.MEMORY_SIZE), jnp.float32))
  if inputs.predict_tokens is not None:
    hidden_PxD = hidden_PxD.astype(jnp.float32)
    prompts = prompts._replace(expected_P=inputs.predict_tokens(hidden_PxD))
    rollout = rollout._replace(feature_BxF=jnp.repeat(hidden_PxD, settings.rollouts, axis=0))
  constants = LoopConstants(
    model=model,
    settings=settings,
    params=inputs.params,
    prompts=prompts,
    prompt_cache=packed(cache, settings.cache_dtype),
    keys_B=sampling.row_keys(inputs.key, prompts, settings.rollouts, inputs.member_B),
    cap_B=jnp.broadcast_to(jnp.minimum(T if inputs.cap is None else inputs.cap, T), (B,)),
    pause_B=jnp.full(B, T + 1 if inputs.pause is None else inputs.pause),
    version=jnp.int32(inputs.version),
    started_tokens=rollout.length_B.sum(),
    carried=inputs.carried,
    greedy_B=inputs.greedy_B,
    prompt_hidden_PxD=hidden_PxD,
  )
  if settings.records.top_tokens:
    rollout = _with_first_top_tokens(constants, logits_PxV, rollout)
  return constants, _sample_first_tokens(constants, logits_PxV, rollout), logits_PxV


def packed(cache: decoder.Cache, dtype: str) -> decoder.Cache:
  """The cache of a forward pass in its storage format."""
  pack = lambda layer: jax.tree.map(lambda x: attention.pack_cache(x, dtype), layer)  # noqa: E731
  return attention.map_columns(pack, cache)


def start_loop(
  constants: LoopConstants,
  rollout: Rollout,
  continues: bool,
  width_N: Sequence[int],
  encode: Encode | None = None,
) -> LoopState:
  """The loop's first state: rows in slots, those with most tokens first.

  The cache of layer n has `width_N[n]` columns. Where rows are continued (`continues`), `encode` fills the cache with
  their tokens in one pass; without `encode` it stays empty.
  """
  model, settings, B = constants.model, constants.settings, len(constants.keys_B)
  S = settings.slots or B
  state = LoopState(
    iterations=jnp.int32(0),
    row_S=jnp.full(S, B, jnp.int32),
    index_S=jnp.zeros(S, jnp.int32),
    column=jnp.int32(0),
    waiting_B=undecoded_rows(constants, rollout),
    rollout=rollout,
    # One array per layer: stacked layers cost the CPU a copy of the cache every token.
    cache=empty_cache(model, S, width_N, settings.cache_dtype),
  )
  if S == B:
    row_S = jnp.where(state.waiting_B, jnp.arange(B), B).astype(jnp.int32)
    cache = attention.start_rows(
      state.cache, constants.prompt_cache, row_S, settings.rollouts, state.waiting_B
    )
    state = state._replace(row_S=row_S, waiting_B=jnp.zeros_like(state.waiting_B), cache=cache)
  elif continues:
    length_B = jnp.where(rollout.length_B > 1, rollout.length_B, 0)
    score_B = jnp.where(
      length_B > 0, 1e9 + length_B, settings.queue_order(progress(constants, state))
    )
    state = refill_slots(constants, state, score_B)
  else:
    state = refill_slots(constants, state)
  if not continues or encode is None:
    return state
  index_S = jnp.where(
    state.row_S < B, cast(jax.Array, rollout.length_B).at[state.row_S].get(mode='clip') - 1, 0
  )
  encoded = lambda s: s._replace(  # noqa: E731
    index_S=index_S, cache=encode(constants, s.row_S, index_S, s.rollout)
  )
  return jax.lax.cond(any_shard(constants, (index_S > 0).any()), encoded, lambda s: s, state)


def ring_widths(model: ModelConfig, width: int) -> list[int]:
  """Columns of each layer's ring where the widest has `width`: a sliding layer needs those of its window."""
  return [min(width, model.window) if slides else width for slides in model.slides]


def empty_cache(model: ModelConfig, rows: int, width_N: Sequence[int], dtype: str) -> decoder.Cache:
  """The cache of `rows` rows, all 0, with `width_N[n]` columns in layer n."""
  states_N = decoder.empty_states(model, rows) if model.is_recurrent else [None] * len(width_N)
  return [
    states or tuple(attention.empty_cache((rows, K, width, d), dtype) for K, d in sizes)
    for states, sizes, width in zip(states_N, decoder.cached_sizes(model), width_N, strict=True)
  ]


def encode_rows(
  constants: LoopConstants, row_S: jax.Array, index_S: jax.Array, rollout: Rollout
) -> decoder.Cache:
  """The cache of the slots' rows, token j in column j: one pass over T columns, those from `index_S` on unused."""
  settings = constants.settings
  T = settings.max_tokens
  row_S = jnp.minimum(row_S, len(constants.keys_B) - 1)
  prompt_S = row_S // settings.rollouts
  _, kv, _ = decoder.apply(
    constants.model,
    constants.params,
    rollout.tokens_BxT[row_S],
    constants.prompts.length_P[prompt_S][:, None] + jnp.arange(T)[None],
    _read_mask(constants.model, index_S, T),
    shared=prompt_cache_of(constants, prompt_S),
    dtype=settings.dtype,
    # A token is routed alike whenever it is read.
    expert_BxQxNxk=None if rollout.expert_BxTxNxk is None else rollout.expert_BxTxNxk[row_S],
  )
  return kv


def _read_mask(model: ModelConfig, index_S: jax.Array, T: int) -> jax.Array:
  mask_SxTxT = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (len(index_S), T, T))
  if model.is_recurrent:  # later tokens would change a state
    mask_SxTxT &= (jnp.arange(T)[None] < index_S[:, None])[:, None]
  return mask_SxTxT


def clipped_slots(constants: LoopConstants, state: LoopState) -> tuple[jax.Array, jax.Array]:
  """Each slot's row and token index, clipped into bounds where the slot is idle."""
  row_S = jnp.minimum(state.row_S, len(constants.keys_B) - 1)
  return row_S, jnp.minimum(state.index_S, constants.settings.max_tokens - 1)


def sample_rows(
  constants: LoopConstants, logits_NxV: jax.Array, row_N: jax.Array, index_N: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
  """Token `index_N` of each row in `row_N`, drawn from its logits, and its log-probability."""
  settings, greedy_B = constants.settings, constants.greedy_B
  return sampling.sample(
    logits_NxV,
    sampling.uniforms(constants.keys_B[row_N], index_N),
    settings.temperature,
    settings.token_filter,
    None if greedy_B is None else greedy_B[row_N],
    constants.model.is_exact,
  )


def record_tokens(
  constants: LoopConstants,
  rollout: Rollout,
  row_S: jax.Array,
  index_S: jax.Array,
  token_S: jax.Array,
  logp_S: jax.Array,
) -> Rollout:
  """Writes token `index_S` of each row in `row_S`, and why the row ends with it. Row B is dropped."""
  end_S = jnp.isin(token_S, jnp.asarray(constants.settings.end_ids, jnp.int32))
  full_S = index_S + 1 >= constants.cap_B.at[row_S].get(mode='clip')
  reason_S = jnp.where(end_S, STOPPED, jnp.where(full_S, TRUNCATED, UNFINISHED)).astype(jnp.int8)
  return rollout._replace(
    tokens_BxT=_write(rollout.tokens_BxT, (row_S, index_S), token_S),
    logp_BxT=_write(rollout.logp_BxT, (row_S, index_S), logp_S),
    length_B=_write(rollout.length_B, row_S, index_S + 1),
    reason_B=_write(rollout.reason_B, row_S, reason_S),
    version_BxT=_write(rollout.version_BxT, (row_S, index_S), constants.version),
  )


def record_experts(
  rollout: Rollout, row_S: jax.Array, index_S: jax.Array, expert_SxNxk: jax.Array | None
) -> Rollout:
  """Writes the expert numbers of token `index_S` of each row in `row_S`. Row B is dropped."""
  assert rollout.expert_BxTxNxk is not None and expert_SxNxk is not None
  expert_BxTxNxk = _write(rollout.expert_BxTxNxk, (row_S, index_S), expert_SxNxk)
  return rollout._replace(expert_BxTxNxk=expert_BxTxNxk)


def top_tokens(constants: LoopConstants, logits_NxV: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The likeliest tokens that are recorded for rows of logits, and their log-probabilities, both [N, K]."""
  settings = constants.settings
  return sampling.top_tokens(
    logits_NxV, settings.temperature, settings.records.top_tokens, constants.model.is_exact
  )


def record_top_tokens(
  rollout: Rollout, row_S: jax.Array, index_S: jax.Array, top: tuple[jax.Array, jax.Array]
) -> Rollout:
  """Writes the likeliest tokens where token `index_S` of each row in `row_S` was drawn. Row B is dropped."""
  return rollout._replace(
    top_id_BxTxK=_write(rollout.top_id_BxTxK, (row_S, index_S), top[0]),
    top_logp_BxTxK=_write(rollout.top_logp_BxTxK, (row_S, index_S), top[1]),
  )


def _write(x: Array, index: jax.Array | tuple[jax.Array, ...], value: jax.Array) -> jax.Array:
  """x with `value` at `index`; indices out of bounds are dropped."""
  return cast(jax.Array, x).at[index].set(value, mode='drop')


def release_slots(constants: LoopConstants, state: LoopState) -> LoopState:
  """Ends an iteration: finished rows leave their slots, and waiting rows take these."""
  B = len(constants.keys_B)
  done_S = ~undecoded_rows(constants, state.rollout)[jnp.minimum(state.row_S, B - 1)]
  state = state._replace(iterations=state.iterations + 1, row_S=jnp.where(done_S, B, state.row_S))
  if len(state.row_S) == B or constants.slot_prompts is not None:
    return state  # every row has its own slot, or no row waits
  free = any_shard(constants, (state.row_S == B).any() & state.waiting_B.any())
  return jax.lax.cond(free, lambda s: refill_slots(constants, s), lambda s: s, state)


def undecoded_rows(constants: LoopConstants, rollout: Rollout) -> jax.Array:
  """Rows that need more decoding in this call, bool [B]."""
  return (rollout.reason_B == UNFINISHED) & (rollout.length_B < constants.pause_B)


def loop_continues(constants: LoopConstants, state: LoopState) -> jax.Array:
  """Whether some slot is busy and the stop rule does not end the loop."""
  go_on = (state.row_S < len(constants.keys_B)).any()
  stop_rule = constants.settings.stop_rule
  if stop_rule is not None:
    go_on &= ~stop_rule(progress(constants, state))
  return any_shard(constants, go_on)


def any_shard(constants: LoopConstants, condition: jax.Array) -> jax.Array:
  """Whether the condition holds on any shard in lockstep; without lockstep, the condition of this shard.

  Shards must take the same loops and branches: XLA may put collectives over all devices inside either, and a device
  that takes another path leaves the others waiting forever.
  """
  if not constants.settings.lockstep:
    return condition
  return jax.lax.psum(condition.astype(jnp.int32), constants.settings.lockstep) > 0


def progress(constants: LoopConstants, state: LoopState) -> queue_order.Progress:
  """The record that queue orders and stop rules read."""
  return queue_order.Progress(
    state.iterations,
    constants.started_tokens,
    state.rollout.length_B,
    state.rollout.reason_B != UNFINISHED,
    constants.cap_B,
    constants.prompts.expected_P,
  )


def refill_slots(
  constants: LoopConstants, state: LoopState, score_B: jax.Array | None = None
) -> LoopState:
  """Gives idle slots to the waiting rows with the largest scores; by default those of the queue order."""
  B = len(constants.keys_B)
  if score_B is None:
    score_B = constants.settings.queue_order(progress(constants, state))
  queue_B = jnp.argsort(jnp.where(state.waiting_B, -score_B, jnp.inf), stable=True)
  idle_S = state.row_S == B
  rank_S = jnp.cumsum(idle_S) - 1
  takes_S = idle_S & (rank_S < state.waiting_B.sum())
  row_S = jnp.where(takes_S, queue_B[jnp.clip(rank_S, 0, B - 1)].astype(jnp.int32), state.row_S)
  return state._replace(
    row_S=row_S,
    index_S=jnp.where(takes_S, 0, state.index_S),
    waiting_B=state.waiting_B.at[row_S].set(False, mode='drop'),
    cache=attention.start_rows(
      state.cache, constants.prompt_cache, row_S, constants.settings.rollouts, takes_S
    ),
  )


def prompt_cache_of(
  constants: LoopConstants, prompt_S: jax.Array, in_place: bool = False
) -> tuple[decoder.Cache, jax.Array]:
  """The prompts' cache and mask [·, L] for the slots: shared by groups of slots, or gathered for each slot.

  With `in_place` only the mask is gathered, for a kernel that reads `prompt_S` of the cache of all prompts.
  """
  if constants.slot_prompts is not None:
    return constants.slot_prompts
  length_P = constants.prompts.length_P
  cache = constants.prompt_cache
  if len(prompt_S) < len(constants.keys_B):
    if not in_place:
      cache = jax.tree.map(lambda x: x[prompt_S], cache)
    length_P = length_P[prompt_S]
  mask_PxL = jnp.arange(constants.prompts.tokens_PxL.shape[1])[None] < length_P[:, None]
  return cache, mask_PxL


def _sample_first_tokens(
  constants: LoopConstants, logits_PxV: jax.Array, rollout: Rollout
) -> Rollout:
  """Samples token 0 of every empty unfinished row, from the last logits of its prompt."""
  settings, B = constants.settings, len(constants.keys_B)
  row_B, zeros_B = jnp.arange(B, dtype=jnp.int32), jnp.zeros(B, jnp.int32)

  def draw(row):
    logits_1xV = logits_PxV[row // settings.rollouts][None]
    token_1, logp_1 = sample_rows(constants, logits_1xV, row[None], 0)
    return token_1[0], logp_1[0]

  token_B, logp_B = jax.lax.map(draw, row_B, batch_size=min(B, _FIRST_TOKENS_AT_ONCE))
  fresh_B = (rollout.length_B == 0) & (rollout.reason_B == UNFINISHED)
  return record_tokens(constants, rollout, jnp.where(fresh_B, row_B, B), zeros_B, token_B, logp_B)


def _with_first_top_tokens(
  constants: LoopConstants, logits_PxV: jax.Array, rollout: Rollout
) -> Rollout:
  """The rollout with the likeliest tokens where every empty unfinished row begins."""
  settings, B = constants.settings, len(constants.keys_B)
  if rollout.top_id_BxTxK is None:
    shape = B, settings.max_tokens, settings.records.top_tokens
    top = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    rollout = rollout._replace(top_id_BxTxK=top[0], top_logp_BxTxK=top[1])
  row_B = jnp.arange(B, dtype=jnp.int32)
  id_PxK, logp_PxK = top_tokens(constants, logits_PxV)
  prompt_B = row_B // settings.rollouts
  fresh_B = (rollout.length_B == 0) & (rollout.reason_B == UNFINISHED)
  write_B = jnp.where(fresh_B, row_B, B)
  return record_top_tokens(
    rollout, write_B, jnp.zeros_like(row_B), (id_PxK[prompt_B], logp_PxK[prompt_B])
  )


def expert_shape(model: ModelConfig) -> jax.ShapeDtypeStruct:
  """Shape [N, k] and type of the expert numbers that are recorded per token."""
  shape = model.mixtures, model.experts_per_token
  return jax.ShapeDtypeStruct(shape, moe.index_dtype(model))


def empty_rollout(rows: int, T: int, experts: jax.ShapeDtypeStruct | None = None) -> Rollout:
  """Rows without tokens; `experts` is `expert_shape` where expert numbers are recorded."""
  return Rollout(
    jnp.zeros((rows, T), jnp.int32),
    jnp.zeros((rows, T), jnp.float32),
    jnp.zeros(rows, jnp.int32),
    jnp.zeros(rows, jnp.int8),
    jnp.zeros((rows, T), jnp.int32),
    jnp.ones(rows, jnp.float32),
    jnp.zeros((rows, 0), jnp.float32),
    expert_BxTxNxk=None if experts is None else jnp.zeros((rows, T, *experts.shape), experts.dtype),
  )
