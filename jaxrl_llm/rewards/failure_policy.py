"""The treatment of completions that could not be graded, and the limit on their share."""

from __future__ import annotations

import math

import numpy as np

from jaxrl_llm.rewards.outcomes import Spec
from jaxrl_llm.rewards.pool import Scores
from jaxrl_llm.rewards.worker import FAILURES, OUTCOMES, SKIP
from jaxrl_llm.types import UserError

_POLICIES = ('score', 'drop')


class FailurePolicy:
  """The policy of config.rewards.failed for each kind of failure, and the failures of the last steps.

  score: the reward is `value`, like that of a wrong answer. drop: the rollout is excluded from the update. By default a
  time-out scores, because the text causes it and a policy must not profit from it. A crash or an error is dropped,
  because the reward function or the data row causes it and a right answer must not be penalized. A skipped sample is
  dropped and does not count as a failure.
  """

  def __init__(self, rewards: Spec):
    """`rewards` is config.rewards. Raises UserError for an unknown policy, or a number out of range."""
    spec, where = dict(rewards.get('failed', {})), 'config.rewards.failed'
    self._drops = np.zeros(len(OUTCOMES), bool)
    self._drops[SKIP] = True
    for code in FAILURES:
      kind = OUTCOMES[code]
      policy = spec.pop(kind, 'score' if kind == 'timeout' else 'drop')
      if policy not in _POLICIES:
        raise UserError(f'{where}.{kind}={policy!r} must be one of: {", ".join(_POLICIES)}.')
      self._drops[code] = policy == 'drop'
    self.value = _number(spec, 'value', 0.0, -math.inf, math.inf)
    if self.value >= rewards.get('right', 1.0):
      raise UserError(
        f'{where}.value={self.value!r} would count as right; give less than config.rewards.right='
        f'{rewards.get("right", 1.0)!r}.'
      )
    self.stop_share = _number(spec, 'stop_share', 0.5, 0.0, 1.0)
    self.stop_steps = _number(spec, 'stop_steps', 3, 1, math.inf)
    if not isinstance(self.stop_steps, int):
      raise UserError(f'{where}.stop_steps={self.stop_steps!r} must be a whole number from 1 up.')
    if spec:
      raise UserError(
        f'{where}.{min(spec)} is unknown; valid: crash, error, stop_share, stop_steps, timeout, value.'
      )
    # (rollouts by outcome, message of the first failure) of the last steps, oldest first.
    self._history: list[tuple[list[int], str]] = []

  def apply(self, scores: Scores) -> tuple[np.ndarray, np.ndarray]:
    """Returns (rewards of all reward functions [B, K], dropped rows bool [B])."""
    parts_BxK, drop_B = scores.parts_BxK.copy(), self._drops[scores.outcome_B]
    parts_BxK[np.isin(scores.outcome_B, FAILURES) & ~drop_B, 0] = self.value
    return parts_BxK, drop_B

  def observe(self, outcome_N: np.ndarray, message: str) -> None:
    """Adds the outcomes of one step; `message` is that of its first failure."""
    counts = np.bincount(outcome_N, minlength=len(OUTCOMES)).tolist()
    self._history = [*self._history, (counts, message)][-self.stop_steps :]

  def check(self) -> None:
    """Raises UserError where more than `stop_share` of the rollouts of the last `stop_steps` steps failed."""
    if len(self._history) < self.stop_steps:
      return
    total = np.sum([counts for counts, _ in self._history], 0)
    failed = total[list(FAILURES)].sum()
    if failed <= self.stop_share * total.sum():
      return
    first = next(message for _, message in self._history if message)
    kinds = ', '.join(f'{total[code]} {OUTCOMES[code]}' for code in FAILURES)
    raise UserError(
      f'config.rewards.failed.stop_share={self.stop_share}: {failed} of {total.sum()} rollouts of the last '
      f'{len(self._history)} steps could not be graded ({kinds}), the first: {first}; correct the reward function, '
      'the rows or config.rewards.deadline_s and memory_mb, and start again: the run resumes from its last checkpoint.'
    )

  def state_dict(self) -> dict:
    """Returns the failures of the last steps for the checkpoint."""
    return dict(seen=[list(step) for step in self._history])

  def load_state_dict(self, state: dict) -> None:
    """Restores the result of `state_dict`."""
    self._history = [(_with_all_outcomes(counts), message) for counts, message in state['seen']][
      -self.stop_steps :
    ]


def _with_all_outcomes(counts: list[int]) -> list[int]:
  """Appends zeros for outcomes that an older checkpoint lacks."""
  return [*counts, *[0] * (len(OUTCOMES) - len(counts))]


def _number(spec: dict, name: str, default: float, low: float, high: float) -> float:
  value = spec.pop(name, default)
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  if not is_number or not low <= value <= high or not math.isfinite(value):
    allowed = 'a finite number' if low == -math.inf else f'a number from {low} to {high}'
    raise UserError(f'config.rewards.failed.{name}={value!r} must be {allowed}.')
  return value
