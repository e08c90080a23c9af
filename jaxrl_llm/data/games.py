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
  (start_x, start_y), (x, y) = (divmod(n, size) for n in rng.sample(range(size * size), 2))
  traits = dict(size=size, start_x=start_x, start_y=start_y, goal_x=x, goal_y=y, walls=walls)
  # A first move towards the goal, for a supervised start.
  along = 'e' if x > start_x else 'w' if x < start_x else ''
  move = along or ('s' if y > start_y else 'n')
  return f'{size}x{size} {start_x},{start_y} to {x},{y}:', move, traits


def _pair_walk(rng: random.Random, **settings: int) -> tuple[str, str, dict]:
  _, _, level = _walk(rng, **settings)
  first = rng.choice(('ew', 'ns'))
  places = [level[name] for name in ('start_x', 'start_y', 'goal_x', 'goal_y')]
  question = '{} {},{} to {},{}:'.format(
    first, *places
  )  # what the environment shows in later turns
  # Any move of the agent: a supervised start learns the form alone.
  return question, rng.choice(first), dict(level, first=first)


# Name → (function (rng, **settings) → (question, answer, traits), default settings).
GAMES: dict[str, tuple[Callable[..., tuple[str, str, dict]], dict[str, int]]] = {
  'guess': (_guess, dict(top=20, min_span=3, max_span=15)),
  'walk': (_walk, dict(min_size=2, max_size=5, walls=2)),
  'pair_walk': (_pair_walk, dict(min_size=2, max_size=4, walls=1)),
}
MINIMUM = dict(top=0, min_span=1, max_span=1, min_size=2, max_size=2, walls=0)


def draw(name: str, rng: random.Random, **settings: int) -> dict:
  """Draws a level: the question, such as '3-9:', the answer for a supervised start, and the traits in `extra`."""
  question, answer, extra = GAMES[name][0](rng, **settings)
  return dict(question=question, answer=answer, extra=dict(game=name, **extra))
