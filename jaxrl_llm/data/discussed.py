"""Strings of digits to reverse, for a policy that discusses its solutions: rev:4821= with the answer 1284.

A demonstration is an episode of the environment `discussion(evaluate='?', score='!')`,
1284<end>?ok<end>!<score>3</score>, in which ? and ! are the observations. Its <end> is the end token of a character
model, and of no other.
"""

from __future__ import annotations

import random

from jaxrl_llm.data import digits

SETTINGS = dict(min_length=3, max_length=5, right=50, judged=50)
MINIMUM = dict(min_length=1, max_length=1, right=0, judged=0)


def draw(rng: random.Random, *, min_length: int, max_length: int, right: int, judged: int) -> dict:
  """Draws a string; `right` percent of the demonstrations reverse it, the others only copy it.

  `judged` percent of the evaluations (ok or no) are true, the others random. Every score is true: 3 for the reversed
  string, else 1. `extra` has `length` and `solution`, the demonstration. Raises ValueError for more than 100 percent.
  """
  for name, percent in (('right', right), ('judged', judged)):
    if percent > 100:
      raise ValueError(f'{name}={percent} is a percentage and must be at most 100')
  row = digits.draw('rev', rng, min_length=min_length, max_length=max_length)
  solution = row['answer'] if rng.randrange(100) < right else row['answer'][::-1]
  is_right = solution == row['answer']  # also of a palindrome that is copied
  approves = is_right if rng.randrange(100) < judged else rng.random() < 0.5
  evaluation, score = 'ok' if approves else 'no', 3 if is_right else 1
  text = f'{solution}<end>?{evaluation}<end>!<score>{score}</score>'
  return row | dict(extra=dict(length=row['extra']['length'], solution=text))
