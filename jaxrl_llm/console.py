"""What a person sees: a live table in a terminal, one plain line a step elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console as Rich
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

_BARS = '▁▂▃▄▅▆▇█'
_SHOWN = (
  ('reward', 'critic/score/mean', '{:.2f}'),
  ('mixed', 'curriculum/mixed_share', '{:.2f}'),
  ('predicted', 'curriculum/predicted_success', '{:.2f}'),
  ('tokens', 'response_length/mean', '{:.1f}'),
  ('entropy', 'actor/entropy', '{:.2f}'),
  ('grad', 'actor/grad_norm', '{:.2f}'),
  ('prob gap', 'training/rollout_probs_diff_max', '{:.0e}'),
  ('s', 'timing_s/step', '{:.1f}'),
)


class Console:
  """Use in `with`. Every method may be called at any time, in a terminal or in a pipe."""

  def __init__(self, steps: int, out: Rich | None = None):
    """steps: how many the run takes in all."""
    self._rich = out or Rich()
    self._steps, self._rewards, self._last = steps, [], {}
    self._live: Live | None = None
    self._began, self._anchor, self._first = time.monotonic(), 0.0, None
    self._progress = Progress(
      TextColumn('step'), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(),
      console=self._rich,
    )  # fmt: skip
    self._task = self._progress.add_task('steps', total=steps)
    self._evaluations: dict[int, dict[str, float]] = {}

  def __enter__(self) -> Console:
    if self._rich.is_terminal:
      self._live = Live(self._table(), console=self._rich, refresh_per_second=4)
      self._live.start()
    return self

  def __exit__(self, *_: Any) -> None:
    if self._live:
      self._live.stop()

  def say(self, text: str) -> None:
    """A line that stays."""
    told = f'[{time.monotonic() - self._began:5.0f} s] {text}'
    self._rich.print(told, markup=False, highlight=False, soft_wrap=True)

  def step(self, row: dict[str, float]) -> None:
    """One step's metrics."""
    self._last = row
    self._rewards.append(row['critic/score/mean'])
    done = row['training/global_step'] + 1
    self._first = done if self._first is None else self._first
    self._progress.update(self._task, completed=done)
    if self._live:
      self._live.update(self._table())
    else:
      told = '  '.join(f'{n} {v}' for n, v in self._values())
      self.say(f'step {done}/{self._steps}{self._left(done)}  {told}')

  def evaluation(self, step: int, metrics: dict[str, float]) -> None:
    """The totals of an evaluation."""
    self._evaluations[step] = metrics
    told = '  '.join(f'{k.rsplit("/", 1)[-1]} {v:.1%}' for k, v in metrics.items() if '/all/' in k)
    self.say(f'held-out at step {step}: {told}')

  def finish(self, root: str) -> None:
    """The learning curve and the table of before and after."""
    if self._live:
      self._live.stop()
      self._live = None
    if self._rewards:
      self._rich.print(f'reward  {spark(self._rewards)}', highlight=False)
    if len(self._evaluations) > 1:
      first, last = min(self._evaluations), max(self._evaluations)
      self._rich.print(before_after(self._evaluations[first], self._evaluations[last], last))
    self._rich.print(f'everything is in {root}', highlight=False, markup=False, soft_wrap=True)

  def _values(self):
    return [(n, f.format(self._last[k])) for n, k, f in _SHOWN if self._last.get(k) is not None]

  def _left(self, done: int) -> str:
    taken = done - self._first
    if not taken:
      self._anchor = time.monotonic()
      return ''
    left = (time.monotonic() - self._anchor) / taken * (self._steps - done)
    return f' ({left / 60:.0f} min left)'

  def _table(self) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row(self._progress)
    if self._last:
      told = '   '.join(f'[dim]{n}[/dim] {v}' for n, v in self._values())
      table.add_row(told)
      table.add_row(f'[dim]reward[/dim] {spark(self._rewards)}')
    return table


def spark(values: list[float], width: int = 60) -> str:
  """A curve of values in [0, 1] in one line: means over equal stretches. Source: none."""
  width = min(width, len(values))
  cuts = [len(values) * i // width for i in range(width + 1)]
  means = [sum(values[a:b]) / (b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
  return ''.join(_BARS[min(int(max(m, 0) * len(_BARS)), len(_BARS) - 1)] for m in means)


def before_after(before: dict[str, float], after: dict[str, float], step: int) -> Table:
  """Held-out accuracies before training and after it, and what they gained, in points. Source: none."""
  table = Table(title='held-out accuracy')
  for name in ('data', 'measure', 'before', f'after {step} steps', 'gain'):
    table.add_column(name, justify='left' if name in ('data', 'measure') else 'right')
  for name in sorted(set(before) & set(after)):
    source, _, measure = name.removeprefix('val-core/').rpartition('/acc/')
    gain = 100 * (after[name] - before[name])
    table.add_row(source, measure, f'{before[name]:.1%}', f'{after[name]:.1%}', f'{gain:+.1f}')
  return table
