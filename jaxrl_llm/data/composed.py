"""Composed string functions: f3(f0(abc)) = ?, to measure whether RL teaches the composition of skills.

The names carry no meaning: a model must first learn each function (depth 1 in a supervised start, or a definition in
the question) before it can compose them (depth 2 and more). The task is of arXiv:2509.25123, with other functions.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable

_LETTERS = string.ascii_lowercase


def _map(to: str) -> Callable[[str], str]:
  table = str.maketrans(_LETTERS, to)
  return lambda x: x.translate(table)


def _pairs_swapped(x: str) -> str:
  return ''.join(x[i : i + 2][::-1] for i in range(0, len(x), 2))


# Name → (function of a string of lower-case letters, its definition in words). No function returns an empty string.
FUNCTIONS: dict[str, tuple[Callable[[str], str], str]] = {
  'f0': (lambda x: x[::-1], 'the letters in reverse order'),
  'f1': (lambda x: ''.join(sorted(x)), 'the letters in alphabetical order'),
  'f2': (lambda x: x[1:] + x[:1], 'the first letter moved to the end'),
  'f3': (lambda x: x[-1:] + x[:-1], 'the last letter moved to the front'),
  'f4': (_map(_LETTERS[1:] + 'a'), 'every letter replaced by the next of the alphabet, z by a'),
  'f5': (_map('z' + _LETTERS[:-1]), 'every letter replaced by the one before, a by z'),
  'f6': (_map(_LETTERS[::-1]), 'every letter replaced by its mirror image: a by z, b by y, …'),
  'f7': (lambda x: ''.join(c * 2 for c in x), 'every letter twice'),
  'f8': (lambda x: x + x[::-1], 'the letters, and then the same in reverse order'),
  'f9': (_pairs_swapped, 'the letters of each pair swapped, the last one alone where it has none'),
  'f10': (lambda x: x[::2] + x[1::2], 'the first, third, fifth, … letters, and then the others'),
  'f11': (lambda x: x + x[:1], 'the first letter once more at the end'),
}

SETTINGS = dict(min_depth=1, max_depth=2, min_length=2, max_length=5, tell=0)
MINIMUM = dict(min_depth=1, max_depth=1, min_length=1, max_length=1, tell=0)


def draw(
  rng: random.Random,
  *,
  min_depth: int,
  max_depth: int,
  min_length: int,
  max_length: int,
  tell: int,
) -> dict:
  """Draws 'f3(f0(abc))=' and its value, arXiv:2509.25123; depth and length are uniform in their ranges.

  tell=1 adds the definitions of the functions to the question. `extra` has depth, length, and the functions, outermost
  first.
  """
  depth, length = rng.randint(min_depth, max_depth), rng.randint(min_length, max_length)
  names = rng.choices(list(FUNCTIONS), k=depth)
  value = ''.join(rng.choices(_LETTERS, k=length))
  question = ''.join(f'{name}(' for name in names) + value + ')' * depth + '='
  if tell:
    lines = [f'{name}(x): {FUNCTIONS[name][1]}.' for name in sorted(set(names))]
    question = '\n'.join([*lines, question])
  for name in reversed(names):
    value = FUNCTIONS[name][0](value)
  return dict(
    question=question,
    answer=value,
    extra=dict(depth=depth, length=length, functions=names),
  )
