"""Sums over the microbatches of a minibatch, such as its gradient, on devices of several slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner.microbatch import (
  Microbatch,
  PackedBatch,
  accumulate,
  accumulate_shards,
  split_arrays,
)
from jaxrl_llm.learner.step_spec import StepSpec

Tree = TypeVar('Tree')
Total = TypeVar('Total')


def accumulate_sums(
  spec: StepSpec,
  packed: PackedBatch,
  arrays: Tree,
  add: Callable[[Total, Microbatch, Tree], Total],
  start: Total,
) -> Total:
  """`accumulate` for totals of which `add` adds to each leaf, or takes its maximum where its name ends in _max.

  Each position of the data axis, which alone crosses slices, has totals of its own until the last microbatch. The
  network between slices then carries gradients once, and not once per microbatch.
  """
  # Weights that rules shard over 'data' would have to be gathered in full before the loop.
  if any('data' in axes for _, axes in spec.layout.rules):
    return accumulate(spec, packed, arrays, add, start)

  def local(packed, by_shard, shard_Z):
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), start)
    total = accumulate_shards(spec, packed, by_shard, add, zeros, shard_Z)
    return jax.tree_util.tree_map_with_path(_reduce, total, start)

  rows, whole = PartitionSpec('data'), PartitionSpec()
  packed_specs = jax.tree.map(lambda _: rows, packed)._replace(order_P=whole, microbatches=whole)
  return jax.shard_map(
    local,
    in_specs=(packed_specs, rows, rows),
    out_specs=whole,
    axis_names={'data'},
    check_vma=False,
  )(packed, split_arrays(spec, packed, arrays), jnp.arange(packed.prompt_ZxPxL.shape[0]))


def _reduce(path: tuple[jax.tree_util.KeyEntry, ...], x: jax.Array, start: jax.Array) -> jax.Array:
  if sharding.path_name(path).endswith('_max'):
    return jnp.maximum(start, jax.lax.pmax(x, 'data'))
  return start + jax.lax.psum(x, 'data')
