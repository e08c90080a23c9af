"""Levels of the text games of config.environment: a row says how hard a game is, the episode's seed draws the game."""

from __future__ import annotations

import random
from collections.abc import Callable


def _guess(rng: random.Random, *, top: int, min_span: int, max_span: int) -> tuple[str, str, dict]:
  low = rng.randint(0, top)
  high = low + rng.randint(min_span, max_span) - 1
  # A first guess that a warm start may learn from: the middle.
  return f'{low}-{high}:', str((low + high) // 2), dict(low=low, high=high)


def _walk(rng: random.Random, *, min_size: int, max_size: int, walls: int) -> tuple[str, str, dict]:
  size = rng.randint(min_size, max_size)
  goal = rng.randrange(1, size * size)
  x, y = goal % size, goal // size
  told = dict(size=size, goal_x=x, goal_y=y, walls=walls)
  return f'{size}x{size} to {x},{y}:', 'e' if x else 's', told


# Name → (how a level is drawn, its settings).
GAMES: dict[str, tuple[Callable[..., tuple[str, str, dict]], dict[str, int]]] = {
  'guess': (_guess, dict(top=20, min_span=3, max_span=15)),
  'walk': (_walk, dict(min_size=2, max_size=5, walls=2)),
}
LEAST = dict(top=0, min_span=1, max_span=1, min_size=2, max_size=2, walls=0)


def draw(name: str, rng: random.Random, **settings: int) -> dict:
  """A level: its question, such as '3-9:', the answer that a warm start learns, and its traits. Source: none."""
  question, answer, extra = GAMES[name][0](rng, **settings)
  return dict(question=question, answer=answer, extra=dict(game=name, **extra))
