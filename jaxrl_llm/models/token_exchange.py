"""Tokens on their way to the devices of their experts, and back."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxrl_llm.distributed import sharding
from jaxrl_llm.models import expert_rows

# x [B, Q, D], weights [B, Q, k] and experts [B, Q, k] of tokens.
Tokens = tuple[jax.Array, jax.Array, jax.Array]
Weights = TypeVar('Weights')
# A device has room for this many times as many rows as even routing would send it.
_SPARE = 1.25
# Of fewer rows from each device the busiest one would often get more than the spare room, which costs a second round.
_FEWEST_ROWS = 256
# Reports leave out what only uneven routing needs.
LATER_ROUNDS = 'later_rounds'


def rows_to_each(tokens: Tokens) -> int:
  """How many rows, of a token for one of its experts each, a device sends to each other one at once."""
  return math.ceil(_SPARE * _even_rows(tokens))


def is_worthwhile(tokens: Tokens) -> bool:
  """Whether `exchange` sends much less than all tokens to all devices, and seldom needs a second round."""
  B, Q, _ = tokens[1].shape
  return _even_rows(tokens) >= _FEWEST_ROWS and rows_to_each(tokens) < B * Q


def _even_rows(tokens: Tokens) -> float:
  return tokens[1].size / jax.lax.axis_size(*sharding.EXPERTS)


class _Routes(NamedTuple):
  """The rows of this device, sorted by the device they go to, and where those of each of n devices start and end."""

  order_N: jax.Array
  place_N: jax.Array
  start_n: jax.Array
  end_n: jax.Array
  rounds: jax.Array  # of the device that needs the most


def exchange(
  fn: Callable[[Tokens, Weights], jax.Array], tokens: Tokens, weights: Weights, experts: int
) -> jax.Array:
  """The sum [B, Q, D] over each token's experts of fn(the token for one expert), which another device may compute.

  `experts`: how many a device holds. fn maps N tokens with k = 1, whose experts are numbered from 0 on their device, to
  [N, 1, D]; tokens of the expert `experts` are empty rows, which need no computation. What exceeds `rows_to_each` goes
  in further rounds, as many as the device with the most rows for another needs.
  """
  rows, devices = rows_to_each(tokens), jax.lax.axis_size(*sharding.EXPERTS)
  order_N, place_N, size_n = expert_rows.sort_by_group(tokens[2].reshape(-1) // experts, devices)
  end_n = jnp.cumsum(size_n)
  most = jax.lax.pmax(size_n.max(), sharding.EXPERTS)
  routes = _Routes(order_N, place_N, end_n - size_n, end_n, -(-most // rows))
  one_round = functools.partial(_one_round, fn, experts, rows)
  inputs = routes, tokens, weights
  return one_round(0, *inputs) + _later_rounds(one_round, inputs)


def _one_round(
  fn: Callable[[Tokens, Weights], jax.Array],
  experts: int,
  rows: int,
  r: jax.Array | int,
  routes: _Routes,
  tokens: Tokens,
  weights: Weights,
) -> jax.Array:
  """The part [B, Q, D] of the sum that rows r·`rows` to (r + 1)·`rows` for each device have."""
  (B, Q, k), devices, expert_N = tokens[2].shape, len(routes.start_n), tokens[2].reshape(-1)
  place_nxC = routes.start_n[:, None] + r * rows + jnp.arange(rows)[None]
  is_sent_nxC = place_nxC < routes.end_n[:, None]
  row_nxC = jnp.where(is_sent_nxC, routes.order_N[place_nxC], B * Q * k)
  expert_nxC = (expert_N % experts).at[row_nxC].get(mode='fill', fill_value=experts)
  device_N = expert_N // experts
  rank_N = routes.place_N - routes.start_n[device_N]  # among rows for the same device
  slot_N = jnp.where(rank_N // rows == r, device_N * rows + rank_N % rows, devices * rows)
  moved = expert_rows.Rows(row_nxC.reshape(-1), slot_N.reshape(B * Q, k))
  weights_moved = moved._replace(slot_Nxk=slot_N[:, None])
  sent = (
    expert_rows.spread(tokens[0].reshape(B * Q, -1), moved),
    expert_rows.spread(tokens[1].reshape(-1, 1), weights_moved),
    expert_nxC.reshape(-1, 1),
  )
  received = jax.tree.map(lambda x_MxA: _swap(x_MxA)[:, None], sent)
  out_MxD = _swap(fn(received, weights)[:, 0])
  return expert_rows.combine(out_MxD, None, moved).reshape(tokens[0].shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@jax.named_scope(LATER_ROUNDS)
def _later_rounds(
  one_round: Callable[..., jax.Array], inputs: tuple[_Routes, Tokens, Weights]
) -> jax.Array:
  """The sum of all rounds but the first. JAX has no gradient of a loop with as many iterations as data need."""
  routes, (x_BxQxD, *_), _ = inputs
  add = lambda r, sum_BxQxD: sum_BxQxD + one_round(r, *inputs)  # noqa: E731
  return jax.lax.fori_loop(1, routes.rounds, add, jnp.zeros_like(x_BxQxD))


def _forward(one_round, inputs):
  return _later_rounds(one_round, inputs), inputs


@jax.named_scope(LATER_ROUNDS)
def _backward(one_round, inputs, slope_BxQxD):
  """The gradient of each round, computed again, for inputs that are not integers."""
  leaves, structure = jax.tree.flatten(inputs)
  is_real = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]

  def gradient(r):
    def of(real):
      real = iter(real)
      merged = [next(real) if kind else x for kind, x in zip(is_real, leaves, strict=True)]
      return one_round(r, *structure.unflatten(merged))

    return jax.vjp(of, real_leaves)[1](slope_BxQxD)[0]

  real_leaves = [x for kind, x in zip(is_real, leaves, strict=True) if kind]
  add = lambda r, sums: jax.tree.map(jnp.add, sums, gradient(r))  # noqa: E731
  zeros = jax.tree.map(jnp.zeros_like, real_leaves)
  sums = iter(jax.lax.fori_loop(1, inputs[0].rounds, add, zeros))
  return (structure.unflatten([next(sums) if kind else None for kind in is_real]),)


_later_rounds.defvjp(_forward, _backward)


def _swap(x_MxA: jax.Array) -> jax.Array:
  """What each device has for this one, from what this one has for each: equal parts in the devices' order."""
  return jax.lax.all_to_all(x_MxA, *sharding.EXPERTS, split_axis=0, concat_axis=0, tiled=True)
