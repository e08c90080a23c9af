"""How evidence ages. (evidence_Nx2, visited index, step) → evidence_Nx2, before new counts are added.

Evidence is (right, wrong) pseudo-counts beyond the prior. Every public function here may be named in
`config.curriculum.forget.fn`.
"""

from __future__ import annotations

import numpy as np


def none(evidence_Nx2: np.ndarray, index: np.ndarray) -> np.ndarray:
  """Nothing is forgotten. Source: none."""
  del index
  return evidence_Nx2


def visit(evidence_Nx2: np.ndarray, index: np.ndarray, *, decay: float = 0.5) -> np.ndarray:
  """α ← λα + (1 − λ)α₀ for the visited prompts alone. Source: arXiv:2507.04632 (MoPPS)."""
  aged = evidence_Nx2.copy()
  aged[index] *= decay
  return aged


def step(evidence_Nx2: np.ndarray, index: np.ndarray, *, decay: float = 0.9) -> np.ndarray:
  """α ← λα + (1 − λ)α₀ for every prompt at every step. Source: arXiv:2510.26374 (BOTS)."""
  del index
  return evidence_Nx2 * decay
