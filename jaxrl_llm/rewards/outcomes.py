"""Scores of rollouts: which groups are mixed, and what share of a success a score counts. Numpy, on the host."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxrl_llm.types import Batch, UserError

SAME = 1e-6  # scores that differ by no more are equal


def compared(method: Any, batch: Batch) -> Any:
  """The scores that decide whether a group is mixed, [B, K], of numpy or jax; see `types.Batch`.

  K = 1, the reward; for a method whose advantage takes each reward alone, those of nonzero weight.
  """
  if not method.needs_parts:
    return batch.reward_B[:, None]
  weight_K = method.weight_K or (1.0,) * batch.parts_BxK.shape[1]
  return batch.parts_BxK[:, np.flatnonzero(weight_K)]


def mixed(score_BxK: np.ndarray, exists_B: np.ndarray, group_B: np.ndarray, groups: int):
  """bool [groups]: whether scores of a group's existing rows differ by more than `SAME`."""
  score_NxK, group_N = np.asarray(score_BxK)[exists_B], group_B[exists_B]
  high_PxK = np.full((groups, score_NxK.shape[1]), -np.inf)
  low_PxK = -high_PxK
  np.maximum.at(high_PxK, group_N, score_NxK)
  np.minimum.at(low_PxK, group_N, score_NxK)
  return (high_PxK - low_PxK > SAME).any(1)


def bounds(grade: Any) -> tuple[float, float]:
  """The scores of config.rewards.fn that count as no success and as a whole one: `bounds`, else (0, right).

  Raises UserError for bounds that are no interval, or that `right` lies outside of.
  """
  right, stated = grade.get('right', 1.0), tuple(grade.get('bounds', ()))
  if not _finite(right):
    raise UserError(f'config.rewards.right={right!r} must be a finite number, such as 1.0.')
  if not stated:
    if right <= 0:
      raise UserError(
        f'config.rewards.right={right!r} is not above 0, so that the curriculum cannot scale scores from 0 to it; '
        f"give the lowest and the highest score, such as --config.rewards.bounds='({right - 1:g}, {right:g})'."
      )
    return 0.0, float(right)
  if len(stated) != 2 or not all(map(_finite, stated)) or not stated[0] < stated[1]:
    raise UserError(
      f'config.rewards.bounds={stated!r} must be the lowest and the highest score of config.rewards.fn, two finite '
      "numbers, such as --config.rewards.bounds='(0.0, 1.0)'; () = from 0 to config.rewards.right."
    )
  if not stated[0] < right <= stated[1]:
    raise UserError(
      f'config.rewards.right={right!r} lies outside of config.rewards.bounds={stated!r}, so that every score or none is '
      f'right; give --config.rewards.right={stated[1]:g}, or other bounds.'
    )
  return float(stated[0]), float(stated[1])


def success(score_B: np.ndarray, grade: Any) -> np.ndarray:
  """float32 in [0, 1]: (score − low) / (high − low), scores outside of the bounds taken for the nearest one."""
  low, high = bounds(grade)
  return np.clip((np.asarray(score_B, np.float32) - low) / (high - low), 0, 1)


def outside(score_B: np.ndarray, grade: Any) -> np.ndarray:
  """bool: scores beyond the bounds. Above `right` is right, so that only stated bounds have an upper one."""
  low, high = bounds(grade)
  return (score_B < low) | ((score_B > high) & bool(tuple(grade.get('bounds', ()))))


def metrics(score_N: np.ndarray, grade: Any) -> dict[str, float]:
  """Of config.rewards.fn's own scores, rollouts that could not be graded left out: N of them."""
  if not len(score_N):
    return {}
  return {
    'grade/right': float((score_N >= grade['right']).mean()),
    'grade/lowest': float(score_N.min()),
    'grade/highest': float(score_N.max()),
    'grade/out_of_bounds': float(outside(score_N, grade).mean()),
  }


def _finite(value: Any) -> bool:
  number = isinstance(value, int | float) and not isinstance(value, bool)
  return number and math.isfinite(value)
