"""What a person sees: a live table in a terminal, one plain line a step elsewhere."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import jax
from rich.console import Console as Rich
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

_WIDTH = 120  # of a plain line, in characters
_BARS = ' ▁▂▃▄▅▆▇█'
_ASCII_BARS = ' .:#'
# (name, metrics, format), the most telling first: a plain line takes seven, or as many as fit.
_LINE = 7
_SHOWN = (
  ('reward', ('critic/score/mean',), '{:.2f}'),
  ('right', ('curriculum/observed_success',), '{:.0%}'),
  ('mixed', ('curriculum/mixed_share',), '{:.0%}'),
  ('tokens', ('response_length/mean',), '{:.1f}'),
  ('entropy', ('actor/entropy',), '{:.2f}'),
  ('time', ('timing_s/gen_update', 'timing_s/grade'), '{:.1f}+{:.1f} s'),  # device + grading
  ('tokens/s', ('perf/throughput',), '{:,.0f}'),
  ('lr', ('actor/lr',), '{:.0e}'),
  ('grad', ('actor/grad_norm',), '{:.2f}'),
  ('predicted', ('curriculum/predicted_success',), '{:.0%}'),
  ('prob gap', ('training/rollout_probs_diff_max',), '{:.0e}'),
  ('choose', ('timing_s/choose',), '{:.2f} s'),
  ('device', ('perf/device_memory_gib',), '{:.1f} GiB'),
  ('host', ('perf/host_memory_gib',), '{:.1f} GiB'),
)
KINDS = ('auto', 'plain', 'quiet', 'json')


def opened(kind: str, steps: int) -> Console:
  """The screen that config.console names. Source: none.

  auto: a live table in a terminal and lines elsewhere; plain: lines; quiet: warnings alone; json: an object a line.
  """
  if kind == 'json':
    return Lines(steps)
  if kind == 'quiet':
    return Console(steps, Rich(quiet=True), loud=Rich(stderr=True, quiet=jax.process_index() != 0))
  return Console(steps, live=kind == 'auto')


class Console:
  """Use in `with`. Every method may be called at any time, in a terminal or in a pipe.

  Of many processes only the first one speaks. What is wrong with a number never stops a run.
  """

  def __init__(
    self, steps: int, out: Rich | None = None, *, live: bool = True, loud: Rich | None = None
  ):
    """steps: how many the run takes in all. live: a table, if `out` is a terminal. loud: for warnings, if not `out`."""
    self._rich = out or _rich()
    self._loud, self._wants_live = loud or self._rich, live
    self._steps, self._rewards, self._last = steps, [], {}
    self._difficulty: list[float] = []
    self._live: Live | None = None
    self._began, self._anchor, self._first = time.monotonic(), 0.0, None
    self._status, self._warnings = '', []
    self._progress = Progress(
      TextColumn('step'), MofNCompleteColumn(), BarColumn(40), TextColumn('{task.fields[left]}'),
      console=self._rich,
    )  # fmt: skip
    self._task = self._progress.add_task('steps', total=steps, left='')
    self._evaluations: dict[int, dict[str, float]] = {}
    self._handler = _Warnings(self)

  def __enter__(self) -> Console:
    if self._rich.is_terminal and self._wants_live and not self._rich.quiet:
      self._live = Live(self._table(), console=self._rich, refresh_per_second=4)
      self._live.start()
      self._handler.attach()
    return self

  def __exit__(self, *_: Any) -> None:
    self._stop()

  def banner(self, **facts: Any) -> None:
    """What is about to run, one fact a line."""
    self._print(banner(**facts))

  def say(self, text: str) -> None:
    """A line that stays."""
    self._print(self._clock() + text)

  def warn(self, text: str) -> None:
    """A line that stays, and is counted in the table."""
    self._warnings.append(text)
    self._print(f'{self._clock()}warning: {text}', self._loud)
    self._refresh()

  def compiling(self, what: str = 'the step', last_s: float | None = None) -> None:
    """Said once, and shown in the table until something else happens: nothing moves meanwhile.

    last_s: how long that took the last time.
    """
    took = '' if last_s is None else f' (the last time that took {_duration(last_s)})'
    self._status = f'compiling {what} ...{took}'
    self.say(self._status)
    self._refresh()

  def history(self, rows: Sequence[dict[str, Any]]) -> None:
    """The metrics of the steps before this start, for the curve."""
    self._rewards = [row.get('critic/score/mean') for row in rows]

  def step(
    self, row: dict[str, Any], difficulty: Callable[[], Sequence[float]] | None = None
  ) -> None:
    """One step's metrics. difficulty: shares of the prompts by expected success, from 0 to 1; asked for where shown."""
    self._last, self._status = row, ''
    if self._live and difficulty is not None:
      self._difficulty = list(difficulty())
    self._rewards.append(row.get('critic/score/mean'))
    done = int(row['training/global_step']) + 1
    left = self._left(done)
    self._progress.update(self._task, completed=done, left=left)
    if self._live:
      self._refresh()
    else:
      told = f'step {done}/{self._steps}' + (f' ({left})' if left else '')
      for name, value in self._values()[:_LINE]:
        if len(told) + len(name) + len(value) + 3 > _WIDTH - len(self._clock()):
          break
        told += f'  {name} {value}'
      self.say(told)

  def evaluation(self, step: int, metrics: dict[str, float]) -> None:
    """The totals of an evaluation."""
    self._evaluations[step], self._status = metrics, ''
    told = '  '.join(
      f'{k.rsplit("/", 1)[-1]} {_percent(v)}' for k, v in metrics.items() if '/all/' in k
    )
    self.say(f'held-out at step {step}: {told}')

  def finish(self, root: str) -> None:
    """The learning curve and the table of before and after."""
    self._stop()
    if self._rewards:
      self._print(curve(self._rewards, 'reward', ascii_only=self._ascii))
    if len(self._evaluations) > 1:
      first, last = min(self._evaluations), max(self._evaluations)
      self._rich.print(before_after(self._evaluations[first], self._evaluations[last], last))
    self._print(f'everything is in {root}')

  @property
  def _ascii(self) -> bool:
    return self._rich.options.ascii_only

  def _print(self, text: str, out: Rich | None = None) -> None:
    if self._ascii:
      text = text.encode('ascii', 'replace').decode()
    (out or self._rich).print(text, markup=False, highlight=False, soft_wrap=True)

  def _clock(self) -> str:
    return f'{time.monotonic() - self._began:6.0f} s  '

  def _stop(self) -> None:
    self._handler.detach()
    if self._live:
      self._live.stop()
      self._live = None

  def _refresh(self) -> None:
    if self._live:
      self._live.update(self._table())

  def _values(self) -> list[tuple[str, str]]:
    found = [(n, [self._last.get(k) for k in keys], f) for n, keys, f in _SHOWN]
    return [(n, f.format(*values)) for n, values, f in found if None not in values]

  def _left(self, done: int) -> str:
    """Time left; the first step of a start compiles, so it counts for nothing."""
    if self._first is None:
      self._first, self._anchor = done, time.monotonic()
    if done == self._first or done >= self._steps:
      return ''
    taken_s = (time.monotonic() - self._anchor) / (done - self._first)
    return f'{_duration(taken_s * (self._steps - done))} left'

  def _table(self) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row(self._progress)
    if self._last:
      # Cut into lines of five, whatever the width of the terminal.
      cells = [Text.assemble((f'{n} ', 'dim'), v) for n, v in self._values()]
      grid = Table.grid(padding=(0, 3))
      for at in range(0, len(cells), 5):
        grid.add_row(*cells[at : at + 5])
      table.add_row(grid)
      table.add_row(Text.assemble(('reward ', 'dim'), spark(self._rewards, ascii_only=self._ascii)))
    if self._difficulty:
      top = max(self._difficulty) or 1.0
      shares = spark([x / top for x in self._difficulty], ascii_only=self._ascii)
      table.add_row(Text.assemble(('prompts ', 'dim'), 'hard ', shares, ' easy'))
    if self._status:
      table.add_row(Text(self._status, 'cyan'))
    if self._warnings:
      told = f'warnings: {len(self._warnings)}, the last: {self._warnings[-1]}'
      table.add_row(Text(told, 'yellow'))
    return table


