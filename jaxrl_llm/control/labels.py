"""Labels that the policy's own answers contradict: what to train on now, and a list for a human.

A visit is one group of answers to a prompt, as strings of which equal ones mean the same: whoever reads
them out brings 0.5 and 1/2 into one form. None is a reply without an answer. Numpy on the host.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from numbers import Real
from typing import NamedTuple

import numpy as np

from jaxrl_llm.types import UserError


class Suspect(NamedTuple):
  """A label that the rollouts contradict."""

  prompt: int
  given: str  # the label of the data
  majority: str  # what the rollouts say
  share: float  # of the last group that says so
  visits: int


def mode(values: Sequence[Hashable]) -> tuple[Hashable, float]:
  """(the value that is most frequent, its share of all); None for the value in a tie or if it is None.

  None is left out of the count and not of the share. In a tie the share is that of each of the tied:
  it is not known what the authors record there. Source: arXiv:2604.03993 (OLR).
  """
  counts = Counter(v for v in values if v is not None).most_common(2)
  if not counts:
    return None, 0.0
  tie = len(counts) > 1 and counts[0][1] == counts[1][1]
  return None if tie else counts[0][0], counts[0][1] / len(values)


def slope(share_V: Sequence[float]) -> float:
  """Least squares of the shares over visits, per visit; 0 for fewer than two. Source: arXiv:2604.03993 (OLR)."""
  if len(share_V) < 2:
    return 0.0
  t_V = np.arange(len(share_V)) - (len(share_V) - 1) / 2
  return float(t_V @ np.asarray(share_V, np.float64) / (t_V @ t_V))


def refined(
  answer_V: Sequence[str | None],
  share_V: Sequence[float],
  *,
  min_slope: float = 0.05,
  after: int = 4,
) -> str | None:
  """The last visit's majority answer if it may stand for the label, else None.

  It may from visit number after + 1 on, where the slope of the majority's share over all visits is at
  least `min_slope` and it is the unique mode of the majorities of all visits, its own among them.
  A share that is high from the start has no slope and never qualifies: that is the published rule.
  Source: arXiv:2604.03993 (OLR; constants of its code, which counts epochs).
  """
  if len(answer_V) <= after or answer_V[-1] is None or slope(share_V) < min_slope:
    return None
  return answer_V[-1] if mode(answer_V)[0] == answer_V[-1] else None


class LabelCare:
  """observe(visit) → label(prompt, given): the label to grade by now; suspects(given) for the log."""

  def __init__(self, *, min_slope: float = 0.05, after: int = 4):
    """`min_slope` share per visit; `after` visits without a change. Raises UserError for what is no number.

    Source: arXiv:2604.03993 (OLR).
    """
    number = isinstance(min_slope, Real) and not isinstance(min_slope, bool)
    if not number or not math.isfinite(min_slope):
      raise UserError(f'config.labels.min_slope={min_slope!r} must be a finite number.')
    if type(after) is not int or after < 1:
      raise UserError(f'config.labels.after={after!r} must be a whole number of at least 1.')
    self._rule = dict(min_slope=min_slope, after=after)
    self._visits: dict[int, tuple[list[str | None], list[float]]] = {}

  def observe(self, index_P: Sequence[int], answers_PxG: Sequence[Sequence[str | None]]) -> None:
    """Records the majority of each visited prompt's answers. Source: arXiv:2604.03993 (OLR)."""
    for prompt, answers in zip(index_P, answers_PxG, strict=True):
      answer, share = mode(answers)
      answer_V, share_V = self._visits.setdefault(int(prompt), ([], []))
      answer_V.append(answer)
      share_V.append(share)

  def label(self, prompt: int, given: str) -> str:
    """What to grade the visit just observed by: the majority if it qualifies, else the given label.

    Asked anew at every visit, so that a change is taken back where it no longer qualifies.
    Source: arXiv:2604.03993 (OLR).
    """
    answer = refined(*self._visits.get(int(prompt), ((), ())), **self._rule)
    return given if answer is None else answer

  def suspects(self, given_N: Sequence[str]) -> list[Suspect]:
    """All prompts whose label is replaced now by another one, by prompt. Source: arXiv:2604.03993 (OLR)."""
    found = []
    for prompt, (answer_V, share_V) in sorted(self._visits.items()):
      answer = self.label(prompt, given_N[prompt])
      if answer != given_N[prompt]:
        found.append(Suspect(prompt, given_N[prompt], answer, share_V[-1], len(answer_V)))
    return found

  def state_dict(self) -> dict[str, list]:
    """Every visit, as [prompt, answers, shares] for JSON. Source: none."""
    return dict(visits=[[p, list(a), list(s)] for p, (a, s) in sorted(self._visits.items())])

  def load_state_dict(self, state: dict[str, list]) -> None:
    """Continues exactly. Source: none."""
    self._visits = {p: (list(a), list(s)) for p, a, s in state['visits']}
