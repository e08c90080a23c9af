"""--mode=reward_model: trains config.model as a reward model on pairs of completions, and writes it as a folder."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from jaxrl_llm.checkpointing import storage
from jaxrl_llm.commands import run_config, targets
from jaxrl_llm.commands.processes import Processes
from jaxrl_llm.types import UserError


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Add nothing: --to and --dtype are flags of --mode=export, too."""


def run(arguments: argparse.Namespace, overrides: Sequence[str], processes: Processes) -> int:
  """Train, continuing the run in --workdir, and write the folder of --to, WORKDIR/export by default.

  Raises UserError for bad input, and preemption.Preempted after SIGTERM, when the run is saved.
  """
  folder = arguments.to or os.path.join(arguments.workdir, 'export')
  if storage.is_remote(folder):
    raise UserError(f'--mode=reward_model writes a local folder, not {folder}; name one with --to.')
  # Imported late: --help and a misspelled flag do not wait for jax.
  from jaxrl_llm.models.export import DTYPES

  if arguments.dtype not in DTYPES:
    raise UserError(f'--dtype={arguments.dtype!r} is unknown; choose one of: {", ".join(DTYPES)}.')
  targets.check_folder('to', folder)
  config = run_config.load_any(arguments, overrides)
  processes.join(arguments, config)
  from jaxrl_llm.runner import reward_training

  reward_training.run(config, arguments.workdir, folder, arguments.dtype)
  return 0
