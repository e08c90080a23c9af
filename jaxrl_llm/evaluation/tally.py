"""From the rows of an evaluation to numbers: by prompt, by source and level, as metrics, as curves, as a table.

A row is one prompt with its greedy completion or its samples: see `evaluate`. All numbers follow from the rows, so that
a file of eval/ reproduces those that a run printed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.evaluation import estimate
from jaxrl_llm.types import JsonObject

_ALL = 'all'
Record = JsonObject


class Values(NamedTuple):
  """One number for every prompt, by the name of the measure."""

  plain: dict[str, np.ndarray]  # greedy, mean@n, best@n
  curves: dict[str, dict[int, np.ndarray]]  # pass, maj, vote → k → [P]
  exact: dict[str, list[bool]]  # of each curve and k: whether all subsets were enumerated


def values(rows: Sequence[Record], right: float) -> Values:
  """The measures of each prompt, in the order of its greedy rows. A score of at least `right` is correct.

  greedy, mean@n and best@n are of the scores. pass@k, maj@k and vote@k are of correctness, for k = 1, 2, 4, … n; maj
  needs the answers of the rows, vote their P(correct) as well.
  """
  plain = dict(greedy=np.array([row['score'][0] for row in _of_kind(rows, 'greedy')], float))
  curves: dict[str, dict[int, np.ndarray]] = {}
  exact: dict[str, list[bool]] = {}
  sampled = _of_kind(rows, 'sampled')
  if not sampled:
    return Values(plain, curves, exact)
  score_PxN = np.array([row['score'] for row in sampled], float)
  n = score_PxN.shape[1]
  plain |= {f'mean@{n}': score_PxN.mean(1), f'best@{n}': score_PxN.max(1)}
  right_PxN, sizes = score_PxN >= right, estimate.sizes(n)
  curves['pass'] = {k: estimate.passes(right_PxN, k) for k in sizes}
  if all('answer' in row for row in sampled):
    answer_PxN = np.array([_numbered(row['answer']) for row in sampled])
    weights: dict[str, np.ndarray | None] = dict(maj=None)
    if all('trust' in row for row in sampled):
      weights['vote'] = np.array([row['trust'] for row in sampled])
    for name, weight_PxN in weights.items():
      by_k = {k: estimate.votes(answer_PxN, right_PxN, k, weight_PxN) for k in sizes}
      curves[name] = {k: value_P for k, (value_P, _) in by_k.items()}
      exact[name] = [complete for _, complete in by_k.values()]
  return Values(plain, curves, exact)


def _of_kind(rows: Sequence[Record], kind: str) -> list[Record]:
  return [row for row in rows if row['kind'] == kind]


def _numbered(answers: Sequence[str | None]) -> list[int]:
  """Equal integers for equal answers, −1 for none."""
  number = {answer: i for i, answer in enumerate(dict.fromkeys(answers))}
  return [-1 if answer is None else number[answer] for answer in answers]


def groups(rows: Sequence[Record], right: float) -> list[Record]:
  """One record for all prompts, for each source, and for each level of a source that has several.

  dict(source, level, prompts, measures: name → dict(mean, low, high), curves: name → dict(k, mean, low, high, exact)):
  intervals of 95 % over prompts (`estimate.interval`), lists as long as `k`, `exact` where all subsets were enumerated.
  `source` of the first is 'all', `level` of entire sources ''.
  """
  by_prompt = values(rows, right)
  places = [(row['source'], row['level']) for row in _of_kind(rows, 'greedy')]
  masks = {(_ALL, ''): np.ones(len(places), bool)}
  for source in sorted({source for source, _ in places}):
    masks[source, ''] = np.array([place[0] == source for place in places])
    levels = sorted({level for other, level in places if other == source}, key=_natural)
    if len(levels) > 1:
      for level in levels:
        masks[source, level] = np.array([place == (source, level) for place in places])
  return [
    dict(source=source, level=level, prompts=int(in_P.sum()), **_summary(by_prompt, in_P))
    for (source, level), in_P in masks.items()
  ]


def _natural(level: str) -> list[tuple[int, str]]:
  """Sorts 'length=10' after 'length=9'."""
  return [
    (int(part), '') if part.isdigit() else (-1, part) for part in re.split(r'([0-9]+)', level)
  ]


def _summary(by_prompt: Values, in_P: np.ndarray) -> JsonObject:
  """The means and intervals of some prompts."""
  interval = lambda value_P: estimate.interval(value_P[in_P])  # noqa: E731
  measures = {name: interval(value_P)._asdict() for name, value_P in by_prompt.plain.items()}
  curves = {}
  for name, by_k in by_prompt.curves.items():
    mean, low, high = map(list, zip(*map(interval, by_k.values()), strict=True))
    exact = by_prompt.exact.get(name, [True] * len(by_k))
    curves[name] = dict(k=list(by_k), mean=mean, low=low, high=high, exact=exact)
    measures[f'{name}@{max(by_k)}'] = dict(mean=mean[-1], low=low[-1], high=high[-1])
  return dict(measures=measures, curves=curves)


def metrics(records: Sequence[Record]) -> dict[str, float]:
  """val-core/<source>/acc/<measure> of entire sources and of all prompts, from `groups`."""
  sources = sorted(
    (record for record in records if not record['level']), key=lambda r: r['source'] == _ALL
  )
  return {
    f'val-core/{record["source"]}/acc/{name}': value['mean']
    for record in sources
    for name, value in record['measures'].items()
  }


def table(records: Sequence[Record]) -> str:
  """The measures of `groups`, and the curves of all prompts, in per cent with their intervals."""
  names = [name for name in records[0]['measures'] if not _is_duplicate(records, name)]
  lines = [['source', 'level', 'prompts', *names]]
  single = sum(not record['level'] for record in records) == 2  # one source, equal to 'all'
  for record in (*records[1 + single :], records[0]):
    cells = [percent(**record['measures'][name]) for name in names]
    lines.append([record['source'], record['level'], str(record['prompts']), *cells])
  curves = records[0]['curves']
  if not curves:
    return aligned(lines)
  curve_lines = [['k', *(f'{name}@k' for name in curves)]]
  for i, k in enumerate(curves['pass']['k']):
    cells = [
      percent(*(curve[part][i] for part in ('mean', 'low', 'high'))) for curve in curves.values()
    ]
    curve_lines.append([str(k), *cells])
  return f'{aligned(lines)}\n\n{aligned(curve_lines)}'


def _is_duplicate(records: Sequence[Record], name: str) -> bool:
  """best@n equals pass@n where scores are 0 and 1."""
  measures = [record['measures'] for record in records]
  return name.startswith('best@') and all(
    m[name] == m[name.replace('best', 'pass')] for m in measures
  )


def percent(mean: float, low: float | None, high: float | None) -> str:
  """'31.2 [24.9, 37.7]'."""
  return f'{100 * mean:.1f}' + (
    '' if low is None or high is None else f' [{100 * low:.1f}, {100 * high:.1f}]'
  )


def aligned(lines: Sequence[Sequence[str]]) -> str:
  """Columns of equal width under a ruled header, words to the left and numbers to the right."""
  columns = list(zip(*lines, strict=True))
  widths = [max(map(len, column)) for column in columns]
  right = [any(c.isdigit() for c in column[-1][:2]) for column in columns]
  pad = lambda cell, width, to_right: cell.rjust(width) if to_right else cell.ljust(width)  # noqa: E731
  padded = ['  '.join(map(pad, line, widths, right)).rstrip() for line in lines]
  return '\n'.join([padded[0], '-' * max(map(len, padded)), *padded[1:]])
