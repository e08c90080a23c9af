"""The treatment of completions that could not be graded, and the limit that stops a run."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxrl_llm import rewards
from jaxrl_llm.rewards import CRASH, ERROR, OK, TIMEOUT
from jaxrl_llm.types import UserError

OUTCOMES = np.array([OK, TIMEOUT, CRASH, ERROR], np.int8)
PARTS = np.array([[1, 0.5], [0, 0], [0, 0], [0, 0]], np.float32)


def applied(**failed):
  parts_BxK, drop_B = rewards.FailurePolicy(dict(fn='exact', failed=failed)).apply(
    rewards.Scores(PARTS, OUTCOMES, {}, '')
  )
  return parts_BxK.tolist(), drop_B.tolist()


def test_by_default_time_outs_score_nothing_and_what_the_grader_breaks_on_is_dropped():
  assert applied() == (PARTS.tolist(), [False, False, True, True])


def test_each_kind_has_its_policy_and_value_goes_to_what_is_scored():
  parts, drop = applied(timeout='drop', error='score', value=-1.0)
  assert parts == [[1, 0.5], [0, 0], [0, 0], [-1, 0]] and drop == [False, True, True, False]


def observed(failures, *steps):
  for failed, total in steps:
    outcome_N = np.array([ERROR] * failed + [OK] * (total - failed), np.int8)
    failures.observe(outcome_N, f'{failed} broke' if failed else '')


def test_the_run_stops_when_more_than_a_share_of_the_last_steps_failed_and_says_what_did():
  failures = rewards.FailurePolicy(dict(failed=dict(stop_share=0.5, stop_steps=2)))
  observed(failures, (8, 8))
  failures.check()  # a step alone decides nothing
  observed(failures, (0, 8))
  failures.check()  # half is not more than half
  observed(failures, (8, 8))
  failures.check()
  observed(failures, (1, 8))
  with pytest.raises(
    UserError, match=r'9 of 16 rollouts of the last 2 steps .*9 error.*: 8 broke; correct'
  ):
    failures.check()
  observed(failures, (1, 8))
  failures.check()


def test_steps_without_rollouts_stop_nothing():
  failures = rewards.FailurePolicy({})
  observed(failures, (0, 0), (0, 0), (0, 0))
  failures.check()


def test_the_window_goes_on_where_a_run_is_continued():
  uninterrupted, before = (rewards.FailurePolicy({}) for _ in range(2))
  observed(uninterrupted, (0, 8), (5, 8), (8, 8))
  observed(before, (0, 8), (5, 8))
  after = rewards.FailurePolicy({})
  after.load_state_dict(json.loads(json.dumps(before.state_dict())))
  observed(after, (8, 8))
  messages = []
  for failures in (uninterrupted, after):
    with pytest.raises(UserError) as error:
      failures.check()
    messages.append(str(error.value))
  assert messages[0] == messages[1] and '13 of 24' in messages[0]


@pytest.mark.parametrize(
  'failed, message',
  [
    (dict(crash='ignore'), "config.rewards.failed.crash='ignore' must be one of: score, drop"),
    (dict(value=float('nan')), 'config.rewards.failed.value=nan must be a finite number'),
    (dict(value=1.0), 'would count as right'),
    (dict(value='0'), "config.rewards.failed.value='0'"),
    (dict(stop_share=1.5), 'config.rewards.failed.stop_share=1.5 must be a number from 0.0 to 1.0'),
    (dict(stop_steps=0), 'config.rewards.failed.stop_steps=0'),
    (dict(stop_steps=1.5), 'config.rewards.failed.stop_steps=1.5 must be a whole number'),
    (dict(oom='drop'), 'config.rewards.failed.oom is unknown'),
  ],
)  # fmt: skip
def test_bad_settings_are_told(failed, message):
  with pytest.raises(UserError, match=message):
    rewards.FailurePolicy(dict(failed=failed))
