"""Which graded rollouts are cut and graded again: correct_PxG, length_PxG → length_PxG, in tokens.

Every public function here may be named in `config.rewards.truncate.fn`; it makes the settings, or None.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Outliers(NamedTuple):
  """Settings of `outliers`."""

  deviations: float
  least_tokens: int

  def cut(self, correct_PxG: np.ndarray, length_PxG: np.ndarray) -> np.ndarray:
    """The lengths to keep, see `outliers`. A row of length 0 does not exist and counts nowhere."""
    exists_PxG = length_PxG > 0
    n_P = exists_PxG.sum(1)
    solved_P = (n_P > 0) & (correct_PxG.astype(bool) | ~exists_PxG).all(1)
    mean_P = length_PxG.sum(1) / np.maximum(n_P, 1)
    off_PxG = (length_PxG - mean_P[:, None]) * exists_PxG
    std_P = np.sqrt((off_PxG**2).sum(1) / np.maximum(n_P, 1))
    most_P = np.floor(mean_P + self.deviations * std_P).astype(length_PxG.dtype)
    far_PxG = solved_P[:, None] & (length_PxG - most_P[:, None] >= max(self.least_tokens, 1))
    return np.where(far_PxG, most_P[:, None], length_PxG)


def none() -> None:
  """Nothing is cut. Source: none."""
  return None


def outliers(*, deviations: float = 3.0, least_tokens: int = 32) -> Outliers:
  """Where all of a group are right: ⌊mean + deviations·std⌋ tokens of each row at least `least_tokens` longer.

  The cut rows are graded again, so that saying more than others of what all can do costs the reward. std over n
  (whether the authors' is over n − 1 was not found): no row of n is more than √(n − 1) of these from the mean, so
  that groups of 10 or fewer have no outlier beyond 3. Source: arXiv:2601.03969 (DOT).
  """
  return Outliers(deviations, least_tokens)
