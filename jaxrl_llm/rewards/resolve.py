"""From `config.rewards` to graders: each a name in one of `_MODULES`, or the user's own 'package.module:function'.

`rewards.fn` says what is right; `rewards.parts` are rewarded beside it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.config import schema, stages
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
from jaxrl_llm.rewards.parsing import extract
from jaxrl_llm.types import Row, UserError

Grader = Callable[[str, Row], float | None]  # None: the reply is to be skipped

# Grader → the package that it needs, which an extra of this name installs.
_NEEDS = dict(
  gym=('reasoning-gym', 'gym'),
  math_verify=('math-verify', 'math'),
  json_schema=('jsonschema', 'json'),
)


# Their public functions are the graders there are.
_MODULES = (verifiers, format_rules, instruction_following, judge, rubric, pairwise, graders)
# What a grader's settings must be, beyond their types; checks see those of the workers, too.
_CHECKS = verifiers.CHECKS | format_rules.CHECKS | judge.CHECKS | rubric.CHECKS | pairwise.CHECKS
_ROWS = (
  verifiers.ROWS
  | format_rules.ROWS
  | instruction_following.ROWS
  | judge.ROWS
  | rubric.ROWS
  | pairwise.ROWS
)
_LOOKED = 100


class Part(NamedTuple):
  """One of the rewards of a row."""

  name: str  # in metrics: critic/score/<name>
  weight: float  # in their sum
  grader: Grader


class _Group(functools.partial):
  """A grader of pairs.py with its settings, as `worker` calls one that sees all replies to a prompt at once."""

  batched = 'group'

  def score_batch(self, texts: Sequence[str], rows: Sequence[Row]) -> list[float]:
    return super().__call__(texts, rows)

  def __call__(self, text: str, row: Row) -> float:
    return self.score_batch([text], [row])[0]


def batch_modes(spec: Any) -> list[str]:
  """How many replies each grader sees at once: '' one, 'group', 'step'. Source: none."""
  groups = stages.choices(pairwise)
  return [
    'group' if part.get('fn') in groups else part.get('batched', '')
    for part in (spec, *spec.get('parts', ()))
  ]


def weights(spec: Any) -> tuple[float, ...]:
  """Of config.rewards.fn, which is 1, then of each of config.rewards.parts. Source: none."""
  return 1.0, *(float(part.get('weight', 1.0)) for part in spec.get('parts', ()))


def resolve_parts(spec: Any) -> tuple[Part, ...]:
  """config.rewards → its own grader, then those of its parts, dict(fn=, weight=1.0, name=fn, <settings>). Source: none.

  Raises UserError as `resolve` does, and for a weight that is no finite number, a name that occurs twice, or
  `right` and `bounds` that no score can be compared with.
  """
  outcomes.bounds(spec)
  found = [Part(_name(spec), 1.0, resolve(spec))]
  for index, part in enumerate(spec.get('parts', ())):
    where = f'rewards.parts[{index}]'
    if not hasattr(part, 'items') or 'fn' not in part:
      raise UserError(f'config.{where}={part!r} must be a dict with fn, such as dict(fn="exact").')
    weight, name = part.get('weight', 1.0), _name(part)
    if not _finite(weight):
      raise UserError(f'config.{where}.weight={weight!r} must be a finite number.')
    if name in [other.name for other in found]:
      raise UserError(f'config.{where} is named {name!r} as another is; give it another `name`.')
    told = {key: value for key, value in part.items() if key not in ('weight', 'name')}
    told |= {name: spec[name] for name in ('deadline_s', 'workers') if name in spec}
    found.append(Part(name, float(weight), resolve(told, where)))
  return tuple(found)


def _name(spec: Any) -> str:
  return spec.get('name') or str(spec['fn']).rpartition(':')[2]


def _finite(value: Any) -> bool:
  number = isinstance(value, int | float) and not isinstance(value, bool)
  return number and math.isfinite(value)


def resolve(spec: Any, where: str = 'rewards') -> Grader:
  """config.rewards, or one of its parts at `where`, → f(text, row) -> float. Source: none.

  Raises UserError for an unknown name or setting, a module that does not import, a function of no convention of
  adapters.py, a grader without the package it needs, or a grader of code without a sandbox: all before anything
  compiles.
  """
  pool = dict(deadline_s=spec.get('deadline_s', math.inf), workers=spec.get('workers', 2))
  spec = {
    key: value for key, value in dict(spec).items() if key not in schema.FIXED_FIELDS['config.rewards']
  }
  fn = spec.get('fn')
  if isinstance(fn, str) and ':' in fn:
    return _own(fn, {key: value for key, value in spec.items() if key != 'fn'}, where)
  package, extra = _NEEDS.get(str(fn), ('', ''))
  if package and importlib.util.find_spec(package.replace('-', '_')) is None:
    raise UserError(
      f"config.{where}.fn={fn!r} needs {package}; install the extra: pip install 'jaxrl_llm[{extra}]'."
    )
  module = next((m for m in _MODULES if isinstance(fn, str) and fn in stages.choices(m)), None)
  if module is None:
    names = sorted(name for m in _MODULES for name in stages.choices(m))
    raise UserError(
      f'config.{where}.fn={fn!r} is unknown; choose one of: {", ".join(names)}, or your own function as '
      "'package.module:function'."
    )
  grader = stages.pick(module, spec, where)
  if module is graders:
    return _sandboxed(grader, where, pool['deadline_s'])
  check = _CHECKS.get(grader.func)
  if check is not None:
    check(_told(grader) | pool, f'config.{where}')
  return _Group(grader.func, **grader.keywords) if module is pairwise else grader


def _told(grader: functools.partial) -> dict[str, Any]:
  """All settings of a grader, its defaults among them."""
  known = inspect.signature(grader.func).parameters.values()
  return {p.name: p.default for p in known if p.kind == p.KEYWORD_ONLY} | grader.keywords


def _sandboxed(grader: functools.partial, where: str, deadline_s: float) -> Grader:
  """A grader of code whose settings are in range, on a machine that has a sandbox for it."""
  told = _told(grader)
  if not _finite(told['wall_s']) or not 0 < told['wall_s'] < deadline_s:
    raise UserError(
      f'config.{where}.wall_s={told["wall_s"]!r} must be a positive number of seconds, less than '
      f'config.rewards.deadline_s={deadline_s!r}.'
    )
  for name, least in (('program_mb', 64), ('processes', 1)):
    if told[name] < least:
      raise UserError(
        f'config.{where}.{name}={told[name]!r} must be a whole number from {least} up.'
      )
  if not _finite(told.get('tolerance', 0.0)) or told.get('tolerance', 0.0) < 0:
    raise UserError(f'config.{where}.tolerance={told["tolerance"]!r} must be a number from 0 up.')
  sandbox.require(f'config.{where}.fn={grader.func.__name__!r}')
  return grader


def check_tasks(spec: Any, data: Any) -> None:
  """Raises UserError where config.data.tasks names a reasoning-gym task that config.rewards cannot score here."""
  graded = any(part.get('fn') == 'gym' for part in (spec, *spec.get('parts', ())))
  if graded and data.source == 'gym':
    names = [task.get('name') for task in data.tasks if hasattr(task, 'items')]
    sandboxed.require(map(str, names), 'config.data.tasks')


def check_rows(named: Sequence[tuple[str, Any]], rows: Sequence[Row]) -> None:
  """Raises UserError where a user's function needs a column that a row has not, or no row can be judged.

  Looked at are _LOOKED rows, evenly: single bad ones are errors of their replies, and counted. Source: none.
  """
  adapters.check_columns(named, rows)
  some = rows[:: max(len(rows) // _LOOKED, 1)]
  for name, grader in named:
    if (
      getattr(grader, 'func', None) is verifiers.gym
    ):  # of files; single rows of unknown tasks are errors of theirs
      tasks = {sandboxed.task_of(row) for row in rows}
      sandboxed.require(tasks & scorers.TASKS, 'the rows')
    read = _ROWS.get(getattr(grader, 'func', None))
    if read and some:
      told = [_why_not(read, row, _told(grader)) for row in some]
      if all(told):
        raise UserError(
          f'config.rewards: {name!r} can judge by none of the rows ({told[0]}); mend the data, or choose another grader.'
        )


def _why_not(read: Callable, row: Row, told: dict[str, Any]) -> str:
  try:
    read(row, told)
  except ValueError as error:
    return str(error)
  return ''


def resolve_extract(grader: Any, field: str) -> Callable:
  """How `grader` finds what it compares in a text, for `field`, which counts equal answers. Source: none.

  Raises UserError for a grader that does not tell.
  """
  valid = stages.choices(extract)
  if grader['fn'] not in valid:
    raise UserError(
      f'{field} counts equal answers, and config.rewards.fn={grader["fn"]!r} does not tell which are; choose a grader '
      f'of: {", ".join(sorted(valid))}.'
    )
  return valid[grader['fn']]


def resolve_vote(spec: Any, grader: Any, rollouts: int) -> majority_vote.Majority | None:
  """config.rewards.vote → a vote that finds answers in texts as config.rewards does; None where there is none. Source: none.

  Raises UserError for a grader that cannot tell what it compares, or more voters to learn from than rollouts.
  """
  made = stages.pick(majority_vote, spec, 'rewards.vote')()
  if made is None:
    return None
  if grader.get('parts', ()):
    raise UserError(
      f'config.rewards.vote.fn={spec["fn"]!r} is the only reward there is; leave config.rewards.parts={grader["parts"]!r} empty.'
    )
  read = resolve_extract(grader, f'config.rewards.vote.fn={spec["fn"]!r}')
  if made.learn_from and not 2 <= made.learn_from <= rollouts:
    raise UserError(
      f'config.rewards.vote.learn_from={made.learn_from} must be from 2 to config.rollouts={rollouts}; 0 stands for all.'
    )
  return made._replace(extract=read)


def _own(path: str, settings: dict[str, Any], field: str) -> Grader:
  module_name, _, name = path.partition(':')
  where = f'config.{field}.fn={path!r}'
  try:
    fn = importlib.import_module(module_name)
    for part in name.split('.'):
      fn = getattr(fn, part, None)
  except Exception as error:
    raise UserError(
      f'{where}: importing {module_name!r} failed ({type(error).__name__}: {error}); '
      'run from its folder or put that on PYTHONPATH.'
    ) from error
  if not callable(fn):
    raise UserError(f'{where}: {module_name!r} has no function {name!r}.')
  made = adapters.user_grader(fn, settings, where)
  if callable(check := getattr(fn, 'check', None)):
    check(made.settings, f'config.{field}')
  return made
