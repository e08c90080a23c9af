"""How tests compile: code that runs once need not be fast, and most of the suite's time goes to compilers."""

from __future__ import annotations

import functools
import gc
import itertools
import os
from importlib import metadata


def _has_older_emitters() -> bool:
  """Whether XLA's CPU compiler can do without the newer fusion emitters; an unknown flag would abort the process."""
  major, minor, patch = (int(x) for x in metadata.version('jaxlib').split('.')[:3])
  return (major, minor, patch) < (0, 11, 1)


def flags(devices: int) -> str:
  """XLA_FLAGS for `devices` virtual devices.

  LLVM takes three times as long over the output of the newer fusion emitters, and a sixth longer over a program in
  pieces, of which each is rounded by what else lies in it.
  """
  emitters = ' --xla_cpu_use_fusion_emitters=false' if _has_older_emitters() else ''
  return (
    f'--xla_force_host_platform_device_count={devices}{emitters} '
    '--xla_cpu_parallel_codegen_split_count=1'
  )


# compiler_options of a program that is read, since by default other operations are fused, or whose last digits count.
AS_TRAINED = dict(xla_backend_optimization_level=3, xla_llvm_disable_expensive_passes=False)
if _has_older_emitters():
  AS_TRAINED['xla_cpu_use_fusion_emitters'] = True


def prepare() -> None:
  """Call it before jax is first imported; processes that tests start inherit it, but for the flags."""
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
  # Programs say of which function they are, not of which lines.
  os.environ.setdefault('JAX_TRACEBACK_IN_LOCATIONS_LIMIT', '0')
  # A mesh of one device is made from jax.devices()[:1].
  if 'xla_force_host_platform_device_count' not in os.environ.get('XLA_FLAGS', ''):
    os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {flags(8)}'.strip()
  collect_seldom()


def collect_seldom() -> None:
  """Tracing makes many objects, few of them in cycles: what is looked for seldom costs less."""
  gc.set_threshold(50_000, 20, 50)


def share_contexts() -> None:
  """Lower programs in a common MLIR context, whose creation is a fifth of the time of a small one.

  What a context has seen stays in its memory, so that after some programs a new one follows.
  """
  from jax._src.interpreters import mlir

  make = getattr(mlir, 'make_ir_context', None)
  if make is None:
    return
  numbers = itertools.count()
  newest = functools.lru_cache(maxsize=1)(lambda block: make())
  mlir.make_ir_context = lambda: newest(next(numbers) // 200)
