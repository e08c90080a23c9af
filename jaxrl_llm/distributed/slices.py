"""Slices: groups of devices with fast links of their own, connected by the data-center network (DCN)."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxrl_llm.types import UserError


def count(devices: Sequence[jax.Device], wanted: int = 0) -> int:
  """The number of slices of a mesh: `wanted`, or where that is 0, those that TPUs belong to, and 1 of other devices.

  Raises UserError where TPUs belong to another number of slices.
  """
  if devices[0].platform != 'tpu':
    return wanted or 1
  found = len({_index(device) for device in devices})
  if wanted not in (0, found):
    raise UserError(
      f'config.mesh.slices={wanted}, but the {len(devices)} devices belong to {found} '
      f'slice{"s" * (found > 1)}; set --config.mesh.slices={found}, or start all processes of all slices.'
    )
  return found


def split(devices: Sequence[jax.Device], wanted: int = 0) -> list[list[jax.Device]]:
  """The devices of each slice: of TPUs by their slice_index, of others consecutive blocks of the same size.

  Raises UserError as `count` does, for slices that differ in devices or processes, and for a process in two slices.
  """
  slices = count(devices, wanted)
  if devices[0].platform == 'tpu':
    groups = [[d for d in devices if _index(d) == i] for i in sorted({*map(_index, devices)})]
  else:
    size = -(-len(devices) // slices)
    groups = [list(devices[start : start + size]) for start in range(0, len(devices), size)]
  processes = [{d.process_index for d in group} for group in groups]
  all_processes = set[int]().union(*processes)
  uneven = len({len(group) for group in groups}) > 1 or len(groups) != slices
  shared = len(all_processes) > 1 and sum(map(len, processes)) > len(all_processes)
  if uneven or shared or len({*map(len, processes)}) > 1:
    raise UserError(
      f'{slices} slices (config.mesh.slices={wanted}) do not share {len(devices)} devices of '
      f'{len(all_processes)} process{"es" * (len(all_processes) > 1)} evenly: each needs as many devices, and '
      'processes of its own; set --config.mesh.slices=1, or start as many processes for every slice.'
    )
  return groups


def _index(device: jax.Device) -> int:
  return getattr(device, 'slice_index', 0)
