"""The curriculum's report: success rates over time, calibration of the posterior, and the most learnable prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.curriculum import Curriculum
from jaxrl_llm.report.rollouts import JsonObject, Rollouts, json_lines
from jaxrl_llm.types import Row, UserError

_MAX_WINDOWS = 5
_RATE_BINS = 10  # D = _RATE_BINS + 2: exactly 0, the bins between, exactly 1
_LISTED_PROMPTS = 8
_BARS = ' ▁▂▃▄▅▆▇█'


class CurriculumReport(NamedTuple):
  """The content of curriculum.json; the field names are its keys."""

  windows: list[tuple[int, int]]  # first and last step of each window of steps
  difficulty_WxD: np.ndarray  # share of visited groups by their success rate, in each window
  prior_D: np.ndarray  # share of all prompts by posterior mean, now
  reliability: list[tuple[float, float, int]]  # predicted rate, observed rate, number of groups
  error: float  # calibration error: Σ share · |predicted − observed|
  brier: float  # Brier score of the prediction that a group is mixed
  most: list[dict]  # visited prompts that are most likely to be mixed
  least: list[dict]
  suspects: list[dict]  # labels that rollouts contradict


def summarize(
  folder: str, curriculum: Curriculum, rows: tuple[Row, ...], rollouts: Rollouts
) -> CurriculumReport:
  """Summarizes the state of `curriculum` and the rollouts in `folder`. Raises UserError where there are none yet."""
  steps, rates = success_of_visits(rollouts)
  if not len(steps):
    raise UserError(f'--workdir={folder} has no rollouts to report on; train first.')
  windows = _windows(steps, rates)
  index = np.arange(curriculum.size)
  mean, _, mixed = curriculum.predict(index)
  visited = index[curriculum.visits(index) > 0]  # of other prompts only the kind is known
  order = visited[np.argsort(-mixed[visited], kind='stable')]

  def entries(indices: np.ndarray) -> list[dict]:
    return [_prompt_entry(i, rows[i], mean[i], mixed[i], curriculum) for i in indices.tolist()]

  history = curriculum.state_dict()['history']
  metrics = curriculum.metrics()
  return CurriculumReport(
    windows=[(int(s.min()), int(s.max())) for s, _ in windows],
    difficulty_WxD=np.array([_histogram(r) for _, r in windows]),
    prior_D=_histogram(mean),
    reliability=_reliability(history[:, 0], history[:, 2]),
    error=metrics.get('curriculum/calibration_error', 0.0),
    brier=metrics.get('curriculum/brier', 0.0),
    most=entries(order[:_LISTED_PROMPTS]),
    least=entries(order[::-1][:_LISTED_PROMPTS]),
    suspects=json_lines(os.path.join(folder, 'suspect_labels.jsonl')),
  )


def success_of_visits(rollouts: Rollouts) -> tuple[np.ndarray, np.ndarray]:
  """Returns (step [V], mean success [V]) of every visit to a prompt without a hint, in the order of the steps.

  For binary scores this is the share of correct rollouts; for graded ones the curriculum's success value.
  """
  without_hint = ~rollouts.column('hinted').astype(bool)
  pairs = [rollouts.column(name)[without_hint] for name in ('step', 'prompt')]
  pairs_Nx2 = np.stack(pairs, axis=1)
  if not len(pairs_Nx2):
    return np.zeros(0, int), np.zeros(0)
  visits_Vx2, visit_N = np.unique(pairs_Nx2, axis=0, return_inverse=True)
  visit_N = visit_N.ravel()
  success = np.bincount(visit_N, rollouts.column('success')[without_hint])
  return visits_Vx2[:, 0], success / np.bincount(visit_N)


def print_tables(report: CurriculumReport, console: Console | None = None) -> None:
  """Prints the report as tables."""
  console = console or Console()
  _print_difficulty(report, console)
  console.print(f'Posterior mean of all prompts now, from 0 to 1: {sparkline(report.prior_D)}\n')
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
  for title, entries in (('Most', report.most), ('Least', report.least)):
    _print_prompts(console, f'{title} learnable prompts', entries)
  if report.suspects:
    _print_suspects(console, report.suspects)


def to_json(report: CurriculumReport) -> JsonObject:
  """Returns the report as JSON values."""
  return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in report._asdict().items()}


def load_json(path: str) -> CurriculumReport | None:
  """Reads a file of `to_json`; None where it is absent, damaged or of another version."""
  try:
    fields = json.loads(safe_files.read(path))
    arrays = {k: np.array(fields[k]) for k in ('difficulty_WxD', 'prior_D')}
    return CurriculumReport(**{k: fields[k] for k in CurriculumReport._fields} | arrays)
  except (OSError, ValueError, KeyError, TypeError):
    return None


def sparkline(share_D: np.ndarray) -> str:
  """Returns a histogram as one line of block characters."""
  top = max(float(np.max(share_D)), 1e-12)
  # At least the lowest bar for every share above zero.
  levels = [0 if x == 0 else max(1, round(x / top * (len(_BARS) - 1))) for x in share_D]
  return ''.join(_BARS[level] for level in levels)


def _windows(steps: np.ndarray, rates: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
  """(steps, rates) of the visits in each window of steps; windows without a visit are left out."""
  count = min(_MAX_WINDOWS, len(np.unique(steps)))
  edges = np.linspace(steps.min(), steps.max() + 1, count + 1)
  window_V = np.clip(np.searchsorted(edges, steps, side='right') - 1, 0, len(edges) - 2)
  windows = [(steps[window_V == w], rates[window_V == w]) for w in range(len(edges) - 1)]
  return [(s, r) for s, r in windows if len(s)]


def _histogram(rate_N: np.ndarray) -> np.ndarray:
  """Shares [D]: exactly 0, ten bins between, exactly 1."""
  inner = (rate_N > 0) & (rate_N < 1)
  bins = np.minimum((rate_N[inner] * _RATE_BINS).astype(int), _RATE_BINS - 1)
  counts = [(rate_N == 0).sum(), *np.bincount(bins, minlength=_RATE_BINS), (rate_N == 1).sum()]
  return np.array(counts) / max(len(rate_N), 1)


def _reliability(predicted: np.ndarray, observed: np.ndarray) -> list[tuple[float, float, int]]:
  bins = np.minimum((predicted * _RATE_BINS).astype(int), _RATE_BINS - 1)
  return [
    (float(predicted[bins == b].mean()), float(observed[bins == b].mean()), int((bins == b).sum()))
    for b in np.unique(bins)
  ]


def _prompt_entry(
  index: int, row: Row, mean: float, mixed: float, curriculum: Curriculum
) -> JsonObject:
  return dict(
    prompt=index,
    question=row.question or row.messages[-1]['content'],
    answer=row.answer,
    source=row.source,
    success=float(mean),
    mixed=float(mixed),
    visits=int(curriculum.visits(index)),
  )


def _print_difficulty(report: CurriculumReport, console: Console) -> None:
  table = Table(title='Success rate of the visited groups, from 0 to 1', title_justify='left')
  table.add_column('steps', overflow='fold')
  # A histogram must stay on one line.
  table.add_column('all wrong ▸ all right', overflow='fold', no_wrap=True)
  for name in ('all wrong', 'between', 'all right'):
    table.add_column(name, overflow='fold')
  for (first, last), share_D in zip(report.windows, report.difficulty_WxD, strict=True):
    wrong, right = share_D[0], share_D[-1]
    cells = [f'{x:.0%}' for x in (wrong, 1 - wrong - right, right)]
    table.add_row(f'{first} – {last}', sparkline(share_D), *cells)
  console.print(table)


def _print_prompts(console: Console, title: str, entries: list[dict]) -> None:
  table = _table_with_question(title, ('prompt', 'P(mixed)', 'success', 'visits'))
  for entry in entries:
    numbers = f'{entry["mixed"]:.2f}', f'{entry["success"]:.2f}', str(entry['visits'])
    table.add_row(str(entry['prompt']), *numbers, _one_line(entry['question']))
  console.print(table)


def _print_suspects(console: Console, suspects: list[dict]) -> None:
  columns = ('prompt', 'label', 'majority', 'share', 'visits')
  table = _table_with_question('Labels that rollouts contradict', columns)
  for suspect in suspects:
    labels = _one_line(suspect['given']), _one_line(suspect['majority'])
    numbers = f'{suspect["share"]:.0%}', str(suspect['visits'])
    table.add_row(str(suspect['prompt']), *labels, *numbers, _one_line(suspect['question']))
  console.print(table)


def _table_with_question(title: str, columns: Iterable[str]) -> Table:
  table = Table(title=title, title_justify='left')
  for name in columns:
    table.add_column(name, justify='right', overflow='fold')
  table.add_column('question', overflow='ellipsis', no_wrap=True, max_width=60)
  return table


def _one_line(text: str) -> Text:
  """Text of the data on one line. As rich.Text, so that [brackets] in it are no markup."""
  return Text(str(text).replace('\n', ' '))
