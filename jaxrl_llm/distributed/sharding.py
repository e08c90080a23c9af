"""Meshes, and layouts of parameters, optimizer states, rollouts and activations on them."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.distributed import hardware, slices
from jaxrl_llm.types import Array, Params, Settings, UserError

# The last axes connect neighboring devices, for the most frequent collectives.
AXES = ('data', 'fsdp', 'context', 'expert', 'decode', 'tensor')
# Axes that shard the rows of a batch, and while sampling, where 'decode' shards features as 'tensor' does.
ROWS = ('data', 'fsdp', 'context', 'expert')
# Axes that shard rows in the update, where 'context' shards the tokens of each row.
UPDATE_ROWS = ('data', 'fsdp', 'expert', 'decode')
# Axes that shard other dimensions of activations.
TOKENS, EXPERTS, FEATURES = ('context',), ('expert',), ('tensor',)
SAMPLED_FEATURES = ('tensor', 'decode')  # while sampling

# (regular expression over the path, axes): the first match counts. Optimizer moments end in the same path.
# Parameters outside experts are sharded over the experts' axis, too, where they are gathered before use.
_ALL, _WIDE = ('fsdp', 'expert'), SAMPLED_FEATURES
# What becomes of these axes while sampling, where the decode loop must gather nothing, and in the update for a layer's
# weights, just before their use.
_STORED: Mapping[str | tuple[str, ...], str | None] = {}
_SAMPLED = dict.fromkeys(('data', 'fsdp', _ALL))
_UPDATED = _SAMPLED | {_WIDE: 'tensor'}
Rules = tuple[tuple[str, tuple[str | tuple[str, ...] | None, ...]], ...]
RULES = (
  (r'experts/(gate|up)/kernel$', ('expert', 'fsdp', _WIDE)),
  (r'experts/down/kernel$', ('expert', _WIDE, 'fsdp')),
  (r'experts/(gate|up)/bias$', ('expert', _WIDE)),
  (r'router/kernel$', (_ALL, None)),
  (r'embed/embedding$', (_WIDE, _ALL)),
  (r'(q|k|v|gate|up)/kernel$', (_ALL, _WIDE)),
  (r'(o|down|delta_out)/kernel$', (_WIDE, _ALL)),
  (r'delta_(step|decay)/kernel$', (_ALL, _WIDE)),
  (r'(head|layer_proj)/kernel$', (_ALL, _WIDE)),
  (r'(q|kv)_a/kernel$', (_ALL, None)),
  (r'(q|kv)_b/kernel$', (_ALL, _WIDE)),
  (r'(q|k|v|gate|up)/bias$', (_WIDE,)),
  # Adapters: A is sharded as the kernel's input dimension, B as its output dimension.
  (r'(q|k|v|gate|up)/a$', (_ALL, None)),
  (r'(q|k|v|gate|up)/b$', (None, _WIDE)),
  (r'(q|kv)_a/a$', (_ALL, None)),
  (r'(q|kv)_b/a$', (_ALL, None)),
  (r'(q|kv)_b/b$', (None, _WIDE)),
  (r'(o|down|delta_out)/a$', (_WIDE, None)),
  (r'(o|down|delta_out)/b$', (None, _ALL)),
)


def rules(extra: Iterable[Any]) -> Rules:
  """RULES, preceded by the (pattern, axes) pairs in `extra`. Raises UserError for malformed pairs."""
  extra = tuple(extra)
  for pair in extra:
    is_pair = isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)
    axes = pair[1] if is_pair else ()
    if not is_pair or not isinstance(axes, tuple | list) or not {*axes} <= {*AXES, None}:
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
  return (*((pattern, tuple(axes)) for pattern, axes in extra), *RULES)


def make_mesh(config: Settings, devices: list[jax.Device] | None = None) -> Mesh:
  """A mesh with the axis sizes in `config` (config.mesh), or of its preset; one size may be −1 for the rest.

  Sizes are those inside one slice. The data axis is as many times as long as there are slices, so that it alone
  crosses the network between them. The mesh of a TPU follows its links. Raises UserError for sizes whose product
  exceeds the number of devices, for another preset than that of the devices, and as `slices.split`.
  """
  devices, config = devices or jax.devices(), dict(config)
  groups = slices.split(devices, config.get('slices', 0))
  count = len(groups[0])
  if config.get('preset'):
    config |= _preset_sizes(config['preset'], count)
  sizes = [config.get(axis, 1) for axis in AXES]
  known = math.prod(s for s in sizes if s != -1)
  if sizes.count(-1) == 1 and count % known == 0:
    sizes = [count // known if s == -1 else s for s in sizes]
  if min(sizes) < 1 or math.prod(sizes) > count:
    requested = ', '.join(f'{a}={size}' for a, size in zip(AXES, sizes, strict=True))
    of_slice = f' of each of the {len(groups)} slices' if len(groups) > 1 else ''
    raise UserError(
      f'config.mesh ({requested}) does not fit {count} devices{of_slice}; '
      'let the product be that number, or set one axis to -1.'
    )
  grid = _grid([group[: math.prod(sizes)] for group in groups], sizes)
  return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _preset_sizes(preset: str, count: int) -> dict[str, int]:
  """Sizes of data and fsdp. Raises UserError for a preset of another number of devices than `count`."""
  chosen = hardware.SLICES[preset]
  chips = hardware.chips(preset) if chosen.topology else None
  if chips not in (None, count) or (preset == 'gpu-node' and count % chosen.fsdp):
    family = preset.partition('-')[0]
    same = [n for n, s in hardware.SLICES.items() if s.topology and hardware.chips(n) == count]
    same = [name for name in same if name.startswith(f'{family}-')]
    remedy = f'preset={same[0]}' if same else "preset='' --config.mesh.fsdp=-1"
    raise UserError(
      f'config.mesh.preset={preset!r} is for {chips or f"a multiple of {chosen.fsdp}"} devices, and a slice here '
      f'has {count}; type --config.mesh.{remedy}.'
    )
  return dict(data=chosen.data, fsdp=chosen.fsdp)


def _grid(groups: list[list[jax.Device]], sizes: list[int]) -> np.ndarray:
  """Devices of all slices in the shape of the mesh. Consecutive TPU chips in jax's list need not be neighbors."""
  if not hasattr(groups[0][0], 'coords'):
    return np.concatenate([np.array(group).reshape(sizes) for group in groups])
  if len(groups) == 1:
    return mesh_utils.create_device_mesh(sizes, groups[0], allow_split_physical_axes=True)
  between = [len(groups)] + [1] * (len(sizes) - 1)
  devices = [device for group in groups for device in group]
  return mesh_utils.create_hybrid_device_mesh(
    sizes, between, devices, allow_split_physical_axes=True
  )


