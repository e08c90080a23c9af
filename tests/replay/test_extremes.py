"""The best and the worst rows of a slot: by hand, without the others, and as a group that has no others."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from objective_table import B, G, P, batch, data, settings

from jaxrl_llm import objective
from jaxrl_llm.replay import extremes, reuse
from jaxrl_llm.types import UserError


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


@pytest.mark.parametrize(
  'reward, exists, kept',
  [
    ([3, 1, 4, 1.5, 9], [1, 1, 1, 1, 1], [4, 2, 1]),
    ([3, 1, 4, 1.5, 9], [1, 0, 1, 1, 0], [0, 2, 3]),
    ([1, 0, 1, 0, 1, 0], [1] * 6, [0, 2, 5]),  # of equal ones the first are better
    ([5, 5, 5, 5], [1] * 4, [0, 1, 3]),
    ([2, 7], [1, 1], [0, 1]),
    ([2, 7], [0, 0], []),
  ],
)
def test_two_best_rows_and_the_worst_one(reward, exists, kept):
  got = extremes.extremes(np.array(reward), np.array(exists, bool), 2, 1)
  assert set(np.flatnonzero(got)) == set(kept)


def test_the_gradient_is_that_of_a_group_that_has_no_other_rows():
  d = data(drift=0)
  given = batch(d)
  joined = reuse.extremes(best=1, worst=2).join(given, 0, 0)
  kept_B = joined.rollout.length_B > 0
  assert kept_B.reshape(P, G).sum(1).tolist() == [3] * P and kept_B.sum() < B
  for p in range(P):
    rows = slice(p * G, p * G + G)
    left_out = d.reward[rows][~kept_B[rows]]
    order = np.sort(d.reward[rows])
    assert left_out.tolist() == [order[-2]]

  def coefficients(rows):
    method = objective.method(settings())
    target = objective.targets(method, rows, G)
    return np.asarray(objective.coefficients(method, target, d.x)[0])

  alone = given._replace(
    rollout=given.rollout._replace(length_B=np.where(kept_B, given.rollout.length_B, 0)),
    reward_B=np.where(kept_B, given.reward_B, 99.0),  # what a row without tokens earned is not read
  )
  got = coefficients(joined)
  np.testing.assert_array_equal(got, coefficients(alone))
  assert not got[~kept_B].any() and (got[kept_B] != 0).any(1).sum() > P
  assert reuse.extremes(best=1, worst=2).metrics(joined, P) == {'replay/rows': 3 * P}


@pytest.mark.parametrize('best, worst', [(G, G), (1, G + 2), (G + 2, 1)])
def test_a_group_that_is_small_enough_is_whole(best, worst):
  given = batch(data())
  joined = reuse.extremes(best=best, worst=worst).join(given, 0, 0)
  np.testing.assert_array_equal(joined.rollout.length_B, given.rollout.length_B)


@pytest.mark.parametrize('chosen', [dict(best=0, worst=2), dict(best=2, worst=0), dict(best=-1)])
def test_wrong_counts_are_refused(chosen):
  ((name, value),) = [item for item in chosen.items() if item[1] < 1]
  message = f'config.replay.reuse.{name}={value} must be a whole number from 1 up'
  with pytest.raises(UserError, match=message):
    reuse.extremes(**chosen)
