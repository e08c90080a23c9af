"""Products, for a model that may call a calculator: 37*48= with the answer 1776.

A demonstration is the answer alone, or an episode with a call, <c>37*48</c>1776=1776, in which 1776 is the observation
between two turns. The environment of such rows is `calculator(tag='c')`.
"""

from __future__ import annotations

import random

SETTINGS = dict(min_digits=2, max_digits=2, calls=25)
MINIMUM = dict(min_digits=1, max_digits=1, calls=0)


def draw(rng: random.Random, *, min_digits: int, max_digits: int, calls: int) -> dict:
  """Draws a product of two factors of as many digits; `calls` percent of the demonstrations hold a call.

  `extra` has `digits` and `solution`, the demonstration. Raises ValueError for more than 100 percent.
  """
  if calls > 100:
    raise ValueError(f'calls={calls} is a percentage and must be at most 100')
  digits = rng.randint(min_digits, max_digits)
  left, right = (rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
  question, answer = f'{left}*{right}', str(left * right)
  called = rng.randrange(100) < calls
  solution = f'<c>{question}</c>{answer}={answer}' if called else answer
  return dict(question=f'{question}=', answer=answer, extra=dict(digits=digits, solution=solution))
