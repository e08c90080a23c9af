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
from rich.cells import cell_len
from rich.console import Console as Rich
from rich.console import Group
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text

from jaxrl_llm.monitoring import ascii_plot

_WIDTH = 120  # of a plain line, in characters
_APART_S = 0.1  # two steps are drawn this far from each other at least
# (name, metrics, format), the most telling first: a plain line takes seven, or as many as fit.
_LINE = 7
_SHOWN = (
  ('reward', ('critic/score/mean',), '{:.2f}'),
  ('success', ('curriculum/observed_success',), '{:.0%}'),
  ('mixed', ('curriculum/mixed_share',), '{:.0%}'),
  ('tokens', ('response_length/mean',), '{:.1f}'),
  ('entropy', ('actor/entropy',), '{:.2f}'),
  ('time', ('timing_s/gen_update', 'timing_s/grade'), ascii_plot.seconds),  # device + grading
  ('tokens/s', ('perf/throughput',), '{:,.0f}'),
  ('lr', ('actor/lr',), '{:.0e}'),
  ('grad', ('actor/grad_norm',), '{:.2f}'),
  ('predicted', ('curriculum/predicted_success',), '{:.0%}'),
  ('prob gap', ('training/rollout_probs_diff_max',), '{:.0e}'),
  ('choose', ('timing_s/choose',), ascii_plot.seconds),
  ('device', ('perf/device_memory_gib',), '{:.1f} GiB'),
  ('host', ('perf/host_memory_gib',), '{:.1f} GiB'),
)
KINDS = ('auto', 'plain', 'quiet', 'json')


