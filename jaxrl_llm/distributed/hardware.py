"""What accelerators can do at best, by the name that jax gives them."""

from __future__ import annotations

import os
from typing import Any, NamedTuple


class Chip(NamedTuple):
  """What a device can do at best; the vendor's figures, bfloat16."""

  flops: float  # per second
  memory_bandwidth: float  # bytes per second
  link_bandwidth: float  # bytes per second, one direction of one link between chips


# Per device kind as jax names it. Source: cloud.google.com/tpu/docs/v5e, /v5p, /v6e (read November 2026).
# Links: v5e 400 GB/s a chip over 4 links and 2 directions, v5p 1200 over 6, v6e 800 over 4.
CHIPS = {
  'TPU v5 lite': Chip(197e12, 819e9, 50e9),
  'TPU v5': Chip(459e12, 2765e9, 100e9),
  'TPU v6 lite': Chip(918e12, 1638e9, 100e9),
}
# GiB that the compiler lets a program use, as it says itself when one does not fit (libtpu 0.0.42).
HBM_GIB = {
  'TPU v5 lite': 15.75,
  'TPU v5': 95.74,
  'TPU v6 lite': 31.25,
  'TPU v4': 15.25,
  'TPU7x': 94.75,
}
# What is fetched into vector memory shall be read there about as often as it is moved. libtpu's 0.5 allows what moves
# twice for one read: a decode loop then fetches keys and values, changes a column and writes all back, every token.
_TPU_OPTIONS = {'xla_tpu_msa_inefficient_use_to_copy_ratio': '0.9'}


class Slice(NamedTuple):
  """A slice as the compiler names it, and how its chips share rows where nothing else is asked for."""

  topology: str  # '' where it is none of TPUs
  data: int
  fsdp: int


# A whole copy of the weights for every 64 chips: what more of them would save is little, and each gather reaches
# farther. By the vendor's names, which count cores for v5p. 'gpu-node': a copy on each node of 8, which NVLink joins.
SLICES = {
  'one': Slice('', 1, 1),
  'gpu-node': Slice('', -1, 8),
  'v5e-4': Slice('v5e:2x2', 1, -1),
  'v5e-8': Slice('v5e:2x4', 1, -1),
  'v5e-16': Slice('v5e:4x4', 1, -1),
  'v5e-64': Slice('v5e:8x8', 1, -1),
  'v5e-256': Slice('v5e:16x16', -1, 64),
  'v5p-8': Slice('v5p:2x2x1', 1, -1),
  'v5p-32': Slice('v5p:2x2x4', 1, -1),
  'v5p-128': Slice('v5p:4x4x4', 1, -1),
  'v6e-4': Slice('v6e:2x2', 1, -1),
  'v6e-8': Slice('v6e:2x4', 1, -1),
  'v6e-16': Slice('v6e:4x4', 1, -1),
  'v6e-64': Slice('v6e:8x8', 1, -1),
  'v6e-256': Slice('v6e:16x16', -1, 64),
}


def topology(name: str) -> str:
  """'v5e:4x4' of 'v5e-16' or 'v5litepod-16'; other names as they are."""
  known = SLICES.get(name.replace('v5litepod-', 'v5e-'))
  return (known and known.topology) or name


def compiler_options(device: Any) -> dict[str, str]:
  """XLA's options for programs of a jax device; of those that LIBTPU_INIT_ARGS names its value holds."""
  if device.platform != 'tpu':
    return {}
  chosen = os.environ.get('LIBTPU_INIT_ARGS', '')
  return {name: value for name, value in _TPU_OPTIONS.items() if name not in chosen}
