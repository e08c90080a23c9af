"""Rows in slots: what every decode loop is made of. Which row decodes where, what it writes, and when it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models import decoder, kvcache, moe
from jaxrl_llm.rollout import early_exit, exit_signals, queue_order, sampling, stopping
from jaxrl_llm.types import STOPPED, TRUNCATED, UNFINISHED, ModelConfig, Prompts, Rollout

# Rows of [V] logits: all B of them would not fit beside a large vocabulary.
_FIRST_TOKENS_AT_ONCE = 64


class DecodeSettings(NamedTuple):
  """What is fixed when generation is compiled."""

  rollouts: int  # G, per prompt
  max_tokens: int  # T
  temperature: float  # 0 = greedy
  end_ids: tuple[int, ...]  # any of these ends a row; the end token belongs to the row
  dtype: str  # of compute
  token_filter: sampling.TokenFilter = sampling.NO_FILTER  # of evaluation; training samples the policy itself
  slots: int = 0  # S, rows decoded at once; 0 = all of them
  queue_order: Callable = queue_order.fifo
  stop_rule: Callable = stopping.none
  exit_rule: Callable = early_exit.none
  cache_dtype: str = 'float32'
  windows: int = 1  # widths of the ring: T / 2ⁿ⁻¹, …, T / 2, T
  test_every: int = 1  # iterations between two looks at whether the loop may end
  record_experts: bool = False  # which each token went to: what the update sends it to again
  lockstep: tuple[str, ...] = ()  # mesh axes whose shards all go on until the last one may stop


class Carry(NamedTuple):
  """What a loop hands from one iteration to the next."""

  iterations: jax.Array  # iterations so far
  row_S: jax.Array  # which row a slot decodes; B where it idles
  at_S: jax.Array  # number of the token that goes into the model next
  column: jax.Array  # written next where all slots write the same, as if no ring ever came round
  waiting_B: jax.Array
  rollout: Rollout
  cache: decoder.Cache


class Fixed(NamedTuple):
  """What a loop reads and does not change."""

  model: ModelConfig
  spec: DecodeSettings
  params: Any
  prompts: Prompts
  prompt_cache: decoder.Cache
  keys_B: jax.Array
  cap_B: jax.Array
  pause_B: jax.Array
  version: jax.Array
  started_tokens: jax.Array
  kept: Any = None  # carried.Carried, of rows that go on where an earlier call left them


def prepare(
  model: ModelConfig,
  params: Any,
  prompts: Prompts,
  key: jax.Array,
  version: jax.Array,
  spec: DecodeSettings,
  begun: Rollout | None = None,
  cap: jax.Array | int | None = None,
  pause: int | None = None,
  member_B: jax.Array | None = None,
) -> tuple[Fixed, Rollout, jax.Array]:
  """All before a loop: what it reads, every row with its first token, and the logits [P, V] of that. Source: none."""
  prompts = jax.tree.map(jnp.asarray, prompts)
  B, T = prompts.tokens_PxL.shape[0] * spec.rollouts, spec.max_tokens
  prompt_cache, logits_PxV = prefill(model, params, prompts, spec.dtype)
  rollout = jax.tree.map(jnp.asarray, begun)
  if begun is None:
    rollout = empty_rollout(B, T, expert_shape(model) if spec.record_experts else None)
  if spec.exit_rule is not early_exit.none and rollout.memory_BxM is None:
    rollout = rollout._replace(memory_BxM=jnp.zeros((B, early_exit.MEMORY_SIZE), jnp.float32))
  fixed = Fixed(
    model=model,
    spec=spec,
    params=params,
    prompts=prompts,
    prompt_cache=[tuple(kvcache.pack(x, spec.cache_dtype) for x in kv) for kv in prompt_cache],
    keys_B=sampling.row_keys(key, prompts, spec.rollouts, member_B),
    cap_B=jnp.broadcast_to(jnp.minimum(T if cap is None else cap, T), (B,)),
    pause_B=jnp.full(B, T + 1 if pause is None else pause),
    version=jnp.int32(version),
    started_tokens=rollout.length_B.sum(),
  )
  return fixed, _first_tokens(fixed, logits_PxV, rollout), logits_PxV


def prefill(
  model: ModelConfig, params: Any, prompts: Prompts, dtype: str
) -> tuple[decoder.Cache, jax.Array]:
  """The prompts' cache, (k, v) [P, K, L, d] a layer, and the logits [P, V] after each one's last token.

  Source: none.
  """
  P, L = prompts.tokens_PxL.shape
  positions_PxL = jnp.broadcast_to(jnp.arange(L), (P, L))
  mask_PxL = positions_PxL < prompts.length_P[:, None]
  hidden, cache, _ = decoder.apply(
    model, params, prompts.tokens_PxL, positions_PxL, decoder.causal(mask_PxL), dtype=dtype
  )
  last = jnp.take_along_axis(hidden, jnp.maximum(prompts.length_P - 1, 0)[:, None, None], axis=1)
  return cache, decoder.head(model, params, last[:, 0], dtype)


def begin(
  fixed: Fixed,
  rollout: Rollout,
  resumes: bool,
  width_N: Sequence[int],
  encode: Callable | None = None,
) -> Carry:
  """Puts rows into the slots, those that hold most tokens first: these are encoded in one pass.

  The cache of layer n has `width_N[n]` columns; `encode`, where given, fills it with what the slots' rows hold, for
  rows that resume. Source: none.
  """
  model, spec, B = fixed.model, fixed.spec, len(fixed.keys_B)
  S = spec.slots or B
  carry = Carry(
    iterations=jnp.int32(0),
    row_S=jnp.full(S, B, jnp.int32),
    at_S=jnp.zeros(S, jnp.int32),
    column=jnp.int32(0),
    waiting_B=runs(fixed, rollout),
    rollout=rollout,
    # One array per layer: stacked layers cost the CPU a copy of the cache every token.
    cache=empty_cache(model, S, width_N, spec.cache_dtype),
  )
  if S == B:
    row_S = jnp.where(carry.waiting_B, jnp.arange(B), B).astype(jnp.int32)
    carry = carry._replace(row_S=row_S, waiting_B=jnp.zeros_like(carry.waiting_B))
  elif resumes:
    held_B = jnp.where(rollout.length_B > 1, rollout.length_B, 0)
    score_B = jnp.where(held_B > 0, 1e9 + held_B, spec.queue_order(progress(fixed, carry)))
    carry = refill(fixed, carry, score_B)
  else:
    carry = refill(fixed, carry)
  if not resumes or encode is None:
    return carry
  at_S = jnp.where(carry.row_S < B, rollout.length_B.at[carry.row_S].get(mode='clip') - 1, 0)
  encoded = lambda c: c._replace(at_S=at_S, cache=encode(fixed, c.row_S, at_S, c.rollout))  # noqa: E731
  return jax.lax.cond(anywhere(fixed, (at_S > 0).any()), encoded, lambda c: c, carry)


def ring_widths(model: ModelConfig, width: int) -> list[int]:
  """Columns of each layer's ring, where the widest has `width`: a sliding layer needs those of its window.

  Source: none.
  """
  return [min(width, model.window) if slides else width for slides in model.slides]


def empty_cache(model: ModelConfig, rows: int, width_N: Sequence[int], dtype: str) -> decoder.Cache:
  """Keys and values of `rows` rows, all 0: `width_N[n]` columns of layer n. Source: none."""
  shapes = [(rows, model.kv_heads, width, model.head_dim) for width in width_N]
  return [(kvcache.zeros(shape, dtype), kvcache.zeros(shape, dtype)) for shape in shapes]


def held(fixed: Fixed, row_S: jax.Array, rollout: Rollout) -> decoder.Cache:
  """Keys and values of what the slots' rows hold, token j in column j: one pass over all of it. Source: none."""
  T, S = fixed.spec.max_tokens, len(row_S)
  row_S = jnp.minimum(row_S, len(fixed.keys_B) - 1)
  prompt_S = row_S // fixed.spec.rollouts
  _, kv, _ = decoder.apply(
    fixed.model,
    fixed.params,
    rollout.tokens_BxT[row_S],
    fixed.prompts.length_P[prompt_S][:, None] + jnp.arange(T)[None],
    jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (S, T, T)),
    shared=prompts_of(fixed, prompt_S),
    dtype=fixed.spec.dtype,
    # A token goes the same way whenever it is read.
    expert_BxQxNxk=None if rollout.expert_BxTxNxk is None else rollout.expert_BxTxNxk[row_S],
  )
  return kv


