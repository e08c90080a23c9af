"""Text games. A row of config.data.source='games' is a game: its answer is looked for, `extra` says how hard it is."""

from __future__ import annotations

import re

from jaxrl_llm.environments.protocol import Result
from jaxrl_llm.types import Row

_WHOLE = re.compile(r'-?[0-9]+')


class Guess:
  """Guessing row.answer: every guess is told whether the number is higher or lower."""

  def __init__(self, higher: str, lower: str, nothing: str, win: float, turn: float):
    self.words, self.nothing, self.win, self.turn = (higher, lower), nothing, win, turn

  def reset(self, row: Row, seed: int) -> None:
    del seed  # the number is the row's
    self.secret = int(row.answer)

  def step(self, text: str) -> Result:
    found = _WHOLE.findall(text)
    # Of more digits than any number has, none is made.
    if not found or len(found[-1]) > 18:
      return Result(self.nothing, self.turn)
    guess = int(found[-1])
    if guess == self.secret:
      return Result(None, self.win, True)
    return Result(self.words[guess > self.secret], self.turn)


class Walk:
  """Walking a grid of row.extra['size']² from the left upper corner to row.answer, 'x,y', around its walls."""

  moves = dict(n=(0, -1), e=(1, 0), s=(0, 1), w=(-1, 0))

  def __init__(self, win: float, turn: float):
    self.win, self.turn = win, turn

  def reset(self, row: Row, seed: int) -> str:
    del seed  # the grid is the row's
    self.size, self.at = int(row.extra['size']), (0, 0)
    self.goal = tuple(map(int, row.answer.split(',')))
    self.walls = {tuple(map(int, wall)) for wall in row.extra['walls']}
    return self._seen()

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
  higher: str = 'higher',
  lower: str = 'lower',
  nothing: str = 'no number',
  win: float = 1.0,
  turn: float = 0.0,
) -> Guess:
  """The last whole number of a turn is the guess; `win` for row.answer, which ends it, `turn` for any other turn.

  Raises ValueError in reset for a row whose answer is no whole number. Source: none.
  """
  return Guess(higher, lower, nothing, win, turn)


def walk(*, win: float = 1.0, turn: float = 0.0) -> Walk:
  """The last of the letters n, e, s, w in a turn is the step; a wall is stood before. `win` at the goal, which ends it.

  A state may be met again, by other ways: what step-level groups compare (config.objective.credit.fn=gigpo).
  Source: none.
  """
  return Walk(win, turn)
