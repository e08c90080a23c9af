"""--mode=report: writes report.html of the runs in --workdir."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence

from jaxrl_llm.checkpointing import storage
from jaxrl_llm.commands import targets
from jaxrl_llm.commands.processes import Processes


def add_flags(parser: argparse.ArgumentParser) -> None:
  """No flags of its own: --workdir and --to."""
  del parser


def run(arguments: argparse.Namespace, overrides: Sequence[str], processes: Processes) -> int:
  """Write the report; see `report.write_report`."""
  del overrides, processes
  if not storage.is_remote(arguments.to):
    targets.check_file('to', arguments.to)
  from jaxrl_llm import report

  with contextlib.ExitStack() as stack:
    folders = [
      stack.enter_context(storage.reading(folder)) for folder in arguments.workdir.split(',')
    ]
    report.write_report(folders, stack.enter_context(storage.target(arguments.to)))
  return 0
