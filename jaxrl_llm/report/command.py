"""`--mode=report`: prints a summary of runs and writes report.html, from their directories alone."""

from __future__ import annotations

import os

from rich.console import Console

from jaxrl_llm.report import alarm_history, curriculum, page
from jaxrl_llm.report.rollouts import Rollouts
from jaxrl_llm.report.run_reader import read_run
from jaxrl_llm.types import UserError


def write_report(folders: list[str], to: str = '') -> str:
  """Prints the curriculum and the health of each run, and writes one page of all runs. Returns the page's path.

  `to` is the file to write; '' means report.html in the first run directory. Raises UserError for a directory that
  holds no run and for a page that cannot be written.
  """
  console = Console()
  rollouts = [Rollouts(folder).refresh() for folder in folders]
  for folder, run_rollouts in zip(folders, rollouts, strict=True):
    _print_run(folder, run_rollouts, console)
  path = to or os.path.join(folders[0], 'report.html')
  try:
    page.write(path, folders, rollouts)
  except OSError as error:
    raise UserError(f'{path} cannot be written ({error}); give another --to=FILE.') from error
  console.print(f'the report is {path}', markup=False, soft_wrap=True)
  return path


def _print_run(folder: str, rollouts: Rollouts, console: Console) -> None:
  run = read_run(folder, rollouts)
  console.print(f'{run["name"]}, step {run["done"]} of {run["steps"]}', markup=False)
  report = curriculum.load_json(os.path.join(folder, 'curriculum.json'))
  if report is not None:
    curriculum.print_tables(report, console)
  for check in run['health']:
    if check['state'] in ('failing', 'recovered'):
      console.print(f'{check["title"]}: {check["text"]}', markup=False)
  console.print(alarm_history.summary(run['health']), markup=False)
