"""Prefill each prompt once, then decode its rollouts in slots: a finished row hands its slot to the next one.

All of it is one `lax.while_loop`. Every slot writes its keys and values into the same column of a ring, the
number of the iteration modulo T. A row at its token a sees the a + 1 youngest columns, so that handing on a
slot is setting a to 0: nothing is moved, cleared or scattered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.generate import order, sampling, stopping
from jaxrl_llm.models import decoder
from jaxrl_llm.types import STOPPED, TRUNCATED, UNFINISHED, ModelConfig, Prompts, Rollout

_FIRST_TOKENS_AT_ONCE = (
  64  # rows of [V] logits: all B of them would not fit beside a large vocabulary
)

LOOP = 'decode'  # what the loop is called inside the compiled program


class Spec(NamedTuple):
  """What is fixed when generation is compiled."""

  rollouts: int  # G, per prompt
  max_tokens: int  # T
  temperature: float  # 0 = greedy
  end_ids: tuple[int, ...]  # any of these ends a row; the end token belongs to the row
  dtype: str  # of compute and cache
  keep: sampling.Filter = sampling.EVERYTHING  # of evaluation; training samples the policy itself
  slots: int = 0  # S, rows decoded at once; 0 = all of them
  order: Callable = order.fifo
  stop: Callable = stopping.none
  lockstep: tuple[str, ...] = ()  # mesh axes whose shards all go on until the last one may stop


class _Carry(NamedTuple):
  rounds: jax.Array  # iterations so far
  row_S: jax.Array  # which row a slot decodes; B where it idles
  at_S: jax.Array  # number of the token that goes into the model next
  waiting_B: jax.Array
  rollout: Rollout
  cache: decoder.Cache


class _Fixed(NamedTuple):
  """What the loop reads and does not change."""

  model: ModelConfig
  spec: Spec
  params: Any
  prompts: Prompts
  prompt_cache: decoder.Cache
  keys_B: jax.Array
  cap_B: jax.Array
  version: jax.Array
  started_tokens: jax.Array


def generate(
  model: ModelConfig,
  params: Any,
  prompts: Prompts,
  key: jax.Array,
  version: jax.Array,
  spec: Spec,
  *,
  begun: Rollout | None = None,
  cap: jax.Array | int | None = None,
) -> tuple[Rollout, jax.Array]:
  """Samples G completions of each prompt: rows b = p * G + g of a Rollout, and the iterations it took.

  `params` are laid out and cast for decoding by the caller: nothing is gathered in the loop. The key
  of a token is fold(key, born, prompt index, g, position), so neither slots, order, mesh nor an
  interruption changes a sample. Columns past a row's end hold token 0 and log-probability 0.

  `begun` holds rows to continue (UNFINISHED) or to leave as they are; `cap`, at most T, is a traced
  number or one per row [B]. Rows that `spec.stop` or nothing else finished stay UNFINISHED.
  Source: none.
  """
  prompts = Prompts(*map(jnp.asarray, prompts))
  B, T = prompts.tokens_PxL.shape[0] * spec.rollouts, spec.max_tokens
  prompt_cache, logits_PxV = prefill(model, params, prompts, spec.dtype)
  cap_B = jnp.broadcast_to(jnp.minimum(T if cap is None else cap, T), (B,))
  rollout = _empty(B, T) if begun is None else jax.tree.map(jnp.asarray, begun)
  started = rollout.length_B.sum()
  keys_B = sampling.row_keys(key, prompts.born_P, prompts.index_P, spec.rollouts)
  fixed = _Fixed(
    model, spec, params, prompts, prompt_cache, keys_B, cap_B, jnp.int32(version), started
  )
  rollout = _first_tokens(fixed, logits_PxV, rollout)
  carry = _begin(fixed, rollout, resumes=begun is not None)
  with jax.named_scope(LOOP):
    carry = jax.lax.while_loop(lambda c: _running(fixed, c), lambda c: _iterate(fixed, c), carry)
  return carry.rollout, carry.rounds


def prefill(
  model: ModelConfig, params: Any, prompts: Prompts, dtype: str
) -> tuple[decoder.Cache, jax.Array]:
  """The prompts' cache, (k, v) [P, K, L, d] a layer, and the logits [P, V] after each one's last token.

  Source: none.
  """
  P, L = prompts.tokens_PxL.shape
  positions_PxL = jnp.broadcast_to(jnp.arange(L), (P, L))
  mask_PxL = positions_PxL < prompts.length_P[:, None]
  hidden, cache = decoder.apply(
    model, params, prompts.tokens_PxL, positions_PxL, decoder.causal(mask_PxL), dtype=dtype
  )
  last = jnp.take_along_axis(hidden, jnp.maximum(prompts.length_P - 1, 0)[:, None, None], axis=1)
  return cache, decoder.head(model, params, last[:, 0], dtype)


def _iterate(fixed: _Fixed, carry: _Carry) -> _Carry:
  """One token for every slot that has a row, then slots change hands."""
  model, spec, T = fixed.model, fixed.spec, fixed.spec.max_tokens
  column = carry.rounds % T
  age_T = (column - jnp.arange(T)) % T
  row_S = jnp.minimum(carry.row_S, len(fixed.keys_B) - 1)
  at_S = jnp.minimum(carry.at_S, T - 1)
  prompt_S = row_S // spec.rollouts
  hidden, cache = decoder.apply(
    model,
    fixed.params,
    carry.rollout.tokens_BxT[row_S, at_S][:, None],
    (fixed.prompts.length_P[prompt_S] + at_S)[:, None],
    (age_T[None] <= at_S[:, None])[:, None],
    shared=_prompts_of(fixed, prompt_S),
    cache=carry.cache,
    at=column,
    dtype=spec.dtype,
  )
  logits_SxV = decoder.head(model, fixed.params, hidden[:, 0], spec.dtype)
  uniform_S = sampling.uniforms(fixed.keys_B[row_S], at_S + 1)
  token_S, logp_S = sampling.sample(logits_SxV, uniform_S, spec.temperature, spec.keep)
  # A row that streams what it held before takes its own next token and records nothing.
  held_S = at_S + 1 < carry.rollout.length_B[row_S]
  write_S = jnp.where(held_S, len(fixed.keys_B), carry.row_S)
  rollout = _record(fixed, carry.rollout, write_S, at_S + 1, token_S, logp_S)
  done_S = rollout.reason_B[row_S] != UNFINISHED
  carry = carry._replace(
    rounds=carry.rounds + 1,
    row_S=jnp.where(done_S, len(fixed.keys_B), carry.row_S),
    at_S=carry.at_S + 1,
    rollout=rollout,
    cache=cache,
  )
  if len(carry.row_S) == len(fixed.keys_B):
    return carry  # every row has its own slot
  free = (carry.row_S == len(fixed.keys_B)).any() & carry.waiting_B.any()
  return jax.lax.cond(_anywhere(fixed, free), lambda c: _refill(fixed, c), lambda c: c, carry)


def _record(fixed: _Fixed, rollout: Rollout, row_S, column_S, token_S, logp_S) -> Rollout:
  """Writes one token for each row in `row_S`; row B does not exist and is dropped."""
  end_S = jnp.isin(token_S, jnp.asarray(fixed.spec.end_ids, jnp.int32))
  full_S = column_S + 1 >= fixed.cap_B.at[row_S].get(mode='clip')
  reason_S = jnp.where(end_S, STOPPED, jnp.where(full_S, TRUNCATED, UNFINISHED)).astype(jnp.int8)
  put = dict(mode='drop')
  return Rollout(
    rollout.tokens_BxT.at[row_S, column_S].set(token_S, **put),
    rollout.logp_BxT.at[row_S, column_S].set(logp_S, **put),
    rollout.length_B.at[row_S].set(column_S + 1, **put),
    rollout.reason_B.at[row_S].set(reason_S, **put),
    rollout.version_BxT.at[row_S, column_S].set(fixed.version, **put),
  )


def _running(fixed: _Fixed, carry: _Carry) -> jax.Array:
  busy = (carry.row_S < len(fixed.keys_B)).any()
  go_on = busy & ~fixed.spec.stop(_progress(fixed, carry))
  return _anywhere(fixed, go_on)


def _anywhere(fixed: _Fixed, yes: jax.Array) -> jax.Array:
  """Whether any shard says yes, where they run in lockstep; else what this one says.

  What decides a loop or a branch must be the same everywhere: XLA may put exchanges between all devices
  inside either, and a device that goes another way is waited for in vain.
  """
  if not fixed.spec.lockstep:
    return yes
  return jax.lax.psum(yes.astype(jnp.int32), fixed.spec.lockstep) > 0


def _progress(fixed: _Fixed, carry: _Carry) -> order.Progress:
  return order.Progress(
    carry.rounds,
    fixed.started_tokens,
    carry.rollout.length_B,
    carry.rollout.reason_B != UNFINISHED,
    fixed.cap_B,
    fixed.prompts.expected_P,
  )


def _refill(fixed: _Fixed, carry: _Carry, score_B: jax.Array | None = None) -> _Carry:
  """Idle slots take the waiting rows with the largest scores."""
  B = len(fixed.keys_B)
  score_B = fixed.spec.order(_progress(fixed, carry)) if score_B is None else score_B
  queue_B = jnp.argsort(jnp.where(carry.waiting_B, -score_B, jnp.inf), stable=True)
  idle_S = carry.row_S == B
  rank_S = jnp.cumsum(idle_S) - 1
  takes_S = idle_S & (rank_S < carry.waiting_B.sum())
  row_S = jnp.where(takes_S, queue_B[jnp.clip(rank_S, 0, B - 1)].astype(jnp.int32), carry.row_S)
  return carry._replace(
    row_S=row_S,
    at_S=jnp.where(takes_S, 0, carry.at_S),
    waiting_B=carry.waiting_B.at[row_S].set(False, mode='drop'),
  )


def _begin(fixed: _Fixed, rollout: Rollout, resumes: bool) -> _Carry:
  """Puts rows into the slots, those that hold most tokens first: these are encoded in one pass."""
  model, spec, B, T = fixed.model, fixed.spec, len(fixed.keys_B), fixed.spec.max_tokens
  S = spec.slots or B
  waiting_B = rollout.reason_B == UNFINISHED
  idle_S, zeros_S = jnp.full(S, B, jnp.int32), jnp.zeros(S, jnp.int32)
  shape = (S, model.kv_heads, T, model.head_dim)
  # One array per layer: stacked layers cost the CPU a copy of the cache every token.
  cache = [
    (jnp.zeros(shape, spec.dtype), jnp.zeros(shape, spec.dtype)) for _ in range(model.layers)
  ]
  carry = _Carry(jnp.int32(0), idle_S, zeros_S, waiting_B, rollout, cache)
  if S == B:
    carry = carry._replace(
      row_S=jnp.where(waiting_B, jnp.arange(B), B).astype(jnp.int32),
      waiting_B=jnp.zeros_like(waiting_B),
    )
  elif resumes:
    held_B = jnp.where(rollout.length_B > 1, rollout.length_B, 0)
    score_B = jnp.where(held_B > 0, 1e9 + held_B, fixed.spec.order(_progress(fixed, carry)))
    carry = _refill(fixed, carry, score_B)
  else:
    carry = _refill(fixed, carry)
  if not resumes:
    return carry
  at_S = jnp.where(carry.row_S < B, rollout.length_B.at[carry.row_S].get(mode='clip') - 1, 0)
  encode = lambda c: _encode(fixed, c._replace(at_S=at_S))  # noqa: E731
  return jax.lax.cond(_anywhere(fixed, (at_S > 0).any()), encode, lambda c: c, carry)


def _encode(fixed: _Fixed, carry: _Carry) -> _Carry:
  """Fills the ring with what the slots' rows hold: token j of a row at its token a gets age a − j."""
  T, S = fixed.spec.max_tokens, len(carry.row_S)
  row_S = jnp.minimum(carry.row_S, len(fixed.keys_B) - 1)
  prompt_S = row_S // fixed.spec.rollouts
  _, kv = decoder.apply(
    fixed.model,
    fixed.params,
    carry.rollout.tokens_BxT[row_S],
    fixed.prompts.length_P[prompt_S][:, None] + jnp.arange(T)[None],
    jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (S, T, T)),
    shared=_prompts_of(fixed, prompt_S),
    dtype=fixed.spec.dtype,
  )
  # The next token of a row goes to column 0, so the one of age a lies in column −a.
  source_SxT = (jnp.arange(T)[None] + carry.at_S[:, None]) % T
  rolled = jax.tree.map(
    lambda x: jnp.take_along_axis(x, source_SxT[:, None, :, None], axis=2).astype(fixed.spec.dtype),
    kv,
  )
  return carry._replace(cache=rolled)


