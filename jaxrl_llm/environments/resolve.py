"""From `config.environment` to a factory of environments: a name in `_MODULES`, or the user's own function."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_llm.config import schema, stages, user_code
from jaxrl_llm.environments import (
  adapters,
  discussion,
  games,
  harness,
  mcp_tools,
  openenv_client,
  tool_format,
  tools,
)
from jaxrl_llm.environments.protocol import Environment
from jaxrl_llm.rewards.code_execution import sandbox
from jaxrl_llm.types import JsonObject, Settings, UserError

if TYPE_CHECKING:  # the module imports jax, which environment workers must not
  from jaxrl_llm.models.tokenizer import Tokenizer

# Their public functions are the environments that can be named.
_MODULES = (tools, games, discussion, adapters, mcp_tools, openenv_client, harness)
# Their steps take bounded time for any text, so they run without a deadline and without a worker.
_INLINE = (
  *(tools.calculator, tools.search, games.guess, games.walk, games.pair_walk),
  discussion.discussion,
)
# Their settings that bound a step, with the defaults: a step must end before the worker is killed.
_OWN_LIMITS = {
  tools.python: ('wall_s', 4.0),
  mcp_tools.mcp: ('timeout_s', 5.0),
  openenv_client.openenv: ('timeout_s', 5.0),
}
_LEAST = dict(turns=1, rounds=0, observation_tokens=0, workers=1, worker_memory_mb=0)
JUDGES = ('environment', 'rewards')

# The section of a config, or its fields by name.
EnvironmentSettings = schema.EnvironmentConfig | Settings


class EnvironmentFactory(NamedTuple):
  """The environment that a config names."""

  make: Callable[[], Environment]
  inline: bool  # whether it runs in this process
  replayable: bool = True  # whether a lost episode can be rebuilt from its turns
  graded_turn: int = -1  # of an episode, read by reward functions; −1: the last


def resolve(settings: EnvironmentSettings) -> EnvironmentFactory | None:
  """The environment that `config.environment` names, None for 'none'.

  Raises UserError for an unknown name or setting, a module that does not import, or a tool whose requirements are
  missing.
  """
  check(settings)
  fixed = schema.FIXED_FIELDS['config.environment']
  stage = {k: v for k, v in dict(settings).items() if k not in fixed}
  fn = stage.get('fn')
  if fn == 'none':
    for name in stage.keys() - {'fn'}:
      raise UserError(
        f"config.environment.{name}={stage[name]!r} is not a setting of 'none', which takes none; choose a function."
      )
    return None
  if isinstance(fn, str) and ':' in fn:
    return _import(fn, {k: v for k, v in stage.items() if k != 'fn'})
  module = next((m for m in _MODULES if isinstance(fn, str) and fn in stages.choices(m)), None)
  if module is None:
    names = sorted(name for m in _MODULES for name in stages.choices(m))
    raise UserError(
      f'config.environment.fn={fn!r} is unknown; choose one of: none, {", ".join(names)}, or your own function as '
      "'package.module:function'."
    )
  make = stages.pick(module, stage, 'environment')
  if make.func is tools.python:
    sandbox.require("config.environment.fn='python'")
  environment = make()  # which checks its settings
  limit = _OWN_LIMITS.get(make.func)
  if limit and make.keywords.get(*limit) >= settings['deadline_s']:
    raise UserError(
      f'config.environment.deadline_s={settings["deadline_s"]!r} must be above config.environment.{limit[0]}, '
      f'{make.keywords.get(*limit)!r}; raise it.'
    )
  return EnvironmentFactory(make, make.func in _INLINE, *_attributes(environment))


def list_tools(settings: EnvironmentSettings) -> tuple[JsonObject, ...]:
  """The tools that an environment offers, in OpenAI's form; () for one without a method `list_tools`.

  Raises UserError as `resolve` does, and where the tools cannot be listed.
  """
  factory = resolve(settings)
  listing = factory and getattr(factory.make(), 'list_tools', None)
  return tuple(listing()) if listing else ()


def with_call_format(
  settings: EnvironmentSettings, tokenizer: Tokenizer, chat: bool
) -> EnvironmentSettings:
  """The settings, with the setting `calls` where the environment offers tools and `calls` is not given.

  Raises UserError where no chat template renders the tools, and where it writes calls in an unknown form.
  """
  if not tokenizer.tools or dict(settings).get('calls'):
    return settings
  form = tool_format.find(tokenizer) if chat else 'config.data.chat=False renders no tools'
  if isinstance(form, str):
    raise UserError(
      f'config.environment.fn={settings["fn"]!r}: {form}; set config.environment.calls, or take another model.'
    )
  return dict(settings) | dict(calls=tuple(form))


def check(settings: EnvironmentSettings) -> None:
  """Raises UserError for a setting that is out of range for every environment."""
  for name, least in _LEAST.items():
    value = settings[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
      raise UserError(
        f'config.environment.{name}={value!r} must be a whole number of at least {least}.'
      )
  for name, least in dict(deadline_s=1e-3, cpu_s=1e-3, weight=0).items():
    value = settings[name]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < least:
      expected = (
        'a finite number of at least 0' if name == 'weight' else 'a positive number of seconds'
      )
      raise UserError(f'config.environment.{name}={value!r} must be {expected}.')
  if settings['judge'] not in JUDGES:
    raise UserError(
      f'config.environment.judge={settings["judge"]!r} must be one of: {", ".join(JUDGES)}.'
    )
  role = settings['role']
  if not isinstance(role, str) or not role:
    raise UserError(
      f"config.environment.role={role!r} must be a role of the chat template, such as 'user' or 'tool'."
    )


def _import(path: str, arguments: JsonObject) -> EnvironmentFactory:
  """The user's function with its settings, called once to check that it returns an environment."""
  where = f'config.environment.fn={path!r}'
  fn = stages.imported(path, where)
  try:
    environment: Any = fn(**arguments)
  except UserError:
    raise
  except Exception as error:  # the user's program may raise anything
    raise UserError(
      f'{where} with {arguments} fails ({user_code.describe(error)}); correct it, or give the settings that it takes.'
    ) from error
  methods = (getattr(environment, 'reset', None), getattr(environment, 'step', None))
  if not all(map(callable, methods)):
    raise UserError(
      f'{where} gives {type(environment).__name__}, which has no reset(row, seed) or no step(text); add '
      'them.'
    )
  make: Callable = fn
  return EnvironmentFactory(lambda: make(**arguments), False, *_attributes(environment))


def _attributes(environment: object) -> tuple[bool, int]:
  """`replayable` and `graded_turn`."""
  return (
    bool(getattr(environment, 'replayable', True)),
    int(getattr(environment, 'graded_turn', -1)),
  )
