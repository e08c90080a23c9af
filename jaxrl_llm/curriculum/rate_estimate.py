"""Estimates of a prompt's success rate: (alpha, beta, random generator) → rate.

Every public function may be named in `config.curriculum.rate_estimate.fn`.
"""

from __future__ import annotations

import numpy as np


def mean(alpha: np.ndarray, beta: np.ndarray, random: np.random.Generator) -> np.ndarray:
  """α / (α + β)."""
  del random
  return alpha / (alpha + beta)


def thompson(alpha: np.ndarray, beta: np.ndarray, random: np.random.Generator) -> np.ndarray:
  """One draw from Beta(α, β) per prompt. arXiv:2507.04632 (MoPPS)."""
  return random.beta(alpha, beta)
