"""Unfinished groups and drafts between steps."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl_llm.replay import Drafts, PartialRollouts, blank
from jaxrl_llm.types import STOPPED, UNFINISHED, Prompts, Rollout

G, L, T = 2, 3, 5


def prompts(*index, born=0):
  P = len(index)
  index_P = np.array(index, np.int32)
  tokens_PxL = np.tile(index_P[:, None], (1, L))
  born_P = np.full(P, born, np.int32)
  return Prompts(tokens_PxL, np.full(P, L, np.int32), index_P, born_P, np.zeros(P, np.float32))


def rollout(*length_B, reason_B, seed=0):
  r, B = np.random.default_rng(seed), len(length_B)
  real = np.arange(T)[None] < np.array(length_B)[:, None]
  return Rollout(
    np.where(real, r.integers(1, 90, (B, T)), 0).astype(np.int32),
    np.where(real, -r.random((B, T)), 0).astype(np.float32),
    np.array(length_B, np.int32),
    np.array(reason_B, np.int8),
    np.zeros((B, T), np.int32),
    np.ones(B, np.float32),
    np.zeros((B, 0), np.float32),
  )


def empty(P):
  return rollout(*[0] * (P * G), reason_B=[UNFINISHED] * (P * G))


def test_groups_with_an_unfinished_row_come_back_first_with_all_their_rows():
  held = PartialRollouts(G, max_age=3)
  got = rollout(5, 2, 3, 3, 1, 4, reason_B=[1, 0, 1, 1, 0, 1])
  whole_P, dropped = held.keep(prompts(10, 11, 12), got, step=0)
  assert whole_P.tolist() == [False, True, False] and dropped == 0 and len(held) == 2
  both, begun = held.begin(prompts(20, born=1), empty(3))
  assert both.index_P.tolist() == [10, 12, 20] and both.born_P.tolist() == [0, 0, 1]
  np.testing.assert_array_equal(begun.tokens_BxT[:4], got.tokens_BxT[[0, 1, 4, 5]])
  np.testing.assert_array_equal(begun.logp_BxT[:4], got.logp_BxT[[0, 1, 4, 5]])
  assert begun.length_B.tolist() == [5, 2, 1, 4, 0, 0]
  assert begun.reason_B.tolist() == [1, 0, 0, 1, 0, 0]
  assert begun.turns is None and [x.dtype for x in begun if x is not None] == [
    x.dtype for x in got if x is not None
  ]


def test_a_held_group_stays_in_its_shard():
  """Three shards of two: of these the second holds both its groups, the third its last one."""
  held = PartialRollouts(G, max_age=3, shards=3)
  reason_B = np.where(np.repeat([1, 1, 0, 0, 1, 0], G), STOPPED, UNFINISHED)
  held.keep(prompts(*range(6)), rollout(*range(1, 13), reason_B=reason_B), step=0)
  both, begun = held.begin(prompts(20, 21, 22), empty(6))
  assert both.index_P.tolist() == [20, 21, 2, 3, 5, 22]
  assert begun.length_B.tolist() == [0, 0, 0, 0, 5, 6, 7, 8, 11, 12, 0, 0]
  other = PartialRollouts(G, max_age=3, shards=2)
  other.load_state_dict(held.state_dict())
  assert other.begin(prompts(20, 21, 22), empty(6))[0].index_P.tolist() == [2, 20, 21, 3, 5, 22]


def test_groups_too_old_are_dropped_and_counted():
  held = PartialRollouts(G, max_age=2)
  parts = prompts(1, born=3), prompts(2, born=4)
  both = Prompts(*(np.concatenate(x) for x in zip(*(p[:5] for p in parts), strict=True)))
  _, dropped = held.keep(both, rollout(1, 1, 1, 1, reason_B=[0, 0, 0, 1]), step=5)
  assert dropped == 1 and held.prompts.index_P.tolist() == [2]


def test_nothing_held_changes_nothing():
  held, fresh, none = PartialRollouts(G, max_age=2), prompts(4, 5), empty(2)
  assert held.begin(fresh, none) == (fresh, none)
  held.keep(fresh, rollout(1, 2, 3, 4, reason_B=[STOPPED] * 4), step=0)
  assert len(held) == 0 and held.begin(fresh, none) == (fresh, none)


def test_unfinished_groups_survive_a_checkpoint():
  a, b = PartialRollouts(G, max_age=3), PartialRollouts(G, max_age=3)
  a.keep(prompts(7), rollout(2, 3, reason_B=[0, 1]), step=0)
  b.load_state_dict(a.state_dict())
  for x, y in zip(a.begin(prompts(8), empty(2)), b.begin(prompts(8), empty(2)), strict=True):
    for left, right in zip(x, y, strict=True):
      np.testing.assert_array_equal(left, right)
  b.load_state_dict(PartialRollouts(G, max_age=3).state_dict())


def test_a_blanked_row_has_no_tokens():
  got = blank(rollout(4, 5, reason_B=[1, 1]), np.array([True, False]))
  assert got.length_B.tolist() == [4, 0]


def noised(got, born):
  return got._replace(noise_BxT=np.where(got.tokens_BxT > 0, born, 0).astype(np.int32))


@pytest.mark.parametrize('noise', [False, True])
def test_drafts_are_the_newest_whole_groups(noise):
  with_noise = noised if noise else lambda got, born: got
  drafts, nothing = Drafts(G, 1), lambda P: with_noise(empty(P), 0)
  first = with_noise(rollout(2, 3, 1, 4, reason_B=[1, 2, 1, 0]), 3)  # the second group is not whole
  drafts.keep(np.array([5, 6]), first)
  got = drafts.take(np.array([6, 5]), nothing(2))
  assert got.length_B.tolist() == [0, 0, 2, 3]
  np.testing.assert_array_equal(got.tokens_BxT[2:], first.tokens_BxT[:2])
  np.testing.assert_array_equal(got.logp_BxT[2:], first.logp_BxT[:2])
  if noise:
    np.testing.assert_array_equal(got.noise_BxT[2:], first.noise_BxT[:2])
  second = with_noise(rollout(5, 1, reason_B=[1, 1], seed=1), 4)
  drafts.keep(np.array([5]), second)
  again = Drafts(G, 1)
  again.load_state_dict(drafts.state_dict())
  np.testing.assert_array_equal(again.take(np.array([5]), nothing(1)).tokens_BxT, second.tokens_BxT)
  drafts.keep(np.array([5]), blank(first, np.zeros(4, bool)))
  assert drafts.take(np.array([5]), nothing(1)).length_B.tolist() == [5, 1], (
    'a blank group is no draft'
  )


def test_drafts_stay_within_their_memory_and_the_oldest_visits_give_way():
  drafts = Drafts(G, 1)
  group = rollout(T, T, reason_B=[1, 1])
  size = sum(x[:G].nbytes for x in (group.tokens_BxT, group.logp_BxT, group.length_B))
  room = 2**20 // size
  for index in range(room + 100):
    drafts.keep(np.array([index]), group)
    if index == room - 1:
      drafts.keep(np.array([0]), group)  # visited again: no longer the oldest
    assert drafts.bytes <= 2**20
    if index % 500 == 0 or index > room + 90:  # a sum over all groups
      assert drafts.bytes == sum(x.nbytes for kept in drafts.groups.values() for x in kept[:3])
  assert list(drafts.groups) == [*range(101, room), 0, *range(room, room + 100)][-room:]
  assert drafts.metrics()['generate/draft_prompts'] == room
  assert 0.99 < drafts.metrics()['generate/draft_memory_mb'] <= 1
  again = Drafts(G, 1)
  again.load_state_dict(drafts.state_dict())
  assert list(again.groups) == list(drafts.groups)
