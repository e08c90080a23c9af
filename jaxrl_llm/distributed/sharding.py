"""Meshes and layouts: which axis of which parameter lies on which axis of the mesh."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.distributed import hardware
from jaxrl_llm.types import UserError

# The last are neighbors: what exchanges most often stands there.
AXES = ('data', 'fsdp', 'context', 'expert', 'tensor')
ROWS = ('data', 'fsdp', 'context', 'expert')  # what a batch is cut over, and sampling
# What it is cut over while it is learned: 'context' cuts each row's tokens then.
UPDATE_ROWS = ('data', 'fsdp', 'expert')

# (regular expression over the path, axes): the first match counts. Optimizer moments end in the same path.
# What is no expert's is cut over the axis of experts, too, wherever it is gathered before its use.
_ALL = ('fsdp', 'expert')
RULES = (
  (r'experts/(gate|up)/kernel$', ('expert', 'fsdp', 'tensor')),
  (r'experts/down/kernel$', ('expert', 'tensor', 'fsdp')),
  (r'experts/router/kernel$', (_ALL, None)),
  (r'embed/embedding$', ('tensor', _ALL)),
  (r'(q|k|v|gate|up)/kernel$', (_ALL, 'tensor')),
  (r'(o|down)/kernel$', ('tensor', _ALL)),
  (r'head/kernel$', (_ALL, 'tensor')),
  (r'(q|k|v|gate|up)/bias$', ('tensor',)),
  # Of an adapter, A as the kernel's input and B as its output.
  (r'(q|k|v|gate|up)/a$', (_ALL, None)),
  (r'(q|k|v|gate|up)/b$', (None, 'tensor')),
  (r'(o|down)/a$', ('tensor', None)),
  (r'(o|down)/b$', (None, _ALL)),
)


def rules(own: Any) -> tuple:
  """RULES, with `own` (pattern, axes) pairs in front. Raises UserError for what is no such pair."""
  for pair in own:
    good = isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)
    axes = pair[1] if good else ()
    if not good or not isinstance(axes, tuple | list) or not {*axes} <= {*AXES, None}:
      raise UserError(
        f'config.mesh.rules holds {pair!r}; each must be (regular expression, axes), one of '
        f'{", ".join(AXES)} or None for each dimension.'
      )
    try:
      re.compile(pair[0])
    except re.error as error:
      raise UserError(
        f'config.mesh.rules: {pair[0]!r} is no regular expression ({error}); correct it.'
      ) from error
  return (*((pattern, tuple(axes)) for pattern, axes in own), *RULES)


def make_mesh(config: Any, devices: list | None = None) -> Mesh:
  """A mesh of as many devices as the AXES in `config` say, or its preset; one of them may be −1.

  TPUs are laid along their links.

  Raises UserError when the product is not the number of devices.
  """
  devices, config = devices or jax.devices(), dict(config)
  if config.get('preset'):
    config |= {axis: getattr(hardware.SLICES[config['preset']], axis) for axis in ('data', 'fsdp')}
  sizes = [config.get(axis, 1) for axis in AXES]
  known = math.prod(s for s in sizes if s != -1)
  if sizes.count(-1) == 1 and len(devices) % known == 0:
    sizes = [len(devices) // known if s == -1 else s for s in sizes]
  if min(sizes) < 1 or math.prod(sizes) > len(devices):
    told = ', '.join(f'{a}={size}' for a, size in zip(AXES, sizes, strict=True))
    raise UserError(
      f'config.mesh ({told}) does not fit {len(devices)} devices; '
      'let the product be that number, or set one axis to -1.'
    )
  used = devices[: math.prod(sizes)]
  return Mesh(_grid(used, sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _grid(devices: list, sizes: list[int]) -> np.ndarray:
  """In the order that jax lists them, chips that stand beside each other need not follow each other."""
  if hasattr(devices[0], 'coords'):
    return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
  return np.array(devices).reshape(sizes)


def describe(sizes: Mapping[str, int]) -> str:
  """Of a mesh, 'fsdp 4 × tensor 2': the axes that cut anything."""
  return ' × '.join(f'{axis} {size}' for axis, size in sizes.items() if size > 1) or 'nothing cut'


def rows_shards(mesh: Mesh, axes: tuple[str, ...] = ROWS) -> int:
  """Into how many parts a batch is cut."""
  return math.prod(mesh.shape[axis] for axis in axes)


def on_mesh(fn: Callable) -> Callable:
  """fn(program, …) with `program.mesh` as the one that its parts ask for."""

  @functools.wraps(fn)
  def run(spec, *args, **keywords):
    with jax.sharding.use_abstract_mesh(spec.layout.mesh.abstract_mesh):
      return fn(spec, *args, **keywords)

  return run


def replicated(mesh: Mesh) -> NamedSharding:
  """The same on every device."""
  return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh) -> NamedSharding:
  """The first dimension cut over ROWS."""
  return NamedSharding(mesh, PartitionSpec(ROWS))


def put(tree: Any, shardings: Any) -> Any:
  """Arrays of the whole mesh, from host arrays that are the same on every process; others as they are.

  `shardings` is a tree of them, or of subtrees that all get the same.
  """

  def place(sharding: NamedSharding, part: Any) -> Any:
    return jax.tree.map(lambda x: _placed(x, sharding), part)

  return jax.tree.map(place, shardings, tree, is_leaf=lambda x: isinstance(x, NamedSharding))


def _placed(leaf: Any, sharding: NamedSharding) -> jax.Array:
  if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
    return leaf
  if sharding.is_fully_addressable:
    return jax.device_put(leaf, sharding)
  host = np.asarray(leaf)
  return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def fetch(tree: Any) -> Any:
  """Host arrays of all rows, on every process; all processes call it."""

  def whole(leaf: Any) -> np.ndarray:
    if (
      isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and not leaf.is_fully_replicated
    ):
      return multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)

  return jax.tree.map(whole, tree)


def any_process(flag: bool) -> bool:
  """Whether it holds on some process; all processes call it."""
  if jax.process_count() == 1:
    return flag
  return bool(multihost_utils.process_allgather(np.bool_(flag)).any())


def layout(tree: Any, mesh: Mesh, rules=RULES, drop: tuple[Any, ...] = ()) -> Any:
  """A NamedSharding for every leaf of a parameter tree or an optimizer state.

  The axes of the first rule that matches the leaf's path, without those in `drop` and without any
  that does not divide its dimension, of several the last ones first; replicated where no rule matches. Of a quantized
  kernel, its numbers lie as the kernel would, and its scales as the channels that they are of.
  """

  def cut(axes, size):
    if not axes or axes in drop:
      return None
    if isinstance(axes, str):
      return axes if size % mesh.shape[axes] == 0 else None
    several = tuple(a for a in axes if mesh.shape[a] > 1)
    while several and size % rows_shards(mesh, several):
      several = several[:-1]
    return several if len(several) > 1 else several[0] if several else None

  def place(path, leaf):
    name, part = re.fullmatch(r'(.*?)((?<=/kernel)/(?:data|scale))?', path_name(path)).groups()
    axes = next((axes for pattern, axes in rules if re.search(pattern, name)), ())
    axes = (*axes[:-2], *axes[-1:]) if part == '/scale' else axes
    if len(axes) != len(leaf.shape):
      axes = ()
    return NamedSharding(mesh, PartitionSpec(*map(cut, axes, leaf.shape)))

  return jax.tree_util.tree_map_with_path(place, tree)


def cache_layout(tree: Any, mesh: Mesh) -> Any:
  """Of keys and values [rows, heads, …]: rows over ROWS, heads over tensor where it divides them.

  Arrays of rows or prompts alone as rows.
  """

  def place(leaf):
    heads = len(leaf.shape) > 1 and leaf.shape[1] % mesh.shape['tensor'] == 0
    return NamedSharding(mesh, PartitionSpec(ROWS, 'tensor') if heads else PartitionSpec(ROWS))

  return jax.tree.map(place, tree)


def decode_layout(params: Any, mesh: Mesh, rules=RULES) -> Any:
  """The layout while sampling: cut over experts and tensor, whole on the others, so no gather in the loop.
  """
  return layout(params, mesh, rules, drop=(*UPDATE_ROWS[:2], _ALL))


def expert_specs(params: Any, mesh: Mesh, rules=RULES) -> Any:
  """PartitionSpecs of `decode_layout` along the axis of experts alone: what each shard of rows is given of it.
  """
  only = lambda s: PartitionSpec(*(a if a == 'expert' else None for a in s.spec))  # noqa: E731
  return jax.tree.map(only, decode_layout(params, mesh, rules))


def layer_gather(mesh: Mesh, rules=RULES) -> Callable[[Any], Any] | None:
  """A function that lays a layer's weights out as `decode_layout` does; None where rows are on one device.

  So each layer is gathered when its turn comes, and given back; told nothing, the compiler may rather exchange the
  rows, which are many times as large. Source: arXiv:1910.02054 (ZeRO), arXiv:2304.11277 (FSDP).
  """
  if rows_shards(mesh, UPDATE_ROWS) == 1:
    return None

  def lay(layer: Any) -> Any:
    mesh_now = jax.sharding.get_abstract_mesh()
    placed = decode_layout(layer, mesh, rules)
    here = jax.tree.map(lambda s: NamedSharding(mesh_now, s.spec), placed)
    return jax.lax.with_sharding_constraint(layer, here)

  return lay


def path_name(path: Any) -> str:
  """Of a leaf, as RULES match it: layers/0/q/kernel."""
  return '/'.join(_key(k) for k in path)


def _key(entry: Any) -> str:
  for name in ('key', 'name', 'idx'):
    if hasattr(entry, name):
      return str(getattr(entry, name))
  return str(entry)
