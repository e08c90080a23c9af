"""Schedules of the length cap."""

from __future__ import annotations

import pytest

from jaxrl_llm.config import stages
from jaxrl_llm.rollout import length_schedule


def test_a_constant_length_is_no_schedule():
  assert stages.active(stages.pick(length_schedule, dict(fn='constant'))) is None


def test_cosine_starts_full_is_lowest_half_way_and_returns():
  caps = [length_schedule.cosine(step, 64, low=16, period=8) for step in range(17)]
  assert caps == [64, 57, 40, 23, 16, 23, 40, 57] * 2 + [64]


def test_stairs_change_at_their_starts_and_never_exceed_the_cap():
  fn = lambda step: length_schedule.stairs(step, 25, starts=(0, 1, 4), caps=(10, 20, 30))  # noqa: E731
  assert [fn(step) for step in range(6)] == [10, 20, 20, 20, 25, 25]


@pytest.mark.parametrize('low', [0, -3])
def test_no_schedule_goes_below_one_token(low):
  assert min(length_schedule.cosine(step, 8, low=low, period=4) for step in range(8)) == 1
