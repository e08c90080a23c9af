"""Rows of reasoning-gym's generators, by their settings or by the levels of their own curricula."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from jaxrl_llm.data import tasks
from jaxrl_llm.types import JsonObject, JsonValue, Row, UserError

LEVELS = 'levels'  # our additional setting: (lowest, highest), both included


def settings_of(name: str) -> set[str]:
  """Returns the names of the settings of a generator."""
  from reasoning_gym.factory import DATASETS

  fields = dataclasses.fields(DATASETS[name][1])
  return {f.name for f in fields if f.init} - {'seed', 'size'} | {LEVELS}


def stream(task: tasks.Task, seed: int) -> tasks.Draw:
  """Returns a function from i to row i of a task. With levels, rows cycle through them.

  Raises UserError for settings that the generator refuses and for invalid levels.
  """
  # The size only bounds i.
  size = task.rows if task.rows > 20_000 else min(20 * task.rows + 1000, 20_000)
  settings = dict(task.settings)
  levels = _levels(task, settings.pop(LEVELS, ()))
  kinds = [
    (dict(level=k), _at_level(task.name, k) | settings, tasks.derived_seed(seed, k)) for k in levels
  ] or [({}, settings, seed)]
  datasets = [
    _dataset(task, size, kind_settings, kind_seed) for _, kind_settings, kind_seed in kinds
  ]

  def draw(index: int) -> Row:
    number, kind = divmod(index, len(kinds))
    if number >= size:
      raise IndexError(index)
    try:
      entry = datasets[kind][number]
    except (
      RuntimeError
    ) as error:  # such as a maze in which no path has the length that is asked for
      raise tasks.NoQuestion(str(error)) from error
    level, kind_settings, _ = kinds[kind]
    answer = '' if entry['answer'] is None else str(entry['answer'])
    gym = dict(name=task.name, settings=kind_settings, answer=entry['answer'])
    extra = dict(gym=gym, metadata=entry['metadata']) | level
    return tasks.make_row(task.name, entry['question'], answer, extra)

  return draw


def _dataset(task: tasks.Task, size: int, settings: JsonObject, seed: int) -> Any:
  import reasoning_gym

  try:
    dataset = reasoning_gym.create_dataset(task.name, seed=seed, size=size, **settings)
    with contextlib.suppress(RuntimeError):  # it finds no question
      dataset[0]  # some generators check their settings only here
  except Exception as error:
    raise UserError(
      f'{task.field}: {task.name!r} refuses its settings {settings} '
      f'({type(error).__name__}: {error}); change them.'
    ) from error
  return dataset


def _levels(task: tasks.Task, bounds: JsonValue) -> range:
  """The levels from bounds[0] to bounds[1]; empty for ()."""
  from reasoning_gym.factory import CURRICULA

  if bounds == ():
    return range(0)
  if task.name not in CURRICULA:
    raise UserError(f'{task.field}.{LEVELS}: {task.name!r} has no levels; give its settings.')
  most = max(len(a.levels) for a in CURRICULA[task.name]().attributes.values()) - 1
  is_pair = (
    isinstance(bounds, list | tuple) and len(bounds) == 2 and all(type(x) is int for x in bounds)
  )
  if not is_pair or not 0 <= bounds[0] <= bounds[1] <= most:
    raise UserError(
      f'{task.field}.{LEVELS}={bounds!r} must be the lowest and the highest, of the levels 0 to {most} of '
      f'{task.name!r}.'
    )
  return range(bounds[0], bounds[1] + 1)


def _at_level(name: str, level: int) -> JsonObject:
  """The settings of the generator's own curriculum at a level; attributes with fewer levels are at their last."""
  from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode
  from reasoning_gym.factory import CURRICULA

  curriculum, names = CURRICULA[name](), set()
  for key, attribute in curriculum.attributes.items():
    curriculum.set_attr_level(key, min(level, len(attribute.levels) - 1))
    fields = ('field_name', 'lower_field_name', 'upper_field_name')
    names |= {getattr(attribute, field, '') for field in fields} - {''}
  # The other modes mix in easier rows; here all rows of a level have the same difficulty.
  settings = curriculum.generate_configuration(
    context=DefaultCurriculumContext(mode=RangeAttributeMode.UPPER_BOUND)
  )
  return {field: getattr(settings, field) for field in sorted(names)}
