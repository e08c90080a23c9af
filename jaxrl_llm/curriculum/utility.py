"""Utilities of prompts: (rate, alpha, beta, group, length) → utility, larger is better.

Functions with a sixth argument, `exponent`, get that of `graded_scores`: P(mixed) is 1 − (1 − P)^exponent.

`length` is the expected tokens of a rollout ÷ the mean over candidates; 1 where it is unknown.

Every public function may be named in `config.curriculum.utility.fn`.
"""

from __future__ import annotations

import numpy as np

from jaxrl_llm.curriculum import graded_scores, setting_checks

Length = np.ndarray | float


def uniform(
  rate: np.ndarray, alpha: np.ndarray, beta: np.ndarray, group: int, length: Length = 1.0
) -> np.ndarray:
  """0 for all prompts; ties are broken at random."""
  del alpha, beta, group, length
  return np.zeros_like(rate)


def mopps(
  rate: np.ndarray,
  alpha: np.ndarray,
  beta: np.ndarray,
  group: int,
  length: Length = 1.0,
  *,
  target: float = 0.5,
) -> np.ndarray:
  """−(x − p*)². arXiv:2507.04632 (MoPPS)."""
  del alpha, beta, group, length
  setting_checks.check_range('utility.target', target, 0, 1)
  return -((rate - target) ** 2)


def bots(
  rate: np.ndarray,
  alpha: np.ndarray,
  beta: np.ndarray,
  group: int,
  length: Length = 1.0,
  *,
  target: float = 0.5,
) -> np.ndarray:
  """−|x − p*|. arXiv:2510.26374 (BOTS; 0.5), arXiv:2506.05316 (DOTS; 0.5)."""
  del alpha, beta, group, length
  setting_checks.check_range('utility.target', target, 0, 1)
  return -np.abs(rate - target)


def mixed_group(
  rate: np.ndarray,
  alpha: np.ndarray,
  beta: np.ndarray,
  group: int | np.ndarray,
  length: Length = 1.0,
  exponent: np.ndarray | None = None,
) -> np.ndarray:
  """P(the next group of G is mixed) under the posterior, in closed form.

  1 − Π_{i<G} (α + i)/(α + β + i) − Π_{i<G} (β + i)/(α + β + i): 1 minus the Beta-binomial
  probabilities of 0 and G. `group` may be an array, one entry per prompt. Exact for binary scores; for graded ones,
  `exponent` [prompts] corrects it, see `graded_scores`.
  """
  del rate, length
  total = alpha + beta
  right, wrong = alpha / total, beta / total
  same = np.ndim(group) == 0
  for i in range(1, group if same else int(np.max(group, initial=1))):
    inverse = 1 / (total + i)
    more = True if same else i < group
    np.multiply(right, (alpha + i) * inverse, out=right, where=more)
    np.multiply(wrong, (beta + i) * inverse, out=wrong, where=more)
  mixed = 1 - right - wrong
  return mixed if exponent is None else graded_scores.corrected(mixed, exponent)


def information(
  rate: np.ndarray, alpha: np.ndarray, beta: np.ndarray, group: int, length: Length = 1.0
) -> np.ndarray:
  """x(1 − x), the variance of one binary score."""
  del alpha, beta, group, length
  return rate * (1 - rate)


def vade(
  rate: np.ndarray, alpha: np.ndarray, beta: np.ndarray, group: int, length: Length = 1.0
) -> np.ndarray:
  """x(1 − x)², largest at 1/3: the harder of two prompts equally far from ½.

  arXiv:2511.18902 (VADE), as its project page states it.
  """
  del alpha, beta, group, length
  return rate * (1 - rate) ** 2


def per_token(
  rate: np.ndarray,
  alpha: np.ndarray,
  beta: np.ndarray,
  group: int,
  length: Length = 1.0,
  exponent: np.ndarray | None = None,
) -> np.ndarray:
  """P(mixed group) ÷ length: utility per token."""
  return mixed_group(rate, alpha, beta, group, exponent=exponent) / length


def per_root_token(
  rate: np.ndarray, alpha: np.ndarray, beta: np.ndarray, group: int, length: Length = 1.0
) -> np.ndarray:
  """√(x(1 − x) ÷ length), the s/√L of the optimal split of a budget, s the standard deviation of one score.

  As in the official code of DUET (Haoyu-Hu/DUET), whose s is measured on the rollouts' gradients.
  """
  del alpha, beta, group
  return np.sqrt(rate * (1 - rate) / length)
