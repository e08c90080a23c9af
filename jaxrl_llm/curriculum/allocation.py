"""Allocation of rollouts to the chosen prompts: (alpha_P, beta_P, length_P, parts, unit) → Allocation.

A part is `unit` rollouts. A step has a fixed number of parts, so that shapes on the device are constant, and the host
assigns parts to prompts. Every rule assigns exactly `parts` of them and at least one to each prompt. `most`, the cap on
rollouts of a prompt, is raised where it leaves too few. Prompts are sorted by utility, best first; remainders and ties
go to the first. `length_P` are expected tokens of a rollout, 0 = unknown.
Every public function may be named in `config.curriculum.allocation.fn`.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from jaxrl_llm.curriculum import setting_checks
from jaxrl_llm.types import UserError


class Allocation(NamedTuple):
  """The result of a rule."""

  parts: np.ndarray  # int32 [P], sums to `parts`
  weight: np.ndarray  # float64 [P], a factor on the advantages of a prompt


def equal(
  alpha: np.ndarray, beta: np.ndarray, length: np.ndarray, parts: int, unit: int
) -> Allocation:
  """⌊parts / P⌋ each, and one more for the first prompts."""
  del beta, length
  _check(len(alpha), parts, unit)
  each, rest = divmod(parts, len(alpha))
  return _allocation(each + (np.arange(len(alpha)) < rest))


def neyman(
  alpha: np.ndarray,
  beta: np.ndarray,
  length: np.ndarray,
  parts: int,
  unit: int,
  *,
  most: int = 32,
  propensity_floor: float = 0.05,
) -> Allocation:
  """n = clip(round(ŝ / √(λL̂)), unit, most), λ such that the total holds; weight 1 / clip(n/n̄, floor, 1).

  log λ is bisected in [−20, 20]. n is rounded to whole parts; the remainder goes to the prompts that rounding reduces
  most. ŝ = √E[p(1 − p)] under the posterior and a budget in rollouts are reconstructed: the authors use the running
  deviation of A·Σ log π, and count tokens. arXiv:2605.08441 (DUET; constants of its code).
  """
  setting_checks.check_range('allocation.propensity_floor', propensity_floor, 0, 1, open_low=True)
  cap = _cap(len(alpha), parts, unit, most)
  has_length = length > 0
  mean_tokens = length[has_length].mean() if has_length.any() else 1.0
  tokens = np.where(has_length, length, mean_tokens)
  want_P = _spread(alpha, beta) / np.sqrt(tokens) / unit
  low, high = -20.0, 20.0
  for _ in range(60):
    middle = (low + high) / 2
    too_many = np.clip(np.rint(want_P * math.exp(-middle / 2)), 1, cap).sum() > parts
    low, high = (middle, high) if too_many else (low, middle)
  real_P = want_P * math.exp(-high / 2)
  count_P = np.clip(np.rint(real_P), 1, cap).astype(np.int64)
  while (short := parts - int(count_P.sum())) != 0:  # λ cannot hit totals between joint roundings
    step = 1 if short > 0 else -1
    room_P = count_P < cap if short > 0 else count_P > 1
    missing_P = np.where(room_P, step * (real_P - count_P), -np.inf)
    count_P[np.argsort(-missing_P, kind='stable')[: min(abs(short), int(room_P.sum()))]] += step
  propensity_P = np.clip(count_P / count_P.mean(), propensity_floor, 1)
  return _allocation(count_P, 1 / propensity_P)


def xrpo(
  alpha: np.ndarray,
  beta: np.ndarray,
  length: np.ndarray,
  parts: int,
  unit: int,
  *,
  most: int = 32,
  confidence: float = 0.95,
  bonus: float = 1.0,
) -> Allocation:
  """Each next part goes to the largest h(n) − h(n + unit) + φ, h = t·s/√n, φ = bonus·√(log(1 + T)/n).

  t is Student's quantile with n − 1 degrees of freedom, T the rollouts assigned so far, and s² = E[p(1 − p)] under the
  posterior, which is never 0, unlike the deviation of an all-right group. From third-party notes; constants and the
  single pass are reconstructed. arXiv:2510.06672 (XRPO).
  """
  del length
  setting_checks.check_range('allocation.bonus', bonus, 0)
  if not 0 < confidence < 1:
    raise UserError(
      f'config.curriculum.allocation.confidence={confidence!r} must be between 0 and 1.'
    )
  cap = _cap(len(alpha), parts, unit, most)
  n = unit * np.arange(1, cap + 2)
  width = np.array([_student((1 + confidence) / 2, max(i - 1, 1)) for i in n.tolist()]) / np.sqrt(n)
  shrink, per_n = width[:-1] - width[1:], 1 / np.sqrt(n)
  spread_P, count_P = _spread(alpha, beta), np.ones(len(alpha), np.int64)
  for assigned in range(len(alpha), parts):
    phi = bonus * math.sqrt(math.log1p(assigned * unit))
    score_P = spread_P * shrink[count_P - 1] + phi * per_n[count_P - 1]
    count_P[np.argmax(np.where(count_P < cap, score_P, -np.inf))] += 1
  return _allocation(count_P)


def marginal(
  alpha: np.ndarray,
  beta: np.ndarray,
  length: np.ndarray,
  parts: int,
  unit: int,
  *,
  right: int = 0,
  wrong: int = 0,
  most: int = 128,
) -> Allocation:
  """Maximizes Σ_P E[p^right (1 − p)^wrong · (1 − pⁿ − (1 − p)ⁿ)] under the posterior, exactly.

  (right, wrong) = (0, 0) is the probability of a mixed group, (1, 1) weighs it by p(1 − p), and (1, 2) is the paper's
  gain p(1 − p)². Every term is concave in n, so that a greedy choice of the next part is optimal. The posterior instead
  of the last observed rate is reconstructed; it replaces the paper's rules for all-right and all-wrong prompts.
  arXiv:2509.25849 (Knapsack RL).
  """
  del length
  for name, power in (('right', right), ('wrong', wrong)):
    if type(power) is not int or power < 0:
      raise UserError(
        f'config.curriculum.allocation.{name}={power!r} must be a whole number from 0 up.'
      )
  cap = _cap(len(alpha), parts, unit, most)
  value_PxC = _mixed(alpha, beta, right, wrong, unit * np.arange(1, cap + 1))
  # Gains decrease mathematically; the minimum removes rounding errors.
  gain_PxC = np.minimum.accumulate(np.diff(value_PxC, axis=1), axis=1)
  position = np.broadcast_to(np.arange(cap - 1), gain_PxC.shape)
  order = np.lexsort((position.ravel(), -gain_PxC.ravel()))[: parts - len(alpha)]
  owner = order // max(cap - 1, 1)
  return _allocation(1 + np.bincount(owner, minlength=len(alpha)))


def _mixed(
  alpha: np.ndarray, beta: np.ndarray, right: int, wrong: int, n: np.ndarray
) -> np.ndarray:
  """E[p^right (1 − p)^wrong (1 − pⁿ − (1 − p)ⁿ)]: the powers turn Beta(α, β) into Beta(α + right, β + wrong)."""
  total, tilt_P = alpha + beta, np.ones(len(alpha))
  for i in range(right):
    tilt_P = tilt_P * (alpha + i) / (total + i)
  for i in range(wrong):
    tilt_P = tilt_P * (beta + i) / (total + right + i)
  alpha, beta = (alpha + right)[:, None], (beta + wrong)[:, None]
  i = np.arange(n[-1])
  all_right, all_wrong = (
    np.cumprod((x + i) / (alpha + beta + i), axis=1)[:, n - 1] for x in (alpha, beta)
  )
  return tilt_P[:, None] * (1 - all_right - all_wrong)


def _spread(alpha: np.ndarray, beta: np.ndarray) -> np.ndarray:
  """√E[p(1 − p)] under Beta(α, β): the standard deviation of one binary score."""
  total = alpha + beta
  return np.sqrt(alpha * beta / (total * (total + 1)))


def _student(probability: float, freedom: int) -> float:
  """The quantile of Student's t: exact for 1 and 2 degrees of freedom, else Fisher's series in 1/ν."""
  if freedom == 1:
    return math.tan(math.pi * (probability - 0.5))
  if freedom == 2:
    return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
  z, v = NormalDist().inv_cdf(probability), freedom
  terms = (
    z,
    (z**3 + z) / 4 / v,
    (5 * z**5 + 16 * z**3 + 3 * z) / 96 / v**2,
    (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384 / v**3,
    (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160 / v**4,
  )
  return sum(terms)


def _check(P: int, parts: int, unit: int) -> None:
  if P < 1 or parts < P or unit < 1:
    raise ValueError(
      f'{P} prompts, {parts} parts of {unit} rollouts: each prompt needs a part of at least 1'
    )


def _cap(P: int, parts: int, unit: int, most: int) -> int:
  """The largest number of parts of a prompt."""
  _check(P, parts, unit)
  setting_checks.check_range('allocation.most', most, 1)
  return max(int(most) // unit, -(-parts // P))


def _allocation(count_P: np.ndarray, weight_P: np.ndarray | None = None) -> Allocation:
  weight_P = np.ones(len(count_P)) if weight_P is None else weight_P
  return Allocation(count_P.astype(np.int32), weight_P)
