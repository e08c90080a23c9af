"""A profiler trace of some steps, for XProf, TensorBoard's profile plugin or Perfetto."""

from __future__ import annotations

import os
import re
from typing import Any

import jax

from jaxrl_llm.types import UserError


def window(spec: str) -> tuple[int, int] | None:
  """Returns (10, 12) for '10:12', which is steps 10 and 11, and None for ''. Raises UserError for anything else."""
  if not spec:
    return None
  match = re.fullmatch(r'(\d+):(\d+)', spec)
  if not match or int(match[1]) >= int(match[2]):
    raise UserError(
      f'config.monitoring.profile.steps={spec!r} must be two step numbers with a colon, the first below the '
      f"second: '10:12'."
    )
  return int(match[1]), int(match[2])


class TraceWindow:
  """Call `before_step` before each step, and `stop` after the last one. Each process writes its own trace."""

  def __init__(self, spec: str, root: str):
    """Writes to `root`/profile. Raises UserError as `window` does."""
    self._window, self._folder = window(spec), os.path.join(root, 'profile')
    self._tracing = False
    if self._window is not None:
      # Otherwise a cached program may carry the operation names of an older version of the code.
      jax.config.update('jax_compilation_cache_include_metadata_in_key', True)

  def before_step(self, step: int, pending: Any) -> str:
    """Starts or stops the trace where the window does. Returns a message for the console, or ''.

    `pending` are the arrays of the steps in progress; they are awaited, so that the trace holds whole steps.
    """
    if self._window is None:
      return ''
    first, stop = self._window
    if not self._tracing and first <= step < stop:
      jax.block_until_ready(pending)
      jax.profiler.start_trace(self._folder)
      self._tracing = True
      return f'tracing steps {step} to {stop - 1}'
    return self.stop(pending) if self._tracing and step >= stop else ''

  def stop(self, pending: Any) -> str:
    """Stops the trace if one is running. Returns a message for the console, or ''."""
    if not self._tracing:
      return ''
    jax.block_until_ready(pending)
    jax.profiler.stop_trace()
    self._tracing = False
    return f'the trace is in {self._folder}: xprof --logdir={self._folder}'
