"""Adam with moments in bfloat16, rounded stochastically: half the memory of the optimizer's state."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.distributed import sharding
from jaxrl_llm.types import Params


class State(NamedTuple):
  """The moments, and what keys their rounding."""

  step: jax.Array  # int32, steps taken
  seed: jax.Array  # int32; here and not in the program, which is then the same for every seed
  mu: Params  # mean of gradients, bfloat16
  nu: Params  # mean of their squares, bfloat16


def scale_by_adam(b1: float, b2: float, eps: float, seed: int) -> optax.GradientTransformation:
  """Adam's step, computed in float32: m/(1 − b1ᵗ) / (√(v/(1 − b2ᵗ)) + eps); m and v are then stored in bfloat16.

  A moment of bfloat16 has 8 bits, so that rounding to the nearest drops changes below 1/512 of it: with b2 = 0.999 a v
  that is too large never falls (with 0.95 it does). Rounded up with probability (x − below) / (above − below), its
  expectation is exact. Each number's rounding depends on seed, step, path and index alone: not on the mesh, and a
  resumed run repeats it.
  arXiv:1412.6980 (Adam), arXiv:1502.02551 (stochastic rounding).
  """

  def init(params: Params) -> State:
    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), params)  # noqa: E731
    return State(jnp.int32(0), jnp.int32(seed), zeros(), zeros())

  # With the names and types of optax's protocol; `updates` are the gradients.
  def update(
    updates: Params, state: optax.OptState, params: Params | None = None
  ) -> tuple[Params, State]:
    del params
    assert isinstance(state, State)
    count = jnp.asarray(optax.safe_increment(state.step))
    key = jax.random.fold_in(jax.random.key(state.seed), count)
    decayed = lambda rate, old, new: rate * old.astype(jnp.float32) + (1 - rate) * new  # noqa: E731
    mu = jax.tree.map(lambda g, m: decayed(b1, m, g), updates, state.mu)
    nu = jax.tree.map(lambda g, v: decayed(b2, v, jnp.square(g)), updates, state.nu)
    correct_1, correct_2 = 1 - b1**count, 1 - b2**count
    change = jax.tree.map(lambda m, v: m / correct_1 / (jnp.sqrt(v / correct_2) + eps), mu, nu)
    return change, State(count, state.seed, *_stored(mu, nu, key))

  return optax.GradientTransformation(init, update)


def round_stochastically(x: jax.Array, random: jax.Array) -> jax.Array:
  """x in bfloat16, rounded away from 0 where `random`, uniform over 0 … 65535, carries into the bits that are kept."""
  bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
  # Bits and no conversion: XLA may drop a conversion to bfloat16 and back.
  kept = ((bits + (random & 0xFFFF).astype(jnp.uint32)) >> 16).astype(jnp.uint16)
  rounded = jax.lax.bitcast_convert_type(kept, jnp.bfloat16)
  return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))  # NaN has such bits, too


def _stored(mu: Params, nu: Params, key: jax.Array) -> tuple[Params, Params]:
  """Both moments in bfloat16; the two halves of one random word round the two moments of a weight."""

  def leaf(path: tuple, m: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    of_leaf = jax.random.fold_in(key, zlib.crc32(sharding.path_name(path).encode()))
    word = jax.random.bits(of_leaf, m.shape, jnp.uint32)
    return round_stochastically(m, word), round_stochastically(v, word >> 16)

  paths, tree = jax.tree_util.tree_flatten_with_path(mu)
  pairs = [leaf(path, m, v) for (path, m), v in zip(paths, jax.tree.leaves(nu), strict=True)]
  rounded_mu, rounded_nu = zip(*pairs, strict=True)
  return jax.tree.unflatten(tree, rounded_mu), jax.tree.unflatten(tree, rounded_nu)
