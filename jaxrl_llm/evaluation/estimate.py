"""What n graded samples a prompt say of k, how sure that is, and whether two evaluations differ. Pure numpy.

P prompts, N samples of each, S subsets of them. All numbers are of prompts: x_P is one number for each, and prompts are
what is drawn at random, since samples of one prompt are alike.
"""

from __future__ import annotations

import itertools
import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

_ALL = 2**14  # subsets up to which all are looked at
_DRAWN = 2**12  # of more than that
_FLIPS = 2**14  # signs: all of them, or so many drawn
_CLOSE = 1e-9  # sums of the same votes in another order


class Interval(NamedTuple):
  """A mean and what 95 % of such intervals hold; None where prompts are too few to say."""

  mean: float
  low: float | None
  high: float | None


class Difference(NamedTuple):
  """Of the means of two evaluations of the same prompts."""

  mean: float
  low: float | None
  high: float | None
  p: float  # two-sided: how often chance signs make a difference as large


def sizes(samples: int) -> list[int]:
  """1, 2, 4, … below the number of samples, and that. Source: none."""
  return [2**i for i in range(samples.bit_length()) if 2**i < samples] + [samples] * (samples > 0)


def passes(right_PxN: np.ndarray, k: int) -> np.ndarray:
  """pass@k of each prompt, 1 − C(n − c, k) / C(n, k) with c right of n: unbiased, unlike 1 − (1 − c/n)^k.

  Source: arXiv:2107.03374 (Codex).
  """
  n = right_PxN.shape[1]
  count_C, of_P = np.unique(np.asarray(right_PxN, bool).sum(1), return_inverse=True)
  # Whole numbers of any size: nothing is rounded before the quotient.
  return np.array([1 - math.comb(n - int(c), k) / math.comb(n, k) for c in count_C])[of_P]


def subsets(n: int, k: int) -> tuple[np.ndarray, bool]:
  """Which k of n samples, float [S, n] of 0 and 1, and whether these are all there are.

  All C(n, k) where these are at most 16,384; else 4,096 drawn with seed 0, the same for every prompt. The mean over
  those has a standard deviation of at most 0.008 a prompt, and averages out over prompts. Source: none.
  """
  whole = math.comb(n, k) <= _ALL
  if whole:
    index_SxK = np.array(list(itertools.combinations(range(n), k)), int).reshape(-1, k)
  else:
    noise = np.random.default_rng(0).random((_DRAWN, n))
    index_SxK = np.argpartition(noise, k - 1, axis=1)[:, :k]
  chosen_SxN = np.zeros((len(index_SxK), n))
  np.put_along_axis(chosen_SxN, index_SxK, 1.0, axis=1)
  return chosen_SxN, whole


def votes(
  answer_PxN: np.ndarray, right_PxN: np.ndarray, k: int, weight_PxN: np.ndarray | None = None
) -> tuple[np.ndarray, bool]:
  """maj@k of each prompt, the mean over subsets of k samples of whether argmax_a Σ_{i says a} w_i is right, and
  whether all subsets were looked at.

  Equal answers of a prompt have equal whole numbers in `answer_PxN`; a negative one is no answer and has no vote.
  Answers with the same sum share: m of them, of which j are right, are worth j/m. No votes at all are wrong. An answer
  is as right as those who gave it on average. Without `weight_PxN` (above 0, else ValueError) each counts 1.
  Source: arXiv:2203.11171 (self-consistency), arXiv:2603.24840 (ARRoL: weights are the judge's probabilities).
  """
  P, N = answer_PxN.shape
  weight_PxN = np.ones((P, N)) if weight_PxN is None else np.asarray(weight_PxN, float)
  if not (weight_PxN > 0).all():
    raise ValueError(
      'votes need weights above 0: without one an answer would be as one that nobody gave'
    )
  chosen_SxN, whole = subsets(N, k)
  value_P = np.zeros(P)
  for p in range(P):
    named = np.unique(answer_PxN[p][answer_PxN[p] >= 0])
    if len(named):
      says_NxA = (answer_PxN[p][:, None] == named[None]).astype(float)
      right_A = np.asarray(right_PxN[p], float) @ says_NxA / says_NxA.sum(0)
      sum_SxA = chosen_SxN @ (says_NxA * weight_PxN[p][:, None])
      top_Sx1 = sum_SxA.max(1, keepdims=True)
      wins_SxA = (sum_SxA >= top_Sx1 - _CLOSE) & (top_Sx1 > _CLOSE)
      value_P[p] = (wins_SxA @ right_A / np.maximum(wins_SxA.sum(1), 1)).mean()
  return value_P, whole