def describe(sizes: Mapping[str, int]) -> str:
  """The axes of a mesh that shard anything: 'fsdp 4 × tensor 2'."""
  return ' × '.join(f'{axis} {size}' for axis, size in sizes.items() if size > 1) or 'nothing cut'


def rows_shards(mesh: Mesh, axes: tuple[str, ...] = ROWS) -> int:
  """The number of shards of a batch."""
  return math.prod(mesh.shape[axis] for axis in axes)


def on_mesh(fn: Callable) -> Callable:
  """fn(spec, …) within the abstract mesh of `spec.layout`, which activation constraints look up."""

  @functools.wraps(fn)
  def run(spec, *args, **keywords):
    with jax.sharding.use_abstract_mesh(spec.layout.mesh.abstract_mesh):
      return fn(spec, *args, **keywords)

  return run


def replicated(mesh: Mesh) -> NamedSharding:
  """A copy on every device."""
  return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh) -> NamedSharding:
  """The first dimension sharded over ROWS."""
  return NamedSharding(mesh, PartitionSpec(ROWS))


def put(tree: Params, shardings: Params) -> Params:
  """Place host arrays, equal on every process, on the mesh; global arrays pass unchanged.

  `shardings` is a prefix of the tree: each of its leaves applies to a whole subtree.
  """

  def place(sharding: NamedSharding, part: Params) -> Params:
    return jax.tree.map(lambda x: _placed(x, sharding), part)

  return jax.tree.map(place, shardings, tree, is_leaf=lambda x: isinstance(x, NamedSharding))


