"""Finding a text in a stream of tokens, however it was cut into tokens: an automaton over the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def build_table(token_texts: Sequence[str], text: str) -> np.ndarray:
  """next[state, token], int16 [len(text) + 1, V]: how many characters of `text` the row ends with after a token.

  The last state means that the text was seen, and is never left. Source: none (the Knuth–Morris–Pratt
  automaton, run over the characters of each token).
  """
  states = len(text) + 1
  step = _automaton(text)
  out = np.zeros((states, len(token_texts)), np.int16)
  for token, piece in enumerate(token_texts):
    for state in range(states):
      now = state
      for character in piece:
        now = now if now == len(text) else step[now].get(character, 0)
      out[state, token] = now
  return out


def _automaton(text: str) -> list[dict[str, int]]:
  """step[state][character]; a character that is not there leads to state 0."""
  step, n = [], len(text)
  for state in range(n):
    ends = {c: text[:state] + c for c in text}
    longest = lambda end: next(k for k in range(state + 1, -1, -1) if end.endswith(text[:k]))  # noqa: B023, E731
    step.append({c: longest(end) for c, end in ends.items()})
  return step