class Lines(Console):
  """What another program reads: a JSON object a line on standard output, {"event": …, "seconds": …, …}."""

  def __init__(self, steps: int, out: TextIO | None = None):
    super().__init__(steps, Rich(quiet=True))
    self._out = out or (sys.stdout if jax.process_index() == 0 else None)

  def banner(self, **facts: Any) -> None:
    self._line('banner', **{name: str(fact) for name, fact in facts.items()})

  def say(self, text: str) -> None:
    self._line('say', text=text)

  def warn(self, text: str) -> None:
    self._line('warning', text=text)

  def compiling(self, what: str = 'the step', last_s: float | None = None) -> None:
    self._line('compiling', what=what, last_s=last_s)

  def step(self, row: dict[str, Any], difficulty: Callable | None = None) -> None:
    self._line('step', **row)

  def evaluation(self, step: int, metrics: dict[str, float]) -> None:
    self._line('evaluation', step=step, **metrics)

  def finish(self, root: str) -> None:
    self._line('finished', folder=root)

  def _line(self, event: str, **more: Any) -> None:
    if self._out is None:
      return
    plain = {k: v.item() if hasattr(v, 'item') else v for k, v in more.items()}
    known = {
      k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in plain.items()
    }
    seconds = round(time.monotonic() - self._began, 3)
    print(json.dumps(dict(event=event, seconds=seconds) | known), file=self._out, flush=True)


