"""Text graphics: curves of block characters, tables of evaluations, and line wrapping."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_BARS = ' ▁▂▃▄▅▆▇█'
_ASCII_BARS = ' .:#'


def banner(**facts: object) -> str:
  """Returns name=value pairs as lines with aligned names."""
  width = max((len(name) for name in facts), default=0)
  lines = [f'  {name.replace("_", " "):{width}}  {value}' for name, value in facts.items()]
  return '\n'.join(['jaxrl_llm', *lines])


def bar(done: int, total: int, width: int, ascii_only: bool = False) -> tuple[str, str]:
  """Returns the filled and the empty part of a progress bar, `width` characters together."""
  filled = width * min(max(done, 0), total) // total if total > 0 else width
  return ('#' if ascii_only else '━') * filled, ('-' if ascii_only else '─') * (width - filled)


def wrap_lines(text: str, width: int, first: str = '', rest: str = '') -> list[str]:
  """Wraps `text` after the prefix `first` to lines of at most `width` columns; further lines begin with `rest`.

  Lines break at two spaces if possible, so that a name stays with its number, else between words. A word that is
  longer than a line, such as a path, is not broken.
  """
  lines: list[str] = []
  for number, paragraph in enumerate(text.split('\n')):
    line, empty = (rest if number else first), True
    for group in re.split(r'(?<=\S)(?=  )', paragraph):
      fits_here = cell_len(line + group) <= width
      fits_below = not empty and cell_len(rest + group.strip()) <= width
      for piece in [group] if fits_here or fits_below else re.findall(r'\s*\S+', group):
        if not empty and cell_len(line + piece) > width:
          lines, line, piece = [*lines, line], rest, piece.strip()
        line, empty = line + piece, False
    lines.append(line)
  return lines


def sparkline(
  values: Sequence[float | None],
  width: int = 60,
  ascii_only: bool = False,
  scale: tuple[float, float] | None = None,
) -> str:
  """Returns a curve on one line: means over equal ranges. `scale`: (lowest, highest); None: those of the curve."""
  means = _range_means(values, width)
  if not means:
    return ''
  low, high = scale or (min(means), max(means))
  bars = _ASCII_BARS if ascii_only else _BARS
  top = len(bars) - 2
  # The lowest value has the second bar, because a space would look like a missing value.
  return ''.join(
    bars[1 + min(max(round((m - low) / ((high - low) or 1.0) * top), 0), top)] for m in means
  )


def scaled_sparkline(
  values: Sequence[float | None], width: int, ascii_only: bool = False
) -> tuple[str, str, str]:
  """Returns (lowest value, curve, highest value) as text of at most `width` characters, or empty text."""
  for cells in range(
    width, 0, -1
  ):  # the numbers depend on the ranges of the cells, and the cells on their room
    means = _range_means(values, cells)
    if not means:
      break
    low, high = f'{min(means):.3g} ', f' {max(means):.3g}'
    if len(means) + len(low) + len(high) <= width:
      return low, sparkline(values, cells, ascii_only), high
  return '', sparkline(values, max(width, 1), ascii_only), ''


def curve(
  values: Sequence[float | None],
  title: str,
  *,
  width: int = 60,
  height: int = 6,
  ascii_only: bool = False,
) -> str:
  """Returns a curve as text: a line with the title, first and last mean, then `height` lines of bars.

  Columns are means over equal ranges of `values`; None and numbers that are not finite are left out.
  """
  means = _range_means(values, width)
  if not means:
    return f'{title}: nothing to show'
  low, high = min(means), max(means)
  scale = (high - low) or 1.0
  bars = _ASCII_BARS if ascii_only else _BARS
  levels = len(bars) - 1
  # At least one level, so that the lowest column is visible.
  filled = [max(1, round((m - low) / scale * height * levels)) for m in means]
  lines = [f'{title}: {means[0]:.3g} -> {means[-1]:.3g} over {_steps(len(values))}']
  for row in reversed(range(height)):
    label = {height - 1: f'{high:.3g}', 0: f'{low:.3g}'}.get(row, '')
    cells = ''.join(bars[min(max(f - row * levels, 0), levels)] for f in filled)
    lines.append(f'{label:>9} |{cells}'.rstrip())
  return '\n'.join(lines)


def before_after(
  before: dict[str, float | None], after: dict[str, float | None], step: int | None = None
) -> AccuracyTable:
  """Returns a table of the accuracies before and after training, with the gains in percentage points.

  It has a row for each measure, of all data and of each source whose value differs.
  """
  rows = []
  for name in sorted(set(before) & set(after), key=_place):
    source, measure = _source_and_measure(name)
    old, new = before[name], after[name]
    repeated = source != 'all' and _of_all(before, name) == old and _of_all(after, name) == new
    # best@n equals pass@n where scores are 0 and 1.
    best = name.replace('/best@', '/pass@')
    if repeated or (best != name and (before.get(best), after.get(best)) == (old, new)):
      continue
    gain = '-' if old is None or new is None else f'{100 * (new - old):+.1f}'
    rows.append((source, measure, percent(old), percent(new), gain))
  return AccuracyTable(rows, 'after' if step is None else f'after {_steps(step)}')


def _steps(count: int) -> str:
  return f'{count} step' if count == 1 else f'{count} steps'


_MEASURES = ('greedy', 'mean', 'pass', 'best', 'maj')


def _place(name: str) -> tuple:
  """Sorts all data before single sources, and greedy accuracies before those of samples."""
  source, measure = _source_and_measure(name)
  kind = measure.split('@')[0]
  return source != 'all', source, _MEASURES.index(kind) if kind in _MEASURES else 9, measure


def _source_and_measure(name: str) -> tuple[str, str]:
  source, _, measure = name.removeprefix('val-core/').rpartition('/acc/')
  return source, measure


def _of_all(metrics: dict[str, float | None], name: str) -> float | None:
  """The same measure over all data."""
  return metrics.get(f'val-core/all/acc/{_source_and_measure(name)[1]}')


class AccuracyTable:
  """A rich renderable: a table, or a list where the table is wider than the terminal."""

  def __init__(self, rows: list[tuple[str, ...]], after_title: str):
    self._rows, self._after_title = rows, after_title

  def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
    rows = self._rows
    if options.ascii_only:
      rows = [tuple(cell.encode('ascii', 'replace').decode() for cell in row) for row in rows]
    table = Table(title='held-out accuracy')
    for name in ('data', 'measure', 'before', self._after_title, 'gain'):
      table.add_column(name, justify='left' if name in ('data', 'measure') else 'right')
    for row in rows:
      table.add_row(*map(Text, row))  # Text: [brackets] in the names of data sets are no markup
    unlimited = options.update(max_width=10**4)  # otherwise the measure is cut to the terminal
    if Measurement.get(console, unlimited, table).maximum <= options.max_width:
      yield table
      return
    lines = [f'held-out accuracy before -> {self._after_title}, and the gain in points']
    lines += [f'{data}  {name}  {a} -> {b}  {gain}' for data, name, a, b, gain in rows]
    for line in lines:
      for part in wrap_lines(line, options.max_width, rest='  '):
        yield Text(part, overflow='fold')


def percent(value: float | None) -> str:
  """Formats 0.125 as 12.5%, and None as -."""
  return '-' if value is None else f'{value:.1%}'


def duration(seconds: float) -> str:
  """Formats a duration in seconds, minutes or hours."""
  if seconds < 90:
    return f'{seconds:.0f} s'
  return f'{seconds / 60:.0f} min' if seconds < 5400 else f'{seconds / 3600:.1f} h'


def seconds(*parts: float) -> str:
  """Formats the parts of a duration in a common unit: '11.2+0.1 s', '24+8 ms'."""
  if all(x < 0.95 for x in parts):
    return '+'.join(f'{1e3 * x:.0f}' for x in parts) + ' ms'
  return '+'.join(f'{x:.1f}' for x in parts) + ' s'


def _range_means(values: Sequence[float | None], width: int) -> list[float]:
  finite = [v for v in values if v is not None and math.isfinite(v)]
  width = min(width, len(finite))
  cuts = [len(finite) * i // width for i in range(width + 1)] if width else []
  return [math.fsum(finite[a:b]) / (b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
