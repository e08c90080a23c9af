"""Puzzles that are solvable by construction; each row states its difficulty.

Tasks of config.data.source='puzzles', with the defaults of their settings:

  compose(min_depth=1, max_depth=2, min_length=2, max_length=5, tell=0)                       see composed.py
  countdown(min_numbers=3, max_numbers=4, min_number=1, max_number=9, max_target=99)          see countdown.py
  discussed(min_length=3, max_length=5, right=50, judged=50)                                  see discussed.py
  keychain(min_links=2, max_links=4, distractors=2, facts=8, min_hops=1, max_hops=2, filler=20, key_letters=0)
                                                                                             see keychain.py
  products(min_digits=2, max_digits=2, calls=25)                                              see products.py
"""

from __future__ import annotations

import random
from collections.abc import Callable

from jaxrl_llm.data import composed, countdown, discussed, keychain, products

# Name → (function (rng, **settings) → dict(question, answer, extra), default settings).
PUZZLES: dict[str, tuple[Callable[..., dict], dict[str, int]]] = {
  'compose': (composed.draw, composed.SETTINGS),
  'countdown': (countdown.draw, countdown.SETTINGS),
  'discussed': (discussed.draw, discussed.SETTINGS),
  'keychain': (keychain.draw, keychain.SETTINGS),
  'products': (products.draw, products.SETTINGS),
}
MINIMUM = (
  composed.MINIMUM | countdown.MINIMUM | discussed.MINIMUM | keychain.MINIMUM | products.MINIMUM
)


def draw(name: str, rng: random.Random, **settings: int) -> dict:
  """Draws a question and its answer; `extra` holds the difficulty and the data for the reward function."""
  return PUZZLES[name][0](rng, **settings)
