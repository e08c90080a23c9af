"""Numbers as text: curves of block characters, tables of before and after, lines that are broken where they may be."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_BARS = ' ▁▂▃▄▅▆▇█'
_ASCII_BARS = ' .:#'


def banner(**facts: object) -> str:
  """name=value pairs as lines, the names in one column. Source: none."""
  width = max((len(name) for name in facts), default=0)
  return '\n'.join(
    [
      'jaxrl_llm',
      *(f'  {name.replace("_", " "):{width}}  {value}' for name, value in facts.items()),
    ]
  )


def bar(done: int, total: int, width: int, ascii_only: bool = False) -> tuple[str, str]:
  """The part that is done and the rest, `width` characters together. Source: none."""
  filled = width * min(max(done, 0), total) // total if total > 0 else width
  return ('#' if ascii_only else '━') * filled, ('-' if ascii_only else '─') * (width - filled)


def wrap_lines(text: str, width: int, first: str = '', rest: str = '') -> list[str]:
  """Lines of at most `width` columns: `first` and the text, and `rest` before what does not fit beside it.

  Broken where there are two spaces, so that names keep their numbers; else between words. A word that is longer than
  a line, a path, stays whole. Source: none.
  """
  told: list[str] = []
  for number, paragraph in enumerate(text.split('\n')):
    line, empty = (rest if number else first), True
    for group in re.split(r'(?<=\S)(?=  )', paragraph):
      here = cell_len(line + group) <= width
      below = not empty and cell_len(rest + group.strip()) <= width
      for piece in [group] if here or below else re.findall(r'\s*\S+', group):
        if not empty and cell_len(line + piece) > width:
          told, line, piece = [*told, line], rest, piece.strip()
        line, empty = line + piece, False
    told.append(line)
  return told


def sparkline(values: Sequence[float | None], width: int = 60, ascii_only: bool = False) -> str:
  """A curve in one line: means over equal stretches, on a scale that holds 0 and 1. Source: none."""
  means = _means(values, width)
  if not means:
    return ''
  low, high = min(0.0, *means), max(1.0, *means)
  bars = _ASCII_BARS if ascii_only else _BARS
  # From the second one up: a zero is shown as a line, not as nothing.
  return ''.join(bars[1 + round((m - low) / (high - low) * (len(bars) - 2))] for m in means)


def curve(
  values: Sequence[float | None],
  title: str,
  *,
  width: int = 60,
  height: int = 6,
  ascii_only: bool = False,
) -> str:
  """A learning curve as text: title, first and last mean, and `height` rows. Source: none.

  Columns are means over equal stretches of `values`; what is None or not finite is left out.
  """
  means = _means(values, width)
  if not means:
    return f'{title}: nothing to show'
  low, high = min(means), max(means)
  scale = (high - low) or 1.0
  bars = _ASCII_BARS if ascii_only else _BARS
  steps = len(bars) - 1
  # At least one eighth, so that the lowest column is seen.
  filled = [max(1, round((m - low) / scale * height * steps)) for m in means]
  lines = [f'{title}: {means[0]:.3g} -> {means[-1]:.3g} over {len(values)} steps']
  for row in reversed(range(height)):
    label = {height - 1: f'{high:.3g}', 0: f'{low:.3g}'}.get(row, '')
    cells = ''.join(bars[min(max(f - row * steps, 0), steps)] for f in filled)
    lines.append(f'{label:>9} |{cells}'.rstrip())
  return '\n'.join(lines)


def before_after(
  before: dict[str, float], after: dict[str, float], step: int | None = None
) -> Gains:
  """Held-out accuracies before training and after it, and what they gained, in points.

  Source: none.
  """
  rows = []
  for name in sorted(set(before) & set(after)):
    source, _, measure = name.removeprefix('val-core/').rpartition('/acc/')
    old, new = before[name], after[name]
    known = old is not None and new is not None
    gain = f'{100 * (new - old):+.1f}' if known else '-'
    rows.append((source, measure, percent(old), percent(new), gain))
  return Gains(rows, 'after' if step is None else f'after {step} steps')


class Gains:
  """What `before_after` returns, for rich to print: a table, or a list where that is wider than the terminal."""

  def __init__(self, rows: list[tuple[str, ...]], told: str):
    self._rows, self._told = rows, told

  def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
    known = self._rows
    if options.ascii_only:
      known = [[cell.encode('ascii', 'replace').decode() for cell in row] for row in known]
    table = Table(title='held-out accuracy')
    for name in ('data', 'measure', 'before', self._told, 'gain'):
      table.add_column(name, justify='left' if name in ('data', 'measure') else 'right')
    for row in known:
      table.add_row(
        *map(Text, row)
      )  # Text: names come from data, and [brackets] in them are no markup
    whole = options.update(max_width=10**4)  # else what it wants is cut to what there is
    if Measurement.get(console, whole, table).maximum <= options.max_width:
      yield table
      return
    lines = [f'held-out accuracy before -> {self._told}, and the gain in points']
    lines += [f'{data}  {name}  {a} -> {b}  {gain}' for data, name, a, b, gain in known]
    for line in lines:
      for part in wrap_lines(line, options.max_width, rest='  '):
        yield Text(part, overflow='fold')


def _means(values: Sequence[float | None], width: int) -> list[float]:
  known = [v for v in values if v is not None and math.isfinite(v)]
  width = min(width, len(known))
  cuts = [len(known) * i // width for i in range(width + 1)] if width else []
  return [math.fsum(known[a:b]) / (b - a) for a, b in zip(cuts, cuts[1:], strict=False)]


def percent(value: float | None) -> str:
  """0.125 as 12.5%. Source: none."""
  return '-' if value is None else f'{value:.1%}'


def duration(seconds: float) -> str:
  """In the unit that fits. Source: none."""
  if seconds < 90:
    return f'{seconds:.0f} s'
  return f'{seconds / 60:.0f} min' if seconds < 5400 else f'{seconds / 3600:.1f} h'


def seconds(*each: float) -> str:
  """Stretches of one step in one unit: '11.2+0.1 s', '24+8 ms'. Source: none."""
  if all(x < 0.95 for x in each):
    return '+'.join(f'{1e3 * x:.0f}' for x in each) + ' ms'
  return '+'.join(f'{x:.1f}' for x in each) + ' s'
