"""SPEAR's store: which rows it holds, when they are replayed, with which advantages. Formulas: official/spear.py."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxrl_llm.checkpointing import checkpoint
from jaxrl_llm.replay import reuse
from jaxrl_llm.types import UserError
from tests.replay.test_rollout_buffer import G, assert_same, batch, indices, slot

NONE_MIXED = np.zeros(9, bool)  # the store reads rewards alone


def graded(index_P, rewards, seed=0):
  """Random rows with these rewards; a reward of None empties a row."""
  rows, values = batch(index_P, seed), np.array(rewards, object).ravel()
  empty_B = np.array([x is None for x in values])
  length_B = np.where(empty_B, 0, rows.rollout.length_B).astype(np.int32)
  reward_B = np.array([x or 0 for x in values], np.float32)
  return rows._replace(reward_B=reward_B, rollout=rows.rollout._replace(length_B=length_B))


def filled(**settings):
  """A store of three groups, two of which have rows above their mean; group means 1/3, 0 and 2/3."""
  store = reuse.self_imitation(**(dict(share=0.5, fill=0.0, warm_up_steps=4) | settings))
  first = graded([4, 5, 6], [[1, 0, 0], [0, 0, 0], [0, 1, 1]])
  store.keep(first, NONE_MIXED, 0)
  return store, first


def test_rows_above_the_mean_of_their_group_are_stored():
  store, first = filled()
  assert list(store.buffer.groups) == [4, 6]
  for prompt, p, rows in ((4, 0, [0]), (6, 2, [1, 2])):
    stored = store.buffer.groups[prompt].batch.rollout
    tokens_NxT = slot(first, p).rollout.tokens_BxT[rows]
    np.testing.assert_array_equal(stored.tokens_BxT, tokens_NxT[:, : stored.tokens_BxT.shape[1]])
    assert not tokens_NxT[:, stored.tokens_BxT.shape[1] :].any()


def test_equal_rewards_that_rounding_tells_apart_are_not_stored():
  store = reuse.self_imitation()
  rows = graded([4], [[0.7] * G])
  assert (rows.reward_B > rows.reward_B.sum() / np.int64(G)).any()
  store.keep(rows, NONE_MIXED, 0)
  assert not store.buffer.groups


def test_empty_rows_are_no_part_of_a_mean():
  store = reuse.self_imitation(fill=0.0)
  store.keep(graded([4, 5, 6], [[1, 0.4, None], [None] * G, [1, None, None]]), NONE_MIXED, 0)
  assert store.means == [(0, pytest.approx([0.7, 1.0]))]
  assert list(store.buffer.groups) == [4] and len(store.buffer.groups[4].batch.reward_B) == 1


def test_replayed_rows_have_their_reward_minus_the_median_as_advantage():
  store, first = filled()
  fresh = graded([7, 8, 9], [[1, 0, 0]] * 3, seed=1)
  got = store.join(fresh, 0, 1)
  assert indices(got)[:3] == [7, 8, 9] and sorted(indices(got)[3:]) == [-1, 4, 6]
  for p in range(3):
    assert_same(slot(got, p)._replace(imitation_B=None), slot(fresh, p))
  assert not got.imitation_B[: 3 * G].any()
  for prompt, p, rows in ((4, 0, [0]), (6, 2, [1, 2])):
    there, stored = slot(got, indices(got).index(prompt)), slot(first, p)
    n = len(rows)
    # The median of 1/3, 0 and 2/3.
    np.testing.assert_allclose(there.imitation_B[:n], 2 / 3, rtol=1e-6)
    assert not there.imitation_B[n:].any() and not there.rollout.length_B[n:].any()
    # Two of four steps of warm-up are over when the batch of step 1 is learned.
    weight_B = stored.rollout.weight_B[rows] * 0.5
    np.testing.assert_allclose(there.rollout.weight_B[:n], weight_B, rtol=1e-6)
    for name in ('tokens_BxT', 'logp_BxT', 'version_BxT', 'length_B'):
      np.testing.assert_array_equal(
        getattr(there.rollout, name)[:n], getattr(stored.rollout, name)[rows]
      )
    assert_same(there.prompts, stored.prompts)
  assert store.metrics(got, 3)['replay/rows'] == 3
  assert got.replayed_B is None and not store.buffer.groups


def test_the_arrays_have_the_types_of_the_batch():
  store, _ = filled()
  got = store.join(batch([7, 8, 9]), 0, 1)
  for a, b in zip(
    jax.tree.leaves(got._replace(imitation_B=None)), jax.tree.leaves(batch([7])), strict=True
  ):
    assert a.dtype == b.dtype
  assert got.imitation_B.dtype == np.float32


def test_rows_that_are_no_longer_above_the_median_are_left_out():
  """Their policy has become better since."""
  store, _ = filled()
  store.keep(graded([1, 2, 3, 9], [[2, 2, 2]] * 4), NONE_MIXED, 1)
  assert store.baseline() == 2
  got = store.join(batch([7, 8, 9]), 0, 2)
  assert indices(got) == [7, 8, 9, -1, -1, -1] and list(store.buffer.groups) == [4, 6]


def test_no_slot_is_taken_by_a_group_without_such_rows():
  for step in range(8):
    store = reuse.self_imitation(fill=0.0)
    store.keep(graded([4, 5, 6], [[1, 0, 0], [0.2, 0, 0], [0.25, 0, 0]]), NONE_MIXED, step)
    store.means = [(step, [0.3])]
    assert indices(store.join(batch([9]), 0, step + 1)) == [9, 4]


@pytest.mark.parametrize('fill, replays', [(0.5, True), (0.67, False), (1.5, False)])
def test_nothing_is_replayed_until_the_buffer_is_full(fill, replays):
  """Two groups for three slots: more than 1.5, not more than 2.01."""
  store, _ = filled(fill=fill)
  got = store.join(batch([7, 8, 9]), 0, 1)
  assert (got.imitation_B > 0).any() == replays
  assert bool(store.buffer.groups) != replays


def test_baselines_of_old_steps_leave_by_whole_steps():
  store = reuse.self_imitation(baselines=3)
  for step in range(4):
    store.keep(graded([1, 2], [[step] * G, [step + 0.5] * G]), NONE_MIXED, step)
  # Before a step is added, steps are dropped until at most three means are left.
  assert [step for step, _ in store.means] == [2, 3]
  assert store.baseline() == 2.75


@pytest.mark.parametrize('step, weight', [(1, 0.073223), (2, 0.25), (4, 0.5), (9, 0.5)])
def test_the_weight_rises_as_a_cosine_and_stays(step, weight):
  store = reuse.self_imitation(weight=0.5, warm_up_steps=4)
  assert store.settings.weight_at(step) == pytest.approx(weight, abs=1e-6)


def test_a_restored_store_replays_the_same(tmp_path):
  """Through the files of a checkpoint, with a replay before and after it."""
  store, again = (reuse.self_imitation(fill=0.5, max_age=3) for _ in range(2))
  at = lambda step: graded(  # noqa: E731
    range(3 * step, 3 * step + 3), np.random.default_rng(step).random((3, G)).tolist(), step
  )
  store.join(at(9), 0, 0)
  for step in range(2):
    store.keep(at(step), NONE_MIXED, step)
  checkpoint.save(str(tmp_path), 2, {'x': np.zeros(1)}, dict(store=store.state_dict()), keep=1)
  again.load_state_dict(checkpoint.restore(str(tmp_path), 2, {'x': np.zeros(1)})[1]['store'])
  assert again.means == store.means and again.buffer.bytes == store.buffer.bytes > 0
  replayed = []
  for step in range(2, 7):
    one, other = store.join(at(step), 0, step), again.join(at(step), 0, step)
    assert_same(one, other)
    replayed.append((one.imitation_B > 0).any())
    for each in (store, again):
      each.keep(at(step), NONE_MIXED, step)
  assert True in replayed and False in replayed


@pytest.mark.parametrize(
  'settings, message',
  [
    (dict(share=1.0), 'config.replay.reuse.share=1.0 must be between 0 and 1'),
    (dict(fill=-1.0), 'config.replay.reuse.fill=-1.0 must be a finite number from 0 up'),
    (dict(weight=float('nan')), 'config.replay.reuse.weight=nan must be a finite number'),
    (dict(baselines=0), 'config.replay.reuse.baselines=0 must be a whole number from 1 up'),
    (dict(warm_up_steps=0), 'config.replay.reuse.warm_up_steps=0 must be a whole number'),
  ],
)
def test_wrong_settings_are_refused(settings, message):
  with pytest.raises(UserError, match=message):
    reuse.self_imitation(**settings)
