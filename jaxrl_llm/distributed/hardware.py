"""Peak figures of accelerators by jax's device kind, slices by name, and compiler options."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
  import jax


class Chip(NamedTuple):
  """Peak figures of a device in bfloat16, as published by the vendor."""

  flops: float  # per second
  memory_bandwidth: float  # bytes per second
  link_bandwidth: float  # bytes per second, one direction of one link between chips


# By jax's device kind, from cloud.google.com/tpu/docs/v5e, /v5p, /v6e (read November 2026).
# Links: v5e 400 GB/s per chip over 4 links and 2 directions, v5p 1200 over 6, v6e 800 over 4.
CHIPS = {
  'TPU v5 lite': Chip(197e12, 819e9, 50e9),
  'TPU v5': Chip(459e12, 2765e9, 100e9),
  'TPU v6 lite': Chip(918e12, 1638e9, 100e9),
}
# GiB that the compiler allows a program, from its message for one that does not fit (libtpu 0.0.42).
HBM_GIB = {
  'TPU v5 lite': 15.75,
  'TPU v5': 95.74,
  'TPU v6 lite': 31.25,
  'TPU v4': 15.25,
  'TPU7x': 94.75,
}
# An array is copied to vector memory only if it is read there about as often as it is moved. libtpu's default of 0.5
# allows two moves per read: a decode loop would fetch the KV cache, change one column and write it back for each token.
_TPU_OPTIONS = {'xla_tpu_msa_inefficient_use_to_copy_ratio': '0.9'}


class Slice(NamedTuple):
  """A slice with the compiler's name of its topology, and the default mesh sizes on it."""

  topology: str  # '' for GPUs
  data: int
  fsdp: int


# By the vendor's names, which count cores for v5p. Each 64 chips hold a copy of the weights: fewer copies would save
# little memory and make gathers slower. 'gpu-node' holds a copy on each node of 8 GPUs, connected by NVLink.
SLICES = {
  'one': Slice('', 1, 1),
  'gpu-node': Slice('', -1, 8),
  'v5e-1': Slice('v5e:1x1', 1, -1),
  'v5e-4': Slice('v5e:2x2', 1, -1),
  'v5e-8': Slice('v5e:2x4', 1, -1),
  'v5e-16': Slice('v5e:4x4', 1, -1),
  'v5e-64': Slice('v5e:8x8', 1, -1),
  'v5e-256': Slice('v5e:16x16', -1, 64),
  'v5p-8': Slice('v5p:2x2x1', 1, -1),
  'v5p-32': Slice('v5p:2x2x4', 1, -1),
  'v5p-128': Slice('v5p:4x4x4', 1, -1),
  'v6e-1': Slice('v6e:1x1', 1, -1),
  'v6e-4': Slice('v6e:2x2', 1, -1),
  'v6e-8': Slice('v6e:2x4', 1, -1),
  'v6e-16': Slice('v6e:4x4', 1, -1),
  'v6e-64': Slice('v6e:8x8', 1, -1),
  'v6e-256': Slice('v6e:16x16', -1, 64),
}


def topology(name: str) -> str:
  """'v5e:4x4' for 'v5e-16' or 'v5litepod-16'; other names unchanged."""
  known = SLICES.get(name.replace('v5litepod-', 'v5e-'))
  return (known and known.topology) or name


def topology_options(name: str) -> dict[str, tuple[int, ...]]:
  """Further arguments of `jax.experimental.topologies.get_topology_desc` for a topology.

  The compiler's hosts have 2 × 2 chips, which do not divide a single chip.
  """
  is_one_chip = re.fullmatch(r'\w+:1(x1)*', topology(name)) is not None
  return dict(chips_per_host_bounds=(1, 1, 1)) if is_one_chip else {}


def compiler_options(device: jax.Device) -> dict[str, str]:
  """XLA's options for programs of a device, without those that LIBTPU_INIT_ARGS sets."""
  if device.platform != 'tpu':
    return {}
  user_options = os.environ.get('LIBTPU_INIT_ARGS', '')
  return {name: value for name, value in _TPU_OPTIONS.items() if name not in user_options}
