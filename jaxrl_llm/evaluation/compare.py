"""Paired comparison of two evaluations of the same prompts by the same grader."""

from __future__ import annotations

import collections
import json
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.evaluation import estimate, tally
from jaxrl_llm.types import JsonObject, UserError

VERSION = 1  # of the file of an evaluation
Evaluation = JsonObject  # the contents of such a file, see `evaluate`


def load(path: str) -> Evaluation:
  """Read the file of an evaluation. Raises UserError for another file or version."""
  where = f'--against={path}'
  try:
    contents = json.loads(safe_files.read(path))
  except (OSError, ValueError) as error:
    raise UserError(
      f'{where} cannot be read ({error}); name the eval/step_….json of a run.'
    ) from error
  version = contents.get('version') if isinstance(contents, dict) else None
  if version != VERSION:
    raise UserError(
      f'{where} is no evaluation of version {VERSION} ({version!r}); evaluate again with --mode=eval.'
    )
  return contents


def check(grader: JsonObject, ids: Sequence[str], theirs: Evaluation) -> None:
  """Raises UserError where `theirs` has another grader, or other prompts than `ids`."""
  if grader != theirs['grader']:
    names = sorted(grader.keys() | theirs['grader'].keys())
    changes = '; '.join(
      f'{name}: {theirs["grader"].get(name)!r} there, {grader.get(name)!r} here'
      for name in names
      if grader.get(name) != theirs['grader'].get(name)
    )
    raise UserError(f'--against was judged by another grader ({changes}); evaluate both with one.')
  here, there = set(_order(ids)), set(_order(_ids(theirs)))
  if here != there:
    raise UserError(
      f'--against holds other prompts: of {len(there)} there and {len(here)} here {len(here & there)} are the same; '
      'evaluate both on the same config.data and config.evaluation.prompts.'
    )


def differences(ours: Evaluation, theirs: Evaluation) -> list[JsonObject]:
  """Ours − theirs for every measure that both have, over all prompts, and for each source where there are several.

  dict(source, measure, prompts, ours, theirs, mean, low, high, p), see `estimate.difference`. Raises UserError as
  `check` does.
  """
  check(ours['grader'], _ids(ours), theirs)
  our_order, their_order = _order(_ids(ours)), _order(_ids(theirs))
  keys = sorted(our_order)
  sources = [row['source'] for row in ours['rows'] if row['kind'] == 'greedy']
  source_P = np.array(sources)[[our_order[key] for key in keys]]
  x = _measures(ours, [our_order[key] for key in keys])
  y = _measures(theirs, [their_order[key] for key in keys])
  distinct, records = sorted(set(sources)), []
  for source in ('all', *(distinct if len(distinct) > 1 else ())):
    in_P = (source_P == source) | (source == 'all')
    for measure in (name for name in x if name in y):
      x_P, y_P = x[measure][in_P], y[measure][in_P]
      record = dict(source=source, measure=measure, prompts=int(in_P.sum()))
      record |= dict(ours=float(x_P.mean()), theirs=float(y_P.mean()))
      records.append(record | estimate.difference(x_P, y_P)._asdict())
  return records


def _ids(evaluation: Evaluation) -> list[str]:
  return [row['id'] for row in evaluation['rows'] if row['kind'] == 'greedy']


def _order(ids: Sequence[str]) -> dict[tuple[str, int], int]:
  """(id, number of its earlier occurrences) of every prompt → its place."""
  occurrences: collections.Counter[str] = collections.Counter()
  order = {}
  for place, name in enumerate(ids):
    order[name, occurrences[name]] = place
    occurrences[name] += 1
  return order


def _measures(evaluation: Evaluation, order: list[int]) -> dict[str, np.ndarray]:
  """Every measure of every prompt, in this order; pass@1, maj@1 and vote@1 are equal, and only the first is kept."""
  values = tally.values(evaluation['rows'], evaluation['grader']['right'])
  curves = {
    f'{name}@{k}': value_P
    for name, by_k in values.curves.items()
    for k, value_P in by_k.items()
    if k > 1 or name == 'pass'
  }
  return {name: value_P[order] for name, value_P in (values.plain | curves).items()}


def table(ours: Evaluation, theirs: Evaluation) -> str:
  """`differences` in percentage points, and the settings that differ. Raises UserError as `check` does."""
  lines = [['source', 'measure', 'prompts', 'against', 'here', 'difference', 'p']]
  for record in differences(ours, theirs):
    means = [f'{100 * record[name]:.1f}' for name in ('theirs', 'ours')]
    change = tally.percent(record['mean'], record['low'], record['high'])
    lines.append(
      [
        record['source'],
        record['measure'],
        str(record['prompts']),
        *means,
        change,
        f'{record["p"]:.3g}',
      ]
    )
  settings = {name: (theirs[name], ours[name]) for name in ('model', 'step')}
  settings |= {k: (theirs['settings'].get(k), value) for k, value in ours['settings'].items()}
  changes = [f'{name}: {old} -> {new}' for name, (old, new) in settings.items() if old != new]
  footer = [f'other than there: {"; ".join(changes)}'] if changes else []
  return '\n'.join(
    [
      tally.aligned(lines),
      '',
      'difference: here − against, in points, with its 95 % interval',
      *footer,
    ]
  )
