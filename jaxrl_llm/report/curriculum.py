"""What a run's curriculum has learned: difficulty over time, how honest the posterior is, and which prompts teach."""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.curriculum import Curriculum
from jaxrl_llm.report.rollouts import Rollouts, lines
from jaxrl_llm.types import Row, UserError

_WINDOWS, _BINS, _SHOWN = 5, 10, 8
_BARS = ' ▁▂▃▄▅▆▇█'


class Report(NamedTuple):
  """What is told, as arrays and rows; see `tell`."""

  windows: list[tuple[int, int]]  # first and last step of each
  difficulty_WxD: np.ndarray  # share of visited groups by their success rate, in each window
  prior_D: np.ndarray  # share of all prompts by posterior mean, now
  reliability: list[tuple[float, float, int]]  # predicted rate, observed rate, groups
  error: float  # Σ share · |predicted − observed|
  brier: float  # of whether a group is mixed
  most: list[dict]  # visited prompts likeliest to be mixed
  least: list[dict]
  suspects: list[dict]  # labels that rollouts contradict


def make(folder: str, curriculum: Curriculum, rows: tuple[Row, ...], read: Rollouts) -> Report:
  """What `curriculum` has learned by now, beside what `read` holds of the rollouts in `folder`.

  Raises UserError where there are no rollouts yet. Source: none.
  """
  steps, rates = visits(read)
  if not len(steps):
    raise UserError(f'--workdir={folder} has no rollouts to report on; train first.')
  edges = np.linspace(steps.min(), steps.max() + 1, min(_WINDOWS, len(np.unique(steps))) + 1)
  window_V = np.clip(np.searchsorted(edges, steps, side='right') - 1, 0, len(edges) - 2)
  windows = [(steps[window_V == w], rates[window_V == w]) for w in range(len(edges) - 1)]
  windows = [(s, r) for s, r in windows if len(s)]
  index = np.arange(curriculum.size)
  mean, _, mixed = curriculum.predict(index)
  seen = index[curriculum.visits(index) > 0]  # of the others nothing but their kind is known
  order = seen[np.argsort(-mixed[seen], kind='stable')]
  told = lambda at: [_prompt(i, rows[i], mean[i], mixed[i], curriculum) for i in at.tolist()]  # noqa: E731
  past = curriculum.state_dict()['history']
  return Report(
    windows=[(int(s.min()), int(s.max())) for s, _ in windows],
    difficulty_WxD=np.array([_histogram(r) for _, r in windows]),
    prior_D=_histogram(mean),
    reliability=_reliability(past[:, 0], past[:, 2]),
    error=curriculum.metrics().get('curriculum/calibration_error', 0.0),
    brier=curriculum.metrics().get('curriculum/brier', 0.0),
    most=told(order[:_SHOWN]),
    least=told(order[::-1][:_SHOWN]),
    suspects=lines(os.path.join(folder, 'suspect_labels.jsonl')),
  )


def visits(read: Rollouts) -> tuple[np.ndarray, np.ndarray]:
  """(step [V], mean success [V]) of every visit to a prompt without a hint, in order.

  Of binary scores it is the share of right rollouts, of graded ones what the curriculum counts.
  """
  plain = ~read.column('hinted').astype(bool)
  pairs = np.stack([read.column('step')[plain], read.column('prompt')[plain]], axis=1)
  if not len(pairs):
    return np.zeros(0, int), np.zeros(0)
  each, visit_N = np.unique(pairs, axis=0, return_inverse=True)
  visit_N = visit_N.ravel()
  success = np.bincount(visit_N, read.column('success')[plain])
  return each[:, 0], success / np.bincount(visit_N)


