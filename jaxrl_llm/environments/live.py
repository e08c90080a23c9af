"""The live episodes of one process, each with its environment object, and the records that ask for their turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxrl_llm.environments.protocol import (
  Environment,
  Result,
  checked,
  first_observation,
  replay,
)
from jaxrl_llm.rewards import CRASH, ERROR, OK
from jaxrl_llm.rewards.outcomes import describe
from jaxrl_llm.types import Row

# (prompt, step of its birth, slot of the prompt, rollout of the slot): one episode among all of a run.
EpisodeKey = tuple[int, int, int, int]


class TurnRequest(NamedTuple):
  """One episode: its turns so far, the newest last. Without turns, the episode begins."""

  key: EpisodeKey
  row: Row
  seed: int
  texts: list[str]


class TurnResult(NamedTuple):
  """The result of a TurnRequest. Without the outcome OK there is no observation."""

  outcome: int  # one of OK, TIMEOUT, CRASH, ERROR, SKIP of rewards
  message: str = ''
  result: Result | None = None  # of the newest turn
  first_observation: str | None = None


class LiveEpisodes:
  """Environments by the keys of their episodes. An exception of an environment becomes an outcome."""

  def __init__(self, make: Callable[[], Environment]):
    self._make = make
    self._environments: dict[EpisodeKey, Environment] = {}

  def open(self, request: TurnRequest) -> TurnResult:
    """Creates an environment, resets it, and replays the turns of the request."""
    self.end(request.key)
    try:
      # It is kept before the reset, which may fail after it acquired something that close() releases.
      environment = self._environments[request.key] = self._make()
      if not request.texts:
        shown = first_observation(environment, request.row, request.seed)
        return TurnResult(OK, first_observation=shown)
      results = replay(environment, request.row, request.seed, request.texts)
      return TurnResult(OK, result=results[-1])
    except Exception as error:
      return _failure(error)

  def step(self, key: EpisodeKey, text: str) -> TurnResult:
    """Takes one turn in a live episode."""
    environment = self._environments[key]
    try:
      return TurnResult(OK, result=checked(environment.step(text)))
    except Exception as error:
      return _failure(error)

  def end(self, key: EpisodeKey) -> TurnResult:
    """Closes the environment of an episode and forgets it."""
    environment = self._environments.pop(key, None)
    try:
      getattr(environment, 'close', lambda: None)()
      return TurnResult(OK)
    except Exception as error:
      return _failure(error)

  def keys(self) -> list[EpisodeKey]:
    """The keys of all episodes that live."""
    return list(self._environments)


def _failure(error: Exception) -> TurnResult:
  outcome = CRASH if isinstance(error, MemoryError) else ERROR
  return TurnResult(outcome, describe(error).decode('utf-8', 'replace'))