def open_console(kind: str, steps: int) -> Console:
  """The screen that config.monitoring.console names. Source: none.

  auto: a live table in a terminal and lines elsewhere; plain: lines; quiet: warnings alone; json: an object a line.
  """
  if kind == 'json':
    return JsonConsole(steps)
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
    self._live: _Live | None = None
    self._began, self._anchor, self._first = time.monotonic(), 0.0, None
    self._done, self._told_left, self._drawn = 0, '', 0.0
    self._status, self._warnings, self._cell = '', [], 0
    self._evaluations: dict[int, dict[str, float]] = {}
    self._handler = _Warnings(self)

  def __enter__(self) -> Console:
    able = self._rich.is_terminal and not self._rich.is_dumb_terminal
    if able and self._wants_live and not self._rich.quiet:
      self._live = _Live(self._lines, self._rich)
      self._live.start(refresh=True)
      self._handler.attach()
    return self

  def __exit__(self, *_: Any) -> None:
    self._stop()

  def banner(self, **facts: Any) -> None:
    """What is about to run, one fact a line."""
    self._print(ascii_plot.banner(**facts))

  def info(self, text: str) -> None:
    """A line that stays."""
    self._print(text, first=self._clock())

  def warn(self, text: str) -> None:
    """A line that stays, and is counted in the table."""
    self._warnings.append(text)
    self._print(f'warning: {text}', self._loud, self._clock())
    self._refresh()

  def compiling(self, what: str = 'the step', last_s: float | None = None) -> None:
    """Said once, and shown in the table until something else happens: nothing moves meanwhile.

    last_s: how long that took the last time.
    """
    took = '' if last_s is None else f' (the last time that took {ascii_plot.duration(last_s)})'
    self._status = f'compiling {what} ...{took}'
    self.info(self._status)
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
    self._done = int(row['training/global_step']) + 1
    self._told_left = self._left(self._done)
    if not self._live:
      self._print(self._short(), first=self._clock())
    elif time.monotonic() - self._drawn > _APART_S:
      self._refresh()

  def evaluation(self, step: int, metrics: dict[str, float]) -> None:
    """The totals of an evaluation."""
    self._evaluations[step], self._status = metrics, ''
    told = '  '.join(
      f'{k.rsplit("/", 1)[-1]} {ascii_plot.percent(v)}' for k, v in metrics.items() if '/all/' in k
    )
    self.info(f'held-out at step {step}:  {told}')

  def finish(self, root: str) -> None:
    """The learning curve and the table of before and after."""
    self._stop()
    if self._rewards:
      width = min(60, self._rich.width - 11)
      self._print(ascii_plot.curve(self._rewards, 'reward', width=width, ascii_only=self._ascii))
    if len(self._evaluations) > 1:
      first, last = min(self._evaluations), max(self._evaluations)
      self._rich.print(
        ascii_plot.before_after(self._evaluations[first], self._evaluations[last], last)
      )
    self._print(f'everything is in {root}')

  @property
  def _ascii(self) -> bool:
    return self._rich.options.ascii_only

  def _print(self, text: str, out: Rich | None = None, first: str = '') -> None:
    """After `first`. A terminal would break lines within a number: they are broken here; elsewhere they stay whole."""
    out, text = out or self._rich, self._known(text)
    if out.is_terminal:
      rest = ' ' * (len(first) if out.width >= 60 else min(len(first), 2))
      text, first = '\n'.join(ascii_plot.wrap_lines(text, out.width, first, rest)), ''
    out.print(first + text, markup=False, highlight=False, soft_wrap=True)

  def _known(self, text: str) -> str:
    """Without what the terminal has no letters for."""
    encoding = self._rich.encoding
    return text.encode(encoding, 'replace').decode(encoding) if self._ascii else text

  def _clock(self) -> str:
    return f'{time.monotonic() - self._began:6.0f} s  '

  def _stop(self) -> None:
    self._handler.detach()
    if self._live:
      self._live.stop()
      self._live = None

  def _refresh(self) -> None:
    if self._live:
      self._drawn = time.monotonic()
      self._live.refresh()

  def _short(self) -> str:
    """A step on a line: as many figures as fit."""
    left = f' ({self._told_left})' if self._told_left else ''
    told = f'step {self._done}/{self._steps}{left}'
    for name, value in self._values()[:_LINE]:
      if len(told) + len(name) + len(value) + 3 > _WIDTH - len(self._clock()):
        break
      told += f'  {name} {value}'
    return told

  def _values(self) -> list[tuple[str, str]]:
    # Of a step that learned nothing, as the first one, what the update says is 0 and means nothing.
    idle = self._last.get('training/trained_tokens') == 0
    shown = {k: v for k, v in self._last.items() if not (idle and k.startswith('actor/'))}
    found = [(n, [shown.get(k) for k in keys], f) for n, keys, f in _SHOWN]
    return [
      (n, f(*values) if callable(f) else f.format(*values))
      for n, values, f in found
      if None not in values
    ]

  def _left(self, done: int) -> str:
    """Time left; the first step of a start compiles, so it counts for nothing."""
    if self._first is None:
      self._first, self._anchor = done, time.monotonic()
    if done == self._first or done >= self._steps:
      return ''
    taken_s = (time.monotonic() - self._anchor) / (done - self._first)
    return f'{ascii_plot.duration(taken_s * (self._steps - done))} left'

  def _lines(self) -> list[Text]:
    """The table, no line wider and not more of them than the terminal has room for: the last figures give way."""
    width, height = self._rich.size
    below = [Text(line, 'cyan') for line in ascii_plot.wrap_lines(self._status, width) if line]
    if self._warnings:
      told = f'warnings: {len(self._warnings)}, the last: {self._known(self._warnings[-1])}'
      below += [Text(line, 'yellow') for line in ascii_plot.wrap_lines(told, width)]
    lines = self._grid(width) if self._last else []
    if self._last:
      shares = ascii_plot.sparkline(self._rewards, max(min(60, width - 7), 1), self._ascii)
      lines.append(Text.assemble(('reward ', 'dim'), shares))
    if self._difficulty and width >= 40:
      top = max(self._difficulty) or 1.0
      shares = ascii_plot.sparkline([x / top for x in self._difficulty], ascii_only=self._ascii)
      lines.append(Text.assemble(('prompts ', 'dim'), 'hard ', shares, ' easy'))
    room = max(height - 2 - len(below), 0)  # beside the bar, and the cursor's line
    return [self._bar(width), *lines[:room], *below][: max(height - 1, 1)]

  def _bar(self, width: int) -> Text:
    told, left = f'step {self._done}/{self._steps} ', self._told_left and f' {self._told_left}'
    room = min(40, width - len(told) - len(left))
    done, rest = ascii_plot.bar(self._done, self._steps, max(room, 0), self._ascii)
    return Text.assemble(told, (done, 'magenta'), (rest, 'dim'), left)

  def _grid(self, width: int) -> list[Text]:
    """name and value in as many columns as fit, which stay where they are from step to step."""
    if not (cells := self._values()):
      return []
    self._cell = max(self._cell, *(len(n) + len(v) + 1 for n, v in cells), 1)
    columns = max((width + 3) // (self._cell + 3), 1)
    columns = -(-len(cells) // -(-len(cells) // columns))  # as many in each line
    lines = []
    for at in range(0, len(cells), columns):
      line = Text()
      for n, v in cells[at : at + columns]:
        line.append(f'{n} ', 'dim').append(v.ljust(self._cell - len(n) + 2))
      line.rstrip()
      lines.append(line)
    return lines


class JsonConsole(Console):
  """What another program reads: a JSON object a line on standard output, {"event": …, "seconds": …, …}."""

  def __init__(self, steps: int, out: TextIO | None = None):
    super().__init__(steps, Rich(quiet=True))
    self._out = out or (sys.stdout if jax.process_index() == 0 else None)

  def banner(self, **facts: Any) -> None:
    self._line('banner', **{name: str(fact) for name, fact in facts.items()})

  def info(self, text: str) -> None:
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


class _Live(Live):
  """Lines that stay at the bottom, also where the window is made narrower.

  A terminal then breaks the lines that are there, and whoever draws over them must go up by more lines than were drawn.
  """

  def __init__(self, lines: Callable[[], list[Text]], out: Rich):
    self._lines, self._made, self._lengths = lines, [], []
    super().__init__(console=out, vertical_overflow='crop')

  def process_renderables(self, renderables: list[Any]) -> list[Any]:
    """Rich's, after the way up."""
    width = self.console.width
    more = sum((length - 1) // width for length in self._lengths if length)
    told = super().process_renderables(renderables)
    self._lengths = [min(length, width) for length in self._made]
    up = [(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)] * more
    return [Control(*up), *told] if up else told

  def get_renderable(self) -> Group:
    """The lines of this moment; asked for by Rich, also from a thread of its own."""
    lines = self._lines()
    for line in lines:
      line.no_wrap, line.overflow = True, 'crop'
    self._made = [cell_len(line.plain) for line in lines]
    return Group(*lines)


def _rich() -> Rich:
  out = Rich(quiet=jax.process_index() != 0)
  if out.is_terminal and not out.is_jupyter and out.file.isatty():
    return out
  # A notebook takes lines as a file does. FORCE_COLOR, which its kernel and many a CI set, makes Rich believe in a
  # terminal, and nothing can be drawn over there; left to itself, Rich makes a page of HTML of every line.
  return Rich(width=_WIDTH, quiet=out.quiet, force_jupyter=False, force_terminal=False)
