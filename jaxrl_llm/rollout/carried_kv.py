"""Keys and values of unfinished rows, carried from one call to the next on the device instead of encoded again.

With the same weights a row goes on as if it had not been interrupted. With new weights its old tokens keep the keys
of the weights that first read them, while its prompt is encoded anew. The recorded log-probability is that of the
distribution sampled in this way, so for weights that score the whole row it is off-policy.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.rollout import slot_loop
from jaxrl_llm.rollout.decode_records import CarriedKV, DecodeSettings, LoopConstants, LoopState
from jaxrl_llm.types import UNFINISHED, ModelConfig, Prompts

LOAD_SCOPE = 'seating'  # name of the branch that loads rows, inside the compiled program


def empty(model: ModelConfig, settings: DecodeSettings, prompts: int) -> CarriedKV:
  """No tokens of `prompts` groups; both of their indices are −1."""
  rows = prompts * settings.rollouts
  width_N = slot_loop.ring_widths(model, settings.max_tokens)
  return CarriedKV(
    jnp.full(prompts, -1, jnp.int32),
    jnp.full(prompts, -1, jnp.int32),
    jnp.zeros(rows, jnp.int32),
    slot_loop.empty_cache(model, rows, width_N, settings.cache_dtype),
  )


def reorder(carried: CarriedKV, prompts: Prompts, rollouts: int) -> CarriedKV:
  """Rows in the order of `prompts`, with no cached tokens for a group that `carried` does not contain.

  Runs on every device for its own rows: `replay.Unfinished` continues a group on the shard where it was. A group that
  moved, after a resume on another mesh, is decoded again token by token.
  """
  same_PxP = prompts.index_P[:, None] == carried.index_P[None]
  same_PxP &= prompts.born_P[:, None] == carried.born_P[None]
  members_G = jnp.arange(rollouts)[None]
  row_B = (jnp.argmax(same_PxP, axis=1)[:, None] * rollouts + members_G).reshape(-1)
  found_B = jnp.repeat(same_PxP.any(axis=1), rollouts)
  return CarriedKV(
    prompts.index_P,
    prompts.born_P,
    jnp.where(found_B, carried.cached_B[row_B], 0),
    jax.tree.map(lambda x: x[row_B], carried.cache),
  )


def load_rows(constants: LoopConstants, state: LoopState, before_S: jax.Array) -> LoopState:
  """Loads the carried cache of rows that took their slots since these held the rows `before_S`.

  Token j of a row at its token a gets age a − j. An iteration that loads no row copies no cache.
  """
  carried = constants.carried
  assert carried is not None
  row_S, _ = slot_loop.clipped_slots(constants, state)
  cached_S = carried.cached_B[row_S]
  takes_S = (state.row_S != before_S) & (state.row_S < len(constants.keys_B)) & (cached_S > 0)

  def load(s: LoopState) -> LoopState:
    def fill(ring, x):
      rows = _roll_columns(x[row_S], cached_S - state.column)
      return jnp.where(_broadcast_over(takes_S[:, None], x), rows, ring)

    cache = jax.tree.map(fill, s.cache, carried.cache)
    return s._replace(index_S=jnp.where(takes_S, cached_S, s.index_S), cache=cache)

  with jax.named_scope(LOAD_SCOPE):
    loads = slot_loop.any_shard(constants, takes_S.any())
    return jax.lax.cond(loads, load, lambda s: s, state)


def collect(constants: LoopConstants, state: LoopState) -> CarriedKV:
  """The cache of unfinished rows after the loop: of rows in slots from the ring, of waiting rows as before."""
  B, carried = len(constants.keys_B), constants.carried
  assert carried is not None
  cached_B = carried.cached_B.at[state.row_S].set(state.index_S, mode='drop')
  cached_B = jnp.where(state.rollout.reason_B == UNFINISHED, cached_B, 0)

  def unroll(ring, x):
    rows = _roll_columns(ring, state.column - state.index_S)
    # With a slot for every row no row waits, and the old cache need not stay allocated during the loop.
    if len(state.row_S) < B:
      rows = x.at[state.row_S].set(rows, mode='drop')
    real_BxW = jnp.arange(x.shape[2])[None] < cached_B[:, None]
    return jnp.where(_broadcast_over(real_BxW, rows), rows, jnp.zeros((), rows.dtype))

  cache = jax.tree.map(unroll, state.cache, carried.cache)
  return CarriedKV(constants.prompts.index_P, constants.prompts.born_P, cached_B, cache)


def _roll_columns(x: jax.Array, by_N: jax.Array) -> jax.Array:
  """x [N, K, W, …] with column c + by[n], modulo W, of row n in column c."""
  source_NxW = (jnp.arange(x.shape[2])[None] + by_N[:, None]) % x.shape[2]
  return jnp.take_along_axis(x, _broadcast_over(source_NxW, x), axis=2)


def _broadcast_over(value_NxW: jax.Array, x: jax.Array) -> jax.Array:
  """[N, W] or [N, 1] as [N, 1, W, …], to broadcast over x [N, K, W, …]."""
  N, W = value_NxW.shape
  return value_NxW.reshape(N, 1, W, *[1] * (x.ndim - 3))
