"""How tests compile: code that runs once need not be fast, and most of the suite's time goes to compilers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def flags(devices: int) -> str:
  """XLA_FLAGS for so many virtual devices. LLVM takes thrice as long over what the newer emitters of fusions write."""
  return f'--xla_force_host_platform_device_count={devices} --xla_cpu_use_fusion_emitters=false'


# compiler_options of a program that is read, for by default other operations are fused, or whose last digits count.
AS_TRAINED = dict(
  xla_cpu_use_fusion_emitters=True,
  xla_backend_optimization_level=3,
  xla_llvm_disable_expensive_passes=False,
)


@contextlib.contextmanager
def optimized() -> Iterator[None]:
  """Programs compiled inside are optimized by LLVM: what two of them then round alike, they need not without."""
  import jax

  kept = jax.config.read('jax_disable_most_optimizations')
  jax.config.update('jax_disable_most_optimizations', False)
  try:
    yield
  finally:
    jax.config.update('jax_disable_most_optimizations', kept)


def prepare() -> None:
  """Call it before jax is first imported; processes that tests start inherit it, but for the flags."""
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
  # A mesh of one device is made from jax.devices()[:1].
  if 'xla_force_host_platform_device_count' not in os.environ.get('XLA_FLAGS', ''):
    os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {flags(8)}'.strip()
