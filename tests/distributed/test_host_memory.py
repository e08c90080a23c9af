"""Freed memory that stays with the process: no page is mapped twice."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys

import numpy as np
import pytest

from jaxrl_llm import main
from jaxrl_llm.checkpointing import checkpoint
from jaxrl_llm.distributed import host_memory

GLIBC = platform.libc_ver()[0] == 'glibc'

# As XLA's programs do it: a thread allocates 64 MiB, writes to all pages and frees them, twice; and twice again.
PROGRAM = """
import ctypes, resource, sys, threading
import numpy as np
from jaxrl_llm.distributed import host_memory

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: huge pages would hide the pages that are counted
if sys.argv[1] == 'keep':
  assert host_memory.keep_freed()

def fill():
  for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(2**23)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

faults = []
for _ in range(2):
  thread = threading.Thread(target=fill)
  thread.start()
  thread.join()
  host_memory.return_freed()
print(faults[1], faults[2])
"""


def _faults(how: str) -> tuple[int, int]:
  """Pages that were mapped by the second time, and by the first one after freed memory was returned."""
  command = [sys.executable, '-c', PROGRAM, how]
  env = dict(JAX_PLATFORMS='cpu', PYTHONPATH=':'.join(sys.path))
  done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
  second, returned = map(int, done.stdout.split())
  return second, returned


@pytest.mark.skipif(not GLIBC, reason='only glibc has these settings')
def test_pages_stay_mapped_until_they_are_returned():
  half = 2**26 // resource.getpagesize() // 2
  second, returned = _faults('keep')
  assert second < 100
  assert returned > half
  assert _faults('plain')[0] > half


@pytest.mark.parametrize(
  'name, value',
  [
    ('JAX_PLATFORMS', 'tpu'),
    ('JAX_PLATFORMS', 'cuda,cpu'),
    ('MALLOC_ARENA_MAX', '4'),
    ('GLIBC_TUNABLES', 'glibc.malloc.hugetlb=1'),
  ],
)
def test_nothing_is_set_for_others(monkeypatch, name, value):
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  monkeypatch.setenv(name, value)
  monkeypatch.setattr(host_memory.ctypes, 'CDLL', lambda _: pytest.fail('malloc was changed'))
  assert not host_memory.keep_freed()


@pytest.mark.parametrize('plugin', ['libtpu', 'jax_plugins'])
def test_an_accelerator_that_jax_can_find_is_seen(monkeypatch, plugin):
  monkeypatch.delenv('JAX_PLATFORMS', raising=False)
  monkeypatch.setattr(host_memory.importlib.util, 'find_spec', lambda name: name == plugin)
  monkeypatch.setattr(host_memory.ctypes, 'CDLL', lambda _: pytest.fail('malloc was changed'))
  assert not host_memory.keep_freed()


def test_musl_is_left_alone(monkeypatch):
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  monkeypatch.setattr(host_memory.platform, 'libc_ver', lambda: ('', ''))
  assert not host_memory.keep_freed()


def test_commands_keep_memory_before_all_else(monkeypatch):
  calls = []
  monkeypatch.setattr(host_memory, 'keep_freed', lambda: calls.append('keep'))
  monkeypatch.setattr(main, 'main', lambda: calls.append('main'))
  monkeypatch.setattr(sys, 'path', sys.path[:])
  main.script()
  assert calls == ['keep', 'main']


def test_a_checkpoint_copies_after_freed_memory_is_returned(monkeypatch, tmp_path):
  calls = []
  monkeypatch.setattr(host_memory, 'return_freed', lambda: calls.append('return'))
  copy = lambda leaf: calls.append('copy') or leaf  # noqa: E731
  monkeypatch.setattr(checkpoint, '_stable_copy', copy)
  checkpoint.save(str(tmp_path), 1, {'x': np.ones(2, np.float32)}, {}, keep=1)
  assert calls == ['return', 'copy']
