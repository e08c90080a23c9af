"""Text games. A row of config.data.source='games' is a level; the episode's seed draws the game."""

from __future__ import annotations

import math
import random
import re

from jaxrl_llm.environments.protocol import Result
from jaxrl_llm.types import Row, UserError

_INTEGER = re.compile(r'-?[0-9]+')
_MAX_DIGITS = 18  # longer matches are not converted; every secret number is shorter


class Guess:
  """Number guessing: the observation says whether the secret number is higher or lower than the guess."""

  def __init__(self, bounds: tuple[int, int], words: tuple[str, str, str], win: float, turn: float):
    self.bounds, self.words, self.win, self.turn = bounds, words, win, turn

  def reset(self, row: Row, seed: int) -> None:
    low, high = (row.extra.get(k, v) for k, v in zip(('low', 'high'), self.bounds, strict=True))
    self.secret = random.Random(seed).randint(low, high)

  def step(self, text: str) -> Result:
    found = _INTEGER.findall(text)
    if not found or len(found[-1]) > _MAX_DIGITS:
      return Result(self.words[2], self.turn)
    guess = int(found[-1])
    if guess == self.secret:
      return Result(None, self.win, True)
    return Result(self.words[guess > self.secret], self.turn)


class Walk:
  """A grid walk from the start to the goal that the row names, around walls that are not shown."""

  moves = dict(n=(0, -1), e=(1, 0), s=(0, 1), w=(-1, 0))

  def __init__(self, win: float, turn: float):
    self.win, self.turn = win, turn

  def reset(self, row: Row, seed: int) -> str | None:
    level, rng = row.extra, random.Random(seed)
    self.size = level['size']
    self.at, self.goal = ((level[f'{name}_x'], level[f'{name}_y']) for name in ('start', 'goal'))
    self.walls: set[tuple[int, int]] = set()
    places = [divmod(n, self.size) for n in rng.sample(range(self.size**2), self.size**2)]
    for place in [p for p in places if p not in (self.at, self.goal)]:
      if len(self.walls) < level['walls']:
        self.walls.add(place)
        if self._distance() == math.inf:
          self.walls.remove(place)
    return self._observation()

  def _distance(self) -> float:
    """Moves to the goal on the shortest way; infinite where there is none."""
    reached, edge, moves = {self.at}, {self.at}, 0
    while edge and self.goal not in edge:
      near = {(x + dx, y + dy) for x, y in edge for dx, dy in self.moves.values()}
      edge = {place for place in near if self._free(*place)} - reached
      reached |= edge
      moves += 1
    return moves if edge else math.inf

  def step(self, text: str) -> Result:
    self._move(text, 'nesw')
    if self.at == self.goal:
      return Result(None, self.win, True)
    return Result(self._observation(), self.turn)

  def _move(self, text: str, letters: str) -> None:
    """Moves by the last of the letters in a turn."""
    for move in re.findall(f'[{letters}]', text.lower())[-1:]:
      x, y = self.at[0] + self.moves[move][0], self.at[1] + self.moves[move][1]
      if self._free(x, y):
        self.at = x, y

  def _free(self, x: int, y: int) -> bool:
    return 0 <= x < self.size and 0 <= y < self.size and (x, y) not in self.walls

  def _observation(self) -> str:
    open_to = [m for m, (x, y) in self.moves.items() if self._free(self.at[0] + x, self.at[1] + y)]
    return f'at {self.at[0]},{self.at[1]}: {" ".join(open_to)}'


class PairWalk(Walk):
  """A walk of two agents, each with moves of its own, who act in turns."""

  agents = ('ew', 'ns')

  def __init__(self, win: float, turn: float, progress: float):
    super().__init__(win, turn)
    self.progress = progress

  def reset(self, row: Row, seed: int) -> None:
    self.turns = self.agents.index(row.extra['first'])
    super().reset(row, seed)  # the row shows the first position
    self.way = self._distance()

  def step(self, text: str) -> Result:
    before = self._distance()
    self._move(text, self.agents[self.turns % 2])
    self.turns += 1
    gain = self.progress * (before - self._distance()) / self.way
    if self.at == self.goal:
      return Result(None, self.win + gain, True)
    return Result(self._observation(), self.turn + gain)

  def _observation(self) -> str:
    (x, y), (goal_x, goal_y) = self.at, self.goal
    return f'{self.agents[self.turns % 2]} {x},{y} to {goal_x},{goal_y}:'  # as the row's question


def guess(
  *,
  low: int = 0,
  high: int = 9,
  higher: str = 'higher',
  lower: str = 'lower',
  nothing: str = 'no number',
  win: float = 1.0,
  turn: float = 0.0,
) -> Guess:
  """The last integer of a turn is the guess. The right one ends the episode with reward `win`, others get `turn`.

  The secret number is drawn from row.extra['low'] to row.extra['high'], else from `low` to `high`. Raises UserError
  where low is above high.
  """
  if low > high:
    raise UserError(
      f'config.environment.low={low} is above config.environment.high={high}; lower it.'
    )
  return Guess((low, high), (higher, lower, nothing), win, turn)


def walk(*, win: float = 1.0, turn: float = 0.0) -> Walk:
  """The last of the letters n, e, s, w in a turn is the move; a wall blocks it. The goal ends it with reward `win`.

  The same state can recur along different paths, which step-level groups compare
  (config.objective.credit_assignment.fn=gigpo).
  """
  return Walk(win, turn)


def pair_walk(*, win: float = 1.0, turn: float = 0.0, progress: float = 0.0) -> PairWalk:
  """A walk of two agents in turns, one along e and w, the other along n and s; another letter moves nothing.

  Both are the policy: the observation says whose turn it is, where they are, and the goal. A turn gets `progress`
  times the share of the way by which it comes nearer, negative where it goes away; these are `progress` together at the
  goal. Agents are compared turn by turn with config.objective.credit_assignment.fn=turn_grouped.
  """
  return PairWalk(win, turn, progress)
