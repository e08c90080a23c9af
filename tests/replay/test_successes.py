"""Right rollouts of earlier visits: storage, replay, and identical draws after resuming."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

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
    assert (got.rollout.version_BxT[b] == -1).all()
  empty = got.rollout.length_B.reshape(2, -1)[0, G:]
  assert empty.tolist() == [0, 0] and (got.correct_B.reshape(2, -1)[0, G:] == 0).all()


def test_the_newest_are_kept_and_none_twice():
  kept = reuse.successes(count=3, keep=3)
  for tokens in ([1, 2, 3], [1, 4, 4]):
    kept.keep(batch([5], tokens, [1, 1, 1]), NO_GROUPS, 0)
  assert [int(x.tokens[0]) for x in kept.rollouts[5]] == [3, 1, 4]
  assert more(kept.join(batch([5], [7, 8, 9], [0, 0, 0]), 0, 1), 3) == [[1, 3, 4]]


def test_a_group_without_fresh_rows_gets_none_and_wrong_or_empty_rows_are_not_kept():
  kept = reuse.successes(count=1)
  kept.keep(batch([5, 6], [1, 2, 3, 4, 5, 6], [1, 0, 0, 1, 0, 0], [1, 1, 1, 0, 1, 1]), NO_GROUPS, 0)
  assert list(kept.rollouts) == [5] and len(kept.rollouts[5]) == 1
  held_back = batch([5], [7, 8, 9], [0, 0, 0], [0, 0, 0])
  assert kept.join(held_back, 0, 1).rollout.length_B.tolist() == [0] * (G + 1)


def test_the_draw_is_of_seed_step_and_prompt_and_a_resumed_run_repeats_it():
  kept = reuse.successes(count=2)
  for t in range(1, 8):
    kept.keep(
      batch([5, 6], [3 * t, 3 * t + 1, 3 * t + 2, 60 + t, 70 + t, 80 + t], [1, 1, 0] * 2),
      NO_GROUPS,
      0,
    )
  kept.rollouts[5][0] = kept.rollouts[5][0]._replace(reason=TRUNCATED)
  fresh = batch([5, 6], [1] * 6, [0] * 6)
  drawn = [more(kept.join(fresh, 0, step), 2) for step in range(20)]
  assert len({str(x) for x in drawn}) > 10
  swapped = batch([6, 5], [1] * 6, [0] * 6)
  assert [more(kept.join(swapped, 0, step), 2)[::-1] for step in range(20)] == drawn
  again = reuse.successes(count=2)
  arrays = {k: [[t.tolist(), r, s] for t, r, s in v] for k, v in kept.state_dict().items()}
  again.load_state_dict(json.loads(json.dumps(arrays)))
  for step in range(20):
    for one, other in zip(kept.join(fresh, 0, step)[1], again.join(fresh, 0, step)[1], strict=True):
      np.testing.assert_array_equal(one, other)
  assert [x.reason for x in again.rollouts[5]] == [TRUNCATED] + [STOPPED] * 7


def test_more_replays_than_are_kept_is_told():
  with pytest.raises(
    UserError, match='config.replay.reuse.count=9 must be from 1 to config.replay.reuse.keep=8'
  ):
    reuse.successes(count=9)
