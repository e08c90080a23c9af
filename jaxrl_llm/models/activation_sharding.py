"""Cuts of a model's own arrays over the mesh that a program runs on, where tokens or experts span devices.

Most of a layout follows from that of weights and rows. Without a mesh, or where its axes are taken by the loop around
the model, everything here leaves arrays as they are.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

ROWS, TOKENS, EXPERTS, FEATURES = ('data', 'fsdp', 'expert'), ('context',), ('expert',), ('tensor',)


def free_axes() -> set[str]:
  """The axes of the mesh that nobody has taken. Source: none."""
  mesh = jax.sharding.get_abstract_mesh()
  return set(mesh.axis_names) - set(mesh.manual_axes)


def is_manual(axes: tuple[str, ...]) -> bool:
  """Whether a loop around the model runs along these, and they are more than one device. Source: none."""
  mesh = jax.sharding.get_abstract_mesh()
  return {*axes} <= {*mesh.manual_axes} and math.prod(mesh.shape[a] for a in axes) > 1


def axes_that_divide(axes: tuple[str, ...], size: int = 0) -> tuple[str, ...]:
  """The free ones of `axes`, if together they are more than one device and divide `size`; else none. Source: none."""
  mesh = jax.sharding.get_abstract_mesh()
  left = tuple(a for a in axes if a in free_axes())
  shards = math.prod(mesh.shape[a] for a in left)
  return left if shards > 1 and size % shards == 0 else ()


def constrain(x: jax.Array, *axes: tuple[str, ...]) -> jax.Array:
  """x with its first dimensions cut over those of `axes` that divide them, where rows or tokens are cut at all.

  () is a dimension that stays whole.
  Said aloud, because the compiler would as soon exchange the rows between devices as the weights. Source: none.
  """
  if not axes_that_divide(ROWS, len(x)) + axes_that_divide(TOKENS):
    return x
  open_ = PartitionSpec.UNCONSTRAINED
  spec = [(axes_that_divide(a, n) or open_) if a else None for a, n in zip(axes, x.shape, strict=False)]
  spec += [open_] * (x.ndim - len(spec))
  mesh = jax.sharding.get_abstract_mesh()
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def pad_to_shards(x: jax.Array, axes: tuple[str, ...], *dimensions: int) -> jax.Array:
  """x with so many zeros behind it that `axes`, where free, divide its `dimensions`. Source: none."""
  mesh = jax.sharding.get_abstract_mesh()
  shards = math.prod(mesh.shape[a] for a in axes_that_divide(axes))
  missing = [-n % shards if i in dimensions else 0 for i, n in enumerate(x.shape)]
  return jnp.pad(x, [(0, more) for more in missing]) if any(missing) else x
