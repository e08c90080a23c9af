"""Sums of evidence by kind, and moments of success rates."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.curriculum.records import StepEvidence

MAX_REVISITS = 32  # of a kind, after which they are the only evidence of its current success rate
_REFRESHED = 1 << 16  # prompts of a step


def moments(evidence: StepEvidence, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Unbiased estimates of p and p² of the visits `at`, of at least 2 rollouts: k/n, Σ_{i≠j} x_i·x_j / (n(n − 1))."""
  k_V, n_V = evidence.right_V[at], evidence.count_V[at]
  return k_V / n_V, pairs(k_V, evidence.graded_V[at], n_V)


def pairs(k_V: np.ndarray, graded_V: np.ndarray, n_V: np.ndarray) -> np.ndarray:
  """Σ_{i≠j} x_i·x_j / (n(n − 1))."""
  return (k_V * (k_V - 1) + graded_V) / (n_V * (n_V - 1))


def decayed_sums(
  sums_SxK: np.ndarray, kind_V: np.ndarray, added_SxV: np.ndarray, decay: float
) -> np.ndarray:
  """Sums by kind, after a decay per visit: it depends on the number of a kind's visits, not on the order of rows."""
  kinds = sums_SxK.shape[1]
  sums_SxK = sums_SxK * decay ** np.bincount(kind_V, minlength=kinds)
  for sum_K, added_V in zip(sums_SxK, added_SxV, strict=True):
    sum_K += np.bincount(kind_V, added_V, minlength=kinds)
  return sums_SxK


def kind_rates(counts_2xK: np.ndarray) -> np.ndarray:
  """Success rate of each kind from right and wrong counts, with two pseudo-counts of the rate of all kinds, m.

  (right + 2·m) / (right + wrong + 2), m = (Σ right + 1) / (Σ right + Σ wrong + 2): a kind without evidence is like the
  others. Were its rate one half, it would look mixed, and a step of few prompts would try one hopeless kind after
  another.
  """
  right_K, total_K = counts_2xK[0], counts_2xK.sum(0)
  everywhere = (right_K.sum() + 1) / (total_K.sum() + 2)
  return (right_K + 2 * everywhere) / (total_K + 2)


def strength(share: np.ndarray) -> np.ndarray:
  """s of 1/(1 + s) = `share`, s in [0.1, 100], in the type of `share`."""
  return 1 / np.clip(share, 1 / 101, 1 / 1.1) - 1


def refreshed(step: int, size: int) -> slice:
  """The prompts whose predictions step `step` computes: all, or a part in turn."""
  start = step * _REFRESHED % (-(-size // _REFRESHED) * _REFRESHED)
  return slice(start, start + _REFRESHED)
