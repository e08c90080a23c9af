"""Peak figures of accelerators by jax's device kind, slices by name, and compiler options."""

from __future__ import annotations

import math
import os
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
  import jax


class Chip(NamedTuple):
  """Peak figures of a device in dense bfloat16, as published by the vendor."""

  flops: float  # per second
  memory_bandwidth: float  # bytes per second
  link_bandwidth: (
    float  # bytes per second, one direction: of one link of a TPU, of a GPU's whole NVLink
  )


class Host(NamedTuple):
  """A host's share of the data-center network (DCN), which connects slices."""

  dcn_bandwidth: float  # bytes per second, one direction
  chips: int


# By jax's device kind, from cloud.google.com/tpu/docs/v5e, /v5p, /v6e (read November 2026).
# Links: v5e 400 GB/s per chip over 4 links and 2 directions, v5p 1200 over 6, v6e 800 over 4.
# GPUs: figures of NVIDIA's data sheets without sparsity, from memory; NVLink is published as both directions.
CHIPS = {
  'TPU v5 lite': Chip(197e12, 819e9, 50e9),
  'TPU v5': Chip(459e12, 2765e9, 100e9),
  'TPU v6 lite': Chip(918e12, 1638e9, 100e9),
  'NVIDIA H100 80GB HBM3': Chip(989.4e12, 3350e9, 450e9),
  'NVIDIA H200': Chip(989.4e12, 4800e9, 450e9),
  'NVIDIA A100-SXM4-80GB': Chip(312e12, 2039e9, 300e9),
  'NVIDIA A100-SXM4-40GB': Chip(312e12, 1555e9, 300e9),
}
# From the same pages: 2 network cards of 100 Gbit/s a host of v5e, 4 of 200 of v6e; 50 Gbit/s a chip of v5p.
HOSTS = {
  'TPU v5 lite': Host(25e9, 8),
  'TPU v5': Host(25e9, 4),
  'TPU v6 lite': Host(100e9, 8),
}
FAMILIES = {
  'TPU v5 lite': 'v5e',
  'TPU v5': 'v5p',
  'TPU v6 lite': 'v6e',
}  # the first part of names in SLICES
# GiB. TPUs: what the compiler allows a program, from its message for one that does not fit (libtpu 0.0.42). GPUs: what
# nvidia-smi states, from memory; jax reserves a part of it.
HBM_GIB = {
  'TPU v5 lite': 15.75,
  'TPU v5': 95.74,
  'TPU v6 lite': 31.25,
  'TPU v4': 15.25,
  'TPU7x': 94.75,
  'NVIDIA H100 80GB HBM3': 79.6,
  'NVIDIA H200': 140.4,
  'NVIDIA A100-SXM4-80GB': 80.0,
  'NVIDIA A100-SXM4-40GB': 40.0,
}
_TPU_OPTIONS = {
  # An array is copied to vector memory only if it is read there about as often as it is moved. libtpu's default of 0.5
  # allows two moves per read: a decode loop would fetch the KV cache, change one column and write it back per token.
  'xla_tpu_msa_inefficient_use_to_copy_ratio': '0.9',
  # Weights are gathered beside products. Only v5e's compiler does that by default, of v5e, v5p and v6e.
  'xla_enable_async_all_gather': 'true',
  'xla_tpu_enable_async_collective_fusion': 'true',
  'xla_tpu_enable_async_collective_fusion_fuse_all_gather': 'true',
  'xla_tpu_enable_async_collective_fusion_multiple_steps': 'true',
}


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


def slices(name: str) -> tuple[int, str]:
  """(2, 'v5e-16') for '2xv5e-16', several slices connected by DCN; (1, name) for other names."""
  several = re.fullmatch(r'([1-9]\d*)x([a-z].*)', name)
  return (int(several[1]), several[2]) if several else (1, name)


def topology(name: str) -> str:
  """'v5e:4x4' for 'v5e-16', 'v5litepod-16' or '2xv5e-16'; other names unchanged."""
  name = slices(name)[1]
  known = SLICES.get(name.replace('v5litepod-', 'v5e-'))
  return (known and known.topology) or name


def chips(name: str) -> int | None:
  """The number of chips of all slices of a topology, 32 for '2xv5e-16'; None for a name without sizes."""
  sizes = re.fullmatch(r'(?:\w+:)?(\d+(?:x\d+)*)', topology(name))
  return slices(name)[0] * math.prod(map(int, sizes[1].split('x'))) if sizes else None


def topology_options(name: str) -> dict[str, int | tuple[int, ...]]:
  """Further arguments of `jax.experimental.topologies.get_topology_desc` for a topology.

  The compiler's hosts have 2 × 2 chips, which do not divide a single chip.
  """
  is_one_chip = re.fullmatch(r'\w+:1(x1)*', topology(name)) is not None
  options: dict[str, int | tuple[int, ...]] = {}
  if is_one_chip:
    options['chips_per_host_bounds'] = (1, 1, 1)
  if slices(name)[0] > 1:
    options['num_slices'] = slices(name)[0]
  return options


def dcn_seconds(device_kind: str, size: float) -> float | None:
  """Seconds in which each chip receives `size` bytes from other slices; None for hosts of unknown speed."""
  host = HOSTS.get(device_kind)
  return None if host is None else size * host.chips / host.dcn_bandwidth


def memory_bytes(device: jax.Device) -> float | None:
  """Bytes that programs may use on a device; None where that is not known, as on a CPU."""
  if device.platform == 'gpu' and (stats := device.memory_stats()):
    return stats.get('bytes_limit')
  gib = HBM_GIB.get(device.device_kind)
  return None if gib is None else gib * 2**30


def compiler_options(device: jax.Device) -> dict[str, str]:
  """XLA's options for programs of a device, without those that LIBTPU_INIT_ARGS sets."""
  if device.platform != 'tpu':
    return {}
  user_options = os.environ.get('LIBTPU_INIT_ARGS', '')
  return {name: value for name, value in _TPU_OPTIONS.items() if f'--{name}=' not in user_options}
