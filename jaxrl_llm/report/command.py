"""`--mode=report`: prints a summary of runs and writes report.html, from their directories alone."""

from __future__ import annotations

import os
from collections.abc import Callable

from rich.console import Console

from jaxrl_llm.checkpointing import storage
from jaxrl_llm.report import alarm_history, curriculum, page, runs
from jaxrl_llm.report.rollouts import Rollouts
from jaxrl_llm.report.run_reader import read_run
from jaxrl_llm.types import UserError


def write_report(folders: list[str], to: str = '') -> str:
  """Prints the curriculum and the health of each run, and writes one page of all runs. Returns the page's path.

  A folder that is no run but holds some gets a page that lists them: runs.html. `to` is the file to write; '' means
  report.html or runs.html in the first folder. Raises UserError for a folder without runs and for a page that cannot
  be written.
  """
  console = Console()
  if any(not runs.is_run(folder) and runs.find(folder) for folder in folders):
    return _write_runs(folders, to, console)
  rollouts = [Rollouts(folder).refresh() for folder in folders]
  for folder, run_rollouts in zip(folders, rollouts, strict=True):
    _print_run(folder, run_rollouts, console)
  return _write(to or os.path.join(folders[0], 'report.html'), page.write, folders, rollouts)


def _write_runs(folders: list[str], to: str, console: Console) -> str:
  found = list(dict.fromkeys(run for folder in folders for run in runs.find(folder)))
  console.print(f'{len(found)} run{"s" * (len(found) != 1)}', markup=False)
  return _write(to or os.path.join(folders[0], 'runs.html'), page.write_runs, found)


def _write(path: str, write: Callable[..., str], *content: list) -> str:
  try:
    write(path, *content)
  except OSError as error:
    raise UserError(f'{path} cannot be written ({error}); give another --to=FILE.') from error
  Console().print(f'the report is {storage.shown(path)}', markup=False, soft_wrap=True)
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
