"""The running estimate of a prompt's rollout length."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.curriculum import LengthEstimate


def test_the_first_visit_counts_whole_and_later_ones_by_their_rate():
  lengths = LengthEstimate(4, rate=0.25)
  lengths.observe(np.array([2, 0]), np.array([8.0, 100.0]))
  lengths.observe(np.array([2]), np.array([16.0]))
  np.testing.assert_array_equal(lengths(np.array([0, 1, 2])), [100, 0, 10])


def test_it_continues_from_its_state():
  a, b = LengthEstimate(3), LengthEstimate(3)
  a.observe(np.array([1]), np.array([5.0]))
  b.load_state_dict(a.state_dict())
  a.observe(np.array([1]), np.array([9.0]))
  assert b.mean.tolist() == [0, 5, 0], 'the state is a copy'
  b.observe(np.array([1]), np.array([9.0]))
  np.testing.assert_array_equal(a.mean, b.mean)