def _placed(leaf: Array, sharding: NamedSharding) -> jax.Array:
  if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
    return leaf
  if sharding.is_fully_addressable:
    return jax.device_put(leaf, sharding)
  host = np.asarray(leaf)
  return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def fetch(tree: Params) -> Params:
  """Host arrays of all rows, on every process; all processes call it."""

  def to_host(leaf: Array) -> np.ndarray:
    if (
      isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and not leaf.is_fully_replicated
    ):
      return multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)

  return jax.tree.map(to_host, tree)


def any_process(flag: bool) -> bool:
  """Whether `flag` is True on any process; all processes call it."""
  if jax.process_count() == 1:
    return flag
  return bool(multihost_utils.process_allgather(np.bool_(flag)).any())


def layout(
  tree: Params,
  mesh: Mesh,
  rules: Rules = RULES,
  changed: Mapping[str | tuple[str, ...], str | None] = _STORED,
) -> Params:
  """A NamedSharding for every leaf of a parameter tree or an optimizer state.

  Each leaf gets the axes of the first rule that matches its path, and is replicated without one. `changed` replaces the
  axes of a dimension, by None for none. Axes that do not divide their dimension are left out; of several axes on one
  dimension, the last ones first. The data of a quantized kernel is laid out as the kernel; scales of channels as these,
  and scales of blocks as the kernel.
  """

  def dividing_axes(axes, size):
    axes = changed.get(axes, axes)
    if not axes:
      return None
    if isinstance(axes, str):
      return axes if size % mesh.shape[axes] == 0 else None
    used = tuple(a for a in axes if mesh.shape[a] > 1)
    while used and size % rows_shards(mesh, used):
      used = used[:-1]
    return used if len(used) > 1 else used[0] if used else None

  def place(path, leaf):
    name, part = re.fullmatch(r'(.*?)((?<=/kernel)/(?:data|scale))?', path_name(path)).groups()
    axes = next((axes for pattern, axes in rules if re.search(pattern, name)), ())
    if part == '/scale' and len(leaf.shape) < len(axes):  # of channels
      axes = (*axes[:-2], *axes[-1:])
    if len(axes) != len(leaf.shape):
      axes = ()
    return NamedSharding(mesh, PartitionSpec(*map(dividing_axes, axes, leaf.shape)))

  return jax.tree_util.tree_map_with_path(place, tree)


def host_device() -> jax.Device | None:
  """The CPU beside accelerators; None where JAX_PLATFORMS excludes it."""
  try:
    return jax.local_devices(backend='cpu')[0]
  except RuntimeError:
    return None


def cache_layout(tree: Params, mesh: Mesh) -> Params:
  """Shardings of keys and values [rows, heads, …]: rows over ROWS, heads over SAMPLED_FEATURES where these divide them.

  Arrays without heads are sharded by rows.
  """
  shards = rows_shards(mesh, SAMPLED_FEATURES)

  def place(leaf):
    heads = len(leaf.shape) > 1 and leaf.shape[1] % shards == 0
    by_row = PartitionSpec(ROWS, SAMPLED_FEATURES) if heads else PartitionSpec(ROWS)
    return NamedSharding(mesh, by_row)

  return jax.tree.map(place, tree)


def decode_layout(params: Params, mesh: Mesh, rules: Rules = RULES) -> Params:
  """The layout while sampling: over experts and SAMPLED_FEATURES alone, so that the decode loop gathers nothing."""
  return layout(params, mesh, rules, _SAMPLED)


def expert_specs(params: Params, mesh: Mesh, rules: Rules = RULES) -> Params:
  """PartitionSpecs of `decode_layout` along the experts' axis alone: the weights that each shard of rows receives."""
  expert_axis = lambda s: PartitionSpec(*(a if a == 'expert' else None for a in s.spec))  # noqa: E731
  return jax.tree.map(expert_axis, decode_layout(params, mesh, rules))


