"""What a machine has used, as the log tells it."""

from __future__ import annotations

import resource
import types

import pytest

from jaxrl_llm.runner import log_records


@pytest.mark.parametrize(
  'stats, want',
  [
    ([{'peak_bytes_in_use': 2**30}, None, {'peak_bytes_in_use': 3 * 2**30}], 3.0),
    ([None, {}], None),
  ],
)
def test_memory_is_that_of_the_fullest_device_where_devices_tell(stats, want, monkeypatch):
  devices = [types.SimpleNamespace(memory_stats=lambda s=s: s) for s in stats]
  monkeypatch.setattr(log_records.jax, 'local_devices', lambda: devices)
  monkeypatch.setattr(log_records.sys, 'platform', 'linux')
  used = types.SimpleNamespace(ru_maxrss=512 * 1024)  # in kilobytes
  monkeypatch.setattr(resource, 'getrusage', lambda _: used)
  told = log_records.memory()
  assert told.pop('perf/host_memory_gib') == 0.5
  assert told == ({} if want is None else {'perf/device_memory_gib': want})
