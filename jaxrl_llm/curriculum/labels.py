"""Labels that the policy's answers contradict: replacements for training, and a list for review.

A visit is one group of answers to a prompt, as normalized strings: equal strings are equal answers. None is a
completion without an answer. Every public function may be named in `config.curriculum.labels.fn`; it returns a
LabelRefiner or None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple

from jaxrl_llm.curriculum.answer_consensus import majority, refined
from jaxrl_llm.types import UserError

_MAX_VISITS = 64  # stored per prompt: more than the epochs of a run


class SuspectLabel(NamedTuple):
  """A label that the rollouts contradict."""

  prompt: int
  given: str | None  # the label in the data; also a key of suspect_labels.jsonl
  majority: str | None  # answer of the rollouts
  share: float  # of that answer in the last group
  visits: int  # number of stored visits


class LabelRefiner:
  """Majority answers over visits: `observe` records, `label` returns the one to grade by, `suspects` lists changes."""

  def __init__(self, *, min_slope: float = 0.05, after: int = 5):
    """`min_slope` share per visit; `after` visits without a change. Raises UserError for invalid numbers.

    arXiv:2604.03993 (OLR).
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
    """Records the majority of each visited prompt's answers; the last 64 visits count. arXiv:2604.03993 (OLR)."""
    for prompt, answers in zip(index_P, answers_PxG, strict=True):
      answer, share = majority(answers)
      answer_V, share_V = self._visits.setdefault(int(prompt), ([], []))
      answer_V.append(answer)
      share_V.append(share)
      del answer_V[:-_MAX_VISITS], share_V[:-_MAX_VISITS]

  def label(self, prompt: int, label: str | None) -> str | None:
    """The label for the visit just observed: the majority if it qualifies, else the `label` of the data.

    Evaluated at every visit, so that a replacement that no longer qualifies is reverted.
    arXiv:2604.03993 (OLR).
    """
    answer = refined(*self._visits.get(int(prompt), ((), ())), **self._rule)
    return label if answer is None else answer

  def suspects(self, label_of: Callable[[int], str | None]) -> list[SuspectLabel]:
    """All prompts whose label is currently replaced, by prompt; `label_of` returns the label of the data.

    arXiv:2604.03993 (OLR).
    """
    suspects = []
    for prompt, (answer_V, share_V) in sorted(self._visits.items()):
      label = label_of(prompt)
      answer = self.label(prompt, label)
      if answer != label:
        suspects.append(SuspectLabel(prompt, label, answer, share_V[-1], len(answer_V)))
    return suspects

  def state_dict(self) -> dict[str, list[Any]]:
    """Every visit, as [prompt, answers, shares] for JSON."""
    return dict(visits=[[p, list(a), list(s)] for p, (a, s) in sorted(self._visits.items())])

  def load_state_dict(self, state: dict[str, list[Any]]) -> None:
    """Restore from `state_dict`."""
    self._visits = {p: (list(a), list(s)) for p, a, s in state['visits']}


def none() -> None:
  """Labels of the data, unchanged."""
  return None


def majority_refined(*, min_slope: float = 0.05, after: int = 5) -> LabelRefiner:
  """A label is replaced by the unique majority answer of the group if its share has grown and most visits agree.

  From visit `after` + 1 on, with a slope of the majority's share of at least `min_slope` per visit; evaluated at every
  visit. arXiv:2604.03993 (OLR; constants of its code, which counts epochs).
  """
  return LabelRefiner(min_slope=min_slope, after=after)
