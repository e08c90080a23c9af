"""The part of each parameter that a device holds, and its bytes, computed from shapes alone."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.commands import compile_report
from jaxrl_llm.config.schema import typed
from jaxrl_llm.config.validation import ConfigLike
from jaxrl_llm.distributed import hardware, sharding
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.types import UserError

_MIB = 2**20
_LAYER = re.compile(r'\blayers/\d+/')


@dataclasses.dataclass(frozen=True)
class Device:
  """Stands for a device in a mesh that is never computed on."""

  id: int
  platform: str = 'tpu'
  device_kind: str = 'any'
  process_index: int = 0
  slice_index: int = 0

  def memory_stats(self) -> None:
    """What is in use is not known."""


@dataclasses.dataclass(frozen=True)
class Row:
  """A parameter, or all of the same name and shape in every layer."""

  name: str
  count: int
  shape: tuple[int, ...]
  update: PartitionSpec  # in the update
  decode: PartitionSpec  # while sampling
  update_bytes: int  # per device, of all `count`
  decode_bytes: int


def run(config: ConfigLike, topology: str, report: str = '') -> None:
  """Print the layout of `config` on `topology`, '8' or 'v5e-16', and write it as JSON to the file `report`.

  Raises UserError for bad input.
  """
  config = typed(config)
  spec = compile_report.make(config, devices(topology))
  parameters, state = rows(spec), state_bytes(spec)
  if report:
    records = [
      vars(row) | dict(update=str(row.update), decode=str(row.decode)) for row in parameters
    ]
    safe_files.write(report, json.dumps(dict(parameters=records, state_bytes=state), indent=2))
  print(table(config.model, spec, parameters, state))


def devices(topology: str) -> list[Device]:
  """As many devices as the topology has; '' stands for those of this machine. Raises UserError."""
  if not topology:
    return [Device(i, platform=d.platform) for i, d in enumerate(jax.devices())]
  count = hardware.chips(topology)
  if count is None:
    raise UserError(
      f'--topology={topology!r} must be a number of devices, or such as v5e-16, v5e:4x4 or 2xv5e-16.'
    )
  slices = hardware.slices(topology)[0]
  return [Device(i, slice_index=i // (count // slices)) for i in range(count)]


def rows(spec: StepSpec) -> list[Row]:
  """Every parameter in the order of the model; those of all layers in one row."""
  params = train_state.abstract_sampling_weights(spec)
  decode = sharding.decode_layout(params, spec.layout.mesh, spec.layout.rules)
  itemsize = np.dtype(spec.model.dtype).itemsize
  merged: dict[tuple[str, tuple[int, ...]], Row] = {}
  placements = jax.tree.leaves(decode, is_leaf=lambda x: hasattr(x, 'spec'))
  leaves = jax.tree_util.tree_leaves_with_path(params)
  for (path, leaf), placement in zip(leaves, placements, strict=True):
    is_packed = re.search(r'/kernel/(data|scale)$', sharding.path_name(path))
    size = leaf.dtype.itemsize if is_packed else itemsize
    row = Row(
      name=_LAYER.sub('layers/*/', sharding.path_name(path)),
      count=1,
      shape=leaf.shape,
      update=leaf.sharding.spec,
      decode=placement.spec,
      update_bytes=_elements(leaf.sharding, leaf.shape) * leaf.dtype.itemsize,
      decode_bytes=_elements(placement, leaf.shape) * size,
    )
    key = row.name, row.shape
    merged[key] = _add(merged[key], row) if key in merged else row
  return list(merged.values())


def _add(total: Row, row: Row) -> Row:
  return dataclasses.replace(
    row,
    count=total.count + row.count,
    update_bytes=total.update_bytes + row.update_bytes,
    decode_bytes=total.decode_bytes + row.decode_bytes,
  )


def state_bytes(spec: StepSpec) -> dict[str, int]:
  """Bytes per device of every part of the train state that is not empty."""
  state = train_state.abstract_state(spec)._asdict()
  count = lambda tree: sum(  # noqa: E731
    _elements(x.sharding, x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)
  )
  return {name: size for name, part in state.items() if (size := count(part))}


def table(model: str, spec: StepSpec, parameters: list[Row], state: dict[str, int]) -> str:
  """The report as lines of text."""
  mesh = sharding.describe(spec.layout.mesh.shape)
  width = max(len(row.name) for row in parameters)
  lines = [
    f'{model} on {spec.layout.mesh.size} devices ({mesh}); MiB per device',
    '',
    f'{"parameter":{width}} {"×":>4} {"shape":>16} {"while learning":>24} {"MiB":>9} {"while sampling":>24} {"MiB":>9}',
  ]
  for row in parameters:
    shape = ' × '.join(map(str, row.shape))
    lines.append(
      f'{row.name:{width}} {row.count:4} {shape:>16} {_axes(row.update):>24} {row.update_bytes / _MIB:9.2f} '
      f'{_axes(row.decode):>24} {row.decode_bytes / _MIB:9.2f}'
    )
  sizes = ', '.join(f'{name} {size / _MIB:,.2f}' for name, size in state.items())
  decode = sum(row.decode_bytes for row in parameters) / _MIB
  # Gradients are summed over microbatches in float32, beside the state.
  update = (sum(state.values()) + state['params']) / _MIB
  return '\n'.join(
    [
      *lines,
      '',
      f'train state: {sizes}',
      f'an update holds at least {update:,.2f}: the train state and the gradients of params',
      f'weights while sampling ({spec.model.dtype}): {decode:,.2f}',
    ]
  )


def _elements(placement: Any, shape: tuple[int, ...]) -> int:
  return math.prod(placement.shard_shape(shape))


def _axes(partition: PartitionSpec) -> str:
  """'fsdp, –' for a matrix sharded by its rows; 'whole' where every device holds all."""
  axes = [('·'.join(axis) if isinstance(axis, tuple) else axis) or '–' for axis in partition]
  return ', '.join(axes) if any(axis != '–' for axis in axes) else 'whole'
