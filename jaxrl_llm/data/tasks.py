"""What the procedural sources share: reading config.data.tasks, and filling two disjoint sets."""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from jaxrl_llm.types import Row, UserError

DEFAULT_SIZE = 1024
# So many draws in a row without a new question: the task has no more, or hardly any.
_MAX_MISSES = 500

Draw = Callable[[int], Row]


class Task(NamedTuple):
  """One entry of config.data.tasks."""

  field: str  # config.data.tasks[i], for messages
  name: str
  settings: dict[str, Any]
  rows: int
  held_out: int


def make_row(source: str, prompt: Any, answer: str, extra: dict[str, Any]) -> Row:
  """A Row whose id is a hash of source, prompt (text or messages) and answer. Source: none."""
  told = json.dumps([source, prompt, answer], sort_keys=True)
  identity = hashlib.sha256(told.encode()).hexdigest()[:16]
  text = isinstance(prompt, str)
  return Row(identity, prompt if text else '', () if text else tuple(prompt), answer, source, extra)


def question_key(row: Row) -> str:
  """What two rows of the same question share, whatever space surrounds it. Source: none."""
  if not row.messages:
    return row.question.strip()
  return json.dumps([[m['role'], m['content'].strip()] for m in row.messages])


def plan(
  entries: Iterable[Any],
  data: Any,
  held_out: int,
  valid: Iterable[str],
  settings_of: Callable[[str], Iterable[str]],
) -> list[Task]:
  """config.data.tasks → tasks with their shares of data.size and of `held_out` rows.

  A task with a `size` has that many rows; the others share the rest of data.size by `weight`
  (default 1). Raises UserError for an unknown task or setting, with the names that come near.
  Source: none.
  """
  valid = sorted(valid)
  read = [
    _read(f'config.data.tasks[{index}]', entry, data.source, valid, settings_of)
    for index, entry in enumerate(entries)
  ]
  sizes = [size for *_, size, _ in read]
  weights = [0 if size else weight for *_, size, weight in read]
  rest = max((data.size or max(DEFAULT_SIZE, sum(sizes))) - sum(sizes), 0)
  rows = [a + b for a, b in zip(sizes, shares(rest, weights), strict=True)]
  for (field, *_), count in zip(read, rows, strict=True):
    if not count:
      raise UserError(
        f'{field} gets no row of config.data.size={data.size}; raise that or its weight.'
      )
  held = shares(held_out, rows)
  return [Task(*e[:3], n, h) for e, n, h in zip(read, rows, held, strict=True)]


def drawn(
  source: str,
  data: Any,
  held_out: int,
  kinds: Mapping[str, Mapping[str, int]],
  least: Mapping[str, int],
  draw: Callable[..., dict],
  default: Iterable[str],
) -> tuple[list[Row], list[Row]]:
  """Rows of tasks that are drawn from a random stream: draw(name, rng, **settings) → question, answer, extra.

  source: in front of a task's name; kinds: of every task its settings, whole numbers, with their defaults; least: how
  small each may be; default: the tasks where data.tasks names none. Raises UserError as `plan`, for settings out of
  range, and where `draw` raises ValueError. Source: none.
  """
  listed = list(data.tasks) or [dict(name=name) for name in default]
  planned = plan(listed, data, held_out, kinds, kinds.__getitem__)
  streams = []
  for index, task in enumerate(planned):
    settings = {**kinds[task.name], **task.settings}
    if why := _fault(settings, least):
      raise UserError(f'{task.field}: {why}.')
    own = functools.partial(draw, task.name, **settings)
    sides = [(data.seed, index, task.name, side) for side in ('train', 'held_out')]
    told = task.field, f'{source}/{task.name}', own
    streams.append(tuple(functools.partial(_drawn_row, *told, seed) for seed in sides))
  return collect(planned, streams, data.seed)


def _drawn_row(field: str, source: str, draw: Callable[..., dict], seed: tuple, index: int) -> Row:
  try:
    drawn = draw(random.Random(derived_seed(*seed, index)))
  except ValueError as error:
    raise UserError(f'{field}: {error}; change its settings.') from error
  return make_row(source, drawn['question'], drawn['answer'], drawn['extra'])


def _fault(settings: Mapping[str, int], least: Mapping[str, int]) -> str:
  """What is wrong with the settings of a task, '' where nothing is."""
  for name, value in settings.items():
    if type(value) is not int or value < least[name]:
      return f'{name}={value!r} must be a whole number of at least {least[name]}'
  for name, low in settings.items():
    top = settings.get(f'max_{name[4:]}', low) if name.startswith('min_') else low
    if low > top:
      return f'{name}={low} is above max_{name[4:]}={top}'
  return ''