def bounded(fixed: Fixed, carry: Carry) -> tuple[jax.Array, jax.Array]:
  """Each slot's row and place in it, within bounds also where it idles. Source: none."""
  row_S = jnp.minimum(carry.row_S, len(fixed.keys_B) - 1)
  return row_S, jnp.minimum(carry.at_S, fixed.spec.max_tokens - 1)


def record(fixed: Fixed, rollout: Rollout, row_S, column_S, token_S, logp_S) -> Rollout:
  """Writes one token for each row in `row_S`; row B does not exist and is dropped. Source: none."""
  end_S = jnp.isin(token_S, jnp.asarray(fixed.spec.end_ids, jnp.int32))
  full_S = column_S + 1 >= fixed.cap_B.at[row_S].get(mode='clip')
  reason_S = jnp.where(end_S, STOPPED, jnp.where(full_S, TRUNCATED, UNFINISHED)).astype(jnp.int8)
  put = dict(mode='drop')
  return rollout._replace(
    tokens_BxT=rollout.tokens_BxT.at[row_S, column_S].set(token_S, **put),
    logp_BxT=rollout.logp_BxT.at[row_S, column_S].set(logp_S, **put),
    length_B=rollout.length_B.at[row_S].set(column_S + 1, **put),
    reason_B=rollout.reason_B.at[row_S].set(reason_S, **put),
    version_BxT=rollout.version_BxT.at[row_S, column_S].set(fixed.version, **put),
  )


