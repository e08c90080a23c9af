"""The words around the answer in right completions of the policy, as in 'The answer is 5.'

The odds of a known answer alone say little of a policy that writes it within a sentence; those of the sentence do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

_KEEP = 0.9  # the weight of a step's wordings in the next step
_MOST = 16  # wordings that are kept

Group = tuple[str, Sequence[str]]  # a known answer and right completions of its prompt


class Wording(NamedTuple):
  """A completion is `before`, the answer and `after`."""

  before: str
  after: str

  def phrase(self, answer: str) -> str:
    """The answer in these words."""
    return self.before + answer + self.after


def none() -> np.ndarray:
  """The record of no wording: uint8, as JSON, which a checkpoint holds."""
  return _packed({})


def commonest(record: np.ndarray) -> Wording | None:
  """The wording of largest weight; None unless that is more than one prompt gives it in one step."""
  weights = _unpacked(record)
  wording = max(weights, key=weights.__getitem__, default=None)
  return wording if wording is not None and weights[wording] > 1 else None


def updated(record: np.ndarray, groups: Iterable[Group]) -> np.ndarray:
  """The record after a step.

  A prompt has weight 1, in equal shares of its right completions, so that words of one question do not become
  everybody's. A completion that does not hold its answer literally has none.
  """
  weights = {wording: _KEEP * weight for wording, weight in _unpacked(record).items()}
  for answer, texts in groups:
    for text in texts:
      before, held, after = text.rpartition(answer) if answer else ('', '', '')
      if held:
        wording = Wording(before, after)
        weights[wording] = weights.get(wording, 0.0) + 1 / len(texts)
  heaviest = sorted(weights, key=weights.__getitem__, reverse=True)[:_MOST]
  return _packed({wording: weights[wording] for wording in heaviest})


def _packed(weights: dict[Wording, float]) -> np.ndarray:
  text = json.dumps([[*wording, weight] for wording, weight in weights.items()])
  return np.frombuffer(text.encode(), np.uint8)


def _unpacked(record: np.ndarray) -> dict[Wording, float]:
  rows = json.loads(record.tobytes().decode())
  return {Wording(before, after): weight for before, after, weight in rows}