def collect(
  tasks: Sequence[Task], streams: Sequence[tuple[Draw, Draw]], seed: int
) -> tuple[list[Row], list[Row]]:
  """Draws each task's two streams into (training, held-out) rows; no question comes twice.

  A stream ends with IndexError. The training rows come in a seeded order. Source: none.
  """
  seen: set[str] = set()
  train, held_out = [], []
  for task, draws in zip(tasks, streams, strict=True):
    ours, theirs = _fill(task, draws, seen)
    if not ours:
      raise UserError(f'{task.field}: {task.name!r} gave no new question; change its settings.')
    if len(ours) < task.rows or len(theirs) < task.held_out:
      logging.warning(
        '%s: %r gave %d training and %d held-out rows, not %d and %d: it has no more questions.',
        task.field, task.name, len(ours), len(theirs), task.rows, task.held_out,
      )  # fmt: skip
    train += ours
    held_out += theirs
  order = np.random.default_rng(seed).permutation(len(train))
  return [train[i] for i in order], held_out


def derived_seed(*parts: Any) -> int:
  """A seed in [0, 2**31) for each tuple of JSON values, far from every other's. Source: none."""
  # Generators add the row number to their seed, so that seeds 0 and 1 would give nearly the same
  # rows.
  told = json.dumps(parts, sort_keys=True, default=str)
  return int.from_bytes(hashlib.sha256(told.encode()).digest()[:4], 'big') >> 1


def _read(
  field: str,
  entry: Any,
  source: str,
  valid: Sequence[str],
  settings_of: Callable[[str], Iterable[str]],
) -> tuple[str, str, dict[str, Any], int, float]:
  """(field, name, settings, size, weight) of one entry of config.data.tasks."""
  if not hasattr(entry, 'items'):
    raise UserError(f'{field}={entry!r} must be a dict with the name of a task: dict(name=...).')
  entry = dict(entry.items())
  name = entry.pop('name', None)
  if name not in valid:
    raise UserError(f'{field}.name={name!r} is no {source} task; {_near(name, valid)}.')
  size, weight = entry.pop('size', 0), entry.pop('weight', 1)
  check_number(field, 'size', size, whole=True)
  check_number(field, 'weight', weight)
  known = sorted(settings_of(name))
  for key in entry:
    if key not in known:
      near = _near(key, ['size', 'weight', *known])
      raise UserError(f'{field}.{key} is no setting of {name!r}; {near}.')
  return field, name, entry, size, weight


def _fill(task: Task, draws: tuple[Draw, Draw], seen: set[str]) -> tuple[list[Row], list[Row]]:
  sets: tuple[list[Row], list[Row]] = ([], [])
  wanted, at, misses = (task.rows, task.held_out), [0, 0], 0
  while misses < _MAX_MISSES and any(len(s) < n for s, n in zip(sets, wanted, strict=True)):
    # In proportion: a task with few questions must not spend them all on one side.
    side = int(len(sets[1]) * wanted[0] < len(sets[0]) * wanted[1])
    try:
      row = draws[side](at[side])
    except IndexError:
      break
    at[side] += 1
    key = question_key(row)
    misses = misses + 1 if key in seen else 0
    if not misses:
      seen.add(key)
      sets[side].append(row)
  return sets


def shares(total: int, weights: Sequence[float]) -> list[int]:
  """Splits `total` in proportion to the weights, by largest remainder. Source: none."""
  if not sum(weights):
    return [0] * len(weights)
  exact = [total * w / sum(weights) for w in weights]
  shares = [int(x) for x in exact]
  order = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
  for i in order[: total - sum(shares)]:
    shares[i] += 1
  return shares


def check_number(field: str, name: str, value: Any, whole: bool = False) -> None:
  """Raises UserError for what is no number from 0 up. Source: none."""
  kinds = int if whole else int | float
  if isinstance(value, bool) or not isinstance(value, kinds) or value < 0:
    what = 'a whole number of rows' if whole else 'a number'
    raise UserError(f'{field}.{name}={value!r} must be {what} from 0 up.')


def _near(name: Any, valid: Sequence[str]) -> str:
  close = difflib.get_close_matches(str(name), valid, n=3, cutoff=0.5)
  every = ', '.join(valid)
  if close:
    return f'did you mean {" or ".join(close)} (valid: {every})'
  return f'choose one of: {every}'
