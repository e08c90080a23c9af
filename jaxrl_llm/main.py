"""The command line: `jaxrl-llm --config=dapo [--workdir=…] [--config.a.b=v] [--mode=…]`.

`python3 -m jaxrl_llm.main` is the same command.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from jaxrl_llm.commands import exit_status, flags
from jaxrl_llm.commands.processes import Processes
from jaxrl_llm.distributed import host_memory
from jaxrl_llm.types import UserError


def main(argv: Sequence[str] | None = None) -> int:
  """Run one mode and return the exit status.

  Bad input ends with one sentence and exit status 2, SIGTERM with all saved and 75, the death of another process of
  the run with one sentence and 76.
  """
  arguments, overrides = flags.parse(sys.argv[1:] if argv is None else argv)
  processes = Processes()
  try:
    status = exit_status.guard(lambda: _run(arguments, overrides, processes), arguments.workdir)
  except Exception as error:
    processes.fail(error)
    raise
  processes.leave(status)
  return status


def script() -> int:
  """The console script. Modules of the current folder can be imported, as with `python3 -m`."""
  sys.path.insert(0, os.getcwd())
  return own_process()


def own_process() -> int:
  """`main` in a process that does nothing else, so that its settings are ours to choose."""
  host_memory.keep_freed()
  return main()


def _run(arguments: argparse.Namespace, overrides: Sequence[str], processes: Processes) -> int:
  _check_system()
  if arguments.mode in flags.COMMANDS:
    return flags.COMMANDS[arguments.mode].run(arguments, overrides, processes)
  from jaxrl_llm.commands import run_config

  config = run_config.load_any(arguments, overrides)
  processes.join(arguments, config)
  # Imported late: --help and a misspelled flag do not wait for jax.
  from jaxrl_llm import train

  train.run(config, arguments.workdir)
  return 0


def _check_system() -> None:
  if sys.platform == 'win32':
    raise UserError(
      f'jaxrl_llm runs on Linux and macOS, and this Python is of {sys.platform}; on Windows, install WSL2 '
      '(wsl --install) and run the same command there.'
    )


if __name__ == '__main__':
  sys.exit(own_process())
