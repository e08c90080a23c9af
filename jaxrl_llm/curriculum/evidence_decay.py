"""Decay of evidence: (last_N, now, visited) → the factor in step `now` on evidence of step `last`.

Evidence is (right, wrong) pseudo-counts beyond the prior, α = α₀ + right: a factor λ means α ← λα + (1 − λ)α₀. With a
prior of Beta(1, 1) the mean of a prompt moves toward ½; with `prior_pooling.kind`, toward the current mean of its kind.

`last` is the step in which a prompt's counts were last written. Other prompts decay when they are read, so that the
cost of a step depends on the visited prompts only. `visited` is True where new counts are added now.
Every public function may be named in `config.curriculum.evidence_decay.fn`.
"""

from __future__ import annotations

import numpy as np

from jaxrl_llm.curriculum import setting_checks

Factor = np.ndarray | float  # float32 [N], or one for all


def none() -> None:
  """No decay."""


def visit(last_N: np.ndarray, now: int, visited: bool, *, decay: float = 0.25) -> Factor:
  """λ at a visit: α ← λα + (1 − λ)α₀ + k. arXiv:2507.04632 (MoPPS; 0.5, 1)."""
  del last_N, now
  setting_checks.check_range('evidence_decay.decay', decay, 0, 1)
  return float(decay) if visited else 1.0


def step(last_N: np.ndarray, now: int, visited: bool, *, decay: float = 0.98) -> Factor:
  """γ^(now − last): α ← γα + (1 − γ)α₀ for every prompt at every step.

  γ is too small where 1 − γ is far above prompts per step ÷ prompts: evidence then vanishes between two visits.
  arXiv:2510.26374 (BOTS; 0.9).
  """
  del visited
  setting_checks.check_range('evidence_decay.decay', decay, 0, 1)
  return np.power(np.float32(decay), (now - last_N).astype(np.float32))


def two_scale(
  last_N: np.ndarray, now: int, visited: bool, *, per_visit: float = 0.5, per_step: float = 0.999
) -> Factor:
  """λ_loc at a visit, times λ_glob^(now − last).

  arXiv:2511.18902 (VADE), reconstructed from its abstract: the two rates are theirs, the form and the numbers are ours.
  """
  setting_checks.check_range('evidence_decay.per_visit', per_visit, 0, 1)
  setting_checks.check_range('evidence_decay.per_step', per_step, 0, 1)
  factor_N = np.power(np.float32(per_step), (now - last_N).astype(np.float32))
  return factor_N * np.float32(per_visit) if visited else factor_N


def reset(last_N: np.ndarray, now: int, visited: bool, *, every: int = 2) -> Factor:
  """1 within a period of `every` steps, 0 across its border. arXiv:2506.05316 (DOTS; 2)."""
  del visited
  setting_checks.check_integer('evidence_decay.every', every, 1)
  return ((last_N - 1) // every == (now - 1) // every).astype(np.float32)
