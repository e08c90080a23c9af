"""Resampled pairs of a group's best and worst rows, against hand-made groups and exact probabilities of draws."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxrl_llm.replay import contrast_pairs, reuse
from jaxrl_llm.types import STOPPED, Batch, Prompts, Rollout, UserError

G = 4


def batch(reward_PxG, length_PxG=None, weight=1.0):
  reward_PxG = np.asarray(reward_PxG, np.float32)
  P, B = len(reward_PxG), reward_PxG.size
  length_B = np.full(B, 3, np.int32) if length_PxG is None else np.ravel(length_PxG)
  prompts = Prompts(
    np.ones((P, 2), np.int32), np.full(P, 2, np.int32), *[np.arange(P, dtype=np.int32)] * 2,
    np.zeros(P, np.float32),
  )  # fmt: skip
  rollout = Rollout(
    np.zeros((B, 9), np.int32), np.zeros((B, 9), np.float32), length_B,
    np.full(B, STOPPED, np.int8), np.zeros((B, 9), np.int32), np.full(B, weight, np.float32),
    np.zeros((B, 0), np.float32),
  )  # fmt: skip
  return Batch(prompts, rollout, reward_PxG.ravel(), (reward_PxG.ravel() > 0).astype(np.float32))


def weights(joined):
  return joined.rollout.weight_B.reshape(-1, G)


def test_the_best_are_paired_with_the_worst_and_the_middle_left_out():
  advantage_PxG = np.array([[0.0, -1.0, 2.0, -1.0], [0.3, 0.2, 0.1, 0.0]])
  exists_PxG = np.array([[1, 1, 1, 1], [1, 1, 0, 1]], bool)
  both = contrast_pairs.pairs(advantage_PxG, exists_PxG, 1.0)
  assert both.tolist() == [[2, 3], [0, 1], [4, 7]]
  assert contrast_pairs.pairs(advantage_PxG, exists_PxG, 0.5).tolist() == [[2, 3], [4, 7]]
  # At least one pair of a group that has one.
  assert contrast_pairs.pairs(advantage_PxG, exists_PxG, 0.1).tolist() == [[2, 3], [4, 7]]
  exists_PxG[1] = [0, 0, 1, 0]
  assert contrast_pairs.pairs(advantage_PxG, exists_PxG, 1.0).tolist() == [[2, 3], [0, 1]]


def test_sub_batches_are_drawn_without_replacement_by_contrast():
  """The frequency of each set of two pairs against its probability: the sum over both orders."""
  contrast_N, random = np.array([1.0, 2.0, 4.0, 0.0]), np.random.default_rng(0)
  seen = {}
  for _ in range(3000):
    copies = contrast_pairs.draw(contrast_N, 2, random)
    assert copies.sum() == 4 and copies.max() <= 2 and copies[3] == 0
    seen[tuple(copies)] = seen.get(tuple(copies), 0) + 1
  p_N = contrast_N / contrast_N.sum()
  sets = list(itertools.combinations(range(3), 2))
  p = {s: sum(p_N[i] * p_N[j] / (1 - p_N[i]) for i, j in (s, s[::-1])) for s in sets}
  for one, two in itertools.combinations_with_replacement(sets, 2):
    want = p[one] * p[two] * (1 if one == two else 2)
    key = tuple(sum(i in s for s in (one, two)) for i in range(4))
    assert abs(seen.get(key, 0) / 3000 - want) < 4 * np.sqrt(want / 3000), key


def test_weights_are_copies_with_the_mean_over_the_tokens_of_the_resampled_batch():
  """One draw of all pairs: rows of a kept pair have equal weights, and Σ weight·|y| = Σ|y|."""
  length_PxG = np.array([[5, 2, 3, 4], [1, 2, 3, 0], [2, 2, 2, 2]])
  given = batch([[1, 0, 0, 0.5], [0, 1, 0, 9], [1, 1, 1, 1]], length_PxG, weight=2.0)
  got = weights(reuse.contrast_pairs(share=0.5, draws=1).join(given, 0, 1))
  kept = np.array([[1, 0, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]])
  np.testing.assert_allclose(
    got, 2 * kept * length_PxG.sum() / (kept * length_PxG).sum(), rtol=1e-6
  )
  assert got.dtype == np.float32


def test_rows_of_equal_rewards_are_never_learned():
  third = np.float32(1 / 3)
  got = reuse.contrast_pairs().join(batch([[third] * G, [third] * G]), 0, 1)
  assert not weights(got).any()
  assert reuse.contrast_pairs().metrics(got, 2) == {'replay/rows': 0, 'replay/effective_rows': 0}


def test_draws_are_by_seed_and_step():
  given, store = batch(np.random.default_rng(0).random((16, G))), reuse.contrast_pairs(draws=2)
  one, again = (weights(store.join(given, 3, 7)) for _ in range(2))
  np.testing.assert_array_equal(one, again)
  assert (one != weights(store.join(given, 3, 8))).any()
  assert (one != weights(store.join(given, 4, 7))).any()
  assert (given.rollout.weight_B == 1).all()


def test_metrics_count_the_learned_rows():
  given = batch([[1, 0, 0, 0], [0, 1, 0, 0]])
  rollout = given.rollout._replace(weight_B=np.array([3, 1, 0, 0, 0, 0, 0, 0], np.float32))
  metrics = reuse.contrast_pairs().metrics(given._replace(rollout=rollout), 2)
  assert metrics == {'replay/rows': 2, 'replay/effective_rows': pytest.approx(16 / 10)}


@pytest.mark.parametrize(
  'settings, message',
  [
    (dict(share=0.0), 'config.replay.reuse.share=0.0 must be above 0 and at most 1'),
    (dict(share=1.1), 'config.replay.reuse.share=1.1 must be above 0 and at most 1'),
    (dict(draws=0), 'config.replay.reuse.draws=0 must be a whole number from 1 up'),
  ],
)
def test_wrong_settings_are_refused(settings, message):
  with pytest.raises(UserError, match=message):
    reuse.contrast_pairs(**settings)
