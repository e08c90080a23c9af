"""Estimates from n graded samples a prompt: pass@k, majority votes, confidence intervals, paired differences.

P prompts, N samples of each, S subsets of them. All numbers are of prompts: x_P is one number for each. Prompts are the
units of sampling, since the samples of one prompt are correlated.
"""

from __future__ import annotations

import itertools
import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

_MAX_SUBSETS = 2**14  # enumerated; of more than that, _DRAWN_SUBSETS are drawn
_DRAWN_SUBSETS = 2**12
_SIGN_FLIPS = 2**14  # enumerated or drawn
_TOLERANCE = 1e-9  # between sums of the same votes in another order


class Interval(NamedTuple):
  """A mean and its 95 % confidence interval; None with too few prompts for one."""

  mean: float
  low: float | None
  high: float | None


class Difference(NamedTuple):
  """The difference of two evaluations' means over the same prompts."""

  mean: float
  low: float | None
  high: float | None
  p: float  # two-sided: share of random signs with a difference as large


def sizes(samples: int) -> list[int]:
  """1, 2, 4, … below the number of samples, and that number."""
  return [2**i for i in range(samples.bit_length()) if 2**i < samples] + [samples] * (samples > 0)


def passes(right_PxN: np.ndarray, k: int) -> np.ndarray:
  """pass@k of each prompt [P]: 1 − C(n − c, k) / C(n, k) with c of n samples correct.

  Unbiased, unlike 1 − (1 − c/n)^k. arXiv:2107.03374 (Codex).
  """
  n = right_PxN.shape[1]
  count_C, prompt_count = np.unique(np.asarray(right_PxN, bool).sum(1), return_inverse=True)
  # Integers of any size: nothing is rounded before the quotient.
  value_C = np.array([1 - math.comb(n - int(c), k) / math.comb(n, k) for c in count_C])
  return value_C[prompt_count]


def subsets(n: int, k: int) -> tuple[np.ndarray, bool]:
  """Subsets of k of n samples, float [S, n] of 0 and 1, and whether these are all C(n, k).

  All of them up to 16,384; else 4,096 drawn with seed 0, the same for every prompt. The standard deviation of a mean
  over drawn subsets is at most 0.008 for a prompt, and averages out over prompts.
  """
  complete = math.comb(n, k) <= _MAX_SUBSETS
  if complete:
    index_SxK = np.array(list(itertools.combinations(range(n), k)), int).reshape(-1, k)
  else:
    noise = np.random.default_rng(0).random((_DRAWN_SUBSETS, n))
    index_SxK = np.argpartition(noise, k - 1, axis=1)[:, :k]
  chosen_SxN = np.zeros((len(index_SxK), n))
  np.put_along_axis(chosen_SxN, index_SxK, 1.0, axis=1)
  return chosen_SxN, complete


def votes(
  answer_PxN: np.ndarray, right_PxN: np.ndarray, k: int, weight_PxN: np.ndarray | None = None
) -> tuple[np.ndarray, bool]:
  """maj@k of each prompt [P], the mean over subsets of k samples of whether argmax_a Σ_{i: answer a} w_i is correct,
  and whether all subsets were enumerated.

  Equal answers of a prompt have equal integers in `answer_PxN`; a negative one is no answer and has no vote.
  m answers with the same sum, of which j are correct, are worth j/m. A subset without votes is wrong. The correctness
  of an answer is the mean over its samples. Without `weight_PxN` (above 0, else ValueError) each sample counts 1.
  arXiv:2203.11171 (self-consistency), arXiv:2603.24840 (ARRoL: weights are P(correct) of a correctness head).
  """
  P, N = answer_PxN.shape
  weight_PxN = np.ones((P, N)) if weight_PxN is None else np.asarray(weight_PxN, float)
  if not (weight_PxN > 0).all():
    raise ValueError('votes need weights above 0: an answer of weight 0 would equal a missing one')
  chosen_SxN, complete = subsets(N, k)
  value_P = np.zeros(P)
  for p in range(P):
    answers_A = np.unique(answer_PxN[p][answer_PxN[p] >= 0])
    if len(answers_A):
      gives_NxA = (answer_PxN[p][:, None] == answers_A[None]).astype(float)
      right_A = np.asarray(right_PxN[p], float) @ gives_NxA / gives_NxA.sum(0)
      sum_SxA = chosen_SxN @ (gives_NxA * weight_PxN[p][:, None])
      top_Sx1 = sum_SxA.max(1, keepdims=True)
      wins_SxA = (sum_SxA >= top_Sx1 - _TOLERANCE) & (top_Sx1 > _TOLERANCE)
      value_P[p] = (wins_SxA @ right_A / np.maximum(wins_SxA.sum(1), 1)).mean()
  return value_P, complete


def interval(x_P: np.ndarray) -> Interval:
  """The mean over prompts with its 95 % confidence interval.

  Rates, x in [0, 1]: Wilson's score interval of m trials, p = x̄, m = P·p(1 − p) / var(x), the number of independent 0/1
  trials with the standard error that prompts have as clusters. For one 0/1 sample a prompt m = P, Wilson's own. Unlike
  x̄ ± 1.96·se it is not empty where all prompts agree, and it covers near 0 and 1; the bootstrap shares both defects.
  Other rewards: x̄ ± t·se. arXiv:2411.00640 (clustered standard errors), Wilson 1927.
  """
  x_P = np.asarray(x_P, float)
  if x_P.min() < 0 or x_P.max() > 1:
    return _student(x_P)
  p, z = float(x_P.mean()), NormalDist().inv_cdf(0.975)
  variance = x_P.var()
  m = len(x_P) * p * (1 - p) / variance if variance > 0 else len(x_P)
  middle = (p + z**2 / (2 * m)) / (1 + z**2 / m)
  half = z / (1 + z**2 / m) * math.sqrt(p * (1 - p) / m + z**2 / (4 * m**2))
  return Interval(p, max(middle - half, 0.0), min(middle + half, 1.0))


def difference(x_P: np.ndarray, y_P: np.ndarray) -> Difference:
  """x̄ − ȳ over the same prompts in the same order, with its 95 % confidence interval and a sign-flip test.

  d = x − y: d̄ ± t·sd(d)/√P, narrower than two separate intervals where prompts are hard for both. p is the share of
  sign vectors with |Σ ± d| at least |Σ d|: of all 2^m for the m differences that are not 0, or of 16,384 drawn with
  seed 0 and the observed one. arXiv:2411.00640 (paired differences), Fisher 1935 (the test).
  """
  d_P = np.asarray(x_P, float) - np.asarray(y_P, float)
  mean = _student(d_P)
  d_M = d_P[np.abs(d_P) > _TOLERANCE]
  complete = 2 ** len(d_M) <= _SIGN_FLIPS
  sums = np.zeros(1) if complete else _drawn_sums(d_M)
  for d in d_M if complete else ():
    sums = np.concatenate([sums - d, sums + d])
  large = np.abs(sums) >= abs(d_M.sum()) - _TOLERANCE
  p = float((large.sum() + (not complete)) / (len(sums) + (not complete)))
  return Difference(*mean, p=p)


def _drawn_sums(d_M: np.ndarray) -> np.ndarray:
  """Σ ± d for drawn signs."""
  random = np.random.default_rng(0)
  parts = (random.integers(0, 2, (_SIGN_FLIPS // 16, len(d_M))) * 2.0 - 1 for _ in range(16))
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
