"""Text games. A row of config.data.source='games' is a level; the episode's seed draws the game that is played."""

from __future__ import annotations

import random
import re

from jaxrl_llm.environments.protocol import Result
from jaxrl_llm.types import Row, UserError

_WHOLE = re.compile(r'-?[0-9]+')


class Guess:
  """Guessing a number: every guess is told whether it is higher or lower."""

  def __init__(self, bounds: tuple[int, int], words: tuple[str, str, str], win: float, turn: float):
    self.bounds, self.words, self.win, self.turn = bounds, words, win, turn

  def reset(self, row: Row, seed: int) -> None:
    low, high = (row.extra.get(k, v) for k, v in zip(('low', 'high'), self.bounds, strict=True))
    self.secret = random.Random(seed).randint(low, high)

  def step(self, text: str) -> Result:
    found = _WHOLE.findall(text)
    # Of more digits than any number has, none is made.
    if not found or len(found[-1]) > 18:
      return Result(self.words[2], self.turn)
    guess = int(found[-1])
    if guess == self.secret:
      return Result(None, self.win, True)
    return Result(self.words[guess > self.secret], self.turn)


class Walk:
  """Walking a grid from its left upper corner to the goal that the row names, around walls that are not shown."""

  moves = dict(n=(0, -1), e=(1, 0), s=(0, 1), w=(-1, 0))

  def __init__(self, win: float, turn: float):
    self.win, self.turn = win, turn

  def reset(self, row: Row, seed: int) -> str:
    told, rng = row.extra, random.Random(seed)
    self.size, self.at, self.goal = told['size'], (0, 0), (told['goal_x'], told['goal_y'])
    self.walls: set[tuple[int, int]] = set()
    places = [divmod(n, self.size) for n in rng.sample(range(self.size**2), self.size**2)]
    for place in [p for p in places if p not in (self.at, self.goal)]:
      if len(self.walls) < told['walls']:
        self.walls.add(place)
        if not self._reached():
          self.walls.remove(place)
    return self._seen()

  def _reached(self) -> bool:
    """Whether a way leads to the goal."""
    found, edge = {self.at}, [self.at]
    while edge:
      x, y = edge.pop()
      near = [(x + dx, y + dy) for dx, dy in self.moves.values()]
      edge += [place for place in near if self._free(*place) and place not in found]
      found.update(edge)
    return self.goal in found

  def step(self, text: str) -> Result:
    for move in re.findall('[nesw]', text.lower())[-1:]:
      x, y = self.at[0] + self.moves[move][0], self.at[1] + self.moves[move][1]
      if self._free(x, y):
        self.at = x, y
    if self.at == self.goal:
      return Result(None, self.win, True)
    return Result(self._seen(), self.turn)

  def _free(self, x: int, y: int) -> bool:
    return 0 <= x < self.size and 0 <= y < self.size and (x, y) not in self.walls

  def _seen(self) -> str:
    open_to = [m for m, (x, y) in self.moves.items() if self._free(self.at[0] + x, self.at[1] + y)]
    return f'at {self.at[0]},{self.at[1]}: {" ".join(open_to)}'


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
  """The last whole number of a turn is the guess; `win` for the right one, which ends it, `turn` for any other turn.

  The number is drawn from row.extra['low'] to row.extra['high'], else from `low` to `high`. Raises UserError where
  low is above high. Source: none.
  """
  if low > high:
    raise UserError(
      f'config.environment.low={low} is above config.environment.high={high}; lower it.'
    )
  return Guess((low, high), (higher, lower, nothing), win, turn)


def walk(*, win: float = 1.0, turn: float = 0.0) -> Walk:
  """The last of the letters n, e, s, w in a turn is the step; a wall is stood before. `win` at the goal, which ends it.

  A state may be met again, by other ways: what step-level groups compare (config.objective.credit_assignment.fn=gigpo).
  Source: none.
  """
  return Walk(win, turn)
