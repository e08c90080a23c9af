"""Scores of rollouts: mixed groups, and the mapping of scores to success in [0, 1]. Numpy, on the host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from jaxrl_llm.types import Batch, UserError

if TYPE_CHECKING:
  from jaxrl_llm.config.schema import RewardsConfig

# config.rewards, or its fields by name.
Spec: TypeAlias = 'RewardsConfig | Mapping[str, Any]'
Settings: TypeAlias = dict[str, Any]  # of a reward function, with defaults and those of the workers

SAME = 1e-6  # scores that differ by no more are equal


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
