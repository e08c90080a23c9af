"""What a run tells while it goes: what is shown of the curriculum."""

from __future__ import annotations

import types

import numpy as np

from jaxrl_llm.runner.run_logger import RunLogger


def test_the_screen_shows_prompts_by_their_expected_success():
  """Means of Beta(1, 9), (9, 1) and (5, 5), and not their α."""
  alpha, beta = np.array([1.0, 1.0, 9.0, 5.0]), np.array([9.0, 9.0, 1.0, 5.0])
  curriculum = types.SimpleNamespace(posterior=lambda index: (alpha[index], beta[index]))
  tables = types.SimpleNamespace(train=types.SimpleNamespace(rows=range(4)))
  logger = types.SimpleNamespace(
    _context=types.SimpleNamespace(
      selection=types.SimpleNamespace(curriculum=curriculum), tables=tables
    )
  )
  shares = RunLogger._difficulty(logger)
  assert len(shares) == 20 and sum(shares) == 1
  assert {i: x for i, x in enumerate(shares) if x} == {2: 0.5, 10: 0.25, 18: 0.25}
