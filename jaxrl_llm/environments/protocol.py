"""The interface of an environment: a Python object that is reset to a row of data and steps by the text of a turn.

    class Counter:
      replayable = True  # False: an episode whose object is lost cannot be rebuilt from its turns, and is dropped
      remembers = True  # False where a result depends on its turn alone: earlier turns are then not replayed
      graded_turn = -1  # which turn reward functions read: the last one; 0: the first

      def reset(self, row, seed): return None       # the first observation, or None
      def step(self, text): return Result('Again.', 0.0, False)
      def close(self): ...                          # releases what reset acquired; may be left out

One environment is created per rollout and lives in one process until its episode is over. The rollouts of a group get
the same row and seed, so they must start alike. Where the object is lost, because the run was restarted or its worker
was killed, the turns so far are replayed through a new one: its results must be a function of the row, the seed and the
turns, unless `replayable` is False.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

from jaxrl_llm.types import Row


class Result(NamedTuple):
  """The result of a step; a plain tuple of the same three values is accepted, too."""

  observation: str | None  # shown before the next turn; None ends the episode
  # of this turn; a tuple has one for each turn so far, which are added to those that earlier turns got before
  reward: float | tuple[float, ...] = 0.0
  done: bool = False


class Environment(Protocol):
  """An environment; see the module. `replayable`, `remembers`, `graded_turn`, `close` may be left out."""

  def reset(self, row: Row, seed: int) -> str | None:
    """Begins an episode; returns the first observation or None. Called once."""
    ...

  def step(self, text: str) -> Result:
    """Takes the text of a turn, without its end token."""
    ...


def replay(environment: Environment, row: Row, seed: int, texts: list[str]) -> list[Result]:
  """Replays an episode; returns the results of all its turns, or of the newest where `remembers` is False.

  Raises the environment's own exceptions. Raises ValueError for an invalid result, or for an episode that ends before
  its last turn.
  """
  environment.reset(row, seed)
  turns = texts if getattr(environment, 'remembers', True) else texts[-1:]
  results = [checked(environment.step(text)) for text in turns]
  if any(ends_episode(result) for result in results[:-1]):
    raise ValueError(
      'replaying the same turns ended the episode sooner: results must be a function of them, or the environment '
      'needs the class attribute replayable = False'
    )
  return results


def first_observation(environment: Environment, row: Row, seed: int) -> str | None:
  """The observation before the first turn. Raises the environment's own exceptions; TypeError for a non-text."""
  observation = environment.reset(row, seed)
  if observation is not None and not isinstance(observation, str):
    raise TypeError(f'reset() returned {type(observation).__name__}, not text or None')
  return None if observation is None else str(observation)


def ends_episode(result: Result) -> bool:
  """Whether no turn follows."""
  return result.done or result.observation is None


def checked(returned: Any) -> Result:
  """A step's return value as a Result with plain types. Raises ValueError where it is not one."""
  try:
    observation, reward, done = returned
    reward = tuple(map(float, reward)) if isinstance(reward, tuple | list) else float(reward)
  except (TypeError, ValueError) as error:
    raise ValueError(
      f'step() returned {str(returned)[:60]!r}, not (observation, reward, done)'
    ) from error
  if observation is not None and not isinstance(observation, str):
    raise ValueError(f'the observation is {type(observation).__name__}, not text or None')
  for number in reward if isinstance(reward, tuple) else (reward,):
    if not math.isfinite(number):
      raise ValueError(f'the reward of a turn is {number}')
  return Result(None if observation is None else str(observation), reward, bool(done))


def turn_rewards(result: Result, turns: int) -> tuple[float, ...] | None:
  """What a result pays to each of `turns` turns, its own the last one; None where it names another number of them."""
  if not isinstance(result.reward, tuple):
    return *(0.0,) * (turns - 1), result.reward
  return result.reward if len(result.reward) == turns else None
