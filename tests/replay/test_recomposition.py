"""RoRecomp's batches: priority against all subsets of small groups, the loss of the learned rows, the buffer."""

from __future__ import annotations

import itertools
import math

import jax
import numpy as np
import pytest

from jaxrl_llm import objective
from jaxrl_llm.checkpointing import checkpoint
from jaxrl_llm.replay import recomposition, reuse
from jaxrl_llm.types import UserError
from tests.objective.official import lib
from tests.replay.test_rollout_buffer import G, assert_same, batch, indices


def graded(index_P, right_PxG, length_PxG, seed=0):
  """Random rows with these lengths, a reward of 1 where right, and weights of 1."""
  rows = batch(index_P, seed)
  right_B = np.ravel(right_PxG).astype(np.float32)
  rollout = rows.rollout._replace(
    length_B=np.ravel(length_PxG).astype(np.int32), weight_B=np.ones(len(right_B), np.float32)
  )
  return rows._replace(rollout=rollout, reward_B=right_B, correct_B=right_B)


def weights(joined):
  return joined.rollout.weight_B.reshape(-1, G)


@pytest.mark.parametrize('kept', [0.3, 0.5, 0.7])
def test_priority_is_the_subset_of_least_length_of_right_and_most_of_wrong_rows(kept):
  """Every group of four rows with lengths 0, 1, 2 and 5, against the best of all subsets of its size."""
  for right_G in itertools.product([0, 1], repeat=4):
    for length_G in itertools.product([0, 1, 2, 5], repeat=4):
      right_G, length_G = np.array(right_G), np.array(length_G)
      got_G = recomposition.priority(right_G, length_G, kept)
      for value, best in ((1, min), (0, max)):
        rows = [g for g in range(4) if length_G[g] > 0 and right_G[g] == value]
        size = math.ceil(kept * len(rows))
        chosen = [g for g in rows if got_G[g]]
        sums = [sum(length_G[g] for g in s) for s in itertools.combinations(rows, size)]
        assert len(chosen) == size and sum(length_G[chosen]) == best(sums)
      assert not got_G[length_G == 0].any()


def test_of_equal_lengths_the_first_rows_have_priority():
  got = recomposition.priority(np.array([0, 1, 1, 0]), np.array([3, 2, 2, 3]), 0.5)
  assert got.tolist() == [True, True, False, False]


RIGHT = [[1, 1, 0], [0, 0, 1], [1, 1, 1]]
LENGTH = [[4, 2, 5], [3, 6, 1], [1, 2, 3]]


def test_priority_rows_are_learned_now_and_the_others_in_the_next_step():
  store = reuse.recomposed(least=1.0)
  first = graded([4, 5, 6], RIGHT, LENGTH)
  got = store.join(first, 0, 0)
  assert ((weights(got) > 0)[:3] == [[0, 1, 1], [0, 1, 1], [0, 0, 0]]).all()
  assert not weights(got)[3:][got.rollout.length_B.reshape(-1, G)[3:] > 0].any()
  store.keep(first, np.array([True, True, False]), 0)
  # The wrong rows of group 4 are one, the right rows of group 5, too: without others.
  assert list(store.buffer.groups) == [4, 5]
  got = store.join(graded([7, 8, 9], RIGHT, LENGTH, seed=1), 0, 1)
  assert indices(got)[:3] == [7, 8, 9] and sorted(indices(got)[3:]) == [-1, 4, 5]
  learned = dict(zip(indices(got), (weights(got) > 0).tolist(), strict=True))
  assert learned[4] == [True, False, False] and learned[5] == [True, False, False]
  assert store.metrics(got, 3) | {'replay/memory_mb': 0} == {
    **{'replay/rows': 2, 'replay/priority_rows': 4, 'replay/groups': 0, 'replay/memory_mb': 0}
  }
  # Each is learned once.
  assert indices(store.join(graded([7, 8, 9], RIGHT, LENGTH), 0, 2))[3:] == [-1, -1, -1]


def test_groups_without_other_rows_and_groups_of_equal_rewards_are_not_stored():
  store = reuse.recomposed()
  rows = graded([4, 5], [[1, 0, 0], [1, 1, 1]], [[1, 2, 0], [1, 2, 3]])
  store.keep(rows, np.ones(2, bool), 0)
  assert not store.buffer.groups


