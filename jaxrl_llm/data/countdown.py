"""Countdown: combine numbers, each used once, to a target. Graded by config.rewards.fn='countdown'.

The task is from a game show; TinyZero introduced it to RL (no paper).
"""

from __future__ import annotations

import random
from fractions import Fraction

SETTINGS = dict(min_numbers=3, max_numbers=4, min_number=1, max_number=9, max_target=99)
MINIMUM = dict(min_numbers=2, max_numbers=2, min_number=1, max_number=1, max_target=1)
_ADDITIVE, _MULTIPLICATIVE = 0, 1  # operator precedence
_MAX_DRAWS = 1000


def draw(
  rng: random.Random,
  *,
  min_numbers: int,
  max_numbers: int,
  min_number: int,
  max_number: int,
  max_target: int,
) -> dict:
  """Draws 'make 46 of 3 7 25:' with the answer 3*7+25; every intermediate result is a whole number from 1 up.

  The target is at most max_target. `extra` has `numbers`, `target` and `count`, the number of numbers. Raises
  ValueError where _MAX_DRAWS draws give no such target.
  """
  count = rng.randint(min_numbers, max_numbers)
  for _ in range(_MAX_DRAWS):
    numbers = [rng.randint(min_number, max_number) for _ in range(count)]
    target, expression = _combined(rng, numbers)
    if 1 <= target <= max_target:
      break
  else:
    raise ValueError(f'{count} numbers from {min_number} up make nothing up to {max_target}')
  return dict(
    question=f'make {target} of {" ".join(map(str, numbers))}:',
    answer=expression,
    extra=dict(numbers=numbers, target=int(target), count=count),
  )


def _combined(rng: random.Random, numbers: list[int]) -> tuple[int, str]:
  """(value, expression) after joining two random parts at a time until one is left."""
  # (value, expression, precedence of its outermost operator)
  parts = [(n, str(n), _MULTIPLICATIVE + 1) for n in numbers]
  while len(parts) > 1:
    left, right = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
    parts.append(_joined(rng, left, right))
  return parts[0][0], parts[0][1]


def _joined(rng: random.Random, left: tuple, right: tuple) -> tuple[int, str, int]:
  a, b = left[0], right[0]
  valid = ['+', '*', *('-' if a > b else ''), *('/' if Fraction(a, b).denominator == 1 else '')]
  sign = rng.choice(valid)
  value = dict([('+', a + b), ('*', a * b), ('-', a - b), ('/', a // b)])[sign]
  precedence = _ADDITIVE if sign in '+-' else _MULTIPLICATIVE
  # Brackets where they are needed: to the right of − and ÷ also for equal precedence.
  operands = [
    f'({text})' if inner < precedence or (inner == precedence and side and sign in '-/') else text
    for side, (_, text, inner) in enumerate((left, right))
  ]
  return value, f'{operands[0]}{sign}{operands[1]}', precedence
