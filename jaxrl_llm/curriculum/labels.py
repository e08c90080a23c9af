"""Labels that the policy's own answers contradict: what to train on now, and a list for a human.

A visit is one group of answers to a prompt, as strings of which equal ones mean the same: whoever reads
them out brings 0.5 and 1/2 into one form. None is a reply without an answer.
Every public function here may be named in `config.curriculum.labels.fn`; it makes what is kept, or None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import NamedTuple

from jaxrl_llm.curriculum.answer_consensus import mode, refined
from jaxrl_llm.types import UserError

_KEPT = 64  # visits that are remembered of a prompt: more epochs than a run has


class SuspectLabel(NamedTuple):
  """A label that the rollouts contradict."""

  prompt: int
  given: str  # the label of the data
  majority: str  # what the rollouts say
  share: float  # of the last group that says so
  visits: int  # remembered


class LabelRefiner:
  """observe(visit) → label(prompt, given): the label to grade by now; suspects(given) for the log."""

  def __init__(self, *, min_slope: float = 0.05, after: int = 4):
    """`min_slope` share per visit; `after` visits without a change. Raises UserError for what is no number.

    Source: arXiv:2604.03993 (OLR).
    """
    number = isinstance(min_slope, Real) and not isinstance(min_slope, bool)
    if not number or not math.isfinite(min_slope):
      raise UserError(f'config.curriculum.labels.min_slope={min_slope!r} must be a finite number.')
    if type(after) is not int or after < 1:
      raise UserError(
        f'config.curriculum.labels.after={after!r} must be a whole number of at least 1.'
      )
    self._rule = dict(min_slope=min_slope, after=after)
    self._visits: dict[int, tuple[list[str | None], list[float]]] = {}

  def observe(self, index_P: Sequence[int], answers_PxG: Sequence[Sequence[str | None]]) -> None:
    """Records the majority of each visited prompt's answers; the newest 64 visits count. arXiv:2604.03993 (OLR)."""
    for prompt, answers in zip(index_P, answers_PxG, strict=True):
      answer, share = mode(answers)
      answer_V, share_V = self._visits.setdefault(int(prompt), ([], []))
      answer_V.append(answer)
      share_V.append(share)
      del answer_V[:-_KEPT], share_V[:-_KEPT]

  def label(self, prompt: int, given: str) -> str:
    """What to grade the visit just observed by: the majority if it qualifies, else the given label.

    Asked anew at every visit, so that a change is taken back where it no longer qualifies.
    Source: arXiv:2604.03993 (OLR).
    """
    answer = refined(*self._visits.get(int(prompt), ((), ())), **self._rule)
    return given if answer is None else answer

  def suspects(self, given: Callable[[int], str]) -> list[SuspectLabel]:
    """All prompts whose label is replaced now by another one, by prompt; `given` tells the data's.

    Source: arXiv:2604.03993 (OLR).
    """
    found = []
    for prompt, (answer_V, share_V) in sorted(self._visits.items()):
      label = given(prompt)
      answer = self.label(prompt, label)
      if answer != label:
        found.append(SuspectLabel(prompt, label, answer, share_V[-1], len(answer_V)))
    return found

  def state_dict(self) -> dict[str, list]:
    """Every visit, as [prompt, answers, shares] for JSON. Source: none."""
    return dict(visits=[[p, list(a), list(s)] for p, (a, s) in sorted(self._visits.items())])

  def load_state_dict(self, state: dict[str, list]) -> None:
    """Continues exactly. Source: none."""
    self._visits = {p: (list(a), list(s)) for p, a, s in state['visits']}


def none() -> None:
  """Rewards by the data's labels. Source: none."""
  return None


def majority_refined(*, min_slope: float = 0.05, after: int = 4) -> LabelRefiner:
  """A label gives way to its group's unique majority answer, where that has grown and is that of most visits.

  From visit `after` + 1 on, with a slope of the majority's share of at least `min_slope` a visit; asked anew at every
  visit. Source: arXiv:2604.03993 (OLR; constants of its code, which counts epochs).
  """
  return LabelRefiner(min_slope=min_slope, after=after)
