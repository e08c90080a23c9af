"""Shared code of the procedural sources: reads config.data.tasks and fills two disjoint sets of rows."""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from absl import logging

from jaxrl_llm.types import JsonObject, JsonValue, Row, UserError

if TYPE_CHECKING:
  from jaxrl_llm.config.schema import DataConfig

DEFAULT_SIZE = 1024
# Draws in a row without a new question after which the task counts as exhausted.
_MAX_MISSES = 500

Draw = Callable[[int], Row]  # it may raise NoQuestion, or IndexError at its end


class NoQuestion(Exception):
  """A generator finds no question for one number of its stream; others may have one."""


class Task(NamedTuple):
  """One entry of config.data.tasks."""

  field: str  # config.data.tasks[i], for messages
  name: str
  settings: JsonObject
  rows: int
  held_out: int


def make_row(
  source: str, prompt: str | Sequence[dict[str, str]], answer: str, extra: JsonObject
) -> Row:
  """Returns a Row whose id is a hash of source, prompt (text or messages) and answer."""
  content = json.dumps([source, prompt, answer], sort_keys=True)
  row_id = hashlib.sha256(content.encode()).hexdigest()[:16]
  is_text = isinstance(prompt, str)
  question, messages = (prompt, ()) if is_text else ('', tuple(prompt))
  return Row(row_id, question, messages, answer, source, extra)


def question_key(row: Row) -> str:
  """Returns a key that is equal for rows of the same question up to surrounding white space.

  Of a row without a question, its id.
  """
  if not row.messages:
    return row.question.strip() or row.id
  return json.dumps([[m['role'], m['content'].strip()] for m in row.messages])


def plan(
  entries: Iterable[Any],
  data: DataConfig,
  held_out: int,
  valid: Iterable[str],
  settings_of: Callable[[str], Iterable[str]],
) -> list[Task]:
  """Returns the tasks of config.data.tasks with their numbers of training and held-out rows.

  A task with a `size` has that many rows; the others share the rest of data.size by `weight` (default 1). Raises
  UserError for an unknown task or setting, with similar names.
  """
  valid = sorted(valid)
  parsed = [
    _parse_entry(f'config.data.tasks[{index}]', entry, data.source, valid, settings_of)
    for index, entry in enumerate(entries)
  ]
  sizes = [size for *_, size, _ in parsed]
  weights = [0 if size else weight for *_, size, weight in parsed]
  rest = max((data.size or max(DEFAULT_SIZE, sum(sizes))) - sum(sizes), 0)
  rows = [a + b for a, b in zip(sizes, shares(rest, weights), strict=True)]
  for (field, *_), count in zip(parsed, rows, strict=True):
    if not count:
      raise UserError(
        f'{field} gets no row of config.data.size={data.size}; raise that or its weight.'
      )
  held_out_rows = shares(held_out, rows)
  return [Task(*e[:3], n, h) for e, n, h in zip(parsed, rows, held_out_rows, strict=True)]


def draw_tasks(
  source: str,
  data: DataConfig,
  held_out: int,
  defaults: Mapping[str, Mapping[str, int]],
  minimum: Mapping[str, int],
  draw: Callable[..., dict],
  default_tasks: Iterable[str],
) -> tuple[list[Row], list[Row]]:
  """Returns (training, held-out) rows of randomly drawn tasks: draw(name, rng, **settings) → question, answer, extra.

  `source` is the prefix of a row's source; `defaults` are the settings of each task, whole numbers of at least
  `minimum`; `default_tasks` are used where data.tasks is empty. Raises UserError as `plan` does, for settings out of
  range, and where `draw` raises ValueError.
  """
  listed = list(data.tasks) or [dict(name=name) for name in default_tasks]
  planned = plan(listed, data, held_out, defaults, defaults.__getitem__)
  streams = []
  for index, task in enumerate(planned):
    settings = {**defaults[task.name], **task.settings}
    if problem := _settings_problem(settings, minimum):
      raise UserError(f'{task.field}: {problem}.')
    draw_task = functools.partial(draw, task.name, **settings)
    sides = [(data.seed, index, task.name, side) for side in ('train', 'held_out')]
    arguments = task.field, f'{source}/{task.name}', draw_task
    streams.append(tuple(functools.partial(_draw_row, *arguments, seed) for seed in sides))
  return collect(planned, streams, data.seed)


def _draw_row(field: str, source: str, draw: Callable[..., dict], seed: tuple, index: int) -> Row:
  try:
    content = draw(random.Random(derived_seed(*seed, index)))
  except ValueError as error:
    raise UserError(f'{field}: {error}; change its settings.') from error
  return make_row(source, content['question'], content['answer'], content['extra'])


