"""What accelerators can do at best, by the name that jax gives them."""

from __future__ import annotations

from typing import NamedTuple


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
