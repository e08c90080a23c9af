"""The processes of a run: joining, the compilation cache, and the exit status that the others see."""

from __future__ import annotations

import argparse
import os

from jaxrl_llm.config.validation import ConfigLike
from jaxrl_llm.distributed import preemption, watchdog


class Processes:
  """The processes that compute together with this one; without any, only the compilation cache is set."""

  def __init__(self):
    self._watchdog: watchdog.Watchdog | None = None

  def join(self, arguments: argparse.Namespace, config: ConfigLike) -> None:
    """Join the other processes, where there are any. Raises UserError for flags that do not fit the machine."""
    # Imported late: --help and a misspelled flag do not wait for jax.
    import jax

    from jaxrl_llm.config import validation
    from jaxrl_llm.distributed import cluster

    silent_s = validation.silent_s(config)
    flags = arguments.coordinator, arguments.processes, arguments.process
    self._watchdog = cluster.join(*flags, os.environ, silent_s)
    cache = os.environ.get('JAXRL_LLM_CACHE') or os.path.expanduser('~/.cache/jaxrl_llm')
    compiled = os.environ.get('JAX_COMPILATION_CACHE_DIR') or os.path.join(cache, 'compiled')
    jax.config.update('jax_compilation_cache_dir', compiled)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)

  def fail(self, error: Exception) -> None:
    """Report an unexpected error to the other processes."""
    if self._watchdog is not None:
      self._watchdog.failed(error)

  def leave(self, status: int) -> None:
    """Report the exit status to the other processes."""
    if self._watchdog is not None:
      self._watchdog.leave(status, well=status in (0, preemption.EXIT_PREEMPTED))