def _settings_problem(settings: Mapping[str, int], minimum: Mapping[str, int]) -> str:
  """Returns what is wrong with the settings of a task, or ''."""
  for name, value in settings.items():
    if type(value) is not int or value < minimum[name]:
      return f'{name}={value!r} must be a whole number of at least {minimum[name]}'
  for name, low in settings.items():
    top = settings.get(f'max_{name[4:]}', low) if name.startswith('min_') else low
    if low > top:
      return f'{name}={low} is above max_{name[4:]}={top}'
  return ''


def collect(
  tasks: Sequence[Task], streams: Sequence[tuple[Draw, Draw]], seed: int
) -> tuple[list[Row], list[Row]]:
  """Draws each task's two streams into (training, held-out) rows without repeated questions.

  A stream ends with IndexError. The training rows are in a seeded random order.
  """
  keys: set[str] = set()
  train, held_out = [], []
  for task, draws in zip(tasks, streams, strict=True):
    training_rows, held_out_rows = _fill(task, draws, keys)
    if not training_rows:
      raise UserError(f'{task.field}: {task.name!r} gave no new question; change its settings.')
    if len(training_rows) < task.rows or len(held_out_rows) < task.held_out:
      logging.warning(
        '%s: %r gave %d training and %d held-out rows, not %d and %d: it has no more questions.',
        task.field, task.name, len(training_rows), len(held_out_rows), task.rows, task.held_out,
      )  # fmt: skip
    train += training_rows
    held_out += held_out_rows
  order = np.random.default_rng(seed).permutation(len(train))
  return [train[i] for i in order], held_out


def derived_seed(*parts: Any) -> int:
  """Returns a seed in [0, 2**31) that is a hash of the parts, which are JSON values."""
  # A hash, because generators add the row number to their seed: seeds 0 and 1 would give nearly the same rows.
  text = json.dumps(parts, sort_keys=True, default=str)
  return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], 'big') >> 1


def _parse_entry(
  field: str,
  entry: JsonValue,
  source: str,
  valid: Sequence[str],
  settings_of: Callable[[str], Iterable[str]],
) -> tuple[str, str, JsonObject, int, float]:
  """(field, name, settings, size, weight) of one entry of config.data.tasks."""
  if not hasattr(entry, 'items'):
    raise UserError(f'{field}={entry!r} must be a dict with the name of a task: dict(name=...).')
  entry = dict(entry.items())
  name = entry.pop('name', None)
  if name not in valid:
    raise UserError(f'{field}.name={name!r} is no {source} task; {_near(name, valid)}.')
  size, weight = entry.pop('size', 0), entry.pop('weight', 1)
  check_number(field, 'size', size, integer=True)
  check_number(field, 'weight', weight)
  known = sorted(settings_of(name))
  for key in entry:
    if key not in known:
      near = _near(key, ['size', 'weight', *known])
      raise UserError(f'{field}.{key} is no setting of {name!r}; {near}.')
  return field, name, entry, size, weight


def _fill(task: Task, draws: tuple[Draw, Draw], keys: set[str]) -> tuple[list[Row], list[Row]]:
  """(training, held-out) rows of a task whose questions are not in `keys`, to which they are added."""
  sets: tuple[list[Row], list[Row]] = ([], [])
  sizes, position, misses = (task.rows, task.held_out), [0, 0], 0
  while misses < _MAX_MISSES and any(len(s) < n for s, n in zip(sets, sizes, strict=True)):
    # In proportion, so that a task with few questions fills both sets.
    side = int(len(sets[1]) * sizes[0] < len(sets[0]) * sizes[1])
    try:
      row = draws[side](position[side])
    except IndexError:
      break
    except NoQuestion:
      row = None
    position[side] += 1
    if row is None or question_key(row) in keys:
      misses += 1
      continue
    misses = 0
    keys.add(question_key(row))
    sets[side].append(row)
  return sets


def shares(total: int, weights: Sequence[float]) -> list[int]:
  """Splits `total` in proportion to the weights, by largest remainder."""
  if not sum(weights):
    return [0] * len(weights)
  exact = [total * w / sum(weights) for w in weights]
  shares = [int(x) for x in exact]
  order = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
  for i in order[: total - sum(shares)]:
    shares[i] += 1
  return shares


def check_number(field: str, name: str, value: JsonValue, integer: bool = False) -> None:
  """Raises UserError unless the value is a number from 0 up."""
  types = int if integer else int | float
  if isinstance(value, bool) or not isinstance(value, types) or value < 0:
    noun = 'a whole number of rows' if integer else 'a number'
    raise UserError(f'{field}.{name}={value!r} must be {noun} from 0 up.')


def _near(name: JsonValue, valid: Sequence[str]) -> str:
  close = difflib.get_close_matches(str(name), valid, n=3, cutoff=0.5)
  every = ', '.join(valid)
  if close:
    return f'did you mean {" or ".join(close)} (valid: {every})'
  return f'choose one of: {every}'
