"""Decoding of turns by calls: a row that waits for its environment keeps its keys and values, and others decode.

A row whose turn has ended comes back with an observation behind it. Only these new tokens are encoded: a few rows and
a few tokens at a time, read against what is cached. Prompts are encoded once for their group, before the first call.
The caches take the memory of P prompts and of S completions, and of S prompts more where S < B. The caller says which
row has which of the S slots; a row that comes back without its slot is encoded again.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models import decoder
from jaxrl_llm.rollout import sampling, slot_loop
from jaxrl_llm.rollout.decode_records import DecodeInputs, DecodeSettings, LoopConstants, LoopState
from jaxrl_llm.types import UNFINISHED, Array, ModelConfig, Rollout

# Tokens are appended by passes of so many rows and columns: about what a pass over the weights computes without
# becoming slower than a decode iteration.
APPENDED_ROWS, APPENDED_TOKENS = 8, 16


class TurnCache(NamedTuple):
  """What stays on the device between two calls of a step."""

  prompts: decoder.Cache  # [P, K, L, d] of each layer
  # [S, K, T + padding, d] of each layer; token j of a row lies in column j, columns from cached_S on are unused
  rows: decoder.Cache
  row_S: jax.Array  # int32, the row of a slot
  cached_S: jax.Array  # int32


class CallLimits(NamedTuple):
  """When a call returns; traced numbers."""

  ready: jax.Array | int  # ended turns
  iterations: jax.Array | int


class CallCounts(NamedTuple):
  """Work of a call."""

  iterations: jax.Array  # of the decode loop
  tokens: jax.Array  # sampled
  appended: jax.Array  # tokens that were encoded before the loop
  positions: jax.Array  # that these passes computed, padding included


def begin(
  model: ModelConfig, settings: DecodeSettings, inputs: DecodeInputs
) -> tuple[Rollout, TurnCache]:
  """Encodes the prompts, and samples the first token of each row without any."""
  constants, rollout, _ = slot_loop.prepare(model, settings, inputs)
  S = settings.slots or len(constants.keys_B)
  # A pass writes whole blocks: its padding falls behind the last column that is read.
  width_N = [settings.max_tokens + APPENDED_TOKENS] * model.layers
  rows = slot_loop.empty_cache(model, S, width_N, settings.cache_dtype)
  row_S = jnp.arange(S, dtype=jnp.int32)
  return rollout, TurnCache(constants.prompt_cache, rows, row_S, jnp.zeros_like(row_S))


def advance(
  model: ModelConfig,
  settings: DecodeSettings,
  inputs: DecodeInputs,
  cache: TurnCache,
  row_S: Array,
  limits: CallLimits,
) -> tuple[Rollout, TurnCache, CallCounts]:
  """Appends what unfinished rows of `inputs.continued` got since the last call, then decodes until a limit.

  `row_S` int32 are the rows of the slots, 0 to B − 1 where there are B. Others do not go on.
  """
  constants, rollout = _constants(model, settings, inputs, cache)
  assert rollout is not None, 'rows that go on'
  B, row_S, length_B = len(constants.keys_B), jnp.asarray(row_S), rollout.length_B
  kept_S = jnp.where(row_S == cache.row_S, cache.cached_S, 0)
  cache, passes = _append(constants, cache._replace(row_S=row_S, cached_S=kept_S), rollout)
  appended = (cache.cached_S - kept_S).sum()
  if len(row_S) < B:  # gathered once, and not for every token
    slot_prompts = slot_loop.prompt_cache_of(constants, row_S // settings.rollouts)
    constants = constants._replace(slot_prompts=slot_prompts)
  state = LoopState(
    iterations=jnp.int32(0),
    row_S=jnp.where(rollout.reason_B[row_S] == UNFINISHED, row_S, B),
    index_S=cache.cached_S,
    column=jnp.int32(0),
    waiting_B=jnp.zeros(B, bool),
    rollout=rollout,
    cache=cache.rows,
  )
  begun = (state.row_S < B).sum()

  def goes_on(state: LoopState) -> jax.Array:
    busy = (state.row_S < B).sum()
    return (busy > 0) & (begun - busy < limits.ready) & (state.iterations < limits.iterations)

  state = jax.lax.while_loop(goes_on, lambda s: _iterate(constants, row_S, s), state)
  counts = CallCounts(
    state.iterations,
    jnp.sum(state.rollout.length_B - length_B),
    appended,
    passes * min(APPENDED_ROWS, len(row_S)) * APPENDED_TOKENS,
  )
  return state.rollout, cache._replace(rows=state.cache, cached_S=state.index_S), counts


def _constants(
  model: ModelConfig, settings: DecodeSettings, inputs: DecodeInputs, cache: TurnCache
) -> tuple[LoopConstants, Rollout | None]:
  prompts, rollout = jax.tree.map(jnp.asarray, (inputs.prompts, inputs.continued))
  B, T = len(prompts.length_P) * settings.rollouts, settings.max_tokens
  constants = LoopConstants(
    model=model,
    settings=settings,
    params=inputs.params,
    prompts=prompts,
    prompt_cache=cache.prompts,
    keys_B=sampling.row_keys(inputs.key, prompts, settings.rollouts),
    cap_B=jnp.full(B, jnp.minimum(T if inputs.cap is None else inputs.cap, T)),
    pause_B=jnp.full(B, T + 1),
    version=jnp.int32(inputs.version),
    started_tokens=jnp.int32(0),
  )
  return constants, rollout


def _append(
  constants: LoopConstants, cache: TurnCache, rollout: Rollout
) -> tuple[TurnCache, jax.Array]:
  """Encodes tokens of unfinished rows that are not cached, but for the last, with which decoding begins."""
  row_S, S = cache.row_S, len(cache.row_S)
  last_B = jnp.where(rollout.reason_B == UNFINISHED, rollout.length_B - 1, 0)

  def new_tokens(cached_S: jax.Array) -> jax.Array:
    return jnp.maximum(last_B[row_S] - cached_S, 0)

  def encode(carry):
    rows, cached_S, passes = carry
    new_S = new_tokens(cached_S)
    # In order, because all rows share their group's prompt in place.
    slot_M = jnp.sort(jax.lax.top_k(new_S, min(APPENDED_ROWS, S))[1].astype(jnp.int32))
    part = jax.tree.map(lambda x: x[slot_M], rows)
    part = _encode_block(constants, part, row_S[slot_M], cached_S[slot_M], rollout)
    count_M = jnp.minimum(new_S[slot_M], APPENDED_TOKENS)
    # What a row without so many new tokens gets behind its columns is replaced before it is read.
    rows = jax.tree.map(lambda x, y: x.at[slot_M].set(y), rows, part)
    return rows, cached_S.at[slot_M].add(count_M), passes + 1

  rows, cached_S, passes = jax.lax.while_loop(
    lambda carry: new_tokens(carry[1]).any(), encode, (cache.rows, cache.cached_S, jnp.int32(0))
  )
  return cache._replace(rows=rows, cached_S=cached_S), passes


def _encode_block(
  constants: LoopConstants,
  rows: decoder.Cache,
  row_M: jax.Array,
  cached_M: jax.Array,
  rollout: Rollout,
) -> decoder.Cache:
  """The caches `rows` of the rows `row_M` with a block of tokens behind the cached ones."""
  settings = constants.settings
  prompt_M = row_M // settings.rollouts
  index_MxN = cached_M[:, None] + jnp.arange(APPENDED_TOKENS)[None]
  column_C = jnp.arange(settings.max_tokens + APPENDED_TOKENS)
  _, rows, _ = decoder.apply(
    constants.model,
    constants.params,
    rollout.tokens_BxT[row_M[:, None], jnp.minimum(index_MxN, settings.max_tokens - 1)],
    constants.prompts.length_P[prompt_M][:, None] + index_MxN,
    column_C[None, None] <= index_MxN[..., None],
    shared=slot_loop.prompt_cache_of(constants, prompt_M),
    cache=rows,
    at=cached_M,
    dtype=settings.dtype,
  )
  return rows


def _iterate(constants: LoopConstants, row_S: jax.Array, state: LoopState) -> LoopState:
  """One token of each row whose turn goes on. `row_S`: the rows of the slots, those that wait included.

  A row that waits writes the keys of no token into its first unused column, where they are replaced before it is read.
  """
  settings, B = constants.settings, len(constants.keys_B)
  index_S, prompt_S = state.index_S, row_S // settings.rollouts
  column_C = jnp.arange(settings.max_tokens + APPENDED_TOKENS)
  hidden_Sx1xD, cache, _ = decoder.apply(
    constants.model,
    constants.params,
    state.rollout.tokens_BxT[row_S, jnp.minimum(index_S, settings.max_tokens - 1)][:, None],
    (constants.prompts.length_P[prompt_S] + index_S)[:, None],
    (column_C[None] <= index_S[:, None])[:, None],
    shared=slot_loop.prompt_cache_of(constants, prompt_S),
    cache=state.cache,
    at=index_S,
    dtype=settings.dtype,
  )
  logits_SxV = decoder.head(constants.model, constants.params, hidden_Sx1xD[:, 0], settings.dtype)
  token_S, logp_S = slot_loop.sample_rows(constants, logits_SxV, row_S, index_S + 1)
  rollout = slot_loop.record_tokens(
    constants, state.rollout, state.row_S, index_S + 1, token_S, logp_S
  )
  index_S = jnp.where(state.row_S < B, index_S + 1, index_S)
  state = state._replace(rollout=rollout, index_S=index_S, cache=cache)
  return slot_loop.release_slots(constants, state)
