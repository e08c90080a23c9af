"""The share of a success that a score counts, and what the bounds may be."""

from __future__ import annotations

import re

import numpy as np
import pytest

from jaxrl_llm.config import loading as configs
from jaxrl_llm.rewards import outcomes
from jaxrl_llm.types import UserError


def rewards_config(**changes):
  spec = configs.default().rewards
  for name, value in changes.items():
    spec[name] = value
  return spec


def test_binary_scores_are_whole_successes_or_none():
  score_B = np.array([0, 1, 1, 0], np.float32)
  success = outcomes.scale(rewards_config()).success(score_B)
  assert success.dtype == np.float32 and success.tolist() == score_B.tolist()
  for right, changes in ((0.5, dict(right=0.5)), (2.0, {}), (0.7, dict(right=0.7))):
    scale = outcomes.scale(rewards_config(**changes))
    assert scale.success(right * score_B).tolist() == score_B.tolist()


@pytest.mark.parametrize(
  'changes, want, beyond',
  [
    ({}, [0, 0, 0.25, 1, 1], [1, 0, 0, 0, 0]),  # above `right` is right
    (dict(right=0.25), [0, 0, 1, 1, 1], [1, 0, 0, 0, 0]),
    (dict(bounds=(-1.0, 1.0)), [0, 0.5, 0.625, 1, 1], [0, 0, 0, 0, 1]),
    (dict(bounds=(0.0, 4.0)), [0, 0, 0.0625, 0.25, 0.5], [1, 0, 0, 0, 0]),
  ],
)
def test_graded_scores_are_the_part_of_the_way_between_the_bounds(changes, want, beyond):
  score_B = np.array([-1, 0, 0.25, 1, 2], np.float32)
  spec = rewards_config(**changes)
  scale = outcomes.scale(spec)
  assert scale.success(score_B).tolist() == want
  assert scale.outside(score_B).tolist() == [bool(x) for x in beyond]
  metrics = scale.metrics(score_B)
  assert metrics['grade/out_of_bounds'] == pytest.approx(0.2)
  assert (metrics['grade/lowest'], metrics['grade/highest']) == (-1, 2)
  assert metrics['grade/right'] == (score_B >= spec.right).mean()
  assert scale.metrics(score_B[:0]) == {}


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(right=float('nan')), 'config.rewards.right=nan must be a finite number'),
    (dict(right=0.0), "config.rewards.right=0.0 is not above 0, so that .* --config.rewards.bounds='(-1, 0)'"),
    (dict(bounds=(1.0, 0.0)), 'config.rewards.bounds=(1.0, 0.0) must be the lowest and the highest score'),
    (dict(bounds=(0.0,)), 'config.rewards.bounds=(0.0,) must be'),
    (dict(bounds=(0.0, float('inf'))), 'config.rewards.bounds=(0.0, inf) must be'),
    (dict(bounds=(0.0, '1')), "config.rewards.bounds=(0.0, '1') must be"),
    (dict(bounds=(0.0, 0.25)), 'lies outside of config.rewards.bounds=(0.0, 0.25), .* --config.rewards.right=0.25'),
    (dict(bounds=(1.0, 2.0)), 'config.rewards.right=1.0 lies outside'),
  ],
)  # fmt: skip
def test_bounds_that_cannot_be_are_refused_with_the_flag_to_type(changes, message):
  with pytest.raises(UserError, match=re.escape(message).replace(r'\.\*', '.*')):
    outcomes.bounds(rewards_config(**changes))


def test_bounds_are_a_field_of_the_command_line():
  flags = ['--config.rewards.bounds=(0.0, 2.0)', '--config.rewards.right=2.0']
  spec = configs.load('configs/tiny.py', flags).rewards
  assert outcomes.bounds(spec) == (0, 2) and spec.fn == 'exact'
  assert outcomes.bounds(configs.load('configs/tiny.py', []).rewards) == (0, 1)
