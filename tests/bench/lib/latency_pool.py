"""Environments whose steps take a simulated time, each with a worker of its own: no process is needed to wait."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence

from jaxrl_llm import environments
from jaxrl_llm.environments import EpisodeKey, TurnRequest, TurnResult
from tests.environments import delayed


class Speaker:
  """Ends after a number of turns between 4 and 16 that follows from the first one."""

  def __init__(self, turns: tuple[int, int] = (4, 16)):
    self.least, self.most = turns

  def reset(self, row, seed):
    self.turns, self.last = 0, 0

  def step(self, text):
    if not self.turns:
      self.last = random.Random(text).randint(self.least, self.most)
    self.turns += 1
    return environments.Result('go on', 1.0, self.turns >= self.last)


class LatencyPool(environments.WorkerPool):
  """The results of a step are there after a log-normal time with the mean `mean_s`, which (episode, turn) decide."""

  def __init__(self, settings, make, mean_s: float):
    super().__init__(settings)
    assert self.factory is not None and self.factory.inline
    self.factory = self.factory._replace(make=make)
    self.mean_s = mean_s
    self._later: list[tuple[float, EpisodeKey, TurnResult]] = []

  def latency_s(self, key: EpisodeKey, turns: int) -> float:
    """The time of an episode's turn; beginning an episode takes none."""
    if not turns:
      return 0.0
    return delayed.latency_s(random.Random(hash((key, turns))), self.mean_s)

  def run(self, requests: Sequence[TurnRequest]) -> list[TurnResult]:
    results = super().run(requests)
    waits_s = [self.latency_s(request.key, len(request.texts)) for request in requests]
    time.sleep(max(waits_s, default=0.0))
    return results

  def submit(self, requests: Sequence[TurnRequest] = (), ended: Iterable[EpisodeKey] = ()) -> None:
    super().submit(requests, ended)
    now, turns = time.monotonic(), {request.key: len(request.texts) for request in requests}
    for key, result in super().collect():
      self._later.append((now + self.latency_s(key, turns[key]), key, result))

  @property
  def pending(self) -> int:
    return len(self._later)

  def collect(self, most_s: float = 0.0) -> list[tuple[EpisodeKey, TurnResult]]:
    if most_s and self._later:
      next_s = min(ready for ready, *_ in self._later) - time.monotonic()
      time.sleep(min(max(next_s, 0.0), most_s))
    now = time.monotonic()
    ready = [(key, result) for at, key, result in self._later if at <= now]
    self._later = [later for later in self._later if later[0] > now]
    return ready
