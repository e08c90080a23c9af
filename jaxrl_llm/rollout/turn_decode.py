"""Decoding of turns by calls: a row that waits for its environment keeps its keys and values, and others decode.

A row whose turn has ended comes back with an observation behind it. Only these new tokens are encoded: a few rows and
a few tokens at a time, read against what is cached. Prompts are encoded once for their group, before the first call.
The caches take the memory of P prompts and of B completions.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models import decoder
from jaxrl_llm.rollout import sampling, slot_loop
from jaxrl_llm.rollout.decode_records import DecodeInputs, DecodeSettings, LoopConstants, LoopState
from jaxrl_llm.types import UNFINISHED, ModelConfig, Rollout

# Tokens are appended by passes of so many rows and columns: about what a pass over the weights computes without
# becoming slower than a decode iteration.
APPENDED_ROWS, APPENDED_TOKENS = 8, 16


class TurnCache(NamedTuple):
  """What stays on the device between two calls of a step."""

  prompts: decoder.Cache  # [P, K, L, d] of each layer
  # [B, K, T + padding, d] of each layer; token j of a row lies in column j, columns from cached_B on are unused
  rows: decoder.Cache
  cached_B: jax.Array  # int32


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
  B = len(constants.keys_B)
  # A pass writes whole blocks: its padding falls behind the last column that is read.
  width_N = [settings.max_tokens + APPENDED_TOKENS] * model.layers
  rows = slot_loop.empty_cache(model, B, width_N, settings.cache_dtype)
  return rollout, TurnCache(constants.prompt_cache, rows, jnp.zeros(B, jnp.int32))


def advance(
  model: ModelConfig,
  settings: DecodeSettings,
  inputs: DecodeInputs,
  cache: TurnCache,
  limits: CallLimits,
) -> tuple[Rollout, TurnCache, CallCounts]:
  """Appends what unfinished rows of `inputs.continued` got since the last call, then decodes until a limit."""
  constants, rollout = _constants(model, settings, inputs, cache)
  assert rollout is not None, 'rows that go on'
  before_B, length_B = cache.cached_B, rollout.length_B
  cache, passes = _append(constants, cache, rollout)
  appended = (cache.cached_B - before_B).sum()
  B = len(constants.keys_B)
  row_B = jnp.arange(B, dtype=jnp.int32)
  goes_on_B = rollout.reason_B == UNFINISHED
  state = LoopState(
    iterations=jnp.int32(0),
    row_S=jnp.where(goes_on_B, row_B, B),
    index_S=cache.cached_B,
    column=jnp.int32(0),
    waiting_B=jnp.zeros(B, bool),
    rollout=rollout,
    cache=cache.rows,
  )
  begun = goes_on_B.sum()

  def goes_on(state: LoopState) -> jax.Array:
    busy = (state.row_S < B).sum()
    return (busy > 0) & (begun - busy < limits.ready) & (state.iterations < limits.iterations)

  state = jax.lax.while_loop(goes_on, lambda s: _iterate(constants, s), state)
  counts = CallCounts(
    state.iterations,
    jnp.sum(state.rollout.length_B - length_B),
    appended,
    passes * min(APPENDED_ROWS, B) * APPENDED_TOKENS,
  )
  return state.rollout, TurnCache(cache.prompts, state.cache, state.index_S), counts


def _constants(
  model: ModelConfig, settings: DecodeSettings, inputs: DecodeInputs, cache: TurnCache
) -> tuple[LoopConstants, Rollout | None]:
  prompts, rollout = jax.tree.map(jnp.asarray, (inputs.prompts, inputs.continued))
  B, T = len(cache.cached_B), settings.max_tokens
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
  B = len(constants.keys_B)
  last_B = jnp.where(rollout.reason_B == UNFINISHED, rollout.length_B - 1, 0)

  def new_tokens(cached_B: jax.Array) -> jax.Array:
    return jnp.maximum(last_B - cached_B, 0)

  def encode(carry):
    rows, cached_B, passes = carry
    new_B = new_tokens(cached_B)
    # In order, because all rows share their group's prompt in place.
    row_M = jnp.sort(jax.lax.top_k(new_B, min(APPENDED_ROWS, B))[1].astype(jnp.int32))
    part = _encode_block(
      constants, jax.tree.map(lambda x: x[row_M], rows), row_M, cached_B, rollout
    )
    count_M = jnp.minimum(new_B[row_M], APPENDED_TOKENS)
    # What a row without so many new tokens gets behind its columns is replaced before it is read.
    rows = jax.tree.map(lambda x, y: x.at[row_M].set(y), rows, part)
    return rows, cached_B.at[row_M].add(count_M), passes + 1

  rows, cached_B, passes = jax.lax.while_loop(
    lambda carry: new_tokens(carry[1]).any(), encode, (cache.rows, cache.cached_B, jnp.int32(0))
  )
  return TurnCache(cache.prompts, rows, cached_B), passes


def _encode_block(
  constants: LoopConstants,
  rows: decoder.Cache,
  row_M: jax.Array,
  cached_B: jax.Array,
  rollout: Rollout,
) -> decoder.Cache:
  """The caches of the rows `row_M` with a block of tokens behind the cached ones."""
  settings = constants.settings
  prompt_M = row_M // settings.rollouts
  index_MxN = cached_B[row_M][:, None] + jnp.arange(APPENDED_TOKENS)[None]
  column_C = jnp.arange(settings.max_tokens + APPENDED_TOKENS)
  _, rows, _ = decoder.apply(
    constants.model,
    constants.params,
    rollout.tokens_BxT[row_M[:, None], jnp.minimum(index_MxN, settings.max_tokens - 1)],
    constants.prompts.length_P[prompt_M][:, None] + index_MxN,
    column_C[None, None] <= index_MxN[..., None],
    shared=slot_loop.prompt_cache_of(constants, prompt_M),
    cache=rows,
    at=cached_B[row_M],
    dtype=settings.dtype,
  )
  return rows


def _iterate(constants: LoopConstants, state: LoopState) -> LoopState:
  """One token of each row whose turn goes on.

  A row that waits writes the keys of no token into its first unused column, where they are replaced before it is read.
  """
  settings, B = constants.settings, len(constants.keys_B)
  row_B, index_B = jnp.arange(B, dtype=jnp.int32), state.index_S
  busy_B = state.row_S < B
  prompt_B = row_B // settings.rollouts
  column_C = jnp.arange(settings.max_tokens + APPENDED_TOKENS)
  hidden_Bx1xD, cache, _ = decoder.apply(
    constants.model,
    constants.params,
    state.rollout.tokens_BxT[row_B, jnp.minimum(index_B, settings.max_tokens - 1)][:, None],
    (constants.prompts.length_P[prompt_B] + index_B)[:, None],
    (column_C[None] <= index_B[:, None])[:, None],
    shared=slot_loop.prompt_cache_of(constants, prompt_B),
    cache=state.cache,
    at=index_B,
    dtype=settings.dtype,
  )
  logits_BxV = decoder.head(constants.model, constants.params, hidden_Bx1xD[:, 0], settings.dtype)
  token_B, logp_B = slot_loop.sample_rows(constants, logits_BxV, row_B, index_B + 1)
  rollout = slot_loop.record_tokens(
    constants, state.rollout, state.row_S, index_B + 1, token_B, logp_B
  )
  state = state._replace(
    rollout=rollout, index_S=jnp.where(busy_B, index_B + 1, index_B), cache=cache
  )
  return slot_loop.release_slots(constants, state)
