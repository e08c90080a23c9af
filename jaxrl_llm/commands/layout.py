"""--mode=layout: prints the part of each parameter that a device holds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jaxrl_llm.commands import run_config, targets
from jaxrl_llm.commands.processes import Processes


def add_flags(parser: argparse.ArgumentParser) -> None:
  """No flags of its own: --topology and --report."""
  del parser


def run(arguments: argparse.Namespace, overrides: Sequence[str], processes: Processes) -> int:
  """Print the layout; see `sharding_report.run`."""
  del processes
  targets.check_file('report', arguments.report)
  config = run_config.load_any(arguments, overrides)
  from jaxrl_llm.commands import sharding_report

  sharding_report.run(config, arguments.topology, arguments.report)
  return 0
