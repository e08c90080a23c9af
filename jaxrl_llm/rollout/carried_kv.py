"""Keys and values of unfinished rows, handed from one call to the next on the device instead of encoded again.

With the same weights a row goes on as if it had never stopped. With new ones its old tokens keep the keys of
the weights that first read them, while its prompt is encoded anew: what is recorded is the log-probability of
what was sampled so, and to one who scores the whole row with one set of weights it is off-policy.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models import decoder
from jaxrl_llm.rollout import slot_loop
from jaxrl_llm.types import UNFINISHED, ModelConfig, Prompts


class CarriedKV(NamedTuple):
  """What a call leaves for a later one; (index, born) names a group, for a prompt may be begun again.

  It costs a cache of B × T columns for as long as the run lasts, the update included, beside the ring of
  S × T columns; twice that where the host lags, and once more while the rows of S < B slots are decoded.
  """

  index_P: jax.Array  # as in Prompts; −1 before the first call
  born_P: jax.Array
  held_B: jax.Array  # int32, tokens of a row whose keys and values are here
  # Token j of a row in column j, of a sliding layer's W in column j modulo W; zeros from held_B on.
  cache: decoder.Cache


def empty(model: ModelConfig, spec: slot_loop.DecodeSettings, prompts: int) -> CarriedKV:
  """Nothing held, of groups that there are not. Source: none."""
  rows, width_N = prompts * spec.rollouts, slot_loop.ring_widths(model, spec.max_tokens)
  return CarriedKV(
    jnp.full(prompts, -1, jnp.int32),
    jnp.full(prompts, -1, jnp.int32),
    jnp.zeros(rows, jnp.int32),
    slot_loop.empty_cache(model, rows, width_N, spec.cache_dtype),
  )


def reorder(old: CarriedKV, prompts: Prompts, rollouts: int) -> CarriedKV:
  """The rows in the order of `prompts`; nothing is held of a group that `old` does not know.

  On every device for its own rows: a group is to go on where it was, as `replay.PartialRollouts` sees to. One
  that does not, after a resume on another mesh, is read again token by token. Source: none.
  """
  same_PxP = prompts.index_P[:, None] == old.index_P[None]
  same_PxP &= prompts.born_P[:, None] == old.born_P[None]
  members_G = jnp.arange(rollouts)[None]
  row_B = (jnp.argmax(same_PxP, axis=1)[:, None] * rollouts + members_G).reshape(-1)
  known_B = jnp.repeat(same_PxP.any(axis=1), rollouts)
  return CarriedKV(
    prompts.index_P,
    prompts.born_P,
    jnp.where(known_B, old.held_B[row_B], 0),
    jax.tree.map(lambda x: x[row_B], old.cache),
  )


def seated(fixed: slot_loop.Fixed, carry: slot_loop.Carry, before_S: jax.Array) -> slot_loop.Carry:
  """Rows that took their slots since these held `before_S` go on where they were left.

  Token j of a row at its token a gets age a − j. A round in which no such row was seated copies
  nothing. Source: none.
  """
  kept = fixed.kept
  row_S, _ = slot_loop.bounded(fixed, carry)
  held_S = kept.held_B[row_S]
  takes_S = (carry.row_S != before_S) & (carry.row_S < len(fixed.keys_B)) & (held_S > 0)

  def load(c: slot_loop.Carry) -> slot_loop.Carry:
    def fill(ring, x):
      rows = _rolled(x[row_S], held_S - carry.column)
      return jnp.where(_beside(takes_S[:, None], x), rows, ring)

    cache = jax.tree.map(fill, c.cache, kept.cache)
    return c._replace(at_S=jnp.where(takes_S, held_S, c.at_S), cache=cache)

  with jax.named_scope(LOAD_SCOPE):
    return jax.lax.cond(slot_loop.anywhere(fixed, takes_S.any()), load, lambda c: c, carry)


LOAD_SCOPE = 'seating'  # what that branch is called inside the compiled program


def left(fixed: slot_loop.Fixed, carry: slot_loop.Carry) -> CarriedKV:
  """What the loop leaves of unfinished rows: of the slots' rows from the ring, else as it was. Source: none."""
  B, kept = len(fixed.keys_B), fixed.kept
  held_B = kept.held_B.at[carry.row_S].set(carry.at_S, mode='drop')
  held_B = jnp.where(carry.rollout.reason_B == UNFINISHED, held_B, 0)

  def unroll(ring, x):
    rows = _rolled(ring, carry.column - carry.at_S)
    # With a slot for every row none waits, and what was handed in need not live as long as the loop.
    if len(carry.row_S) < B:
      rows = x.at[carry.row_S].set(rows, mode='drop')
    real_BxW = jnp.arange(x.shape[2])[None] < held_B[:, None]
    return jnp.where(_beside(real_BxW, rows), rows, jnp.zeros((), rows.dtype))

  cache = jax.tree.map(unroll, carry.cache, kept.cache)
  return CarriedKV(fixed.prompts.index_P, fixed.prompts.born_P, held_B, cache)


def _rolled(x: jax.Array, by_N: jax.Array) -> jax.Array:
  """x [N, K, W, …] with column c + by[n], modulo W, of row n in column c."""
  source_NxW = (jnp.arange(x.shape[2])[None] + by_N[:, None]) % x.shape[2]
  return jnp.take_along_axis(x, _beside(source_NxW, x), axis=2)


def _beside(value_NxW: jax.Array, x: jax.Array) -> jax.Array:
  """[N, W] or [N, 1] as [N, 1, W, …], to go with x [N, K, W, …]."""
  N, W = value_NxW.shape
  return value_NxW.reshape(N, 1, W, *[1] * (x.ndim - 3))
