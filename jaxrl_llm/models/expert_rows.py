"""Rows of tokens in the order of their experts: a row is a token for one of its experts, a slot a place for a row."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rows(NamedTuple):
  """Which row lies in which slot. Row n·k + j is token n for its expert j; numbers beyond the last mean none."""

  row_M: jax.Array  # of each slot
  slot_Nxk: jax.Array  # of each row


def sort_by_group(group_N: jax.Array, groups: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The stable order [N] of rows by group (0 … `groups` − 1), the place [N] of each in it, and the groups' sizes.

  Counting needs no sort. XLA for TPUs takes a quarter of a minute to compile a sort of 2^16 rows, in each pass.
  """
  rows_N = jnp.arange(len(group_N))
  count_NxG = jnp.cumsum(group_N[:, None] == jnp.arange(groups)[None], axis=0, dtype=jnp.int32)
  size_G = count_NxG[-1]
  start_G = jnp.cumsum(size_G) - size_G
  place_N = start_G[group_N] + jnp.take_along_axis(count_NxG, group_N[:, None], axis=1)[:, 0] - 1
  order_N = jnp.zeros_like(rows_N).at[place_N].set(rows_N, unique_indices=True)
  return order_N, place_N, size_G


@jax.custom_vjp
def spread(x_NxD: jax.Array, rows: Rows) -> jax.Array:
  """The token [M, D] of each slot's row; zeros in slots without one.

  The gradient gathers rows, too: JAX's own would add them in a scatter, which TPUs do one by one.
  """
  return _gather(x_NxD, rows.row_M // rows.slot_Nxk.shape[1])


@jax.custom_vjp
def combine(y_MxD: jax.Array, weight_Nxk: jax.Array | None, rows: Rows) -> jax.Array:
  """Σ over each token's rows of weight · y of the row's slot, [N, D]; without weights, of y. Rows in no slot are 0.

  One gather for each of the k experts: an array [N, k, D] would be padded to 8 or more experts on TPUs.
  """
  out_NxD = 0.0
  for j, slot_N in enumerate(rows.slot_Nxk.T):
    y_NxD = _gather(y_MxD, slot_N).astype(jnp.promote_types(y_MxD.dtype, jnp.float32))
    out_NxD += y_NxD if weight_Nxk is None else y_NxD * weight_Nxk[:, j, None]
  return out_NxD.astype(y_MxD.dtype)


def _gather(x_NxD: jax.Array, at_M: jax.Array) -> jax.Array:
  return x_NxD.at[at_M].get(mode='fill', fill_value=0)


def _spread_gradient(rows: Rows, slope_MxD: jax.Array) -> tuple[jax.Array, None]:
  return combine(slope_MxD, None, rows), None


def _combine_gradient(saved, slope_NxD: jax.Array):
  y_MxD, weight_Nxk, rows = saved
  slope_MxD = spread(slope_NxD, rows)
  if weight_Nxk is None:
    return slope_MxD, None, None
  weight_Mx1 = _gather(weight_Nxk.reshape(-1, 1), rows.row_M)
  by_expert = [
    (_gather(y_MxD, slot_N).astype(weight_Nxk.dtype) * slope_NxD).sum(-1)
    for slot_N in rows.slot_Nxk.T
  ]
  slope_Nxk = jnp.stack(by_expert, 1).astype(weight_Nxk.dtype)
  return slope_MxD * weight_Mx1.astype(slope_MxD.dtype), slope_Nxk, None


spread.defvjp(lambda x_NxD, rows: (spread(x_NxD, rows), rows), _spread_gradient)
combine.defvjp(lambda *args: (combine(*args), args), _combine_gradient)
