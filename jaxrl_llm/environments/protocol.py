"""What an environment is: a plain Python object that is shown a row of data, hears a turn and answers it.

    class Own:
      remembers = True  # False where an answer hangs on the turn alone: then no turn is ever told again

      def reset(self, row, seed): return None       # what the question is followed by, or None
      def step(self, text): return Result('Again.', 0.0, False)

One is made for every rollout. The rollouts of a group get the same row and seed, so that they start alike. Whoever
calls it keeps no live object: the state of an episode is its turns, told once more from the first, so that an answer
must follow from the row, the seed and the turns.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

from jaxrl_llm.types import Row


class Result(NamedTuple):
  """What an environment says to a turn; a tuple of the same three will do."""

  observation: str | None  # stands between this turn and the next; None: there is no next one
  reward: float = 0.0  # for this turn
  done: bool = False


class Environment(Protocol):
  """See above. `remembers` may be left out, which is True."""

  def reset(self, row: Row, seed: int) -> str | None:
    """Begins an episode."""

  def step(self, text: str) -> Result:
    """Hears the text of a turn, its end token not included."""


def replayed(environment: Environment, row: Row, seed: int, texts: list[str]) -> list[Result]:
  """The results of the last turns of `texts`: of all of them, or of the newest where nothing is remembered.

  Raises whatever the environment raises, and ValueError for what is no result, or for an episode that ends before its
  last turn when it is told again. Source: none.
  """
  environment.reset(row, seed)
  told = texts if getattr(environment, 'remembers', True) else texts[-1:]
  results = [checked(environment.step(text)) for text in told]
  if any(ends_episode(result) for result in results[:-1]):
    raise ValueError(
      'told the same turns again, the environment ends sooner: it must be a function of them'
    )
  return results


def opening(environment: Environment, row: Row, seed: int) -> str | None:
  """What the environment shows before the first turn. Raises what it raises, TypeError for no text. Source: none."""
  shown = environment.reset(row, seed)
  if shown is not None and not isinstance(shown, str):
    raise TypeError(f'reset() returned {type(shown).__name__}, not text or None')
  return shown


def ends_episode(result: Result) -> bool:
  """Whether no turn follows. Source: none."""
  return result.done or result.observation is None


def checked(given: Any) -> Result:
  """The result, with plain types. Raises ValueError where it is none. Source: none."""
  try:
    observation, reward, done = given
    reward = float(reward)
  except (TypeError, ValueError) as error:
    raise ValueError(
      f'step() returned {str(given)[:60]!r}, not (observation, reward, done)'
    ) from error
  if observation is not None and not isinstance(observation, str):
    raise ValueError(f'the observation is {type(observation).__name__}, not text or None')
  if not math.isfinite(reward):
    raise ValueError(f'the reward of a turn is {reward}')
  return Result(observation, reward, bool(done))
