"""Resolves config.rewards to reward functions: a name in one of `_MODULES`, or 'package.module:function'.

`rewards.fn` decides what is right; the rewards of `rewards.parts` are added to it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_llm.config import extras, schema, stages
from jaxrl_llm.rewards import (
  adapters,
  format_rules,
  instruction_following,
  majority_vote,
  outcomes,
  pairwise,
  verifiers,
)
from jaxrl_llm.rewards.code_execution import graders, sandbox
from jaxrl_llm.rewards.gym import sandboxed, scorers
from jaxrl_llm.rewards.model_judge import judge, rubric
from jaxrl_llm.rewards.outcomes import Settings, Spec
from jaxrl_llm.rewards.parsing import extract
from jaxrl_llm.types import Row, UserError

if TYPE_CHECKING:
  from jaxrl_llm.config.schema import DataConfig, RewardsConfig, Stage

Grader = Callable[[str, Row], float | None]  # None skips the sample

# Reward function → (the package that it needs, the extra that installs it).
_NEEDS = dict(
  gym=('reasoning-gym', 'gym'),
  math_verify=('math-verify', 'math'),
  json_schema=('jsonschema', 'json'),
)


# Modules whose public functions are the reward functions of the registry.
_MODULES = (verifiers, format_rules, instruction_following, judge, rubric, pairwise, graders)
# Reward function → check(settings, where) of its settings beyond their types; settings include those of the workers.
_CHECKS = verifiers.CHECKS | format_rules.CHECKS | judge.CHECKS | rubric.CHECKS | pairwise.CHECKS
# Reward function → check(row, settings) that raises ValueError for a row that it cannot use.
_ROWS = (
  verifiers.ROWS
  | format_rules.ROWS
  | instruction_following.ROWS
  | judge.ROWS
  | rubric.ROWS
  | pairwise.ROWS
)
_MAX_CHECKED_ROWS = 100


class Part(NamedTuple):
  """One reward function of config.rewards."""

  name: str  # in metrics: critic/score/<name>
  weight: float  # in the sum of the rewards
  grader: Grader | None  # None: the reward of an environment


class _GroupGrader(functools.partial):
  """A reward function of pairwise.py with its settings, in the form in which a worker calls it for a whole group."""

  batched = 'group'

  def score_batch(self, texts: Sequence[str], rows: Sequence[Row]) -> list[float]:
    return super().__call__(texts, rows)

  def __call__(self, text: str, row: Row) -> float:
    return self.score_batch([text], [row])[0]


def batch_modes(spec: Spec) -> list[str]:
  """Returns which completions each reward function gets in one call: '' = one, 'group' or 'step'."""
  groups = stages.choices(pairwise)
  return [
    'group' if part.get('fn') in groups else part.get('batched', '')
    for part in (spec, *spec.get('parts', ()))
  ]


def weights(spec: Spec) -> tuple[float, ...]:
  """Returns the weights of config.rewards.fn, which is 1, and of each of config.rewards.parts."""
  return 1.0, *(float(part.get('weight', 1.0)) for part in spec.get('parts', ()))


def names(spec: Spec) -> tuple[str, ...]:
  """Returns the names of config.rewards.fn and of each of config.rewards.parts."""
  return tuple(_name(part) for part in (spec, *spec.get('parts', ())))


def resolve_parts(spec: Spec) -> tuple[Part, ...]:
  """Returns the reward function of config.rewards, then those of its parts, dict(fn=, weight=1.0, name=fn, <settings>).

  Raises UserError as `resolve` does, and for a weight that is no finite number, a name that occurs twice, or
  invalid `right` and `bounds`.
  """
  outcomes.bounds(spec)
  resolved = [Part(_name(spec), 1.0, resolve(spec))]
  for index, part in enumerate(spec.get('parts', ())):
    where = f'rewards.parts[{index}]'
    if not hasattr(part, 'items') or 'fn' not in part:
      raise UserError(f'config.{where}={part!r} must be a dict with fn, such as dict(fn="exact").')
    weight, name = part.get('weight', 1.0), _name(part)
    if not _finite(weight):
      raise UserError(f'config.{where}.weight={weight!r} must be a finite number.')
    if name in [other.name for other in resolved]:
      raise UserError(f'config.{where} is named {name!r} as another is; give it another `name`.')
    settings = {key: value for key, value in part.items() if key not in ('weight', 'name')}
    settings |= {key: spec[key] for key in ('deadline_s', 'workers') if key in spec}
    resolved.append(Part(name, float(weight), resolve(settings, where)))
  return tuple(resolved)


def _name(spec: Spec) -> str:
  return spec.get('name') or str(spec['fn']).rpartition(':')[2]


def _finite(value: Any) -> bool:
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  return is_number and math.isfinite(value)


def resolve(spec: Spec, where: str = 'rewards') -> Grader:
  """Returns f(text, row) -> float for config.rewards, or for one of its parts at `where`.

  Raises UserError for an unknown name or setting, a module that cannot be imported, a signature that adapters.py does
  not know, a missing package, and for code execution without a sandbox.
  """
  pool = dict(deadline_s=spec.get('deadline_s', math.inf), workers=spec.get('workers', 2))
  spec = {
    key: value
    for key, value in dict(spec).items()
    if key not in schema.FIXED_FIELDS['config.rewards']
  }
  fn = spec.get('fn')
  if isinstance(fn, str) and ':' in fn:
    return _user_function(fn, {key: value for key, value in spec.items() if key != 'fn'}, where)
  package, extra = _NEEDS.get(str(fn), ('', ''))
  if package and importlib.util.find_spec(package.replace('-', '_')) is None:
    raise UserError(
      f'config.{where}.fn={fn!r} needs {package}; install the extra: {extras.install(extra)}.'
    )
  module = next((m for m in _MODULES if isinstance(fn, str) and fn in stages.choices(m)), None)
  if module is None:
    names = sorted(name for m in _MODULES for name in stages.choices(m))
    own = ':'.join(str(fn).rsplit('.', 1)) if '.' in str(fn) else 'package.module:function'
    raise UserError(
      f'config.{where}.fn={fn!r} is unknown; choose one of: {", ".join(names)}, or your own function as {own!r}.'
    )
  grader = stages.pick(module, spec, where)
  if module is graders:
    return _sandboxed(grader, where, pool['deadline_s'])
  check = _CHECKS.get(grader.func)
  if check is not None:
    check(_settings(grader) | pool, f'config.{where}')
  return _GroupGrader(grader.func, **grader.keywords) if module is pairwise else grader


def _settings(grader: functools.partial) -> Settings:
  """All settings of a reward function, with defaults."""
  parameters = inspect.signature(grader.func).parameters.values()
  return {p.name: p.default for p in parameters if p.kind == p.KEYWORD_ONLY} | grader.keywords


def _sandboxed(grader: functools.partial, where: str, deadline_s: float) -> Grader:
  """Checks the settings of a reward function that executes code, and that this machine has a sandbox."""
  settings = _settings(grader)
  if not _finite(settings['wall_s']) or not 0 < settings['wall_s'] < deadline_s:
    raise UserError(
      f'config.{where}.wall_s={settings["wall_s"]!r} must be a positive number of seconds, less than '
      f'config.rewards.deadline_s={deadline_s!r}.'
    )
  for name, minimum in (('program_mb', 64), ('processes', 1)):
    if settings[name] < minimum:
      raise UserError(
        f'config.{where}.{name}={settings[name]!r} must be a whole number from {minimum} up.'
      )
  if not _finite(settings.get('tolerance', 0.0)) or settings.get('tolerance', 0.0) < 0:
    raise UserError(
      f'config.{where}.tolerance={settings["tolerance"]!r} must be a number from 0 up.'
    )
  sandbox.require(f'config.{where}.fn={grader.func.__name__!r}')
  return grader


def with_function(settings: RewardsConfig, fn: str) -> RewardsConfig:
  """Returns config.rewards with `fn` alone at its defaults, and the same limits and workers."""
  return dataclasses.replace(
    settings,
    fn=fn,
    right=1.0,
    bounds=(),
    parts=(),
    vote=schema.stage('none'),
    truncate=schema.stage('none'),
    settings={},
  )


def check_tasks(spec: Spec, data: DataConfig) -> None:
  """Raises UserError where config.data.tasks names a reasoning-gym task that config.rewards cannot score here."""
  graded = any(part.get('fn') == 'gym' for part in (spec, *spec.get('parts', ())))
  if graded and data.source == 'gym':
    names = [task.get('name') for task in data.tasks if hasattr(task, 'items')]
    sandboxed.require(map(str, names), 'config.data.tasks')


def check_rows(named: Sequence[tuple[str, Any]], rows: Sequence[Row]) -> None:
  """Raises UserError where a user's function needs a column that a row lacks, and where no row can be graded.

  At most about _MAX_CHECKED_ROWS evenly spaced rows are checked. A single bad row is an error of its completions.
  """
  adapters.check_columns(named, rows)
  sample = rows[:: max(len(rows) // _MAX_CHECKED_ROWS, 1)]
  for name, grader in named:
    function = getattr(grader, 'func', None)
    if (
      function is verifiers.gym
    ):  # rows of files; a single row of an unknown task is an error of its completions
      tasks = {sandboxed.task_of(row) for row in rows}
      sandboxed.require(tasks & scorers.TASKS, 'the rows')
    check = _ROWS.get(function)
    if check and sample:
      problems = [_row_problem(check, row, _settings(grader)) for row in sample]
      if all(problems):
        raise UserError(
          f'config.rewards: {name!r} can grade none of the rows ({problems[0]}); correct the data, or choose '
          f'another function.'
        )


def _row_problem(check: Callable[[Row, Settings], object], row: Row, settings: Settings) -> str:
  try:
    check(row, settings)
  except ValueError as error:
    return str(error)
  return ''


def resolve_extract(spec: Spec, field: str) -> Callable[[str], Hashable]:
  """Returns the function that extracts the compared answer from a text, for the config field `field`.

  Raises UserError for a reward function without one.
  """
  valid = stages.choices(extract)
  if spec['fn'] not in valid:
    raise UserError(
      f'{field} counts equal answers, which config.rewards.fn={spec["fn"]!r} cannot determine; choose one of: '
      f'{", ".join(sorted(valid))}.'
    )
  return valid[spec['fn']]


def resolve_vote(vote: Stage, spec: Spec, rollouts: int) -> majority_vote.Majority | None:
  """Returns the vote of config.rewards.vote, which extracts answers as config.rewards does; None without a vote.

  Raises UserError for a reward function without extraction, for parts, and for an invalid `learn_from`.
  """
  majority = stages.pick(majority_vote, vote, 'rewards.vote')()
  if majority is None:
    return None
  if spec.get('parts', ()):
    raise UserError(
      f'config.rewards.vote.fn={vote["fn"]!r} is the only reward there is; leave '
      f'config.rewards.parts={spec["parts"]!r} empty.'
    )
  extract_answer = resolve_extract(spec, f'config.rewards.vote.fn={vote["fn"]!r}')
  if majority.learn_from and not 2 <= majority.learn_from <= rollouts:
    raise UserError(
      f'config.rewards.vote.learn_from={majority.learn_from} must be from 2 to config.rollouts={rollouts}; '
      f'0 stands for all.'
    )
  return majority._replace(extract=extract_answer)


def _user_function(path: str, settings: Settings, field: str) -> Grader:
  where = f'config.{field}.fn={path!r}'
  fn = stages.imported(path, where)
  grader = adapters.user_grader(fn, settings, where)
  if callable(check := getattr(fn, 'check', None)):
    check(grader.settings, f'config.{field}')
  return grader
