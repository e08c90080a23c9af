"""The words around the answer in right completions of the policy, as in 'The answer is 5.' or '2 + 3 = 5'.

The odds of a known answer alone say little of a policy that writes it within a sentence; those of the sentence do. A
sentence may repeat a part of its question, which is found in other questions by the number of characters before and
after it: '2 + 3' is 'Calculate 2 + 3.' without the first ten and the last one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

_KEEP = 0.9  # the weight of a step's wordings in the next step
_MOST = 16  # wordings that are kept
_SHORTEST = 3  # characters of a question that are a repeated part of it


class Group(NamedTuple):
  """Right completions of a prompt."""

  question: str
  answer: str
  texts: Sequence[str]


class Lead(NamedTuple):
  """The text before an answer: `before`, a part of the question, and `between`."""

  before: str
  part: tuple[int, int] | None = None  # characters of the question before and after the part
  between: str = ''

  def text(self, question: str) -> str:
    """The text before the answer to a question."""
    if self.part is None:
      return self.before
    first, rest = self.part
    return self.before + question[first : max(len(question) - rest, first)] + self.between


class Wording(NamedTuple):
  """A completion is `lead`, the answer and `after`."""

  lead: Lead
  after: str

  def phrase(self, question: str, answer: str) -> str:
    """The answer in these words."""
    return self.lead.text(question) + answer + self.after


def none() -> np.ndarray:
  """The record of no wording: uint8, as JSON, which a checkpoint holds."""
  return _packed({})


def commonest(record: np.ndarray) -> Wording | None:
  """The wording of largest weight among those of the commonest lead.

  None unless that lead has more weight than one prompt gives it in one step.
  """
  weights = _unpacked(record)
  leads: dict[Lead, float] = {}
  for (lead, _), weight in weights.items():
    leads[lead] = leads.get(lead, 0.0) + weight
  # Of two with the same weight the first, which repeats nothing: characters that all questions have say so by chance.
  best = max(leads, key=leads.__getitem__, default=None)
  if best is None or leads[best] <= 1:
    return None
  return max((x for x in weights if x.lead == best), key=weights.__getitem__)


def updated(record: np.ndarray, groups: Iterable[Group]) -> np.ndarray:
  """The record after a step.

  A prompt has weight 1, in equal shares of its right completions, so that words of one question do not become
  everybody's. A completion that does not hold its answer literally has no words; one that repeats a part of its
  question counts for the words with and without it.
  """
  weights = {wording: _KEEP * weight for wording, weight in _unpacked(record).items()}
  for question, answer, texts in groups:
    for text in texts:
      before, held, after = text.rpartition(answer) if answer else ('', '', '')
      for lead in _leads(question, before) if held else ():
        wording = Wording(lead, after)
        weights[wording] = weights.get(wording, 0.0) + 1 / len(texts)
  heaviest = sorted(weights, key=weights.__getitem__, reverse=True)[:_MOST]
  return _packed({wording: weights[wording] for wording in heaviest})


def _leads(question: str, before: str) -> list[Lead]:
  """The text as it stands and, if it repeats characters of the question, with the longest such part."""
  start = size = 0
  for end in range(1, len(before) + 1):
    if before[end - size - 1 : end] in question:  # one more than the longest so far
      start, size = end - size - 1, size + 1
  if size < _SHORTEST:
    return [Lead(before)]
  first = question.index(before[start : start + size])
  part = first, len(question) - first - size
  return [Lead(before), Lead(before[:start], part, before[start + size :])]


def _packed(weights: dict[Wording, float]) -> np.ndarray:
  text = json.dumps([[*lead, after, weight] for (lead, after), weight in weights.items()])
  return np.frombuffer(text.encode(), np.uint8)


def _unpacked(record: np.ndarray) -> dict[Wording, float]:
  rows = json.loads(record.tobytes().decode())
  return {
    Wording(Lead(before, part and tuple(part), between), after): weight
    for before, part, between, after, weight in rows
  }
