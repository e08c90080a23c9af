"""`--mode=report`: what runs have learned, in the terminal and as report.html, from their folders alone."""

from __future__ import annotations

import os

from rich.console import Console

from jaxrl_llm.report import alarm_history, curriculum, page
from jaxrl_llm.report.rollouts import Rollouts
from jaxrl_llm.report.run_reader import gather
from jaxrl_llm.types import UserError


def write_report(folders: list[str], to: str = '') -> str:
  """Prints the curriculum and the health of each run, and writes one page of all; returns where that is.

  `to`: the file; '' = report.html in the first folder. Raises UserError for a folder that is no run's, and for a page
  that cannot be written. Source: none.
  """
  console = Console()
  read = [Rollouts(folder).refresh() for folder in folders]
  for folder, own in zip(folders, read, strict=True):
    told = gather(folder, own)
    console.print(f'{told["name"]}, step {told["done"]} of {told["steps"]}', markup=False)
    found = curriculum.read(os.path.join(folder, 'curriculum.json'))
    if found is not None:
      curriculum.tell(found, console)
    for one in told['health']:
      if one['state'] in ('now', 'past'):
        console.print(f'{one["title"]}: {one["words"]}', markup=False)
    console.print(alarm_history.overall(told['health']), markup=False)
  path = to or os.path.join(folders[0], 'report.html')
  try:
    page.write(path, folders, read)
  except OSError as error:
    raise UserError(f'{path} cannot be written ({error}); give another --to=FILE.') from error
  console.print(f'the report is {path}', markup=False, soft_wrap=True)
  return path
