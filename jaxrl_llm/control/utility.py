"""How much a prompt is worth choosing. (rate, alpha, beta, group) → utility, larger is better.

Every public function here may be named in `config.curriculum.utility.fn`.
"""

from __future__ import annotations

import numpy as np

from jaxrl_llm.control import setting


def uniform(rate: np.ndarray, alpha: np.ndarray, beta: np.ndarray, group: int) -> np.ndarray:
  """The same for all: ties are broken at random. Source: none."""
  del alpha, beta, group
  return np.zeros_like(rate)


def mopps(
  rate: np.ndarray, alpha: np.ndarray, beta: np.ndarray, group: int, *, target: float = 0.5
) -> np.ndarray:
  """−(x − p*)². Source: arXiv:2507.04632 (MoPPS)."""
  del alpha, beta, group
  setting.within('utility.target', target, 0, 1)
  return -((rate - target) ** 2)


def mixed_group(rate: np.ndarray, alpha: np.ndarray, beta: np.ndarray, group: int) -> np.ndarray:
  """P(next group of G is neither all right nor all wrong) under the posterior, in closed form.

  1 − Π_{i<G} (α + i)/(α + β + i) − Π_{i<G} (β + i)/(α + β + i): the Beta-binomial's two ends
  taken away. No Thompson noise, and G counts. Source: none.
  """
  del rate
  right, wrong = np.ones_like(alpha), np.ones_like(alpha)
  for i in range(group):
    right = right * (alpha + i) / (alpha + beta + i)
    wrong = wrong * (beta + i) / (alpha + beta + i)
  return 1 - right - wrong


def information(rate: np.ndarray, alpha: np.ndarray, beta: np.ndarray, group: int) -> np.ndarray:
  """x(1 − x), the variance of one answer. Source: none."""
  del alpha, beta, group
  return rate * (1 - rate)
