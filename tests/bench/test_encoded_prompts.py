"""The simulated choice of prompts by odds of answers, on made-up recordings whose rates are known."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bench import encoded_prompts

SAMPLES, SIZE = 8, 960


def recording(odds: bool, kinds: bool = False) -> dict[str, np.ndarray]:
  """An eighth of the prompts has the rate one half; the others are never right.

  `odds`, `kinds`: whether these say which; odds are those of other prompts otherwise.
  """
  random = np.random.default_rng(0)
  at_half_N = np.arange(SIZE) % 8 == 0
  right_N = np.where(at_half_N, 4, 0)
  odds_N = np.where(at_half_N, 0.0, -8.0) + 0.1 * random.normal(size=SIZE)
  odds_N = odds_N if odds else random.permutation(odds_N)
  kind_N = at_half_N.astype(int) if kinds else np.zeros(SIZE, int)
  hidden_NxD = random.normal(size=(SIZE, 3))
  states_NxF = np.concatenate([hidden_NxD, odds_N[:, None]], axis=1).astype(np.float32)
  return dict(right=right_N, kind=kind_N, states=states_NxF)


def simulated(found, **pooling: int) -> np.ndarray:
  """Means over three orders."""
  runs = [encoded_prompts.simulated(found, SAMPLES, 4, 40, order, **pooling) for order in range(3)]
  return np.mean(runs, axis=0)


@pytest.mark.parametrize('multiple', [2, 4])
def test_odds_find_the_mixed_groups_of_what_is_encoded(multiple):
  encoded, mixed, first, second = simulated(recording(odds=True), multiple=multiple, considered=1)
  assert encoded == 4 * multiple
  np.testing.assert_allclose(mixed, multiple / 8, atol=0.1)  # of 4 · multiple prompts an eighth
  # All mixed groups have the rate one half: 4 · 4 · 4 / (8 · 7).
  np.testing.assert_allclose((first + second) / 2, mixed * 64 / 56, rtol=1e-6)


def test_odds_of_other_prompts_find_nothing():
  mixed = simulated(recording(odds=False), multiple=4, considered=1)[1]
  np.testing.assert_allclose(mixed, 1 / 8, atol=0.08)


def test_kinds_choose_what_is_encoded():
  found = recording(odds=False, kinds=True)
  few, many = (simulated(found, multiple=2, considered=x) for x in (1, 8))
  assert few[0] == many[0] == 8
  assert many[1] > few[1] + 0.25


def test_the_table_leaves_out_what_there_are_too_few_prompts_for():
  text = encoded_prompts.table(recording(odds=True), SAMPLES, 32, 2, 2)
  rows = [line.split(' | ')[:2] for line in text.splitlines()[3:]]
  largest = SIZE // 32
  expected = [(m, c) for m, c in encoded_prompts.SETTINGS if m * c <= largest]
  assert [tuple(int(x.strip('| ')) for x in row) for row in rows] == expected
  assert '| at random | – | 0 | 0.125 | 0.143 | 0.143 |' in text
