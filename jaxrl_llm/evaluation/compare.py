"""Two evaluations of the same prompts, by the same grader: who is better, by how much, and how sure that is."""

from __future__ import annotations

import collections
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.evaluation import estimate, tally
from jaxrl_llm.types import UserError

VERSION = 1  # of the file of an evaluation


def load(path: str) -> dict[str, Any]:
  """The file of an evaluation. Raises UserError where it is none, or of another version. Source: none."""
  where = f'--against={path}'
  try:
    told = json.loads(safe_files.read(path))
  except (OSError, ValueError) as error:
    raise UserError(
      f'{where} cannot be read ({error}); name the eval/step_….json of a run.'
    ) from error
  if not isinstance(told, dict) or told.get('version') != VERSION:
    found = told.get('version') if isinstance(told, dict) else None
    raise UserError(
      f'{where} is no evaluation of version {VERSION} ({found!r}); evaluate again with --mode=eval.'
    )
  return told


def check(grader: dict[str, Any], ids: Sequence[str], theirs: dict[str, Any]) -> None:
  """Raises UserError where `theirs` had another grader, or other prompts than `ids`. Source: none."""
  if grader != theirs['grader']:
    names = sorted(grader.keys() | theirs['grader'].keys())
    told = '; '.join(
      f'{name}: {theirs["grader"].get(name)!r} there, {grader.get(name)!r} here'
      for name in names
      if grader.get(name) != theirs['grader'].get(name)
    )
    raise UserError(f'--against was judged by another grader ({told}); evaluate both with one.')
  here, there = set(_order(ids)), set(_order(_ids(theirs)))
  if here != there:
    raise UserError(
      f'--against holds other prompts: of {len(there)} there and {len(here)} here {len(here & there)} are the same; '
      'evaluate both on the same config.data and config.evaluation.prompts.'
    )


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[dict[str, Any]]:
  """Ours − theirs for every measure that both have, of all prompts, and of each source where there are several.

  dict(source, measure, prompts, ours, theirs, mean, low, high, p), see `estimate.difference`. Raises UserError as
  `check` does. Source: none.
  """
  check(ours['grader'], _ids(ours), theirs)
  order, other = (_order(_ids(told)) for told in (ours, theirs))
  names = sorted(order)
  of_rows = [row['source'] for row in ours['rows'] if row['kind'] == 'greedy']
  source_P = np.array(of_rows)[[order[name] for name in names]]
  x = _plain(ours, [order[name] for name in names])
  y = _plain(theirs, [other[name] for name in names])
  sources, found = sorted(set(of_rows)), []
  for source in ('all', *(sources if len(sources) > 1 else ())):
    in_P = (source_P == source) | (source == 'all')
    for measure in (name for name in x if name in y):
      pair = x[measure][in_P], y[measure][in_P]
      told = dict(ours=float(pair[0].mean()), theirs=float(pair[1].mean()), prompts=int(in_P.sum()))
      told |= estimate.difference(*pair)._asdict()
      found.append(dict(source=source, measure=measure) | told)
  return found


def _ids(told: dict[str, Any]) -> list[str]:
  return [row['id'] for row in told['rows'] if row['kind'] == 'greedy']


def _order(ids: Sequence[str]) -> dict[tuple[str, int], int]:
  """(id, how often it came before) of every prompt → its place."""
  seen: collections.Counter = collections.Counter()
  order = {}
  for place, name in enumerate(ids):
    order[name, seen[name]] = place
    seen[name] += 1
  return order


def _plain(told: dict[str, Any], order: list[int]) -> dict[str, np.ndarray]:
  """Every measure of every prompt, in this order; of pass@1, maj@1 and vote@1, which are one, the first."""
  found = tally.values(told['rows'], told['grader']['right'])
  curves = {
    f'{name}@{k}': value_P
    for name, by_k in found.curves.items()
    for k, value_P in by_k.items()
    if k > 1 or name == 'pass'
  }
  return {name: value_P[order] for name, value_P in (found.plain | curves).items()}


def table(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
  """`differences` in points, and what else differs. Raises UserError as that does. Source: none."""
  lines = [['source', 'measure', 'prompts', 'against', 'here', 'difference', 'p']]
  for one in differences(ours, theirs):
    cells = [f'{100 * one[name]:.1f}' for name in ('theirs', 'ours')]
    change = tally.percent(one['mean'], one['low'], one['high'])
    lines.append(
      [one['source'], one['measure'], str(one['prompts']), *cells, change, f'{one["p"]:.3g}']
    )
  told = {name: (theirs[name], ours[name]) for name in ('model', 'step')}
  told |= {name: (theirs['settings'].get(name), value) for name, value in ours['settings'].items()}
  unlike = [f'{name}: {old} -> {new}' for name, (old, new) in told.items() if old != new]
  about = [f'other than there: {"; ".join(unlike)}'] if unlike else []
  return '\n'.join(
    [
      tally.aligned(lines),
      '',
      'difference: here − against, in points, with its 95 % interval',
      *about,
    ]
  )
