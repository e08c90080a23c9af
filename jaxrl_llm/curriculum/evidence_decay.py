"""How evidence ages. (last_N, now, visited) → what evidence of step `last` is multiplied by in step `now`.

Evidence is (right, wrong) pseudo-counts beyond the prior, α = α₀ + right: to age it by λ is
α ← λα + (1 − λ)α₀. With a prior of Beta(1, 1) that pulls a prompt's mean towards ½, which training
does not; under `share.kind` the pull is towards what prompts of its kind do now.

`last` is when a prompt's counts were last written, so that a step costs what was visited and not the
data set: all others are aged when they are read. `visited` says that new counts come now.
Every public function here may be named in `config.curriculum.evidence_decay.fn`.
"""

from __future__ import annotations

import numpy as np

from jaxrl_llm.curriculum import setting_checks

Factor = np.ndarray | float  # float32 [N], or one for all


def none(last_N: np.ndarray, now: int, visited: bool) -> Factor:
  """Nothing is forgotten: 1. Source: none."""
  del last_N, now, visited
  return 1.0


def visit(last_N: np.ndarray, now: int, visited: bool, *, decay: float = 0.25) -> Factor:
  """λ at a visit: α ← λα + (1 − λ)α₀ + k. Source: arXiv:2507.04632 (MoPPS; 0.5, 1)."""
  del last_N, now
  setting_checks.within('forget.decay', decay, 0, 1)
  return float(decay) if visited else 1.0


def step(last_N: np.ndarray, now: int, visited: bool, *, decay: float = 0.98) -> Factor:
  """γ^(now − last): α ← γα + (1 − γ)α₀ for every prompt at every step.

  Too small for the data where 1 − γ is far above prompts per step ÷ prompts: little is then left
  of a prompt's evidence when its turn comes again. Source: arXiv:2510.26374 (BOTS; 0.9).
  """
  del visited
  setting_checks.within('forget.decay', decay, 0, 1)
  return np.power(np.float32(decay), (now - last_N).astype(np.float32))


def two_scale(
  last_N: np.ndarray, now: int, visited: bool, *, per_visit: float = 0.5, per_step: float = 0.999
) -> Factor:
  """λ_loc at a visit, times λ_glob^(now − last).

  Source: arXiv:2511.18902 (VADE), reconstructed from its abstract: that there are two rates is theirs,
  the form and the numbers are ours.
  """
  setting_checks.within('forget.per_visit', per_visit, 0, 1)
  setting_checks.within('forget.per_step', per_step, 0, 1)
  factor_N = np.power(np.float32(per_step), (now - last_N).astype(np.float32))
  return factor_N * np.float32(per_visit) if visited else factor_N


def reset(last_N: np.ndarray, now: int, visited: bool, *, every: int = 2) -> Factor:
  """1 within a round of `every` steps, 0 across its border. Source: arXiv:2506.05316 (DOTS; 2)."""
  del visited
  setting_checks.whole('forget.every', every, 1)
  return ((last_N - 1) // every == (now - 1) // every).astype(np.float32)
