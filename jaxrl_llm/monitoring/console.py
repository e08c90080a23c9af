"""Console output: a live table in a terminal, one plain line per step elsewhere."""

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
from rich.console import ConsoleRenderable, Group
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text

from jaxrl_llm.monitoring import ascii_plot, update_metrics
from jaxrl_llm.monitoring.example import Example
from jaxrl_llm.types import JsonObject

_WIDTH = 120  # of a plain line, in characters
_MIN_REDRAW_S = 0.1  # least time between two redraws of the table
_LINE_METRICS = 7  # most metrics of a plain line
# (label, metrics, format), the most important first.
_METRICS = (
  ('reward', ('critic/score/mean',), '{:.2f}'),
  ('loss', ('reward_model/loss',), '{:.3f}'),
  ('accuracy', ('reward_model/accuracy',), '{:.0%}'),
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
# Between two lines about an evaluation that takes long.
_MIN_LINES_S = 15.0
KINDS = ('auto', 'plain', 'quiet', 'json')


def open_console(kind: str, steps: int) -> Console:
  """Returns the console of config.monitoring.console.

  auto: a live table in a terminal and lines elsewhere; plain: lines; quiet: only warnings; json: one object per line.
  """
  if kind == 'json':
    return JsonConsole(steps)
  if kind == 'quiet':
    warnings = Rich(stderr=True, quiet=jax.process_index() != 0)
    return Console(steps, Rich(quiet=True), warnings_out=warnings)
  return Console(steps, live=kind == 'auto')


class Console:
  """The console of a run, a context manager. Every method may be called at any time, in a terminal or in a pipe.

  Only process 0 prints. Display errors never abort training: missing and non-finite numbers are accepted.
  """

  def __init__(
    self,
    steps: int,
    out: Rich | None = None,
    *,
    live: bool = True,
    warnings_out: Rich | None = None,
  ):
    """`steps`: of the whole run. live: draws a table if `out` is a terminal. warnings_out: default `out`."""
    self._rich = out or _rich()
    self._warnings_out, self._wants_live = warnings_out or self._rich, live
    self._steps, self._rewards, self._row = steps, [], {}
    self._difficulty: list[float] = []
    self._live: _Live | None = None
    self._start_s, self._timed_from_s, self._first_done = time.monotonic(), 0.0, None
    self._done, self._time_left, self._drawn_s, self._line_s = 0, '', 0.0, 0.0
    self._status, self._warnings, self._cell_width = '', [], 0
    self._evaluations: dict[int, dict[str, float]] = {}
    self._handler = _WarningHandler(self)

  def __enter__(self) -> Console:
    can_redraw = self._rich.is_terminal and not self._rich.is_dumb_terminal
    if can_redraw and self._wants_live and not self._rich.quiet:
      self._live = _Live(self._lines, self._rich)
      self._live.start(refresh=True)
      self._handler.attach()
    return self

  def __exit__(self, *_: object) -> None:
    self._stop()

  def banner(self, **facts: Any) -> None:
    """Prints the facts about the run, one per line."""
    self._print(ascii_plot.banner(**facts))

  def info(self, text: str) -> None:
    """Prints a line."""
    self._print(text, prefix=self._clock())

  def warn(self, text: str) -> None:
    """Prints a warning, and counts it in the table."""
    self._warnings.append(text)
    self._print(f'warning: {text}', self._warnings_out, self._clock())
    self._refresh()

  def compiling(self, program: str = 'the step', last_s: float | None = None) -> None:
    """Prints that compilation begins, and shows it in the table until the next event. last_s: its last duration."""
    last = '' if last_s is None else f' (it took {ascii_plot.duration(last_s)} the last time)'
    self._status = f'compiling {program} ...{last}'
    self.info(self._status)
    self._refresh()

  def history(self, rows: Sequence[JsonObject]) -> None:
    """Adds the metrics of the steps before a resume to the reward curve."""
    self._rewards = [row.get('critic/score/mean') for row in rows]

  def step(self, row: JsonObject, difficulty: Callable[[], Sequence[float]] | None = None) -> None:
    """Shows the metrics of a step.

    `difficulty` returns the shares of the prompts by expected success, from 0 to 1; it is called in a live table only.
    """
    self._row, self._status = row, ''
    if self._live and difficulty is not None:
      self._difficulty = list(difficulty())
    self._rewards.append(row.get('critic/score/mean'))
    self._done = int(row['training/global_step']) + 1
    self._time_left = self._estimate_time_left(self._done)
    if not self._live:
      self._print(self._step_line(), prefix=self._clock())
    elif time.monotonic() - self._drawn_s > _MIN_REDRAW_S:
      self._refresh()

  def evaluating(self, step: int, done: int, prompts: int) -> None:
    """Shows how many held-out prompts are complete: in the table, or as a line from time to time."""
    self._status = f'evaluating at step {step}: {done} of {prompts} prompts'
    if self._live:
      self._refresh()
    elif not done or (done < prompts and time.monotonic() - self._line_s > _MIN_LINES_S):
      self._line_s = time.monotonic()
      self.info(self._status)

  def evaluation(
    self, step: int, metrics: dict[str, float], example: Example | None = None
  ) -> None:
    """Prints the accuracies over all data, and a completion."""
    self._evaluations[step], self._status = metrics, ''
    totals = '  '.join(
      f'{k.rsplit("/", 1)[-1]} {ascii_plot.percent(v)}' for k, v in metrics.items() if '/all/' in k
    )
    self.info(f'held-out at step {step}:  {totals}')
    if example is not None:
      self.info(example.line(_WIDTH - len(self._clock())))

  def finish(self, root: str) -> None:
    """Prints the reward curve and the table of accuracies before and after training."""
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

  def _print(self, text: str, out: Rich | None = None, prefix: str = '') -> None:
    """Prints after `prefix`. Lines are wrapped for a terminal only, which would break them within a number."""
    out, text = out or self._rich, self._encodable(text)
    if out.is_terminal:
      indent = ' ' * (len(prefix) if out.width >= 60 else min(len(prefix), 2))
      text, prefix = '\n'.join(ascii_plot.wrap_lines(text, out.width, prefix, indent)), ''
    out.print(prefix + text, markup=False, highlight=False, soft_wrap=True)

  def _encodable(self, text: str) -> str:
    """Replaces characters that the encoding of the terminal lacks."""
    encoding = self._rich.encoding
    return text.encode(encoding, 'replace').decode(encoding) if self._ascii else text

  def _clock(self) -> str:
    return f'{time.monotonic() - self._start_s:6.0f} s  '

  def _stop(self) -> None:
    self._handler.detach()
    if self._live:
      self._live.stop()
      self._live = None

  def _refresh(self) -> None:
    if self._live:
      self._drawn_s = time.monotonic()
      self._live.refresh()

  def _step_line(self) -> str:
    """The step and as many metrics as fit on a line."""
    left = f' ({self._time_left})' if self._time_left else ''
    line = f'step {self._done}/{self._steps}{left}'
    for name, value in self._values()[:_LINE_METRICS]:
      if len(line) + len(name) + len(value) + 3 > _WIDTH - len(self._clock()):
        break
      line += f'  {name} {value}'
    return line

  def _values(self) -> list[tuple[str, str]]:
    """(label, formatted value) of the metrics that the last row has."""
    row = update_metrics.without_idle(self._row)
    metrics = [(name, [row.get(k) for k in keys], form) for name, keys, form in _METRICS]
    return [
      (name, form(*values) if callable(form) else form.format(*values))
      for name, values, form in metrics
      if None not in values
    ]

  def _estimate_time_left(self, done: int) -> str:
    """The time left, from the mean duration of the steps after the first one, which compiles."""
    if self._first_done is None:
      self._first_done, self._timed_from_s = done, time.monotonic()
    if done == self._first_done or done >= self._steps:
      return ''
    step_s = (time.monotonic() - self._timed_from_s) / (done - self._first_done)
    return f'{ascii_plot.duration(step_s * (self._steps - done))} left'

  def _lines(self) -> list[Text]:
    """The lines of the table, cut to the size of the terminal: the last metrics are left out first."""
    width, height = self._rich.size
    below = [Text(line, 'cyan') for line in ascii_plot.wrap_lines(self._status, width) if line]
    if self._warnings:
      text = f'warnings: {len(self._warnings)}, the last: {self._encodable(self._warnings[-1])}'
      below += [Text(line, 'yellow') for line in ascii_plot.wrap_lines(text, width)]
    lines = self._grid(width) if self._row else []
    if self._row:
      room = max(min(72, width - 7), 1)
      low, curve, high = ascii_plot.scaled_sparkline(self._rewards, room, self._ascii)
      lines.append(Text.assemble(('reward ', 'dim'), (low, 'dim'), curve, (high, 'dim')))
    if self._difficulty and width >= 40:
      top = max(self._difficulty) or 1.0
      shares = ascii_plot.sparkline(self._difficulty, ascii_only=self._ascii, scale=(0.0, top))
      lines.append(Text.assemble(('prompts ', 'dim'), 'hard ', shares, ' easy'))
    room = max(height - 2 - len(below), 0)  # without the progress bar and the line of the cursor
    return [self._bar(width), *lines[:room], *below][: max(height - 1, 1)]

  def _bar(self, width: int) -> Text:
    label, left = f'step {self._done}/{self._steps} ', self._time_left and f' {self._time_left}'
    room = min(40, width - len(label) - len(left))
    done, rest = ascii_plot.bar(self._done, self._steps, max(room, 0), self._ascii)
    return Text.assemble(label, (done, 'magenta'), (rest, 'dim'), left)

  def _grid(self, width: int) -> list[Text]:
    """Labels and values in as many columns as fit. Columns never become narrower, so that they stay in place."""
    if not (cells := self._values()):
      return []
    self._cell_width = max(self._cell_width, *(len(n) + len(v) + 1 for n, v in cells), 1)
    columns = max((width + 3) // (self._cell_width + 3), 1)
    columns = -(-len(cells) // -(-len(cells) // columns))  # equally many in each line
    lines = []
    for start in range(0, len(cells), columns):
      line = Text()
      for n, v in cells[start : start + columns]:
        line.append(f'{n} ', 'dim').append(v.ljust(self._cell_width - len(n) + 2))
      line.rstrip()
      lines.append(line)
    return lines


class JsonConsole(Console):
  """Machine-readable output: one JSON object per line on standard output, {"event": …, "seconds": …, …}."""

  def __init__(self, steps: int, out: TextIO | None = None):
    super().__init__(steps, Rich(quiet=True))
    self._out = out or (sys.stdout if jax.process_index() == 0 else None)

  def banner(self, **facts: Any) -> None:
    self._line('banner', **{name: str(fact) for name, fact in facts.items()})

  def info(self, text: str) -> None:
    self._line('say', text=text)

  def warn(self, text: str) -> None:
    self._line('warning', text=text)

  def compiling(self, program: str = 'the step', last_s: float | None = None) -> None:
    self._line('compiling', what=program, last_s=last_s)

  def step(self, row: JsonObject, difficulty: Callable | None = None) -> None:
    self._line('step', **row)

  def evaluating(self, step: int, done: int, prompts: int) -> None:
    self._line('evaluating', step=step, done=done, prompts=prompts)

  def evaluation(
    self, step: int, metrics: dict[str, float], example: Example | None = None
  ) -> None:
    self._line('evaluation', step=step, **metrics)
    if example is not None:
      self._line('example', step=step, **example._asdict())

  def finish(self, root: str) -> None:
    self._line('finished', folder=root)

  def _line(self, event: str, **fields: Any) -> None:
    if self._out is None:
      return
    plain = {k: v.item() if hasattr(v, 'item') else v for k, v in fields.items()}
    finite = {
      k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in plain.items()
    }
    seconds = round(time.monotonic() - self._start_s, 3)
    print(json.dumps(dict(event=event, seconds=seconds) | finite), file=self._out, flush=True)


class _WarningHandler(logging.Handler):
  """Prints logged warnings through the console while the table is live, because stderr would overwrite it."""

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
  """Lines at the bottom of the terminal that are redrawn correctly after the window becomes narrower.

  A narrower terminal wraps the lines that are displayed, so the cursor must move up by more lines than were drawn.
  """

  def __init__(self, lines: Callable[[], list[Text]], out: Rich):
    self._lines, self._rendered_lengths, self._drawn_lengths = lines, [], []
    super().__init__(console=out, vertical_overflow='crop')

  def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
    """Adds the cursor movement over the wrapped lines."""
    width = self.console.width
    wrapped = sum((length - 1) // width for length in self._drawn_lengths if length)
    processed = super().process_renderables(renderables)
    self._drawn_lengths = [min(length, width) for length in self._rendered_lengths]
    up = [(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)] * wrapped
    return [Control(*up), *processed] if up else processed

  def get_renderable(self) -> Group:
    """Returns the current lines. Rich calls this from a thread of its own, too."""
    lines = self._lines()
    for line in lines:
      line.no_wrap, line.overflow = True, 'crop'
    self._rendered_lengths = [cell_len(line.plain) for line in lines]
    return Group(*lines)


def _rich() -> Rich:
  out = Rich(quiet=jax.process_index() != 0)
  if out.is_terminal and not out.is_jupyter and out.file.isatty():
    return out
  # Notebooks get plain lines, as files do. FORCE_COLOR, which IPython kernels and CI services set, would make Rich
  # assume a terminal, where nothing can be redrawn; and Rich renders each line as HTML in a notebook by default.
  return Rich(width=_WIDTH, quiet=out.quiet, force_jupyter=False, force_terminal=False)
