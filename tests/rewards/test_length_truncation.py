"""Which rows of all-right groups are cut, and where."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.rewards import length_truncation


def cut(correct, length, **settings):
  settings = dict(deviations=2.0, least_tokens=1) | settings
  return (
    length_truncation.outliers(**settings).cut(np.array([correct]), np.array([length])).tolist()[0]
  )


def test_identical_lengths_are_never_cut():
  for deviations in (0.0, 1.0, 3.0):
    assert cut([1] * 4, [7] * 4, deviations=deviations) == [7] * 4


def test_an_outlier_of_an_all_right_group_is_cut_at_mean_and_deviations():
  length = [10] * 8 + [100]  # mean 20, unbiased std 30
  assert cut([1] * 9, length) == [10] * 8 + [80]
  assert cut([1] * 8 + [0], length) == length  # one is wrong
  assert cut([1] * 9, length, least_tokens=20) == [10] * 8 + [80]
  assert cut([1] * 9, length, least_tokens=21) == length
  assert cut([1] * 9, length, deviations=3.0) == length  # of 9 rows none can be so far


def test_rows_that_do_not_exist_count_nowhere():
  length = [10] * 8 + [100, 0, 0]
  assert cut([1] * 9 + [0, 0], length) == [10] * 8 + [80, 0, 0]
  assert cut([0] * 3, [0] * 3) == [0] * 3


def test_groups_are_cut_apart_and_types_stay():
  length = np.array([[10] * 8 + [100], [5] * 9], np.int32)
  got = length_truncation.outliers(deviations=2.0).cut(np.ones((2, 9), bool), length)
  assert got.dtype == np.int32 and got[1].tolist() == [5] * 9
  assert got[0, -1] == 100  # 20 tokens are less than 32
  assert length_truncation.none() is None
