"""Environments of other packages, stepped by the text of a turn."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import re
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, TypeAlias

from jaxrl_llm.config import stages
from jaxrl_llm.config.extras import install
from jaxrl_llm.environments import tool_calls
from jaxrl_llm.environments.protocol import Result
from jaxrl_llm.rewards import adapters as signatures
from jaxrl_llm.types import JsonObject, Row, Settings, UserError

Foreign: TypeAlias = Any  # an object or value of another package
_RESERVED = ('reset', 'get_reward', 'close')  # methods that are no tools
_INTEGER = re.compile(r'(?<![\w.])-?[0-9]{1,18}(?!\w|\.\d)')


class Gymnasium:
  """An environment of gymnasium with text or numbered actions."""

  def __init__(
    self,
    name: str,
    options: Settings,
    actions: tuple[str, ...],
    illegal: tuple[str, float],
    replayable: bool,
  ):
    self.name, self.options, self.actions = name, options, actions
    self.illegal, self.replayable = illegal, replayable
    self.env: Foreign = None

  def reset(self, row: Row, seed: int) -> str:
    self.env = importlib.import_module('gymnasium').make(self.name, **self.options)
    observation, _ = self.env.reset(seed=seed, options=row.extra.get('options'))
    return self._text(observation)

  def step(self, text: str) -> Result:
    action = self._action(text)
    if action is None or not self.env.action_space.contains(action):
      return Result(*self.illegal)
    observation, reward, terminated, truncated, _ = self.env.step(action)
    over = bool(terminated or truncated)
    return Result(None if over else self._text(observation), float(reward), over)

  def close(self) -> None:
    if self.env is not None:
      self.env.close()

  def _action(self, text: str) -> str | int | None:
    """The turn itself in a text space; elsewhere the number of the last action word, or the last integer."""
    if type(self.env.action_space).__name__ == 'Text':
      return text.strip()
    if self.actions:
      words = re.findall(r'\w+', text.lower())
      return next((self.actions.index(w) for w in reversed(words) if w in self.actions), None)
    found = _INTEGER.findall(text)
    return int(found[-1]) if found else None

  def _text(self, observation: Foreign) -> str:
    if self.env.render_mode == 'ansi':
      return self.env.render()
    return str(observation.tolist() if hasattr(observation, 'tolist') else observation)


def gymnasium(
  *,
  name: str,
  options: Settings = MappingProxyType({}),
  actions: tuple[str, ...] = (),
  illegal: str = 'illegal action',
  illegal_reward: float = 0.0,
  replayable: bool = True,
) -> Gymnasium:
  """gymnasium.make(name, **options): a turn is the action, as text or as the last integer; rewards are added up.

  With `actions`, the number of an action is the place of its word: the last of these words in a turn counts. A turn
  without an action gets the observation `illegal`. Observations are `render()` with options=dict(render_mode='ansi'),
  else the environment's own as text. The seed of a group is that of `reset`, whose options are row.extra['options'].

  Raises UserError without gymnasium, and for a name that it does not know.
  """
  field = f'config.environment.name={name!r}'
  if not math.isfinite(illegal_reward):
    raise UserError(
      f'config.environment.illegal_reward={illegal_reward!r} must be a finite number.'
    )
  try:
    importlib.import_module('gymnasium').spec(name)
  except ImportError as error:
    raise UserError(f'{field} needs gymnasium; {install("gymnasium")}.') from error
  except Exception as error:  # the package's own errors, or those of a module that the name imports
    raise UserError(
      f'{field} is unknown to gymnasium ({error}); name one that it registers.'
    ) from error
  words = tuple(word.lower() for word in actions)
  return Gymnasium(name, dict(options), words, (illegal, illegal_reward), replayable)


class ToolMethods:
  """An environment whose methods are the tools, in the form of TRL's environment_factory."""

  def __init__(self, factory: Callable[[], Foreign], tag: str, replayable: bool):
    self.factory, self.tag, self.replayable = factory, tag, replayable
    self.environment: Foreign = None
    self.tools: dict[str, Callable] = {}
    self.paid = 0.0  # what get_reward() returned last

  def reset(self, row: Row, seed: int) -> Foreign:
    del seed  # the interface has none
    self.environment = self.factory()
    methods = inspect.getmembers(type(self.environment), inspect.isfunction)
    names = [name for name, _ in methods if not name.startswith('_') and name not in _RESERVED]
    self.tools = {name: getattr(self.environment, name) for name in names}
    prompt = list(row.messages) or [dict(role='user', content=row.question)]
    return _awaited(self.environment.reset(**dict(prompt=prompt) | signatures.columns(row)))

  def step(self, text: str) -> Result:
    try:
      calls = tool_calls.named(text, self.tag)
    except ValueError as error:
      return Result(f'error: {error}', self._increment())
    if not calls:
      return Result(None, self._increment(), True)
    shown = [self._call(name, arguments) for name, arguments in calls]
    return Result('\n'.join(shown), self._increment())

  def close(self) -> None:
    getattr(self.environment, 'close', lambda: None)()

  def _call(self, name: str, arguments: JsonObject) -> str:
    if name not in self.tools:
      return f'error: there is no tool {name!r}; the tools are: {", ".join(sorted(self.tools))}'
    try:
      return str(_awaited(self.tools[name](**arguments)))
    except Exception as error:  # the policy's arguments cause it: it may try others
      return f'error: {error}'

  def _increment(self) -> float:
    """What get_reward() rose by, so that the rewards of an episode that is cut off add up to it, too."""
    get_reward = getattr(self.environment, 'get_reward', None)
    if get_reward is None:
      return 0.0
    before, self.paid = self.paid, float(_awaited(get_reward()))
    return self.paid - before


def _awaited(value: Foreign) -> Foreign:
  """The value, or the result of a coroutine."""
  return asyncio.run(value) if inspect.iscoroutine(value) else value


def trl(*, factory: str, tag: str = 'tool_call', replayable: bool = True) -> ToolMethods:
  """TRL's environment_factory='package.module:Class': public methods are tools, called as <tag>{"name": …}</tag>.

  `reset` gets the columns of the row. A turn may hold several calls, whose results are the lines of the observation; a
  turn without a call ends the episode. The reward of a turn is the increment of `get_reward()`, which must not change
  the environment: it is called after every turn. The tools belong into the rows' prompts.

  Raises UserError where `factory` does not import or has no reset.
  """
  where = f'config.environment.factory={factory!r}'
  make = stages.imported(factory, where)
  if inspect.isclass(make) and not callable(getattr(make, 'reset', None)):
    raise UserError(
      f"{where} has no reset(**columns); add it, or name an environment in TRL's form."
    )
  return ToolMethods(make, tag, replayable)