def interval(x_P: np.ndarray) -> Interval:
  """The mean over prompts, with 95 % of where that of all such prompts may lie.

  Rates, x in [0, 1]: Wilson's score interval of m trials, p = x̄, m = P·p(1 − p) / var(x), the number of independent 0/1
  trials with the standard error that prompts have as clusters. Where each prompt is 0 or 1, as of greedy answers, m = P
  and it is Wilson's own. It was chosen over x̄ ± 1.96·se, which is empty where all prompts agree and too short near 0
  and 1, and over the bootstrap, which shares both and needs draws. Other rewards: x̄ ± t·se.
  Source: arXiv:2411.00640 (clustered standard errors), Wilson 1927.
  """
  x_P = np.asarray(x_P, float)
  if x_P.min() < 0 or x_P.max() > 1:
    return _student(x_P)
  p, z = float(x_P.mean()), NormalDist().inv_cdf(0.975)
  spread = x_P.var()
  m = len(x_P) * p * (1 - p) / spread if spread > 0 else len(x_P)
  middle = (p + z**2 / (2 * m)) / (1 + z**2 / m)
  half = z / (1 + z**2 / m) * math.sqrt(p * (1 - p) / m + z**2 / (4 * m**2))
  return Interval(p, max(middle - half, 0.0), min(middle + half, 1.0))


def difference(x_P: np.ndarray, y_P: np.ndarray) -> Difference:
  """x̄ − ȳ over the same prompts in the same order, with its 95 % interval and a sign-flip test.

  d = x − y: d̄ ± t·sd(d)/√P, which is narrower than two intervals apart as far as prompts are hard for both. p is the
  share of all 2^m signs of the m differences that are not 0, or of 16,384 drawn with seed 0 and the one that was seen,
  whose |Σ ± d| is at least |Σ d|. Source: arXiv:2411.00640 (paired differences), Fisher 1935 (the test).
  """
  d_P = np.asarray(x_P, float) - np.asarray(y_P, float)
  found = _student(d_P)
  d_M = d_P[np.abs(d_P) > _CLOSE]
  whole = 2 ** len(d_M) <= _FLIPS
  sums = np.zeros(1) if whole else _flipped(d_M)
  for d in d_M if whole else ():
    sums = np.concatenate([sums - d, sums + d])
  large = np.abs(sums) >= abs(d_M.sum()) - _CLOSE
  return Difference(*found, p=float((large.sum() + (not whole)) / (len(sums) + (not whole))))


def _flipped(d_M: np.ndarray) -> np.ndarray:
  """Σ ± d for drawn signs."""
  random = np.random.default_rng(0)
  parts = (random.integers(0, 2, (_FLIPS // 16, len(d_M))) * 2.0 - 1 for _ in range(16))
  return np.concatenate([signs @ d_M for signs in parts])


def _student(x_P: np.ndarray) -> Interval:
  """x̄ ± t·sd/√P."""
  mean, P = float(x_P.mean()), len(x_P)
  if P < 2:
    return Interval(mean, None, None)
  half = _t(P - 1) * float(x_P.std(ddof=1)) / math.sqrt(P)
  return Interval(mean, mean - half, mean + half)


def _t(freedom: int) -> float:
  """The 97.5 % quantile of Student's t: below 5 degrees from its table, above four terms in 1/ν, 3e-4 off at most."""
  if freedom < 5:
    return (12.7062, 4.3027, 3.1824, 2.7764)[freedom - 1]
  z = NormalDist().inv_cdf(0.975)
  terms = (
    (z**3 + z) / 4,
    (5 * z**5 + 16 * z**3 + 3 * z) / 96,
    (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
  )
  return z + sum(term / freedom ** (i + 1) for i, term in enumerate(terms))
