"""Memory of a step: refusal of a state that cannot fit, and settings with which a program needs less."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import cast

import jax
from jax.sharding import AbstractMesh

from jaxrl_llm.config.schema import Config
from jaxrl_llm.distributed import hardware, sharding
from jaxrl_llm.learner import device_memory
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.types import ModelConfig, UserError

_GIB = 2**30
Changes = dict[str, int | str | bool]  # fields of the configuration, and their new values


def check_state(config: Config, spec: StepSpec) -> None:
  """Raises UserError where weights and optimizer alone are larger than a device, with a mesh that holds them."""
  device = spec.layout.mesh.devices.flat[0]
  limit = hardware.memory_bytes(device)
  size = device_memory.state_bytes(spec)
  if limit is None or size <= limit:
    return
  raise UserError(
    f'weights and optimizer take {size / _GIB:.1f} GiB on each of {spec.layout.mesh.size} devices (config.mesh: '
    f'{sharding.describe(spec.layout.mesh.shape)}), and a {device.device_kind} has {limit / _GIB:.1f}; '
    f'{_larger_mesh(config, spec, limit)}.'
  )


def _larger_mesh(config: Config, spec: StepSpec, limit: float) -> str:
  """The flags of a mesh that holds the state: of these devices, or of a larger slice of the same kind."""
  chips = spec.layout.mesh.size // spec.layout.slices
  for mesh in _meshes_with_room(config, spec, limit, chips):
    return f'type {flags(mesh_changes(config, mesh))}'
  device = spec.layout.mesh.devices.flat[0]
  for name in hardware.SLICES:
    count = hardware.chips(name) if hardware.SLICES[name].topology else None
    same_kind = name.partition('-')[0] == hardware.FAMILIES.get(device.device_kind)
    if not count or count <= chips or not same_kind:
      continue
    for mesh in _meshes_with_room(config, spec, limit, count):
      changes = mesh_changes(config, mesh)
      return f'no mesh of them has room, but {name} has: type --topology={name} {flags(changes)}'
  return 'no mesh has room; type --config.lora.rank=16 to train an adapter, or name a smaller config.model'


def _meshes_with_room(
  config: Config, spec: StepSpec, limit: float, chips: int
) -> Iterator[dict[str, int]]:
  for sizes in layouts(spec.model.config, chips):
    whole = sizes | dict(data=sizes['data'] * spec.layout.slices)
    shape = AbstractMesh(tuple(whole[axis] for axis in sharding.AXES), sharding.AXES)
    mesh = cast(jax.sharding.Mesh, shape)  # its shape alone is read
    rows = config.prompts // config.learner.minibatches
    resized = spec._replace(layout=spec.layout._replace(mesh=mesh))
    divides = all(
      rows % sharding.rows_shards(mesh, axes) == 0 for axes in (sharding.ROWS, sharding.UPDATE_ROWS)
    )
    if divides and device_memory.state_bytes(resized) <= limit:
      yield sizes


def layouts(model: ModelConfig, devices: int) -> list[dict[str, int]]:
  """Meshes of a slice to try: tensor 1 … 8 or decode 4, expert 1 … 16 for mixtures, fsdp 16, 64 or all of the others.

  Meshes that leave devices idle or cut heads, features or experts unevenly are left out.
  """
  meshes, heads = [], {model.of_layers(slides).kv_heads for slides in model.slides}
  for tensor, decode in ((1, 1), (2, 1), (4, 1), (8, 1), (1, 4)):
    parts = tensor * decode
    for expert in (1, 4, 8, 16) if model.experts else (1,):
      rest = devices // (parts * expert)
      even = model.mlp % parts == 0 and all(n % parts == 0 for n in heads)
      if not even or (model.experts or 0) % expert or rest * parts * expert != devices:
        continue
      fixed = dict(context=1, expert=expert, decode=decode, tensor=tensor)
      for fsdp in sorted({n for n in (16, 64, rest) if rest % n == 0}):
        meshes.append(dict(data=rest // fsdp, fsdp=fsdp) | fixed)
  return meshes


def mesh_changes(config: Config, sizes: Mapping[str, int]) -> Changes:
  """The fields that turn config.mesh into these sizes."""
  changes: Changes = {'mesh.preset': ''} if config.mesh.preset else {}
  return changes | {
    f'mesh.{axis}': size for axis, size in sizes.items() if size != config.mesh[axis]
  }


def flags(changes: Mapping[str, int | str | bool]) -> str:
  """Changes as they are typed on the command line."""
  return ' '.join(f'--config.{name}={value}' for name, value in changes.items())


def smaller_updates(config: Config, spec: StepSpec) -> Iterator[Changes]:
  """Settings with which the update needs less and less memory: fewer tokens at once, a kernel, rounded moments."""
  packing, changes = spec.update.packing, Changes()
  if not spec.update.remat:
    changes['learner.remat'] = True
    yield dict(changes)
  bins = packing.bins // 2
  while bins:
    changes['learner.microbatch_tokens'] = bins * packing.tokens
    yield dict(changes)
    bins //= 2
  kernel = {'tpu': 'splash', 'gpu': 'cudnn'}.get(spec.layout.mesh.devices.flat[0].platform)
  whole_rows = spec.layout.mesh.shape['context'] == 1 and not spec.model.config.chunked
  if kernel and whole_rows and spec.update.attention is None:
    yield changes | {'learner.attention': kernel}
  if config.optimizer.fn == 'adamw' and config.optimizer.moments_dtype == 'float32':
    yield changes | {'optimizer.moments_dtype': 'bfloat16'}


def smaller_rollouts(config: Config, spec: StepSpec) -> Iterator[Changes]:
  """Settings with which sampling needs less and less memory: fewer slots, rounded keys, weights cut over tensor."""
  layout, changes = spec.layout, Changes()
  shards = sharding.rows_shards(layout.mesh)
  local = (spec.rollout.decode.slots or layout.prompts * config.rollouts) // shards // 2
  while local:
    changes['rollout.slots'] = local * shards
    yield dict(changes)
    local //= 2
  if config.rollout.cache_dtype != 'int8':
    changes['rollout.cache_dtype'] = 'int8'
    yield dict(changes)
  for sizes in layouts(spec.model.config, layout.mesh.size // layout.slices):
    if sizes['tensor'] > layout.mesh.shape['tensor']:
      yield changes | mesh_changes(config, sizes)


@contextlib.contextmanager
def explained(config: Config, spec: StepSpec) -> Iterator[None]:
  """Turns RESOURCE_EXHAUSTED of a compiled step into a UserError that names settings with which it needs less."""
  remedy = lambda: (  # noqa: E731
    f'the update needs less with {_options(smaller_updates(config, spec))}, and sampling with '
    f'{_options(smaller_rollouts(config, spec))}'
  )
  with exhaustion_explained(spec.layout.mesh, 'the step', remedy):
    yield


@contextlib.contextmanager
def exhaustion_explained(
  mesh: jax.sharding.Mesh, program: str, remedy: Callable[[], str]
) -> Iterator[None]:
  """Turns RESOURCE_EXHAUSTED of `program` on the devices of a mesh into a UserError with `remedy()`."""
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    kind = mesh.devices.flat[0].device_kind
    reason = str(error).strip().splitlines()[0]
    raise UserError(
      f'{program} does not fit into the memory of a {kind} ({reason}); {remedy()}.'
    ) from error


def _options(choices: Iterable[Changes]) -> str:
  """The first choice, and the first with each further field."""
  texts, names = [], set[str]()
  for changes in itertools.islice(choices, 32):
    if new := {name: value for name, value in changes.items() if name not in names}:
      texts.append(flags(new))
      names |= set(new)
  return ', '.join(texts) or 'a larger config.mesh or a smaller config.model'
