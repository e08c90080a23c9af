"""Outcomes of grading: rewards and failures of items, the policy for failures, mixed groups, and scores as success.

Numpy, on the host; grading workers import this module without jax.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from jaxrl_llm.config import user_code
from jaxrl_llm.types import Batch, Row, UserError

if TYPE_CHECKING:
  from jaxrl_llm.config.schema import RewardsConfig
  from jaxrl_llm.rewards.pool import Scores
  from jaxrl_llm.rewards.resolve import Grader

# config.rewards, or its fields by name.
Spec: TypeAlias = 'RewardsConfig | Mapping[str, Any]'
Settings: TypeAlias = dict[str, Any]  # of a reward function, with defaults and those of the workers

# Outcomes of an item.
OK, TIMEOUT, CRASH, ERROR, SKIP = 0, 1, 2, 3, 4
OUTCOMES = ('ok', 'timeout', 'crash', 'error', 'skip')
FAILURES = (TIMEOUT, CRASH, ERROR)  # a skipped completion is no failure of the grader

SAME = 1e-6  # scores that differ by no more are equal
MESSAGE_BYTES = 400  # of an item's error in the result file
_ERROR_CHARS = 200  # of an exception's own text
_POLICIES = ('score', 'drop')

# (rewards, message, outcome) of one item; rewards are 0.0 where the outcome is not OK.
Result = tuple[float | Sequence[float] | np.ndarray, bytes, int]


def attempt_batch(
  graders: Sequence[Grader | None], completions: Sequence[str], rows: Sequence[Row], size: int
) -> Result:
  """Grade the completions of one batched call: rewards [size, K], NaN for completions to skip."""
  rewards = np.zeros((size, len(graders)))
  try:
    for k, grader in enumerate(graders):
      for b, reward in enumerate(grader.score_batch(completions, rows) if grader else ()):
        if reward is not None and not math.isfinite(reward):
          raise ValueError(f'the grader returned {reward}')
        rewards[b, k] = math.nan if reward is None else reward
    return rewards.reshape(-1) if size == 1 else rewards, b'', OK
  except Exception as error:
    return failure(error)


def attempt(graders: Sequence[Grader | None], completion: str, row: Row) -> Result:
  """Grade one completion with all graders; an exception of any of them is an error of the item, without rewards.

  A MemoryError is a crash instead, because the grader may be correct. None from the first grader, which decides
  correctness, skips the completion. None from another grader, or in its place, adds nothing.
  """
  try:
    scores = [0.0 if grader is None else grader(completion, row) for grader in graders]
    if scores[0] is None:
      return 0.0, b'', SKIP
    rewards = tuple(0.0 if score is None else float(score) for score in scores)
    for reward in rewards:
      if not math.isfinite(reward):
        raise ValueError(f'the grader returned {reward}')
    return rewards, b'', OK
  except Exception as error:
    return failure(error)


def failure(error: Exception) -> Result:
  """The result of an item whose grading raised `error`."""
  return 0.0, describe(error), CRASH if isinstance(error, MemoryError) else ERROR


def describe(error: BaseException) -> bytes:
  """One line about an error, with the line of the user's code that raised it, short enough for the result file."""
  text, place = user_code.describe(error), user_code.location(error)
  line = text.removesuffix(place)[:_ERROR_CHARS] + place
  return line.encode('utf-8', 'replace')[:MESSAGE_BYTES]


def compared(method: Any, batch: Batch) -> Any:
  """Returns the scores that decide whether a group is mixed, [B, K], of numpy or jax; see `types.Batch`.

  K = 1, the reward. If the advantage uses each reward separately, the K rewards of nonzero weight.
  """
  if not method.needs_parts:
    return batch.reward_B[:, None]
  weight_K = method.weight_K or (1.0,) * batch.parts_BxK.shape[1]
  return batch.parts_BxK[:, np.flatnonzero(weight_K)]


def mixed(score_BxK: np.ndarray, exists_B: np.ndarray, group_B: np.ndarray, groups: int):
  """Returns bool [groups]: whether the scores of a group's existing rows differ by more than `SAME`."""
  score_NxK, group_N = np.asarray(score_BxK)[exists_B], group_B[exists_B]
  high_PxK = np.full((groups, score_NxK.shape[1]), -np.inf)
  low_PxK = -high_PxK
  np.maximum.at(high_PxK, group_N, score_NxK)
  np.minimum.at(low_PxK, group_N, score_NxK)
  return (high_PxK - low_PxK > SAME).any(1)


def bounds(spec: Spec) -> tuple[float, float]:
  """Returns the scores that count as success 0 and 1: config.rewards.bounds, else (0, config.rewards.right).

  Raises UserError for bounds that are no interval, or that do not include `right`.
  """
  right, configured = spec.get('right', 1.0), tuple(spec.get('bounds', ()))
  if not _finite(right):
    raise UserError(f'config.rewards.right={right!r} must be a finite number, such as 1.0.')
  if not configured:
    if right <= 0:
      raise UserError(
        f'config.rewards.right={right!r} is not above 0, so that the curriculum cannot scale scores from 0 to it; '
        f"give the lowest and the highest score, such as --config.rewards.bounds='({right - 1:g}, {right:g})'."
      )
    return 0.0, float(right)
  if len(configured) != 2 or not all(map(_finite, configured)) or configured[0] >= configured[1]:
    raise UserError(
      f'config.rewards.bounds={configured!r} must be the lowest and the highest score of config.rewards.fn, two finite '
      "numbers, such as --config.rewards.bounds='(0.0, 1.0)'; () = from 0 to config.rewards.right."
    )
  if not configured[0] < right <= configured[1]:
    raise UserError(
      f'config.rewards.right={right!r} lies outside of config.rewards.bounds={configured!r}, so that every '
      f'score or none is '
      f'right; give --config.rewards.right={configured[1]:g}, or other bounds.'
    )
  return float(configured[0]), float(configured[1])


class Scale(NamedTuple):
  """The scores that count as success 0 and 1, and the lowest score of a right answer."""

  low: float
  high: float
  right: float
  bounded: bool  # config.rewards.bounds is set, so that scores above `high` are out of bounds

  def success(self, score_B: np.ndarray) -> np.ndarray:
    """Returns (score − low) / (high − low) clipped to [0, 1], float32."""
    return np.clip((np.asarray(score_B, np.float32) - self.low) / (self.high - self.low), 0, 1)

  def outside(self, score_B: np.ndarray) -> np.ndarray:
    """Returns bool [B]: scores out of bounds."""
    return (score_B < self.low) | ((score_B > self.high) & self.bounded)

  def metrics(self, score_N: np.ndarray) -> dict[str, float]:
    """Returns metrics of the scores of config.rewards.fn, for the N rollouts that could be graded."""
    if not len(score_N):
      return {}
    return {
      'grade/right': float((score_N >= self.right).mean()),
      'grade/lowest': float(score_N.min()),
      'grade/highest': float(score_N.max()),
      'grade/out_of_bounds': float(self.outside(score_N).mean()),
    }


def scale(spec: Spec) -> Scale:
  """Returns the scale of config.rewards. Raises UserError as `bounds`."""
  return Scale(*bounds(spec), spec.get('right', 1.0), bool(tuple(spec.get('bounds', ()))))


def _finite(value: Any) -> bool:
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  return is_number and math.isfinite(value)


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