def judge(fixed: Fixed, carry: Carry, write_S: jax.Array, logits_SxV: jax.Array) -> Carry:
  """Applies the exit rule to the rows that just took a token. Source: none."""
  rollout, row_S = carry.rollout, jnp.minimum(write_S, len(fixed.keys_B) - 1)
  verdict = fixed.spec.exit_rule(
    early_exit.RowSignals(
      rollout.tokens_BxT[row_S],
      rollout.length_B[row_S],
      fixed.cap_B[row_S],
      *exit_signals.token_signals(logits_SxV),
      exit_signals.lottery(fixed.keys_B[row_S], rollout.length_B[row_S]),
      rollout.memory_BxM[row_S],
    )
  )
  reason_S = exit_signals.ended(verdict, rollout.reason_B[row_S])
  return carry._replace(
    rollout=rollout._replace(
      reason_B=rollout.reason_B.at[write_S].set(reason_S, mode='drop'),
      weight_B=rollout.weight_B.at[write_S].multiply(verdict.weight_S, mode='drop'),
      memory_BxM=rollout.memory_BxM.at[write_S].set(verdict.memory_SxM, mode='drop'),
    ),
  )


def hand_on(fixed: Fixed, carry: Carry) -> Carry:
  """Ends an iteration: rows that are done leave their slots, and waiting ones take them. Source: none."""
  B = len(fixed.keys_B)
  done_S = ~runs(fixed, carry.rollout)[jnp.minimum(carry.row_S, B - 1)]
  carry = carry._replace(iterations=carry.iterations + 1, row_S=jnp.where(done_S, B, carry.row_S))
  if len(carry.row_S) == B:
    return carry  # every row has its own slot
  free = (carry.row_S == B).any() & carry.waiting_B.any()
  return jax.lax.cond(anywhere(fixed, free), lambda c: refill(fixed, c), lambda c: c, carry)


def runs(fixed: Fixed, rollout: Rollout) -> jax.Array:
  """Which rows are still to be decoded, [B]. Source: none."""
  return (rollout.reason_B == UNFINISHED) & (rollout.length_B < fixed.pause_B)


