"""Result files: a head written by hand, and sections between markers that benchmarks write.

A section begins with the line `<!-- generated: NAME -->` and ends with `<!-- end: NAME -->`. Writing it again replaces
what lies between; everything else of the file stays. A section that the file lacks is appended.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
import platform
import re
from collections.abc import Iterable, Sequence
from importlib import metadata

from tests.bench.lib import smoke

FOLDER = pathlib.Path(__file__).parents[1] / 'results'
PICTURES = pathlib.Path(__file__).parents[1] / 'pictures'
BUSY = 0.5  # load average above which times are not comparable


def path(name: str, is_smoke: bool) -> pathlib.Path:
  """The result file or picture of that name; in smoke runs a temporary file."""
  if is_smoke:
    return pathlib.Path(smoke.folder()) / name
  return (PICTURES if name.endswith('.svg') else FOLDER) / name


def write(file: pathlib.Path, name: str, section: str) -> None:
  """Replaces the section `name` of a result file, or appends it. Raises ValueError as `replaced` does."""
  text = file.read_text(encoding='utf-8') if file.exists() else f'# {file.stem}\n'
  try:
    text = replaced(text, name, section)
  except ValueError as error:
    raise ValueError(f'{file}: {error}') from None
  part = file.with_name(f'{file.name}.part')
  part.write_text(text, encoding='utf-8')
  os.replace(part, file)


def replaced(text: str, name: str, section: str) -> str:
  """`text` with another section `name`.

  Raises ValueError unless both markers of the section occur once, in order, or neither does.
  """
  begin, end = f'<!-- generated: {name} -->', f'<!-- end: {name} -->'
  block = f'{begin}\n{section.strip()}\n{end}'
  lines = text.splitlines()
  counts = lines.count(begin), lines.count(end)
  if counts == (0, 0):
    return f'{text.rstrip()}\n\n{block}\n'
  if counts != (1, 1) or lines.index(begin) > lines.index(end):
    raise ValueError(
      f'the section {name!r} has {counts[0]} lines {begin!r} and {counts[1]} lines {end!r}; keep one of each, in this '
      'order, or remove both.'
    )
  pattern = re.compile(f'^{re.escape(begin)}$.*?^{re.escape(end)}$', re.DOTALL | re.MULTILINE)
  return pattern.sub(lambda _: block, text)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """A Markdown table."""
  lines = [header, ['---'] * len(header), *rows]
  return '\n'.join('| ' + ' | '.join(cells) + ' |' for cells in lines)


def facts(packages: Sequence[str], load: float) -> str:
  """One line: machine, versions, date, and the load average before the run."""
  busy = '' if load <= BUSY else ' (busy: do not compare these times)'
  return f'{machine()}; {versions(packages)}; {today()}; load average before: {load:.2f}{busy}.'


def machine() -> str:
  """Processor and number of cores."""
  name = platform.processor() or platform.machine()
  with contextlib.suppress(OSError, StopIteration):
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
    name = next(line.split(':')[1].strip() for line in lines if line.startswith('model name'))
  return f'{name}, {os.cpu_count()} cores'


def versions(packages: Sequence[str]) -> str:
  """Python and the installed ones of `packages`, with versions."""
  found = [f'Python {platform.python_version()}']
  for name in packages:
    with contextlib.suppress(metadata.PackageNotFoundError):
      found.append(f'{name} {metadata.version(name)}')
  return ', '.join(found)


def today() -> str:
  """The date as year-month-day."""
  return datetime.date.today().isoformat()


def load_average() -> float:
  """Of the last minute."""
  return os.getloadavg()[0]
