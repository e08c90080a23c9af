"""How evidence ages. (evidence_Nx2, visited index) → evidence_Nx2, once a step, before new counts.

Evidence is (right, wrong) pseudo-counts beyond the prior, α = α₀ + right: to age it by λ is
α ← λα + (1 − λ)α₀. With a prior of Beta(1, 1) that pulls a prompt's mean towards ½, which training
does not; under `share.kind` the pull is towards what prompts of its kind do now.
Every public function here may be named in `config.curriculum.forget.fn`.
"""

from __future__ import annotations

import numpy as np

from jaxrl_llm.control import setting


def none(evidence_Nx2: np.ndarray, index: np.ndarray) -> np.ndarray:
  """Nothing is forgotten. Source: none."""
  del index
  return evidence_Nx2.copy()


def visit(evidence_Nx2: np.ndarray, index: np.ndarray, *, decay: float = 0.25) -> np.ndarray:
  """α ← λα + (1 − λ)α₀ for the visited prompts alone. Source: arXiv:2507.04632 (MoPPS; 0.5, 1)."""
  setting.within('forget.decay', decay, 0, 1)
  aged = evidence_Nx2.copy()
  aged[index] *= decay
  return aged


def step(evidence_Nx2: np.ndarray, index: np.ndarray, *, decay: float = 0.98) -> np.ndarray:
  """α ← γα + (1 − γ)α₀ for every prompt at every step.

  Too small for the data where 1 − γ is far above prompts per step ÷ prompts: little is then left
  of a prompt's evidence when its turn comes again. Source: arXiv:2510.26374 (BOTS; 0.9).
  """
  del index
  setting.within('forget.decay', decay, 0, 1)
  return evidence_Nx2 * decay