def running(fixed: Fixed, carry: Carry) -> jax.Array:
  """Whether the loop goes on: some slot is busy, and the stop rule does not say otherwise. Source: none."""
  busy = (carry.row_S < len(fixed.keys_B)).any()
  return anywhere(fixed, busy & ~fixed.spec.stop_rule(progress(fixed, carry)))


def anywhere(fixed: Fixed, yes: jax.Array) -> jax.Array:
  """Whether any shard says yes, where they run in lockstep; else what this one says.

  What decides a loop or a branch must be the same everywhere: XLA may put exchanges between all devices
  inside either, and a device that goes another way is waited for in vain. Source: none.
  """
  if not fixed.spec.lockstep:
    return yes
  return jax.lax.psum(yes.astype(jnp.int32), fixed.spec.lockstep) > 0


def progress(fixed: Fixed, carry: Carry) -> queue_order.Progress:
  """What orders and stop rules look at. Source: none."""
  return queue_order.Progress(
    carry.iterations,
    fixed.started_tokens,
    carry.rollout.length_B,
    carry.rollout.reason_B != UNFINISHED,
    fixed.cap_B,
    fixed.prompts.expected_P,
  )


def refill(fixed: Fixed, carry: Carry, score_B: jax.Array | None = None) -> Carry:
  """Idle slots take the waiting rows with the largest scores. Source: none."""
  B = len(fixed.keys_B)
  score_B = fixed.spec.queue_order(progress(fixed, carry)) if score_B is None else score_B
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


def prompts_of(fixed: Fixed, prompt_S: jax.Array):
  """The prompts' cache as the slots see it: shared by groups of slots, or one gathered for each. Source: none."""
  length_P = fixed.prompts.length_P
  cache = fixed.prompt_cache
  if len(prompt_S) < len(fixed.keys_B):
    cache, length_P = jax.tree.map(lambda x: x[prompt_S], (cache, length_P))
  mask_PxL = jnp.arange(fixed.prompts.tokens_PxL.shape[1])[None] < length_P[:, None]
  return cache, mask_PxL


def _first_tokens(fixed: Fixed, logits_PxV: jax.Array, rollout: Rollout) -> Rollout:
  """Token 0 of every row that holds none, from the last logits of its prompt."""
  spec, B = fixed.spec, len(fixed.keys_B)
  row_B, zeros_B = jnp.arange(B, dtype=jnp.int32), jnp.zeros(B, jnp.int32)

  def draw(row):
    uniform_1 = sampling.uniforms(fixed.keys_B[row][None], 0)
    token_1, logp_1 = sampling.sample(
      logits_PxV[row // spec.rollouts][None], uniform_1, spec.temperature, spec.token_filter
    )
    return token_1[0], logp_1[0]

  token_B, logp_B = jax.lax.map(draw, row_B, batch_size=min(B, _FIRST_TOKENS_AT_ONCE))
  fresh_B = (rollout.length_B == 0) & (rollout.reason_B == UNFINISHED)
  return record(fixed, rollout, jnp.where(fresh_B, row_B, B), zeros_B, token_B, logp_B)


def expert_shape(model: ModelConfig) -> jax.ShapeDtypeStruct:
  """[N, k] numbers of experts: what a token tells of its way through the model. Source: none."""
  shape = model.layers, model.experts_per_token
  return jax.ShapeDtypeStruct(shape, moe.index_dtype(model))


def empty_rollout(rows: int, T: int, told: jax.ShapeDtypeStruct | None = None) -> Rollout:
  """No tokens in any row; `told`, of each: `routes`, where they are recorded. Source: none."""
  return Rollout(
    jnp.zeros((rows, T), jnp.int32),
    jnp.zeros((rows, T), jnp.float32),
    jnp.zeros(rows, jnp.int32),
    jnp.zeros(rows, jnp.int8),
    jnp.zeros((rows, T), jnp.int32),
    jnp.ones(rows, jnp.float32),
    jnp.zeros((rows, 0), jnp.float32),
    expert_BxTxNxk=None if told is None else jnp.zeros((rows, T, *told.shape), told.dtype),
  )
