"""Rows of reasoning-gym's generators, by their settings or by the levels of their own curricula."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_llm.data import tasks
from jaxrl_llm.types import Row, UserError

LEVELS = 'levels'  # the setting that is ours: (lowest, highest), both included


def settings_of(name: str) -> set[str]:
  """What a task of this generator may set. Source: none."""
  from reasoning_gym.factory import DATASETS

  fields = dataclasses.fields(DATASETS[name][1])
  return {f.name for f in fields if f.init} - {'seed', 'size'} | {LEVELS}


def stream(task: tasks.Task, seed: int) -> tasks.Draw:
  """Row i of a task; with levels, one of each in turn. The size only bounds how far it may be read.

  Raises UserError for settings that the generator refuses, and levels that are none. Source: none.
  """
  size = task.rows if task.rows > 20_000 else min(20 * task.rows + 1000, 20_000)
  settings = dict(task.settings)
  levels = _levels(task, settings.pop(LEVELS, ()))
  kinds = [
    (dict(level=k), _at_level(task.name, k) | settings, tasks.derived_seed(seed, k)) for k in levels
  ] or [({}, settings, seed)]
  datasets = [_dataset(task, size, told, own) for _, told, own in kinds]

  def draw(index: int) -> Row:
    each, kind = divmod(index, len(kinds))
    if each >= size:
      raise IndexError(index)
    entry, (level, told, _) = datasets[kind][each], kinds[kind]
    answer = '' if entry['answer'] is None else str(entry['answer'])
    gym = dict(name=task.name, settings=told, answer=entry['answer'])
    extra = dict(gym=gym, metadata=entry['metadata']) | level
    return tasks.make_row(task.name, entry['question'], answer, extra)

  return draw


def _dataset(task: tasks.Task, size: int, settings: dict[str, Any], seed: int) -> Any:
  import reasoning_gym

  try:
    dataset = reasoning_gym.create_dataset(task.name, seed=seed, size=size, **settings)
    dataset[0]  # some generators see only now that their settings cannot be met
  except Exception as error:
    raise UserError(
      f'{task.field}: {task.name!r} refuses its settings {settings} '
      f'({type(error).__name__}: {error}); change them.'
    ) from error
  return dataset


def _levels(task: tasks.Task, told: Any) -> range:
  """The levels that a task asks for; none of them, where it asks for none."""
  from reasoning_gym.factory import CURRICULA

  if told == ():
    return range(0)
  if task.name not in CURRICULA:
    raise UserError(f'{task.field}.{LEVELS}: {task.name!r} has no levels; give its settings.')
  most = max(len(a.levels) for a in CURRICULA[task.name]().attributes.values()) - 1
  pair = isinstance(told, list | tuple) and len(told) == 2 and all(type(x) is int for x in told)
  if not pair or not 0 <= told[0] <= told[1] <= most:
    raise UserError(
      f'{task.field}.{LEVELS}={told!r} must be the lowest and the highest, of the levels 0 to {most} of {task.name!r}.'
    )
  return range(told[0], told[1] + 1)


def _at_level(name: str, level: int) -> dict[str, Any]:
  """What the generator's own curriculum sets at a level: all its attributes there, or at their last."""
  from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode
  from reasoning_gym.factory import CURRICULA

  curriculum, names = CURRICULA[name](), set()
  for key, attribute in curriculum.attributes.items():
    curriculum.set_attr_level(key, min(level, len(attribute.levels) - 1))
    fields = ('field_name', 'lower_field_name', 'upper_field_name')
    names |= {getattr(attribute, field, '') for field in fields} - {''}
  # Not easier ones among them, as its other modes have it: rows of a level are alike.
  made = curriculum.generate_configuration(
    context=DefaultCurriculumContext(mode=RangeAttributeMode.UPPER_BOUND)
  )
  return {field: getattr(made, field) for field in sorted(names)}