class _Warnings(logging.Handler):
  """Takes warnings to the screen while a table is live: stderr would tear it."""

  def __init__(self, screen: Console):
    super().__init__(logging.WARNING)
    self._screen = screen
    self._logger = logging.getLogger('absl')
    self._propagated: bool | None = None

  def attach(self) -> None:
    self._propagated, self._logger.propagate = self._logger.propagate, False
    self._logger.addHandler(self)

  def detach(self) -> None:
    if self._propagated is not None:
      self._logger.removeHandler(self)
      self._logger.propagate, self._propagated = self._propagated, None

  def emit(self, record: logging.LogRecord) -> None:
    self._screen.warn(record.getMessage())


def _rich() -> Rich:
  out = Rich(quiet=jax.process_index() != 0)
  return out if out.is_terminal else Rich(width=_WIDTH, quiet=out.quiet)


def banner(**facts: Any) -> str:
  """name=value pairs as lines, the names in one column. Source: none."""
  width = max((len(name) for name in facts), default=0)
  return '\n'.join(
    [
      'jaxrl_llm',
      *(f'  {name.replace("_", " "):{width}}  {value}' for name, value in facts.items()),
    ]
  )


def spark(values: Sequence[float | None], width: int = 60, ascii_only: bool = False) -> str:
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
) -> Table:
  """Held-out accuracies before training and after it, and what they gained, in points.

  Source: none.
  """
  told = 'after' if step is None else f'after {step} steps'
  table = Table(title='held-out accuracy')
  for name in ('data', 'measure', 'before', told, 'gain'):
    table.add_column(name, justify='left' if name in ('data', 'measure') else 'right')
  for name in sorted(set(before) & set(after)):
    source, _, measure = name.removeprefix('val-core/').rpartition('/acc/')
    old, new = before[name], after[name]
    known = old is not None and new is not None
    gain = f'{100 * (new - old):+.1f}' if known else '-'
    # Text: names come from data, and [brackets] in them are no markup.
    table.add_row(Text(source), Text(measure), _percent(old), _percent(new), gain)
  return table


def _means(values: Sequence[float | None], width: int) -> list[float]:
  known = [v for v in values if v is not None and math.isfinite(v)]
  width = min(width, len(known))
  cuts = [len(known) * i // width for i in range(width + 1)] if width else []
  return [math.fsum(known[a:b]) / (b - a) for a, b in zip(cuts, cuts[1:], strict=False)]


def _percent(value: float | None) -> str:
  return '-' if value is None else f'{value:.1%}'


def _duration(seconds: float) -> str:
  if seconds < 90:
    return f'{seconds:.0f} s'
  return f'{seconds / 60:.0f} min' if seconds < 5400 else f'{seconds / 3600:.1f} h'
