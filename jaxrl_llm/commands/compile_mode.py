"""--mode=compile: compiles the step for a TPU slice that is not present; --sweep compares meshes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jaxrl_llm.commands import run_config, targets
from jaxrl_llm.commands.processes import Processes

_TOPOLOGY = 'v5e-16'


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Add --sweep and --lengths."""
  parser.add_argument(
    '--sweep',
    action='store_true',
    help='with --mode=compile: tries layouts, and names the fastest that fits',
  )
  parser.add_argument(
    '--lengths',
    default='',
    help='with --mode=compile: mean,sigma of completions in tokens, log-normal; default: all of their tokens',
  )


def run(arguments: argparse.Namespace, overrides: Sequence[str], processes: Processes) -> int:
  """Print the report; 1 where the step does not fit or its decode loop has a problem."""
  del processes
  targets.check_file('report', arguments.report)
  config = run_config.load_any(arguments, overrides)
  from jaxrl_llm.commands import compile_report, mesh_sweep

  compile_config = mesh_sweep.run if arguments.sweep else compile_report.run
  return compile_config(
    config, arguments.topology or _TOPOLOGY, arguments.report, arguments.lengths
  )
