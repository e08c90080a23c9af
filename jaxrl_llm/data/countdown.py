"""Countdown: make a number of some given ones, each used once. Graded by config.rewards.fn='countdown'.

Source of the task: a game show; as a task of RL, TinyZero (no paper).
"""

from __future__ import annotations

import random
from fractions import Fraction

SETTINGS = dict(min_numbers=3, max_numbers=4, min_number=1, max_number=9, max_target=99)
LEAST = dict(min_numbers=2, max_numbers=2, min_number=1, max_number=1, max_target=1)
_LOW, _HIGH = 0, 1  # how tightly + − and × ÷ bind
_TRIES = 1000


def draw(
  rng: random.Random,
  *,
  min_numbers: int,
  max_numbers: int,
  min_number: int,
  max_number: int,
  max_target: int,
) -> dict:
  """'make 46 of 3 7 25:' → an expression that does, such as 3*7+25; every step of it is a whole number from 1 up.

  The target is no larger than max_target. `extra` has `numbers`, `target` and `count`, how many numbers there are.
  Raises ValueError where _TRIES draws gave no such target. Source: none.
  """
  count = rng.randint(min_numbers, max_numbers)
  for _ in range(_TRIES):
    numbers = [rng.randint(min_number, max_number) for _ in range(count)]
    target, expression = _made(rng, numbers)
    if 1 <= target <= max_target:
      break
  else:
    raise ValueError(f'{count} numbers from {min_number} up make nothing up to {max_target}')
  return dict(
    question=f'make {target} of {" ".join(map(str, numbers))}:',
    answer=expression,
    extra=dict(numbers=numbers, target=int(target), count=count),
  )


def _made(rng: random.Random, numbers: list[int]) -> tuple[int, str]:
  """Two parts at a time are put together, until one is left: its value, and how it is written."""
  parts = [(n, str(n), _HIGH + 1) for n in numbers]
  while len(parts) > 1:
    left, right = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
    parts.append(_joined(rng, left, right))
  return parts[0][0], parts[0][1]


def _joined(rng: random.Random, left: tuple, right: tuple) -> tuple[int, str, int]:
  a, b = left[0], right[0]
  able = ['+', '*', *('-' if a > b else ''), *('/' if Fraction(a, b).denominator == 1 else '')]
  sign = rng.choice(able)
  value = dict([('+', a + b), ('*', a * b), ('-', a - b), ('/', a // b)])[sign]
  binds = _LOW if sign in '+-' else _HIGH
  # Brackets where they are needed: to the right of − and ÷ equals need them, too.
  told = [
    f'({text})' if own < binds or (own == binds and side and sign in '-/') else text
    for side, (_, text, own) in enumerate((left, right))
  ]
  return value, f'{told[0]}{sign}{told[1]}', binds
