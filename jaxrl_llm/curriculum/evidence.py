"""Evidence of prompts' success rates and lengths in graded batches, and predictions compared with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxrl_llm.curriculum.records import Index
from jaxrl_llm.rewards import outcomes
from jaxrl_llm.types import TRUNCATED, Array, Batch

_BINS = 10  # of predicted success rates
Lengths = Callable[[np.ndarray], np.ndarray]  # prompt indices → expected tokens of a rollout


class Evidence(NamedTuple):
  """Counts of each prompt with rollouts, in the order of prompt indices: the arguments of `Curriculum.observe`."""

  index_V: np.ndarray  # int32, distinct
  mass_V: np.ndarray  # float64 in [0, n]: sum of successes; k of n for binary scores
  count_V: np.ndarray  # int32, n, at least 1
  truncated_V: np.ndarray  # int32, truncated rollouts that were not right
  tokens_V: np.ndarray  # int32, of all n rollouts
  mixed_V: np.ndarray  # bool: scores of the group differ
  truncated_mass_V: np.ndarray  # float64, the part of `mass_V` from truncated rollouts
  graded_V: np.ndarray  # float64, sum of x(1 − x) over successes x: 0 for binary scores
  truncated_graded_V: np.ndarray  # float64, the part of `graded_V` from truncated rollouts


def gather_evidence(batch: Batch, score_BxK: np.ndarray, chosen_P: np.ndarray) -> Evidence:
  """The evidence of the slots `chosen_P`; `score_BxK` decides which groups are mixed.

  Where rows were kept at random, successes count 1 / their probability, rescaled to the group, so that the selection
  does not bias the success rate.
  """
  P = len(chosen_P)

  def by_slot(x_B: Array) -> np.ndarray:
    return np.asarray(x_B).reshape(P, -1)[chosen_P]

  length_PxG = by_slot(batch.rollout.length_B)
  exists_PxG = length_PxG > 0
  cut_PxG = exists_PxG & by_slot((batch.rollout.reason_B == TRUNCATED) & (batch.correct_B < 1))
  weight_PxG = by_slot(batch.rollout.weight_B).astype(float) * exists_PxG
  # Exactly 1 where all weights are 1, so that counts stay whole numbers.
  scale_P = exists_PxG.sum(1) / np.maximum(weight_PxG.sum(1), 1e-9)
  success_PxG = by_slot(batch.success).astype(float)
  mass_PxG = weight_PxG * success_PxG * scale_P[:, None]
  index_V, slot_P = np.unique(np.asarray(batch.prompts.index_P)[chosen_P], return_inverse=True)

  def sums(x_PxG: np.ndarray) -> np.ndarray:
    return np.bincount(slot_P, x_PxG.sum(1), len(index_V))

  counts = (sums(x).astype(np.int32) for x in (exists_PxG, cut_PxG, length_PxG))
  count_V, truncated_V, tokens_V = counts
  mass_V = np.minimum(sums(mass_PxG), count_V)
  truncated_mass_V = np.minimum(sums(mass_PxG * cut_PxG), mass_V)
  graded_PxG = mass_PxG * (1 - success_PxG)
  graded_V = sums(graded_PxG)
  truncated_graded_V = np.minimum(sums(graded_PxG * cut_PxG), graded_V)
  G = length_PxG.shape[1]
  rows = np.repeat(chosen_P, G), exists_PxG.ravel(), np.repeat(slot_P, G)
  mixed_V = outcomes.mixed(np.asarray(score_BxK)[rows[0]], *rows[1:], len(index_V))
  evidence = index_V, mass_V, count_V, truncated_V, tokens_V, mixed_V, truncated_mass_V
  evidence = *evidence, graded_V, truncated_graded_V
  return Evidence(*(x[count_V > 0] for x in evidence))


def checked_evidence(
  index: np.ndarray,
  k: np.ndarray,
  n: np.ndarray,
  truncated: np.ndarray | None,
  tokens: np.ndarray | None,
  mixed: np.ndarray | None,
  *real: np.ndarray | None,
) -> Evidence:
  """The arguments of `Curriculum.observe`, in the order of prompt indices, with defaults. Raises ValueError."""
  zeros = np.zeros(len(index), int)
  integers = [np.asarray(zeros if x is None else x) for x in (index, n, truncated, tokens)]
  index, n, truncated, tokens = integers
  k = np.asarray(k, float)
  cut_k, graded, cut_graded = (np.asarray(zeros if x is None else x, float) for x in real)
  mixed = (k > 0) & (k < n) if mixed is None else np.asarray(mixed, bool)
  possible = ((k >= 0) & (k <= n)).all() and ((cut_k >= 0) & (cut_k <= k)).all()
  possible &= bool(((cut_graded >= 0) & (cut_graded <= graded)).all())
  typed = all(np.issubdtype(x.dtype, np.integer) for x in integers)
  if not typed or len(np.unique(index)) != len(index) or not possible:
    raise ValueError(
      'observe needs distinct prompts, integers except for k, 0 <= truncated_k <= k <= n and 0 <= truncated_graded <= '
      'graded'
    )
  # Floating-point sums depend on the order, and the order of rows must not matter.
  order = np.argsort(index)
  evidence = index, k, n, truncated, tokens, mixed, cut_k, graded, cut_graded
  return Evidence(*(x[order] for x in evidence))


def without_truncated(evidence: Evidence) -> Evidence:
  """The evidence of rollouts that are not truncated, or right; the number of a prompt may be 0."""
  mass_V = evidence.mass_V - evidence.truncated_mass_V
  # Where rows were kept at random, the mass is an estimate and may exceed the number of the others.
  cut_V = np.minimum(evidence.truncated_V, evidence.count_V - mass_V)
  graded_V = evidence.graded_V - evidence.truncated_graded_V
  return evidence._replace(mass_V=mass_V, count_V=evidence.count_V - cut_V, graded_V=graded_V)


def calibration_metrics(latest_Vx4: np.ndarray, history_Vx4: np.ndarray) -> dict[str, float]:
  """Means of the latest step, calibration error and Brier score of the history.

  Columns are predicted success rate, predicted probability of a mixed group, observed success rate, and whether the
  group was mixed.
  """
  metrics = {}
  if len(latest_Vx4):
    mean = latest_Vx4.mean(0)
    metrics = {
      'curriculum/predicted_success': float(mean[0]),
      'curriculum/observed_success': float(mean[2]),
      'curriculum/predicted_mixed': float(mean[1]),
      'curriculum/mixed_share': float(mean[3]),
    }
  past = history_Vx4
  return metrics | {
    'curriculum/calibration_error': calibration_error(past[:, 0], past[:, 2]),
    'curriculum/brier': float(((past[:, 1] - past[:, 3]) ** 2).mean()),
  }


def visit_metrics(visits_N: np.ndarray, truncated_N: np.ndarray, group: int) -> dict[str, float]:
  """The share of prompts with a visit, and of rollouts that hit the length cap."""
  share = float(truncated_N.sum() / max(visits_N.sum() * group, 1))
  return {'curriculum/coverage': float((visits_N > 0).mean()), 'curriculum/truncated_share': share}


def calibration_error(predicted: np.ndarray, observed: np.ndarray) -> float:
  """Σ_bins share · |mean predicted − mean observed|, ten bins of the prediction."""
  bins = np.minimum((predicted * _BINS).astype(int), _BINS - 1)
  gaps = [
    (bins == b).mean() * abs(predicted[bins == b].mean() - observed[bins == b].mean())
    for b in np.unique(bins)
  ]
  return float(sum(gaps))


class LengthEstimate:
  """mean ← mean + rate·(observed − mean) per visit to a prompt; the first visit sets it; 0 = no visit yet."""

  def __init__(self, size: int, rate: float = 0.5):
    """`size` prompts; `rate` is the weight of the latest visit."""
    self.rate, self.mean = rate, np.zeros(size, np.float32)

  def observe(self, index_N: np.ndarray, tokens_N: np.ndarray) -> None:
    """Updates the estimates with the mean tokens of each visited group."""
    for i, tokens in zip(index_N, tokens_N, strict=True):
      old = self.mean[i]
      self.mean[i] = tokens if old == 0 else old + self.rate * (tokens - old)

  def __call__(self, index_N: np.ndarray) -> np.ndarray:
    """Expected tokens, float32 [N]; 0 where unknown."""
    return self.mean[index_N]

  def state_dict(self) -> dict[str, np.ndarray]:
    """State for the checkpoint."""
    return dict(mean=self.mean)

  def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
    """Restore from `state_dict`."""
    self.mean = np.asarray(state['mean'], np.float32).copy()


def expected_tokens(pool: np.ndarray, lengths: Lengths | None) -> tuple[np.ndarray, np.float32]:
  """Expected tokens of the candidates, and the mean of the known ones; 0 where unknown."""
  tokens = np.zeros(0, np.float32) if lengths is None else lengths(pool)
  known = np.count_nonzero(tokens)
  return tokens, np.float32(tokens.sum(dtype=float) / max(known, 1))


def contiguous(index: np.ndarray) -> Index:
  """An equivalent slice where there is one: it reads memory in order and copies nothing."""
  first = int(index[0])
  run = np.array_equal(index, np.arange(first, first + len(index)))
  return slice(first, first + len(index)) if run else index
