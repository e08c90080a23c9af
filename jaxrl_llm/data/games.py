"""Levels of the text games of config.environment. A row sets the difficulty; the seed of the episode draws the game."""

from __future__ import annotations

import random
from collections.abc import Callable


def _guess(rng: random.Random, *, top: int, min_span: int, max_span: int) -> tuple[str, str, dict]:
  low = rng.randint(0, top)
  high = low + rng.randint(min_span, max_span) - 1
  # The answer is a first guess for a supervised start: the middle.
  return f'{low}-{high}:', str((low + high) // 2), dict(low=low, high=high)


def _walk(rng: random.Random, *, min_size: int, max_size: int, walls: int) -> tuple[str, str, dict]:
  size = rng.randint(min_size, max_size)
  goal = rng.randrange(1, size * size)
  x, y = goal % size, goal // size
  traits = dict(size=size, goal_x=x, goal_y=y, walls=walls)
  return f'{size}x{size} to {x},{y}:', 'e' if x else 's', traits


# Name → (function (rng, **settings) → (question, answer, traits), default settings).
GAMES: dict[str, tuple[Callable[..., tuple[str, str, dict]], dict[str, int]]] = {
  'guess': (_guess, dict(top=20, min_span=3, max_span=15)),
  'walk': (_walk, dict(min_size=2, max_size=5, walls=2)),
}
MINIMUM = dict(top=0, min_span=1, max_span=1, min_size=2, max_size=2, walls=0)


def draw(name: str, rng: random.Random, **settings: int) -> dict:
  """Draws a level: the question, such as '3-9:', the answer for a supervised start, and the traits in `extra`."""
  question, answer, extra = GAMES[name][0](rng, **settings)
  return dict(question=question, answer=answer, extra=dict(game=name, **extra))