def layer_gather(mesh: Mesh, rules: Rules = RULES) -> Callable[[Params], Params] | None:
  """A function that lays out a layer's weights whole but for experts and FEATURES; None if rows are on one device.

  Each layer is then gathered just before its use and freed after it; its gradient is scattered into `layout` where it
  arises. Without the constraints the compiler may exchange the rows, which are many times as large, or keep gradients
  of all layers whole. arXiv:1910.02054 (ZeRO), arXiv:2304.11277 (FSDP).
  """
  if rows_shards(mesh, UPDATE_ROWS) == 1:
    return None

  def gather(layer: Params) -> Params:
    whole, parts = layout(layer, mesh, rules, _UPDATED), layout(layer, mesh, rules)
    return jax.tree.map(_gathered, layer, _on_current_mesh(whole), _on_current_mesh(parts))

  return gather


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(x: jax.Array, whole: NamedSharding, part: NamedSharding) -> jax.Array:
  """x laid out as `whole`; its gradient is laid out as `part`."""
  del part
  return jax.lax.with_sharding_constraint(x, whole)


def _scatter(whole: NamedSharding, part: NamedSharding, _, gradient: jax.Array) -> tuple[jax.Array]:
  # The sum over devices, then each device's part of it: together they are one reduce-scatter.
  gradient = jax.lax.with_sharding_constraint(gradient, whole)
  return (jax.lax.with_sharding_constraint(gradient, part),)


_gathered.defvjp(lambda x, whole, part: (_gathered(x, whole, part), None), _scatter)


def keep_layout(params: Params, mesh: Mesh, rules: Rules = RULES) -> Params:
  """Arrays like parameters, such as their gradients, constrained to `layout`; unchanged if rows are on one device."""
  if rows_shards(mesh, UPDATE_ROWS) == 1:
    return params
  shardings = _on_current_mesh(layout(params, mesh, rules))
  return jax.lax.with_sharding_constraint(params, shardings)


def _on_current_mesh(shardings: Params) -> Params:
  mesh = jax.sharding.get_abstract_mesh()
  return jax.tree.map(lambda s: NamedSharding(mesh, s.spec), shardings)


def free_axes() -> set[str]:
  """Mesh axes that no enclosing shard_map has made manual."""
  mesh = jax.sharding.get_abstract_mesh()
  return set(mesh.axis_names) - set(mesh.manual_axes)


def is_manual(axes: tuple[str, ...]) -> bool:
  """Whether an enclosing shard_map has made all of `axes` manual, and they span more than one device."""
  mesh = jax.sharding.get_abstract_mesh()
  return {*axes} <= {*mesh.manual_axes} and math.prod(mesh.shape[a] for a in axes) > 1


def _in_phase(axes: tuple[str, ...]) -> tuple[str, ...]:
  """`axes` as written for the update; while sampling, where ROWS are manual, 'decode' shards features."""
  if not {*ROWS} <= {*jax.sharding.get_abstract_mesh().manual_axes}:
    return axes
  return SAMPLED_FEATURES if axes == FEATURES else tuple(a for a in axes if a != 'decode')


def axes_that_divide(axes: tuple[str, ...], size: int = 0) -> tuple[str, ...]:
  """The free axes among `axes`, if together they span several devices and divide `size`; else ().

  FEATURES stand for SAMPLED_FEATURES while sampling.
  """
  mesh = jax.sharding.get_abstract_mesh()
  free = tuple(a for a in _in_phase(axes) if a in free_axes())
  shards = math.prod(mesh.shape[a] for a in free)
  return free if shards > 1 and size % shards == 0 else ()


def constrain(x: jax.Array, *axes: tuple[str, ...]) -> jax.Array:
  """Shard the leading dimensions of x over those of `axes` that divide them; () keeps a dimension unsharded.

  A no-op where neither rows nor tokens are sharded. The constraint is explicit because the compiler might otherwise
  exchange rows between devices in place of weights.
  """
  if not axes_that_divide(UPDATE_ROWS, len(x)) + axes_that_divide(TOKENS):
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


def path_name(path: tuple[Any, ...]) -> str:
  """The path of a leaf as RULES match it: layers/0/q/kernel."""
  return '/'.join(_key(k) for k in path)


def _key(entry: Any) -> str:
  for name in ('key', 'name', 'idx'):
    if hasattr(entry, name):
      return str(getattr(entry, name))
  return str(entry)
