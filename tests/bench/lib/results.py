"""Result files: a head written by hand, and sections between markers that benchmarks write.

A section begins with the line `<!-- generated: NAME -->` and ends with `<!-- end: NAME -->`. Writing it again replaces
what lies between; everything else of the file stays. A section that the file lacks is appended.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import io
import os
import pathlib
import platform
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib import metadata

FOLDER = pathlib.Path(__file__).parents[1] / 'results'
PICTURES = pathlib.Path(__file__).parents[1] / 'pictures'
BUSY = 0.5  # load average above which times are not comparable


def path(name: str, is_smoke: bool) -> pathlib.Path:
  """The result file or picture of that name; in smoke runs a temporary file."""
  if is_smoke:
    return pathlib.Path(smoke_folder()) / name
  return (PICTURES if name.endswith('.svg') else FOLDER) / name


def smoke_folder() -> str:
  """A temporary folder that is removed at exit."""
  path = tempfile.mkdtemp(prefix='smoke-')
  atexit.register(shutil.rmtree, path, ignore_errors=True)
  return path


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
  print(f'written to {file}', file=sys.stderr)


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


class _Copy(io.TextIOBase):
  """A stream that keeps what is written to another one."""

  def __init__(self, stream):
    self.stream, self.kept = stream, []

  def write(self, text: str) -> int:
    self.kept.append(text)
    return self.stream.write(text)

  def flush(self) -> None:
    self.stream.flush()


def write_output(is_smoke: bool) -> None:
  """At the end of this process, writes what it printed to the result file of its benchmark, with command and machine.

  A benchmark that fails writes nothing. The section is named after the options, so that other sizes are kept.
  """
  spec = sys.modules['__main__'].__spec__
  assert spec is not None, 'start benchmarks with python -m'
  name, load = spec.name.rpartition('.')[2], load_average()
  options = [word for word in sys.argv[1:] if word not in ('--write', '--smoke')]
  command = shlex.join(['python', '-m', spec.name, *options, '--write'])
  file, copy = path(f'{name}.md', is_smoke), _Copy(sys.stdout)
  sys.stdout = copy

  def write_section() -> None:
    if hasattr(sys, 'last_value'):  # an exception ended the process
      return
    output = ''.join(copy.kept).strip()
    line = facts(('jax', 'jaxlib', 'flax', 'torch', 'transformers'), load)
    write(file, ' '.join(options) or name, f'`{command}`\n\n```text\n{output}\n```\n\n{line}')

  atexit.register(write_section)