def _prompts_of(fixed: _Fixed, prompt_S: jax.Array):
  """The prompts' cache as the slots see it: shared by groups of slots, or one gathered for each."""
  length_P = fixed.prompts.length_P
  cache = fixed.prompt_cache
  if len(prompt_S) < len(fixed.keys_B):
    cache, length_P = jax.tree.map(lambda x: x[prompt_S], (cache, length_P))
  mask_PxL = jnp.arange(fixed.prompts.tokens_PxL.shape[1])[None] < length_P[:, None]
  return cache, mask_PxL


def _first_tokens(fixed: _Fixed, logits_PxV: jax.Array, rollout: Rollout) -> Rollout:
  """Token 0 of every row that holds none, from the last logits of its prompt."""
  spec, B = fixed.spec, len(fixed.keys_B)
  row_B, zeros_B = jnp.arange(B, dtype=jnp.int32), jnp.zeros(B, jnp.int32)

  def draw(row):
    uniform_1 = sampling.uniforms(fixed.keys_B[row][None], 0)
    token_1, logp_1 = sampling.sample(
      logits_PxV[row // spec.rollouts][None], uniform_1, spec.temperature, spec.keep
    )
    return token_1[0], logp_1[0]

  token_B, logp_B = jax.lax.map(draw, row_B, batch_size=min(B, _FIRST_TOKENS_AT_ONCE))
  fresh_B = (rollout.length_B == 0) & (rollout.reason_B == UNFINISHED)
  return _record(fixed, rollout, jnp.where(fresh_B, row_B, B), zeros_B, token_B, logp_B)


def _empty(rows: int, T: int) -> Rollout:
  return Rollout(
    jnp.zeros((rows, T), jnp.int32),
    jnp.zeros((rows, T), jnp.float32),
    jnp.zeros(rows, jnp.int32),
    jnp.zeros(rows, jnp.int8),
    jnp.zeros((rows, T), jnp.int32),
  )
