"""Which part of which parameter lies on a device, and how many bytes that is, before anything is loaded or rented."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.commands import compile_report
from jaxrl_llm.distributed import hardware, sharding
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.types import UserError

_MIB = 2**20
_LAYER = re.compile(r'\blayers/\d+/')


@dataclasses.dataclass(frozen=True)
class Device:
  """Stands for a device in a mesh that nothing runs on."""

  id: int
  platform: str = 'tpu'
  device_kind: str = 'any'
  process_index: int = 0


class Row(NamedTuple):
  """A parameter, or all of the same name and shape in every layer."""

  name: str
  count: int
  shape: tuple[int, ...]
  update: PartitionSpec  # where it is learned
  decode: PartitionSpec  # where rollouts are sampled
  update_bytes: int  # per device, of all `count`
  decode_bytes: int


def run(config: Any, topology: str, report: str = '') -> None:
  """Prints the layout of `config` on `topology`, '8' or 'v5e-16', and writes it as JSON to `report`.

  Raises UserError for bad input. Source: none.
  """
  spec = compile_report.make(config, devices(topology))
  found, state = rows(spec), state_bytes(spec)
  if report:
    told = [row._asdict() | dict(update=str(row.update), decode=str(row.decode)) for row in found]
    safe_files.write(report, json.dumps(dict(parameters=told, state_bytes=state), indent=2))
  print(table(config.model, spec, found, state))


def devices(topology: str) -> list[Device]:
  """As many as the topology has; '' stands for those of this machine. Source: none."""
  if not topology:
    return [Device(i, platform=d.platform) for i, d in enumerate(jax.devices())]
  sizes = re.fullmatch(r'(?:\w+:)?(\d+(?:x\d+)*)', hardware.topology(topology))
  if sizes is None:
    raise UserError(
      f'--topology={topology!r} must be a number of devices, or such as v5e-16 or v5e:4x4.'
    )
  return [Device(i) for i in range(math.prod(map(int, sizes[1].split('x'))))]


def rows(spec: StepSpec) -> list[Row]:
  """Every parameter in the order of the model; those of all layers in one row. Source: none."""
  params = train_state.abstract_sampling_weights(spec)
  decode = sharding.decode_layout(params, spec.layout.mesh, spec.layout.rules)
  size, found = np.dtype(spec.model.dtype).itemsize, {}
  places = jax.tree.leaves(decode, is_leaf=lambda x: hasattr(x, 'spec'))
  for (path, leaf), place in zip(jax.tree_util.tree_leaves_with_path(params), places, strict=True):
    name = _LAYER.sub('layers/*/', sharding.path_name(path))
    one = Row(
      name,
      1,
      leaf.shape,
      leaf.sharding.spec,
      place.spec,
      _elements(leaf.sharding, leaf.shape) * leaf.dtype.itemsize,
      _elements(place, leaf.shape) * size,
    )
    before = found.get((name, leaf.shape))
    if before is not None:
      more = {
        k: getattr(before, k) + getattr(one, k) for k in ('count', 'update_bytes', 'decode_bytes')
      }
      one = one._replace(**more)
    found[name, leaf.shape] = one
  return list(found.values())


def state_bytes(spec: StepSpec) -> dict[str, int]:
  """Bytes per device of every part of the train state that has any. Source: none."""
  state = train_state.abstract_state(spec)._asdict()
  count = lambda tree: sum(  # noqa: E731
    _elements(x.sharding, x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)
  )
  return {name: size for name, part in state.items() if (size := count(part))}


def table(model: str, spec: StepSpec, found: list[Row], state: dict[str, int]) -> str:
  """As text. Source: none."""
  mesh = sharding.describe(spec.layout.mesh.shape)
  wide = max(len(row.name) for row in found)
  lines = [
    f'{model} on {spec.layout.mesh.size} devices ({mesh}); MiB per device',
    '',
    f'{"parameter":{wide}} {"×":>4} {"shape":>16} {"while learning":>24} {"MiB":>9} {"while sampling":>24} {"MiB":>9}',
  ]
  for row in found:
    shape = ' × '.join(map(str, row.shape))
    lines.append(
      f'{row.name:{wide}} {row.count:4} {shape:>16} {_axes(row.update):>24} {row.update_bytes / _MIB:9.2f} '
      f'{_axes(row.decode):>24} {row.decode_bytes / _MIB:9.2f}'
    )
  told = ', '.join(f'{name} {size / _MIB:,.2f}' for name, size in state.items())
  decode = sum(row.decode_bytes for row in found) / _MIB
  return '\n'.join(
    [
      *lines,
      '',
      f'train state: {told}',
      f'weights while sampling ({spec.model.dtype}): {decode:,.2f}',
    ]
  )


def _elements(sharding: Any, shape: tuple[int, ...]) -> int:
  return math.prod(sharding.shard_shape(shape))


def _axes(spec: PartitionSpec) -> str:
  """'fsdp, –' for a matrix cut in its rows; 'whole' where every device holds all."""
  told = [('·'.join(axis) if isinstance(axis, tuple) else axis) or '–' for axis in spec]
  return ', '.join(told) if any(axis != '–' for axis in told) else 'whole'
