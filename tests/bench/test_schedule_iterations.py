"""The simulated decode loop against the real one, with the lengths as caps on the rows of a tiny model."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bench import schedules


@pytest.mark.parametrize('submitted', [1.0, 4 / 3, 2.0])
def test_iterations_are_those_of_the_real_loop(submitted):
  """Slots, refills, the stop rule and continued groups."""
  real, simulated = schedules.iterations(submitted, 4)
  assert len(real) == len(simulated) == 4
  np.testing.assert_allclose(simulated, real, rtol=0.15)
  assert sum(simulated) == pytest.approx(sum(real), rel=0.05)
