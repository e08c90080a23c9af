"""A trace of some steps, for XProf, TensorBoard's profile plugin or Perfetto."""

from __future__ import annotations

import os
import re
from typing import Any

import jax

from jaxrl_llm.types import UserError


def window(spec: str) -> tuple[int, int] | None:
  """'10:12' → (10, 12): steps 10 and 11; '' → None. Raises UserError for anything else. Source: none."""
  if not spec:
    return None
  found = re.fullmatch(r'(\d+):(\d+)', spec)
  if not found or int(found[1]) >= int(found[2]):
    raise UserError(
      f"config.monitoring.profile.steps={spec!r} must be two step numbers with a colon, the first below the second: '10:12'."
    )
  return int(found[1]), int(found[2])


class TraceWindow:
  """Call `at` before each step, and `done` after the last one. Each process writes its own part."""

  def __init__(self, spec: str, root: str):
    """Writes to `root`/profile. Raises UserError as `window`."""
    self._window, self._folder, self._on = window(spec), os.path.join(root, 'profile'), False
    if self._window is not None:
      # Else a program may come from the cache with the names of an older version's code.
      jax.config.update('jax_compilation_cache_include_metadata_in_key', True)

  def before_step(self, step: int, pending: Any) -> str:
    """Starts or stops the trace; returns what to say, if anything. `pending`: arrays that a stop waits for."""
    if self._window is None:
      return ''
    first, last = self._window
    if not self._on and first <= step < last:
      jax.block_until_ready(pending)  # what was asked before belongs to other steps
      jax.profiler.start_trace(self._folder)
      self._on = True
      return f'tracing steps {step} to {last - 1}'
    return self.stop(pending) if self._on and step >= last else ''

  def stop(self, pending: Any) -> str:
    """Stops the trace, if it is on; returns what to say."""
    if not self._on:
      return ''
    jax.block_until_ready(pending)
    jax.profiler.stop_trace()
    self._on = False
    return f'the trace is in {self._folder}: xprof --logdir={self._folder}'
