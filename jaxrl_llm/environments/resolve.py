"""From `config.environment` to what makes an environment: a name in `_MODULES`, or the user's own function."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxrl_llm.config import schema, stages
from jaxrl_llm.environments import games, tools
from jaxrl_llm.environments.protocol import Environment
from jaxrl_llm.rewards.code_execution import sandbox
from jaxrl_llm.types import UserError

# Their public functions are the environments there are.
_MODULES = (tools, games)
# They answer in bounded time, whatever the turn says: they need no deadline, so no worker.
_INLINE = (tools.calculator, tools.search, games.guess, games.walk)
_WHOLE = dict(turns=1, rounds=0, observation_tokens=0, workers=1)
JUDGES = ('environment', 'rewards')


class EnvironmentFactory(NamedTuple):
  """config.environment, read."""

  make: Callable[[], Environment]
  inline: bool  # answers in this process


def resolve(spec: Any) -> EnvironmentFactory | None:
  """What `config.environment` names, None for 'none'. Source: none.

  Raises UserError for an unknown name or setting, a module that does not import, or a tool without what it needs.
  """
  settings = {k: v for k, v in dict(spec).items() if k not in schema.FIXED_FIELDS['config.environment']}
  fn = settings.get('fn')
  check(spec)
  if fn == 'none':
    for name in settings.keys() - {'fn'}:
      raise UserError(
        f"config.environment.{name}={settings[name]!r} is not a setting of 'none', which takes none; choose a function."
      )
    return None
  if isinstance(fn, str) and ':' in fn:
    return EnvironmentFactory(_own(fn, {k: v for k, v in settings.items() if k != 'fn'}), False)
  module = next((m for m in _MODULES if isinstance(fn, str) and fn in stages.choices(m)), None)
  if module is None:
    names = sorted(name for m in _MODULES for name in stages.choices(m))
    raise UserError(
      f'config.environment.fn={fn!r} is unknown; choose one of: none, {", ".join(names)}, or your own function as '
      "'package.module:function'."
    )
  make = stages.pick(module, settings, 'environment')
  if make.func is tools.python:
    sandbox.require("config.environment.fn='python'")
    if make.keywords.get('wall_s', 4.0) >= spec['deadline_s']:
      raise UserError(
        f'config.environment.deadline_s={spec["deadline_s"]!r} must be above the wall_s of its programs; raise it.'
      )
  make()  # checks its settings
  return EnvironmentFactory(make, make.func in _INLINE)


def check(spec: Any) -> None:
  """Raises UserError for a setting of any environment that is out of range. Source: none."""
  for name, least in _WHOLE.items():
    value = spec[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
      raise UserError(
        f'config.environment.{name}={value!r} must be a whole number of at least {least}.'
      )
  for name, least in dict(deadline_s=1e-3, weight=0).items():
    value = spec[name]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < least:
      told = (
        'a positive number of seconds' if name == 'deadline_s' else 'a finite number of at least 0'
      )
      raise UserError(f'config.environment.{name}={value!r} must be {told}.')
  if spec['judge'] not in JUDGES:
    raise UserError(
      f'config.environment.judge={spec["judge"]!r} must be one of: {", ".join(JUDGES)}.'
    )
  if not isinstance(spec['role'], str) or not spec['role']:
    raise UserError(
      f"config.environment.role={spec['role']!r} must be a role of the chat template, such as 'user' or 'tool'."
    )


def _own(path: str, settings: dict[str, Any]) -> Callable[[], Environment]:
  module_name, _, name = path.partition(':')
  where = f'config.environment.fn={path!r}'
  try:
    fn = getattr(importlib.import_module(module_name), name, None)
    if not callable(fn):
      raise UserError(f'{where}: {module_name!r} has no function {name!r}.')
    make = lambda: fn(**settings)  # noqa: E731
    made = make()
  except UserError:
    raise
  except Exception as error:  # the user's program: anything may come
    raise UserError(
      f'{where} with {settings} fails ({type(error).__name__}: {error}); run from its folder or put that on '
      'PYTHONPATH, and give the settings that it takes.'
    ) from error
  if not callable(getattr(made, 'reset', None)) or not callable(getattr(made, 'step', None)):
    raise UserError(
      f'{where} gives {type(made).__name__}, which has no reset(row, seed) and step(text).'
    )
  return make
