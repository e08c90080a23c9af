"""A cached right completion in place of a row of an all-wrong group: storage, injection, and a resumed run."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from replay.test_successes import G, L, T, batch

from jaxrl_llm.checkpointing import checkpoint
from jaxrl_llm.replay import reuse
from jaxrl_llm.types import STOPPED, UserError

NO_GROUPS = np.zeros(0, bool)  # right rows of any group are cached
ROWS = lambda batch: jax.tree.leaves((batch.rollout, batch.reward_B, batch.correct_B))  # noqa: E731


def first_tokens(batch):
  """The first token of each row, by group."""
  return batch.rollout.tokens_BxT[:, 0].reshape(-1, G).tolist()


def cached(*batches, **how):
  store = reuse.cached(**how)
  for step, group in enumerate(batches):
    store.keep(group, NO_GROUPS, step)
  return store


def test_a_cached_completion_replaces_one_row_of_an_all_wrong_group_and_no_other():
  store = cached(batch([5, 6], [1, 2, 3, 4, 5, 6], [0, 1, 1, 1, 0, 0]))
  # Prompt 6 has a right row, prompt 7 nothing cached, and prompt 5 is all wrong.
  fresh = batch([6, 5, 7], range(10, 19), [0, 0, 1, 0, 0, 0, 0, 0, 0])
  got = store.join(fresh, 0, 1)
  (at,) = np.flatnonzero(got.replayed_B)
  assert at in (3, 4, 5)
  assert first_tokens(got)[0] == [10, 11, 12] and first_tokens(got)[2] == [16, 17, 18]
  for new, old in zip(ROWS(got), ROWS(fresh), strict=True):
    assert new.shape == old.shape and new.dtype == old.dtype
    np.testing.assert_array_equal(np.delete(new, at, 0), np.delete(old, at, 0))
  rollout = got.rollout
  assert rollout.tokens_BxT[at].tolist() == [2, 2, 2, 0]  # the first right row, 2 % T + 1 tokens
  assert (rollout.length_B[at], rollout.reason_B[at], rollout.weight_B[at]) == (3, STOPPED, 1)
  assert (got.reward_B[at], got.correct_B[at]) == (0.75, 1)
  assert not rollout.logp_BxT[at].any() and (rollout.version_BxT[at] == -1).all()


def test_the_prompt_that_is_learned_is_that_of_the_fresh_group():
  hinted = batch([5], [1, 2, 3], [1, 0, 0])
  prompts = hinted.prompts._replace(
    tokens_PxL=np.full((1, L), 9, np.int32), hint_P=np.ones(1, np.float32)
  )
  store = cached(hinted._replace(prompts=prompts))
  fresh = batch([5], [7, 8, 9], [0, 0, 0])
  fresh = fresh._replace(prompts=fresh.prompts._replace(hint_P=np.zeros(1, np.float32)))
  got = store.join(fresh, 0, 1)
  assert got.replayed_B.sum() == 1 and 1 in first_tokens(got)[0]
  jax.tree.map(np.testing.assert_array_equal, got.prompts, fresh.prompts)


def test_every_success_refreshes_the_cache():
  store = cached(batch([5], [1, 2, 3], [1, 1, 0]), batch([5], [4, 5, 6], [0, 1, 1]))
  (group,) = store.buffer.groups.values()
  assert group.batch.rollout.tokens_BxT[:, 0].tolist() == [5] and group.step == 1
  store.keep(batch([5], [7, 8, 9], [0, 0, 0]), NO_GROUPS, 2)
  assert store.buffer.groups[5].batch.rollout.tokens_BxT[0, 0] == 5


def test_empty_rows_are_neither_cached_nor_replaced_nor_right():
  store = cached(batch([5, 6], [1, 2, 3, 4, 5, 6], [1, 0, 0, 1, 0, 0], [0, 1, 1, 1, 1, 1]))
  assert list(store.buffer.groups) == [6]
  fresh = batch([6], [7, 8, 9], [1, 0, 0], [0, 0, 2])  # the right row was dropped
  got = store.join(fresh, 0, 1)
  assert got.replayed_B.tolist() == [0, 0, 1] and got.rollout.length_B.tolist() == [0, 0, 1]
  waiting = batch([6], [7, 8, 9], [0, 0, 0], [0, 0, 0])
  assert not store.join(waiting, 0, 1).replayed_B.any()


def test_a_success_rate_of_an_injected_row_is_1():
  store = cached(batch([5], [1, 2, 3], [1, 0, 0]))
  fresh = batch([5], [7, 8, 9], [0, 0, 0])
  got = store.join(fresh._replace(success_B=np.full(G, 0.25, np.float32)), 0, 1)
  assert sorted(got.success_B.tolist()) == [0.25, 0.25, 1.0]


def test_the_replaced_row_is_of_seed_step_and_prompt_and_a_resumed_run_repeats_it(tmp_path):
  store = cached(batch([5, 6], [1, 2, 3, 4, 5, 6], [1, 0, 0, 1, 0, 0]))
  fresh = batch([5, 6], range(10, 16), [0] * 6)
  at = lambda own, step: np.flatnonzero(own.join(fresh, 0, step).replayed_B).tolist()  # noqa: E731
  places = [at(store, step) for step in range(30)]
  assert len({tuple(x) for x in places}) == G * G
  swapped = batch([6, 5], [*range(13, 16), *range(10, 13)], [0] * 6)
  for step in range(5):
    joined = [store.join(fresh, 0, step), store.join(swapped, 0, step)]
    one, other = (x.replayed_B.reshape(2, G).tolist() for x in joined)
    assert one == other[::-1]
  again, device = reuse.cached(), {'x': np.zeros(1)}
  checkpoint.save(str(tmp_path), 1, device, dict(store=store.state_dict()), keep=1)
  again.load_state_dict(checkpoint.restore(str(tmp_path), 1, device)[1]['store'])
  assert again.buffer.bytes == store.buffer.bytes > 0
  for step in range(30):
    one, other = store.join(fresh, 0, step), again.join(fresh, 0, step)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_the_cache_is_bounded_and_the_oldest_leave_it():
  store, size = reuse.cached(memory_mb=1), 0
  for prompt in range(3000):
    store.keep(batch([prompt], [1, 2, 3], [1, 0, 0]), NO_GROUPS, prompt)
    size = max(size, store.buffer.bytes)
  assert 0.9 * 2**20 < size <= 2**20
  kept = list(store.buffer.groups)
  assert kept == list(range(3000 - len(kept), 3000))
  (row,) = {len(group.batch.reward_B) for group in store.buffer.groups.values()}
  assert row == 1 and T == 4


def test_a_cache_without_memory_is_refused():
  with pytest.raises(UserError, match='config.replay.reuse.memory_mb=0 must be a whole number'):
    reuse.cached(memory_mb=0)
