"""Memory of a process that computes on the CPU: what a program frees is kept for its next call."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import sys

# Parameters of glibc's mallopt, from its malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def keep_freed() -> bool:
  """Let glibc keep freed memory, where programs run on the CPU; returns whether it does.

  XLA's CPU programs allocate their temporaries in each call. By default glibc returns such large blocks to the system,
  which has to fill them with zeros again: more than a gigabyte in each step of the default job. Only threads that start
  later obey, so that this comes before the first device is asked for. Nothing is changed where jax can find an
  accelerator, another C library is used, or the environment sets malloc itself.
  """
  if not _on_cpu_alone() or not _has_glibc() or _set_by_user():
    return False
  mallopt = ctypes.CDLL(None).mallopt
  # One arena: those of further threads have 64 MiB at most, and map what is larger in every call.
  settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1))
  return all([mallopt(name, value) == 1 for name, value in settings])


def return_freed() -> None:
  """Return freed memory to the system once, before something that lasts takes a part of it."""
  if _has_glibc():
    ctypes.CDLL(None).malloc_trim(0)


def _has_glibc() -> bool:
  return platform.libc_ver()[0] == 'glibc'


def _on_cpu_alone() -> bool:
  if wanted := os.environ.get('JAX_PLATFORMS'):
    return wanted == 'cpu'
  plugins = ('libtpu', 'jax_plugins')
  return sys.platform == 'linux' and not any(importlib.util.find_spec(name) for name in plugins)


def _set_by_user() -> bool:
  tuned = 'glibc.malloc' in os.environ.get('GLIBC_TUNABLES', '')
  return tuned or any(name.startswith('MALLOC_') for name in os.environ)
