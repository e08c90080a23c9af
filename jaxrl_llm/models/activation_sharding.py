"""Sharding constraints on activations, for meshes that split tokens or experts over devices.

The layout of most arrays follows from that of weights and rows. Without a mesh these functions return their input
unchanged. So they do for mesh axes that an enclosing shard_map has made manual.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

ROWS, TOKENS, EXPERTS, FEATURES = ('data', 'fsdp', 'expert'), ('context',), ('expert',), ('tensor',)


def free_axes() -> set[str]:
  """Mesh axes that no enclosing shard_map has made manual."""
  mesh = jax.sharding.get_abstract_mesh()
  return set(mesh.axis_names) - set(mesh.manual_axes)


def is_manual(axes: tuple[str, ...]) -> bool:
  """Whether an enclosing shard_map has made all of `axes` manual, and they span more than one device."""
  mesh = jax.sharding.get_abstract_mesh()
  return {*axes} <= {*mesh.manual_axes} and math.prod(mesh.shape[a] for a in axes) > 1


def axes_that_divide(axes: tuple[str, ...], size: int = 0) -> tuple[str, ...]:
  """The free axes among `axes`, if together they span several devices and divide `size`; else ()."""
  mesh = jax.sharding.get_abstract_mesh()
  free = tuple(a for a in axes if a in free_axes())
  shards = math.prod(mesh.shape[a] for a in free)
  return free if shards > 1 and size % shards == 0 else ()


def constrain(x: jax.Array, *axes: tuple[str, ...]) -> jax.Array:
  """Shard the leading dimensions of x over those of `axes` that divide them; () keeps a dimension unsharded.

  A no-op where neither rows nor tokens are sharded. The constraint is explicit because the compiler might otherwise
  exchange rows between devices in place of weights.
  """
  if not axes_that_divide(ROWS, len(x)) + axes_that_divide(TOKENS):
    return x
  any_axis = PartitionSpec.UNCONSTRAINED
  spec = [
    (axes_that_divide(a, n) or any_axis) if a else None for a, n in zip(axes, x.shape, strict=False)
  ]
  spec += [any_axis] * (x.ndim - len(spec))
  mesh = jax.sharding.get_abstract_mesh()
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def pad_to_shards(x: jax.Array, axes: tuple[str, ...], *dimensions: int) -> jax.Array:
  """x, zero-padded at the end of `dimensions` until the free axes among `axes` divide them."""
  mesh = jax.sharding.get_abstract_mesh()
  shards = math.prod(mesh.shape[a] for a in axes_that_divide(axes))
  missing = [-n % shards if i in dimensions else 0 for i, n in enumerate(x.shape)]
  return jnp.pad(x, [(0, n) for n in missing]) if any(missing) else x
