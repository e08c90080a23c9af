"""Decay of evidence when it is read equals decay of all evidence at every step."""

from __future__ import annotations

import numpy as np
import pytest
from curricula import PLAIN, G, make, observe, posterior

N, STEPS = 12, 30


def eager(per_visit, per_step, evidence_2xN, index, counts_2xV):
  """One step as it is written in the papers, for all prompts."""
  evidence_2xN = evidence_2xN * per_step
  evidence_2xN[:, index] = evidence_2xN[:, index] * per_visit + counts_2xV
  return evidence_2xN


@pytest.mark.parametrize(
  'decay, per_visit, per_step',
  [
    (dict(fn='none'), 1.0, 1.0),
    (dict(fn='visit', decay=0.3), 0.3, 1.0),
    (dict(fn='step', decay=0.8), 1.0, 0.8),
    (dict(fn='two_scale', per_visit=0.6, per_step=0.9), 0.6, 0.9),
    (dict(fn='two_scale', per_visit=0.0, per_step=0.0), 0.0, 0.0),
  ],
)
def test_ageing_what_is_read_is_ageing_everything(decay, per_visit, per_step):
  curriculum, random = make(N, **PLAIN | dict(evidence_decay=decay)), np.random.default_rng(0)
  evidence_2xN = np.zeros((2, N))
  for _ in range(STEPS):
    index = random.choice(N - 1, random.integers(0, 5), replace=False)  # the last is never seen
    k = random.integers(0, G + 1, len(index))
    observe(curriculum, index, k)
    counts = np.stack([k, G - k])
    evidence_2xN = eager(per_visit, per_step, evidence_2xN, index, counts)
    np.testing.assert_allclose(posterior(curriculum), 1 + evidence_2xN, rtol=2e-5)


def test_a_reset_forgets_at_the_border_of_a_round():
  curriculum = make(N, **PLAIN | dict(evidence_decay=dict(fn='reset', every=3)))
  for step in range(7):
    observe(curriculum, [step % 3], [6])
    seen = [step % 3 - i for i in range(step % 3 + 1)]  # of this round
    expected = np.ones((2, N))
    expected[:, seen] += [[6], [2]]
    np.testing.assert_allclose(posterior(curriculum), expected, rtol=1e-5)
