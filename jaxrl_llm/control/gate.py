"""Last changes to a choice. (chosen index, size, random generator) → index, all distinct.

Every public function here may be named in `config.curriculum.gate.fn`.
"""

from __future__ import annotations

import numpy as np


def none(index: np.ndarray, size: int, random: np.random.Generator) -> np.ndarray:
  """As chosen. Source: none."""
  del size, random
  return index


def audit(
  index: np.ndarray, size: int, random: np.random.Generator, *, share: float = 0.05
) -> np.ndarray:
  """Each slot is given, with probability `share`, to a prompt drawn uniformly from those not chosen.

  Keeps the posterior of prompts that a utility would never choose again from going stale.
  Source: none.
  """
  audited = random.random(len(index)) < share
  others = np.setdiff1d(np.arange(size), index)
  drawn = random.permutation(others)[: audited.sum()]
  index = index.copy()
  index[np.flatnonzero(audited)[: len(drawn)]] = drawn
  return index
