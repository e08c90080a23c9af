"""Groups of recent steps: storage within a bound of bytes, deterministic draws, and the batch that they join."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc

import jax
import numpy as np
import pytest

from jaxrl_llm.replay import reuse
from jaxrl_llm.replay.rollout_buffer import RolloutBuffer, StoredGroup
from jaxrl_llm.types import STOPPED, Batch, Prompts, Rollout, UserError

G, L, T = 3, 5, 8
ENV = os.environ | dict(JAX_PLATFORMS='cpu')


def batch(index_P, seed=0, width=T):
  """Random rows of 1 to `width` tokens, with padding of zeros as in a rollout."""
  r, P = np.random.default_rng(seed), len(index_P)
  length_B = r.integers(1, width + 1, P * G).astype(np.int32)
  real = np.arange(width)[None] < length_B[:, None]
  length_P = r.integers(1, L + 1, P).astype(np.int32)
  prompt_tokens = r.integers(1, 9, (P, L)) * (np.arange(L)[None] < length_P[:, None])
  index_P = np.array(index_P, np.int32)
  prompts = Prompts(
    prompt_tokens.astype(np.int32), length_P, index_P, index_P * 0, np.zeros(P, np.float32)
  )
  rollout = Rollout(
    (real * r.integers(1, 99, real.shape)).astype(np.int32),
    (real * -r.random(real.shape)).astype(np.float32),
    length_B,
    np.full(P * G, STOPPED, np.int8),
    (real * r.integers(0, 9, real.shape)).astype(np.int32),
    r.random(P * G).astype(np.float32),
    np.zeros((P * G, 0), np.float32),
  )
  right_B = r.integers(0, 2, P * G).astype(np.float32)
  return Batch(prompts, rollout, r.random(P * G).astype(np.float32), right_B)


def slot(batch, p):
  """The arrays of one slot."""
  rows = jax.tree.map(lambda x: x[p * G : (p + 1) * G], batch._replace(prompts=None))
  return rows._replace(prompts=jax.tree.map(lambda x: x[p : p + 1], batch.prompts))


def assert_same(one, other):
  assert jax.tree.structure(one) == jax.tree.structure(other)
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    np.testing.assert_array_equal(a, b)
    assert a.dtype == b.dtype


def indices(joined):
  return joined.prompts.index_P.tolist()


def test_mixed_groups_come_back_bit_for_bit_behind_the_fresh_slots():
  store, first, fresh = reuse.mixed_groups(share=0.5), batch([4, 5, 6]), batch([7, 8, 9], seed=1)
  store.keep(first, np.array([True, False, True]), step=0)
  got = store.join(fresh, 0, 1)
  assert indices(got)[:3] == [7, 8, 9] and sorted(indices(got)[3:]) == [-1, 4, 6]
  for p in range(3):
    assert_same(slot(got, p), slot(fresh, p))
  for prompt, p in ((4, 0), (6, 2)):
    assert_same(slot(got, indices(got).index(prompt)), slot(first, p))
  empty = slot(got, 5)
  assert indices(got)[5] == -1 and not empty.rollout.length_B.any() and not empty.reward_B.any()
  assert (empty.rollout.weight_B == 1).all() and empty.prompts.length_P == 0
  length_B = slot(got, 3).rollout.length_B, slot(got, 4).rollout.length_B
  assert store.metrics(got, 3)['replay/rows'] == sum((x > 0).sum() for x in length_B)
  assert got.replayed_B is None and got.success_B is None


def test_a_stored_group_is_no_view_of_its_batch():
  store, first = reuse.mixed_groups(share=0.5), batch([4, 5])
  store.keep(first, np.ones(2, bool), step=0)
  want = slot(first, 0).rollout.tokens_BxT.copy()
  first.rollout.tokens_BxT[:] = 0
  got = store.join(batch([7, 8]), 0, 1)
  np.testing.assert_array_equal(slot(got, indices(got).index(4)).rollout.tokens_BxT, want)


def test_a_batch_has_one_group_of_a_prompt_and_the_buffer_its_newest():
  store = reuse.mixed_groups(share=0.5)
  for step, seed in enumerate((1, 2)):
    store.keep(batch([4, 5], seed), np.ones(2, bool), step)
  got = store.join(batch([5, 9]), 0, 2)
  assert indices(got) == [5, 9, 4, -1]
  assert_same(slot(got, 2), slot(batch([4, 5], 2), 0))


@pytest.mark.parametrize('age', [1, 2, 3])
def test_a_group_is_replayed_up_to_the_largest_age(age):
  store = reuse.mixed_groups(share=0.5, max_age=2)
  store.keep(batch([4]), np.ones(1, bool), step=10)
  assert indices(store.join(batch([7]), 0, 10 + age)) == [7, 4 if age <= 2 else -1]
  assert len(store.buffer.groups) == (age <= 2) and (store.buffer.bytes > 0) == (age <= 2)


@pytest.mark.parametrize('steps, last', [(3, 2), (0, 9)])
def test_only_the_first_steps_replay_groups(steps, last):
  store = reuse.mixed_groups(share=0.5, max_age=20, steps=steps)
  store.keep(batch([4]), np.ones(1, bool), step=0)
  drawn = [4 in indices(store.join(batch([7]), 0, step)) for step in range(1, 10)]
  assert drawn == [step <= last for step in range(1, 10)]


def test_draws_are_by_seed_and_step_and_uniform():
  store = reuse.mixed_groups(share=0.5, max_age=1000)
  store.keep(batch(range(8)), np.ones(8, bool), step=0)
  draws = [indices(store.join(batch([90, 91]), 3, step))[2:] for step in range(400)]
  assert draws == [indices(store.join(batch([90, 91]), 3, step))[2:] for step in range(400)]
  assert draws != [indices(store.join(batch([90, 91]), 4, step))[2:] for step in range(400)]
  assert all(len(set(x)) == 2 for x in draws)
  counts = np.bincount(np.ravel(draws), minlength=8)
  assert np.abs(counts - 100).max() < 40  # four standard deviations


DRAW = """
import sys; sys.path[:0] = ['tests/replay']
import numpy as np, test_rollout_buffer as t
store = t.reuse.mixed_groups(share=0.5)
store.keep(t.batch(range(20)), np.ones(20, bool), step=0)
print([t.indices(store.join(t.batch([90, 91, 92]), 5, step)) for step in range(1, 5)])
"""


def test_two_processes_draw_the_same_groups():
  outs = [
    subprocess.run(
      [sys.executable, '-c', DRAW], env=ENV | dict(PYTHONHASHSEED=seed), check=True,
      capture_output=True, text=True,
    ).stdout
    for seed in ('1', '2')
  ]  # fmt: skip
  assert outs[0] == outs[1] and '90' in outs[0]


def test_a_restored_buffer_draws_and_returns_the_same():
  store, again = reuse.mixed_groups(share=0.5), reuse.mixed_groups(share=0.5)
  for step in range(3):
    store.keep(batch(range(step, step + 4), step), np.ones(4, bool), step)
  again.load_state_dict(store.state_dict())
  assert list(again.buffer.groups) == list(store.buffer.groups)
  assert again.buffer.bytes == store.buffer.bytes > 0
  for step in range(3, 8):
    assert_same(store.join(batch([90, 91]), 0, step), again.join(batch([90, 91]), 0, step))


def test_ten_thousand_groups_stay_within_the_bound_of_bytes():
  """By tracemalloc, which sees numpy's buffers and Python's objects."""
  store = reuse.mixed_groups(share=0.5, max_age=10**6, memory_mb=2)
  tracemalloc.start()
  before = tracemalloc.get_traced_memory()[0]
  for step in range(2500):
    store.keep(batch(range(4 * step, 4 * step + 4), step, width=64), np.ones(4, bool), step)
  used = tracemalloc.get_traced_memory()[0] - before
  tracemalloc.stop()
  assert 0.8 * 2**21 < store.buffer.bytes <= 2**21
  assert used <= 2**21
  # The newest are the ones that stay.
  assert list(store.buffer.groups) == list(range(10_000 - len(store.buffer.groups), 10_000))


def test_a_group_larger_than_the_buffer_is_not_stored():
  buffer = RolloutBuffer(max_age=4, memory_mb=1)
  buffer.add(StoredGroup(batch([1], width=40_000), 0))
  assert not buffer.groups and buffer.bytes == 0


@pytest.mark.parametrize('share, slots', [(0.5, 8), (0.2, 2), (1 / 3, 4), (0.75, 24)])
def test_the_share_is_of_the_batch(share, slots):
  assert reuse.mixed_groups(share=share).slots(8) == slots
  assert slots / (8 + slots) == pytest.approx(share)


@pytest.mark.parametrize(
  'settings, message',
  [
    (dict(share=1.0), 'config.replay.reuse.share=1.0 must be between 0 and 1'),
    (dict(share=0.0), 'config.replay.reuse.share=0.0 must be between 0 and 1'),
    (dict(steps=-1), 'config.replay.reuse.steps=-1 must be 0, for all steps, or a number'),
    (dict(max_age=0), 'config.replay.reuse.max_age=0 must be a whole number from 1 up'),
    (dict(memory_mb=0), 'config.replay.reuse.memory_mb=0 must be a whole number from 1 up'),
  ],
)
def test_wrong_settings_are_refused(settings, message):
  with pytest.raises(UserError, match=message):
    reuse.mixed_groups(**settings)


def test_a_share_without_a_slot_is_refused():
  with pytest.raises(UserError, match='share=0.05 leaves no slot for replayed groups'):
    reuse.mixed_groups(share=0.05).slots(4)
