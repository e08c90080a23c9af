"""--mode=fit: fits a sigmoid of compute to a metric of the runs in --workdir."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence

from jaxrl_llm.checkpointing import storage
from jaxrl_llm.commands import targets
from jaxrl_llm.commands.processes import Processes


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Add --metric, --compute, --skip and --plot."""
  parser.add_argument('--metric', default='critic/score/mean', help='with --mode=fit')
  parser.add_argument(
    '--compute', default='seconds', help='with --mode=fit: seconds, tokens or steps'
  )
  parser.add_argument(
    '--skip', type=float, default=0.0, help='with --mode=fit: share of the compute to leave out'
  )
  parser.add_argument('--plot', default='', help='with --mode=fit: a .svg, .png or .pdf to write')


def run(arguments: argparse.Namespace, overrides: Sequence[str], processes: Processes) -> int:
  """Print the fits; see `scaling_fit.run`."""
  del overrides, processes
  targets.check_file('plot', arguments.plot)
  from jaxrl_llm.commands import scaling_fit

  with contextlib.ExitStack() as stack:
    folders = [
      stack.enter_context(storage.reading(folder, rollouts=False))
      for folder in arguments.workdir.split(',')
    ]
    scaling_fit.run(folders, arguments.metric, arguments.compute, arguments.skip, arguments.plot)
  return 0
