"""All checks of a configuration that come before anything is loaded."""

from __future__ import annotations

from jaxrl_llm.config import compatibility, validation
from jaxrl_llm.config.schema import typed
from jaxrl_llm.config.validation import ConfigLike
from jaxrl_llm.distributed.hardware import SLICES
from jaxrl_llm.learner import optimizer
from jaxrl_llm.learner.precision import TYPES
from jaxrl_llm.monitoring import console, trace_window, trackers
from jaxrl_llm.types import UserError


def validate(config: ConfigLike) -> None:
  """Raises UserError for a field that is missing, unknown, of another type or out of range, and for settings that do
  not go together.

  What depends on devices, data or the model, and the names of functions, are checked elsewhere.
  """
  validation.check(config)
  weights_dtypes = ('auto', *TYPES)
  if config.rollout.weights_dtype not in weights_dtypes:
    raise UserError(
      f'config.rollout.weights_dtype={config.rollout.weights_dtype!r} must be one of: {", ".join(weights_dtypes)}.'
    )
  preset = config.mesh.preset
  if preset and preset not in SLICES:
    raise UserError(
      f'config.mesh.preset={preset!r} is unknown; choose one of: {", ".join(SLICES)}, or set the axes.'
    )
  if config.monitoring.console not in console.KINDS:
    raise UserError(
      f'config.monitoring.console={config.monitoring.console!r} must be one of: {", ".join(console.KINDS)}.'
    )
  trackers.check(config.monitoring)
  trace_window.window(config.monitoring.profile.steps)
  compatibility.check(config)
  optimizer.check(typed(config).optimizer)
