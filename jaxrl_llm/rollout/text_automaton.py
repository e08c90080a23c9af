"""Text search in a stream of tokens: a finite automaton over the vocabulary, independent of the tokenization."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def build_table(token_texts: Sequence[str], text: str) -> np.ndarray:
  """Transition table next[state, token], int16 [len(text) + 1, V], of the Knuth–Morris–Pratt automaton.

  The state is how many characters of `text` end the row after the token; the automaton runs over the characters of
  each token. The last state means that the text is complete, and is never left.
  """
  states = len(text) + 1
  step = _automaton(text)
  table = np.zeros((states, len(token_texts)), np.int16)
  for token, piece in enumerate(token_texts):
    for start in range(states):
      state = start
      for character in piece:
        state = state if state == len(text) else step[state].get(character, 0)
      table[start, token] = state
  return table


def _automaton(text: str) -> list[dict[str, int]]:
  """step[state][character]; a missing character leads to state 0."""
  step, n = [], len(text)
  for state in range(n):
    ends = {c: text[:state] + c for c in text}
    longest = lambda end: next(k for k in range(state + 1, -1, -1) if end.endswith(text[:k]))  # noqa: B023, E731
    step.append({c: longest(end) for c, end in ends.items()})
  return step
