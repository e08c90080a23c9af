"""What is made of answers that could not be graded, and when there are too many of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxrl_llm.rewards.pool import Scores
from jaxrl_llm.rewards.worker import FAILURES, OUTCOMES, SKIP
from jaxrl_llm.types import UserError

_POLICIES = ('score', 'drop')


class FailurePolicy:
  """`config.rewards.failed`: what each kind of failure means for its rollout; and a window of the last steps.

  score: the reward is `value`, as a wrong answer's would be. drop: the rollout is as if it had not been generated.
  By default a time-out scores: what keeps a grader busy is the text, and a policy must not profit from it. A crash or
  an error is dropped: it says something of the grader or the data row, and a right answer must not be unlearned for it;
  nothing is gained by one either, as a rollout without weight is not learned from. What the grader skips is dropped,
  and is no failure. Source: none.
  """

  def __init__(self, grade: Any):
    """grade: config.rewards. Raises UserError for an unknown policy, or a number out of range."""
    spec, where = dict(grade.get('failed', {})), 'config.rewards.failed'
    self._drops = np.zeros(len(OUTCOMES), bool)
    self._drops[SKIP] = True
    for code in FAILURES:
      kind = OUTCOMES[code]
      policy = spec.pop(kind, 'score' if kind == 'timeout' else 'drop')
      if policy not in _POLICIES:
        raise UserError(f'{where}.{kind}={policy!r} must be one of: {", ".join(_POLICIES)}.')
      self._drops[code] = policy == 'drop'
    self.value = _number(spec, 'value', 0.0, -math.inf, math.inf)
    if self.value >= grade.get('right', 1.0):
      raise UserError(
        f'{where}.value={self.value!r} would count as right; give less than config.rewards.right='
        f'{grade.get("right", 1.0)!r}.'
      )
    self.stop_share = _number(spec, 'stop_share', 0.5, 0.0, 1.0)
    self.stop_steps = _number(spec, 'stop_steps', 3, 1, math.inf)
    if not isinstance(self.stop_steps, int):
      raise UserError(f'{where}.stop_steps={self.stop_steps!r} must be a whole number from 1 up.')
    if spec:
      raise UserError(
        f'{where}.{min(spec)} is unknown; valid: crash, error, stop_share, stop_steps, timeout, value.'
      )
    # (rollouts by outcome, the first failure) of the last steps, the oldest first.
    self._seen: list[tuple[list[int], str]] = []

  def apply(self, scores: Scores) -> tuple[np.ndarray, np.ndarray]:
    """(rewards of all graders [B, K], which rows are dropped [B]). Source: none."""
    parts_BxK, drop_B = scores.parts_BxK.copy(), self._drops[scores.outcome_B]
    parts_BxK[np.isin(scores.outcome_B, FAILURES) & ~drop_B, 0] = self.value
    return parts_BxK, drop_B

  def observe(self, outcome_N: np.ndarray, message: str) -> None:
    """One step's graded rollouts; `message` tells the first failure among them. Source: none."""
    counts = np.bincount(outcome_N, minlength=len(OUTCOMES)).tolist()
    self._seen = [*self._seen, (counts, message)][-self.stop_steps :]

  def check(self) -> None:
    """Raises UserError where more than `stop_share` of the last `stop_steps` steps' rollouts failed. Source: none."""
    if len(self._seen) < self.stop_steps:
      return
    total = np.sum([counts for counts, _ in self._seen], 0)
    failed = total[list(FAILURES)].sum()
    if failed <= self.stop_share * total.sum():
      return
    first = next(message for _, message in self._seen if message)
    kinds = ', '.join(f'{total[code]} {OUTCOMES[code]}' for code in FAILURES)
    raise UserError(
      f'config.rewards.failed.stop_share={self.stop_share}: {failed} of {total.sum()} rollouts of the last '
      f'{len(self._seen)} steps could not be graded ({kinds}), the first: {first}; mend the grader, the rows '
      'or config.rewards.deadline_s and memory_mb, and start again: the run goes on from its last checkpoint.'
    )

  def state_dict(self) -> dict:
    """For the checkpoint. Source: none."""
    return dict(seen=[list(step) for step in self._seen])

  def load_state_dict(self, state: dict) -> None:
    """Back from `state_dict`. Source: none."""
    self._seen = [(_whole(counts), message) for counts, message in state['seen']][
      -self.stop_steps :
    ]


def _whole(counts: list[int]) -> list[int]:
  """Of a checkpoint from before there was a way to skip."""
  return [*counts, *[0] * (len(OUTCOMES) - len(counts))]


def _number(spec: dict, name: str, default: Any, low: float, high: float) -> Any:
  value = spec.pop(name, default)
  number = isinstance(value, int | float) and not isinstance(value, bool)
  if not number or not low <= value <= high or not math.isfinite(value):
    told = 'a finite number' if low == -math.inf else f'a number from {low} to {high}'
    raise UserError(f'config.rewards.failed.{name}={value!r} must be {told}.')
  return value
