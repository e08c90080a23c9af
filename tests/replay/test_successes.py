"""Right rollouts of earlier visits: storage, replay, and identical draws after resuming."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxrl_llm.checkpointing import checkpoint
from jaxrl_llm.replay import reuse
from jaxrl_llm.types import STOPPED, TRUNCATED, Batch, Prompts, Rollout, UserError

G, L, T = 3, 2, 4
NO_GROUPS = np.zeros(0, bool)  # right rows of any group are stored


def batch(index_P, tokens_B, correct_B, length_B=None):
  """Every token of a row is the same; lengths from 1 to T."""
  tokens_B, B = np.array(tokens_B, np.int32), len(tokens_B)
  index_P = np.array(index_P, np.int32)
  P = len(index_P)
  length_B = np.array(length_B if length_B is not None else tokens_B % T + 1, np.int32)
  real = np.arange(T)[None] < length_B[:, None]
  rollout = Rollout(
    np.where(real, tokens_B[:, None], 0).astype(np.int32),
    np.where(real, -0.5, 0).astype(np.float32),
    length_B,
    np.full(B, STOPPED, np.int8),
    np.full((B, T), 7, np.int32),
    np.ones(B, np.float32),
    np.zeros((B, 0), np.float32),
  )
  prompts = Prompts(np.zeros((P, L), np.int32), np.full(P, L, np.int32), index_P, index_P, index_P)
  correct_B = np.array(correct_B, np.float32)
  return Batch(prompts, rollout, 0.75 * correct_B, correct_B)


def more(joined, count):
  """Of each prompt the replayed tokens, sorted; 0 for an empty row."""
  by_prompt = lambda x: x.reshape(-1, G + count, *x.shape[1:])[:, G:]  # noqa: E731
  first = by_prompt(joined.rollout.tokens_BxT)[:, :, 0] * (by_prompt(joined.rollout.length_B) > 0)
  return np.sort(first, axis=1).tolist()


def stored(store, prompt):
  """The first token of each stored row of a prompt."""
  return store.buffer.groups[prompt].batch.rollout.tokens_BxT[:, 0].tolist()


def test_right_rows_come_back_beside_the_fresh_ones_of_their_prompt():
  kept = reuse.successes(count=2)
  kept.keep(batch([5, 6], [1, 2, 3, 4, 5, 6], [1, 0, 1, 0, 0, 0]), NO_GROUPS, 0)
  fresh = batch([6, 5], [7, 8, 9, 10, 11, 12], [0, 1, 0, 0, 0, 0])
  got = kept.join(fresh, 0, 1)
  assert more(got, 2) == [[0, 0], [1, 3]]
  assert got.replayed_B.reshape(2, -1).tolist() == [[0, 0, 0, 1, 1]] * 2
  assert got.rollout.turns is None
  rows = lambda batch: jax.tree.leaves((batch.rollout, batch.reward_B, batch.correct_B))  # noqa: E731
  for new, old in zip(rows(got), rows(fresh), strict=True):
    new = new.reshape(2, G + 2, *new.shape[1:])
    np.testing.assert_array_equal(new[:, :G].reshape(old.shape), old)
    assert new.dtype == old.dtype
  back = {int(t[0]): b for b, t in enumerate(got.rollout.tokens_BxT) if got.replayed_B[b]}
  for token in (1, 3):
    b = back[token]
    assert got.rollout.length_B[b] == token % T + 1 and got.rollout.reason_B[b] == STOPPED
    assert (got.rollout.tokens_BxT[b] == token).sum() == token % T + 1
    assert (got.reward_B[b], got.correct_B[b], got.rollout.weight_B[b]) == (0.75, 1, 1)
    assert (got.rollout.version_BxT[b] == -1).all() and not got.rollout.logp_BxT[b].any()
  empty = got.rollout.length_B.reshape(2, -1)[0, G:]
  assert empty.tolist() == [0, 0] and (got.correct_B.reshape(2, -1)[0, G:] == 0).all()


def test_the_newest_are_kept_and_none_twice():
  kept = reuse.successes(count=3, keep=3)
  for tokens in ([1, 2, 3], [1, 4, 4]):
    kept.keep(batch([5], tokens, [1, 1, 1]), NO_GROUPS, 0)
  assert stored(kept, 5) == [3, 1, 4]
  assert more(kept.join(batch([5], [7, 8, 9], [0, 0, 0]), 0, 1), 3) == [[1, 3, 4]]


def test_a_group_without_fresh_rows_gets_none_and_wrong_or_empty_rows_are_not_kept():
  kept = reuse.successes(count=1)
  kept.keep(batch([5, 6], [1, 2, 3, 4, 5, 6], [1, 0, 0, 1, 0, 0], [1, 1, 1, 0, 1, 1]), NO_GROUPS, 0)
  assert list(kept.buffer.groups) == [5] and stored(kept, 5) == [1]
  held_back = batch([5], [7, 8, 9], [0, 0, 0], [0, 0, 0])
  assert kept.join(held_back, 0, 1).rollout.length_B.tolist() == [0] * (G + 1)


def test_the_draw_is_of_seed_step_and_prompt_and_a_resumed_run_repeats_it(tmp_path):
  kept = reuse.successes(count=2)
  for t in range(1, 8):
    kept.keep(
      batch([5, 6], [3 * t, 3 * t + 1, 3 * t + 2, 60 + t, 70 + t, 80 + t], [1, 1, 0] * 2),
      NO_GROUPS,
      0,
    )
  kept.buffer.groups[5].batch.rollout.reason_B[0] = TRUNCATED
  fresh = batch([5, 6], [1] * 6, [0] * 6)
  drawn = [more(kept.join(fresh, 0, step), 2) for step in range(20)]
  assert len({str(x) for x in drawn}) > 10
  swapped = batch([6, 5], [1] * 6, [0] * 6)
  assert [more(kept.join(swapped, 0, step), 2)[::-1] for step in range(20)] == drawn
  again = reuse.successes(count=2)
  device = {'x': np.zeros(1)}
  checkpoint.save(str(tmp_path), 1, device, dict(store=kept.state_dict()), keep=1)
  again.load_state_dict(checkpoint.restore(str(tmp_path), 1, device)[1]['store'])
  for step in range(20):
    for one, other in zip(kept.join(fresh, 0, step)[1], again.join(fresh, 0, step)[1], strict=True):
      np.testing.assert_array_equal(one, other)
  assert again.buffer.groups[5].batch.rollout.reason_B.tolist() == [TRUNCATED] + [STOPPED] * 7
  assert again.buffer.bytes == kept.buffer.bytes > 0


def test_a_success_rate_of_a_replay_is_1():
  kept = reuse.successes(count=2)
  first = batch([5, 6], [1, 2, 3, 4, 5, 6], [1, 0, 0, 0, 0, 0])
  kept.keep(first._replace(success_B=first.correct_B / 2), NO_GROUPS, 0)
  got = kept.join(first._replace(success_B=first.correct_B / 2), 0, 1)
  assert got.success_B.reshape(2, -1).tolist() == [[0.5, 0, 0, 1, 0], [0, 0, 0, 0, 0]]


def test_prompts_that_were_right_long_ago_leave_a_full_buffer():
  kept = reuse.successes(count=1, memory_mb=1)
  size = 0
  for prompt in range(3000):
    kept.keep(batch([prompt], [1, 2, 3], [1, 0, 0]), NO_GROUPS, prompt)
    size = max(size, kept.buffer.bytes)
  assert 0.9 * 2**20 < size <= 2**20
  assert list(kept.buffer.groups) == list(range(3000 - len(kept.buffer.groups), 3000))


def test_more_replays_than_are_kept_is_told():
  with pytest.raises(
    UserError, match='config.replay.reuse.count=9 must be from 1 to config.replay.reuse.keep=8'
  ):
    reuse.successes(count=9)