def tell(report: Report, console: Console | None = None) -> None:
  """Prints it. Source: none."""
  console = console or Console()
  table = Table(title='Success rate of the visited groups, from 0 to 1', title_justify='left')
  table.add_column('steps', overflow='fold')
  # A histogram is one line.
  table.add_column('all wrong ▸ all right', overflow='fold', no_wrap=True)
  for name in ('all wrong', 'between', 'all right'):
    table.add_column(name, overflow='fold')
  for (first, last), share_D in zip(report.windows, report.difficulty_WxD, strict=True):
    wrong, right = share_D[0], share_D[-1]
    cells = [f'{x:.0%}' for x in (wrong, 1 - wrong - right, right)]
    table.add_row(f'{first} – {last}', bars(share_D), *cells)
  console.print(table)
  console.print(f'Posterior mean of all prompts now, from 0 to 1: {bars(report.prior_D)}\n')
  table = Table(
    title='Predicted and observed success rate of the latest groups', title_justify='left'
  )
  for name in ('predicted', 'observed', 'groups'):
    table.add_column(name, justify='right')
  for predicted, observed, count in report.reliability:
    table.add_row(f'{predicted:.2f}', f'{observed:.2f}', str(count))
  console.print(table)
  console.print(
    f'calibration error {report.error:.3f}, Brier score of "mixed" {report.brier:.3f}\n'
  )
  for title, rows in (('Most', report.most), ('Least', report.least)):
    _prompts(console, f'{title} learnable prompts', rows)
  if report.suspects:
    _suspects(console, report.suspects)


def plain(report: Report) -> dict[str, Any]:
  """The same as lists and numbers, for JSON. Source: none."""
  return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in report._asdict().items()}


def read(path: str) -> Report | None:
  """Back from what `plain` gave to a JSON file; None where there is none, or another. Source: none."""
  try:
    told = json.loads(safe_files.read(path))
    arrays = {k: np.array(told[k]) for k in ('difficulty_WxD', 'prior_D')}
    return Report(**{k: told[k] for k in Report._fields} | arrays)
  except (OSError, ValueError, KeyError, TypeError):
    return None


def bars(share_D: np.ndarray) -> str:
  """A histogram in one line. Source: none."""
  top = max(float(np.max(share_D)), 1e-12)
  # Whatever there is shows.
  levels = [0 if x == 0 else max(1, round(x / top * (len(_BARS) - 1))) for x in share_D]
  return ''.join(_BARS[level] for level in levels)


def _histogram(rate_N: np.ndarray) -> np.ndarray:
  """Shares: exactly 0, ten bins between, exactly 1."""
  inner = (rate_N > 0) & (rate_N < 1)
  bins = np.minimum((rate_N[inner] * _BINS).astype(int), _BINS - 1)
  counts = [(rate_N == 0).sum(), *np.bincount(bins, minlength=_BINS), (rate_N == 1).sum()]
  return np.array(counts) / max(len(rate_N), 1)


def _reliability(predicted: np.ndarray, observed: np.ndarray) -> list[tuple[float, float, int]]:
  bins = np.minimum((predicted * _BINS).astype(int), _BINS - 1)
  return [
    (float(predicted[bins == b].mean()), float(observed[bins == b].mean()), int((bins == b).sum()))
    for b in np.unique(bins)
  ]


def _prompt(index: int, row: Row, mean: float, mixed: float, curriculum: Curriculum) -> dict:
  question = row.question or row.messages[-1]['content']
  seen = int(curriculum.visits(index))
  return dict(
    prompt=index,
    question=question,
    answer=row.answer,
    source=row.source,
    success=float(mean),
    mixed=float(mixed),
    visits=seen,
  )


def _prompts(console: Console, title: str, rows: list[dict]) -> None:
  table = Table(title=title, title_justify='left')
  for name in ('prompt', 'P(mixed)', 'success', 'visits'):
    table.add_column(name, justify='right', overflow='fold')
  table.add_column('question', overflow='ellipsis', no_wrap=True, max_width=60)
  for row in rows:
    numbers = f'{row["mixed"]:.2f}', f'{row["success"]:.2f}', str(row['visits'])
    table.add_row(str(row['prompt']), *numbers, _words(row['question']))
  console.print(table)


def _suspects(console: Console, rows: list[dict]) -> None:
  table = Table(title='Labels that rollouts contradict', title_justify='left')
  for name in ('prompt', 'label', 'majority', 'share', 'visits'):
    table.add_column(name, justify='right', overflow='fold')
  table.add_column('question', overflow='ellipsis', no_wrap=True, max_width=60)
  for row in rows:
    labels = _words(row['given']), _words(row['majority'])
    numbers = f'{row["share"]:.0%}', str(row['visits'])
    table.add_row(str(row['prompt']), *labels, *numbers, _words(row['question']))
  console.print(table)


def _words(told: object) -> Text:
  """In one line, and [brackets] in it are no markup."""
  return Text(str(told).replace('\n', ' '))
