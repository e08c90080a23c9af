"""From the rows of an evaluation to numbers: by prompt, by source and level, as metrics, as curves, as a table.

A row is one prompt answered in one way, `kind` 'greedy' or 'sampled': see `evaluate`. Everything here follows from
rows, so that a file tells what a run told.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.evaluation import estimate

_ALL = 'all'


class Values(NamedTuple):
  """One number for every prompt, by the name of what it measures."""

  plain: dict[str, np.ndarray]  # greedy, mean@n, best@n
  curves: dict[str, dict[int, np.ndarray]]  # pass, maj, vote → k → [P]
  whole: dict[str, list[bool]]  # of each curve and k: whether all subsets were looked at


def values(rows: Sequence[dict], right: float) -> Values:
  """Of each prompt, in the order of its greedy rows. A score from `right` up is a right answer. Source: none.

  greedy, mean@n and best@n are of scores as the grader gave them. pass@k, maj@k and vote@k are of right and wrong, for
  k = 1, 2, 4, … n; maj only where rows say which answers are equal, vote only where they say how far each is trusted.
  """
  of = lambda kind: [row for row in rows if row['kind'] == kind]  # noqa: E731
  plain = dict(greedy=np.array([row['score'][0] for row in of('greedy')], float))
  sampled, curves, whole = of('sampled'), {}, {}
  if not sampled:
    return Values(plain, curves, whole)
  score_PxN = np.array([row['score'] for row in sampled], float)
  n = score_PxN.shape[1]
  plain |= {f'mean@{n}': score_PxN.mean(1), f'best@{n}': score_PxN.max(1)}
  right_PxN, sizes = score_PxN >= right, estimate.sizes(n)
  curves['pass'] = {k: estimate.passes(right_PxN, k) for k in sizes}
  if all('answer' in row for row in sampled):
    answer_PxN = np.array([_numbers(row['answer']) for row in sampled])
    weights = dict(maj=None)
    if all('trust' in row for row in sampled):
      weights['vote'] = np.array([row['trust'] for row in sampled])
    for name, weight_PxN in weights.items():
      told = {k: estimate.votes(answer_PxN, right_PxN, k, weight_PxN) for k in sizes}
      curves[name] = {k: value_P for k, (value_P, _) in told.items()}
      whole[name] = [exact for _, exact in told.values()]
  return Values(plain, curves, whole)


def _numbers(answers: Sequence[str | None]) -> list[int]:
  """Equal numbers for equal answers, −1 for none."""
  number = {answer: i for i, answer in enumerate(dict.fromkeys(answers))}
  return [-1 if answer is None else number[answer] for answer in answers]


def groups(rows: Sequence[dict], right: float) -> list[dict[str, Any]]:
  """One record for all prompts, for each source, and for each level of a source that has several. Source: none.

  dict(source, level, prompts, measures: name → dict(mean, low, high), curves: name → dict(k, mean, low, high, exact)):
  intervals of 95 % over prompts (`estimate.interval`), lists as long as `k`, `exact` where all subsets were looked at.
  `source` of the first is 'all', `level` of whole sources ''.
  """
  of_prompts = values(rows, right)
  first = [(row['source'], row['level']) for row in rows if row['kind'] == 'greedy']
  at = {(_ALL, ''): np.ones(len(first), bool)}
  for source in sorted({source for source, _ in first}):
    at[source, ''] = np.array([one[0] == source for one in first])
    levels = sorted({level for other, level in first if other == source}, key=_natural)
    if len(levels) > 1:
      at |= {
        (source, level): np.array([one == (source, level) for one in first]) for level in levels
      }
  return [
    dict(source=source, level=level, prompts=int(in_P.sum()), **_told(of_prompts, in_P))
    for (source, level), in_P in at.items()
  ]


def _natural(level: str) -> list:
  """'length=10' after 'length=9'."""
  return [
    (int(part), '') if part.isdigit() else (-1, part) for part in re.split(r'([0-9]+)', level)
  ]


def _told(of_prompts: Values, in_P: np.ndarray) -> dict[str, Any]:
  """The means and intervals of some prompts."""
  of = lambda value_P: estimate.interval(value_P[in_P])  # noqa: E731
  measures = {name: of(value_P)._asdict() for name, value_P in of_prompts.plain.items()}
  curves = {}
  for name, by_k in of_prompts.curves.items():
    mean, low, high = map(list, zip(*(of(value_P) for value_P in by_k.values()), strict=True))
    exact = of_prompts.whole.get(name, [True] * len(by_k))
    curves[name] = dict(k=list(by_k), mean=mean, low=low, high=high, exact=exact)
    measures[f'{name}@{max(by_k)}'] = dict(mean=mean[-1], low=low[-1], high=high[-1])
  return dict(measures=measures, curves=curves)


def metrics(told: Sequence[dict[str, Any]]) -> dict[str, float]:
  """val-core/<source>/acc/<measure> of whole sources and of all. Source: none."""
  whole = sorted((group for group in told if not group['level']), key=lambda g: g['source'] == _ALL)
  return {
    f'val-core/{group["source"]}/acc/{name}': value['mean']
    for group in whole
    for name, value in group['measures'].items()
  }


def table(told: Sequence[dict[str, Any]]) -> str:
  """The measures of every group, and the curves of all prompts, in per cent with their intervals. Source: none."""
  names = [name for name in told[0]['measures'] if not _said_twice(told, name)]
  lines = [['source', 'level', 'prompts', *names]]
  alone = sum(not group['level'] for group in told) == 2  # a single source is all there is
  for group in (*told[1 + alone :], told[0]):
    cells = [percent(**group['measures'][name]) for name in names]
    lines.append([group['source'], group['level'], str(group['prompts']), *cells])
  curves = told[0]['curves']
  if not curves:
    return aligned(lines)
  ks = curves['pass']['k']
  steps = [['k', *(f'{name}@k' for name in curves)]]
  for i, k in enumerate(ks):
    cells = [
      percent(*(curve[part][i] for part in ('mean', 'low', 'high'))) for curve in curves.values()
    ]
    steps.append([str(k), *cells])
  return f'{aligned(lines)}\n\n{aligned(steps)}'


def _said_twice(told: Sequence[dict[str, Any]], name: str) -> bool:
  """best@n where scores are 0 and 1: it is pass@n."""
  measures = [group['measures'] for group in told]
  return name.startswith('best@') and all(
    m[name] == m[name.replace('best', 'pass')] for m in measures
  )


def percent(mean: float, low: float | None, high: float | None) -> str:
  """'31.2 [24.9, 37.7]'. Source: none."""
  return f'{100 * mean:.1f}' + ('' if low is None else f' [{100 * low:.1f}, {100 * high:.1f}]')


def aligned(lines: Sequence[Sequence[str]]) -> str:
  """Columns of one width each under a ruled header, words to the left and numbers to the right. Source: none."""
  columns = list(zip(*lines, strict=True))
  widths = [max(map(len, column)) for column in columns]
  right = [any(c.isdigit() for c in column[-1][:2]) for column in columns]
  pad = lambda cell, width, to_right: cell.rjust(width) if to_right else cell.ljust(width)  # noqa: E731
  laid = ['  '.join(map(pad, line, widths, right)).rstrip() for line in lines]
  return '\n'.join([laid[0], '-' * max(map(len, laid)), *laid[1:]])