def test_the_loss_is_the_mean_over_the_tokens_of_the_learned_rows():
  """With the advantages of whole groups; against a sum over these rows alone."""
  settings = dict(aggregation='token_mean', trust_region=dict(fn='clip', low=0.2, high=0.28))
  method = objective.method(lib.settings(settings))
  data = lib.draw(0)
  store = reuse.recomposed()
  joined = store.join(lib.batch(data, needs_old=False), 0, 0)
  rows = {k: v for k, v in data.items() if np.ndim(v)}
  target = objective.targets(method, joined, lib.G)
  logp_BxT = np.concatenate([rows['logp'], np.zeros_like(rows['logp'])])
  c_BxT = np.asarray(objective.coefficients(method, target, logp_BxT)[0])
  learned_B = np.asarray(joined.rollout.weight_B)[: lib.B] > 0
  length_PxG, right_PxG = (rows[k].reshape(-1, lib.G) for k in ('length', 'correct'))
  for p in range(lib.P):
    mixed = len(set(right_PxG[p][length_PxG[p] > 0])) > 1
    want = recomposition.priority(right_PxG[p], length_PxG[p], 0.5) & mixed
    assert (learned_B.reshape(-1, lib.G)[p] == (want & (length_PxG[p] > 0))).all()
  # The same advantages with a denominator of all tokens, scaled to those of the learned rows.
  plain = objective.targets(method, lib.batch(data, needs_old=False), lib.G)
  all_BxT = np.asarray(objective.coefficients(method, plain, rows['logp'])[0])
  tokens, learned = rows['length'].sum(), (rows['length'] * learned_B).sum()
  want = all_BxT * learned_B[:, None] * tokens / learned
  np.testing.assert_allclose(c_BxT[: lib.B], want, rtol=1e-5, atol=1e-9)
  assert np.abs(want).max() > 1e-3 and not c_BxT[lib.B :].any()


@pytest.mark.parametrize(
  'step, probability', [(0, 1), (5, 0.882843), (10, 0.6), (20, 0.2), (90, 0.2)]
)
def test_compensation_becomes_seldom(step, probability):
  store = reuse.recomposed(least=0.2, fall_steps=20)
  assert store.schedule.probability_at(step) == pytest.approx(probability, abs=1e-6)
  replays = []
  for seed in range(400):
    store.keep(graded([4], RIGHT[:1], LENGTH[:1]), np.ones(1, bool), step)
    replays.append(4 in indices(store.join(graded([7], RIGHT[:1], LENGTH[:1]), seed, step)))
  deviation = math.sqrt(probability * (1 - probability) / 400)
  assert abs(np.mean(replays) - probability) <= 4 * deviation


def test_a_restored_store_replays_the_same(tmp_path):
  store, again = (reuse.recomposed(max_age=3, fall_steps=12) for _ in range(2))
  at = lambda step: graded(range(3 * step, 3 * step + 3), RIGHT, LENGTH, step)  # noqa: E731
  for step in range(3):
    store.keep(at(step), np.array([True, True, False]), step)
  device = {'x': np.zeros(1)}
  checkpoint.save(str(tmp_path), 2, device, dict(store=store.state_dict()), keep=1)
  again.load_state_dict(checkpoint.restore(str(tmp_path), 2, device)[1]['store'])
  assert list(again.buffer.groups) == list(store.buffer.groups)
  replayed = 0
  for step in range(3, 9):
    one, other = store.join(at(step), 0, step), again.join(at(step), 0, step)
    assert_same(one, other)
    replayed += int(store.metrics(one, 3)['replay/rows'])
    for each in (store, again):
      each.keep(at(step), np.array([True, True, False]), step)
  assert replayed > 0


def test_the_arrays_have_the_types_of_the_batch():
  given = graded([7, 8, 9], RIGHT, LENGTH)
  got = reuse.recomposed().join(given, 0, 1)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(given), strict=True):
    assert a.dtype == b.dtype


@pytest.mark.parametrize(
  'settings, message',
  [
    (dict(kept=1.0), 'config.replay.reuse.kept=1.0 must be between 0 and 1'),
    (dict(least=1.5), 'config.replay.reuse.least=1.5 must be a probability'),
    (dict(share=1.0), 'config.replay.reuse.share=1.0 must be between 0 and 1'),
    (dict(fall_steps=0), 'config.replay.reuse.fall_steps=0 must be a whole number from 1 up'),
  ],
)
def test_wrong_settings_are_refused(settings, message):
  with pytest.raises(UserError, match=message):
    reuse.recomposed(**settings)
