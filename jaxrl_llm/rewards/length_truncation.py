"""Truncation of graded rollouts, which are then graded again: correct_PxG, length_PxG → length_PxG, in tokens.

`config.rewards.truncate.fn` may name every public function of this module; it returns the settings, or None.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Outliers(NamedTuple):
  """Settings of `outliers`."""

  deviations: float
  least_tokens: int

  def cut(self, correct_PxG: np.ndarray, length_PxG: np.ndarray) -> np.ndarray:
    """Returns the lengths after truncation, see `outliers`. Rows of length 0 are empty and not counted."""
    exists_PxG = length_PxG > 0
    n_P = exists_PxG.sum(1)
    solved_P = (n_P > 0) & (correct_PxG.astype(bool) | ~exists_PxG).all(1)
    mean_P = length_PxG.sum(1) / np.maximum(n_P, 1)
    off_PxG = (length_PxG - mean_P[:, None]) * exists_PxG
    std_P = np.sqrt((off_PxG**2).sum(1) / np.maximum(n_P - 1, 1))
    most_P = np.floor(mean_P + self.deviations * std_P).astype(length_PxG.dtype)
    far_PxG = solved_P[:, None] & (length_PxG - most_P[:, None] >= max(self.least_tokens, 1))
    return np.where(far_PxG, most_P[:, None], length_PxG)


def none() -> None:
  """No truncation."""
  return None


def outliers(*, deviations: float = 3.0, least_tokens: int = 32) -> Outliers:
  """Cuts length outliers of all-right groups to ⌊mean + deviations·std⌋ tokens, arXiv:2601.03969 (DOT).

  Outliers are at least `least_tokens` longer than that. They are graded again, so that an overlong answer to a solved
  prompt loses its reward. std is unbiased: no row of n is more than (n − 1) / √n of these from the mean, so that groups
  of 10 or fewer have no outlier beyond 3.
  """
  return Outliers(deviations, least_tokens)
