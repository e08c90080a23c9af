"""Dynamic sampling and further rollouts: waiting groups, full batches, conservation of groups, and resuming."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxrl_llm.replay import Collector, dynamic_sampling
from jaxrl_llm.types import STOPPED, Batch, Prompts, Rollout, UserError

P, G, L, T = 3, 2, 2, 4


def batch(index_P, right_P, part_P=None, length=2):
  """Of slot p the first right_P[p] rows are right; a token says which prompt, part and rollout it is."""
  index_P = np.array(index_P, np.int32)
  part_P = np.zeros_like(index_P) if part_P is None else np.array(part_P, np.int32)
  said_PxG = index_P[:, None] * 100 + part_P[:, None] * 10 + np.arange(G)
  B = said_PxG.size
  rollout = Rollout(
    np.repeat(said_PxG.reshape(-1, 1), T, axis=1).astype(np.int32),
    np.full((B, T), -0.5, np.float32),
    np.full(B, length, np.int32),
    np.full(B, STOPPED, np.int8),
    np.full((B, T), 7, np.int32),
    np.ones(B, np.float32),
    np.zeros((B, 0), np.float32),
  )
  length_P = np.full(len(index_P), L, np.int32)
  tokens_PxL = np.repeat(index_P[:, None], L, axis=1)
  prompts = Prompts(tokens_PxL, length_P, index_P, index_P, index_P.astype(np.float32), part_P)
  correct_B = (np.arange(G) < np.array(right_P)[:, None]).reshape(-1).astype(np.float32)
  parts_BxK = np.stack([correct_B, said_PxG.reshape(-1)], axis=1)
  return Batch(prompts, rollout, 0.5 * correct_B, correct_B, parts_BxK=parts_BxK)


EMPTY = jax.tree.map(np.zeros_like, batch([0] * P, [0] * P))


def said(got):
  """The rows that are learned from, by slot."""
  first_PxG = got.rollout.tokens_BxT[:, 0].reshape(-1, G)
  return first_PxG[got.rollout.length_B.reshape(-1, G)[:, 0] > 0].tolist()


def same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_batches_wait_until_mixed_groups_fill_them_and_surplus_goes_into_the_next():
  kept = Collector(dynamic_sampling.mixed(patience=5), P, G)
  kept.add(batch([1, 2, 3], [1, 0, 2]), 0)
  got, metrics = kept.take(EMPTY, 0)
  assert got is EMPTY and metrics['collect/queued'] == 1
  kept.add(batch([4, 5, 6], [1, 1, 1]), 1)
  got, metrics = kept.take(EMPTY, 1)
  assert said(got) == [[100, 101], [400, 401], [500, 501]]
  assert metrics == {'collect/queued': 1, 'collect/short': 0, 'collect/dropped': 0}
  assert got.prompts.index_P.tolist() == [1, 4, 5]
  same(jax.tree.map(lambda x: x[2:], got.rollout), batch([4, 5], [1, 1]).rollout)
  assert got.parts_BxK[:, 1].tolist() == [100, 101, 400, 401, 500, 501]
  assert got.correct_B.tolist() == [1, 0] * 3 and got.reward_B.tolist() == [0.5, 0] * 3
  kept.add(batch([7, 8, 9], [0, 0, 1]), 2)
  assert kept.take(EMPTY, 2)[0] is EMPTY and len(kept.queue) == 2


def test_after_patience_the_batch_is_learned_short_and_the_old_are_dropped():
  kept = Collector(dynamic_sampling.mixed(patience=2, max_age=1), P, G)
  kept.add(batch([1, 2, 3], [1, 0, 0]), 0)
  assert kept.take(EMPTY, 0)[0] is EMPTY
  kept.add(batch([4, 5, 6], [0, 1, 0]), 1)
  got, metrics = kept.take(EMPTY, 1)
  assert said(got) == [[100, 101], [500, 501]] and metrics['collect/short'] == 1
  # The slot that is left names no prompt, so that no group takes it for its own.
  assert got.prompts.index_P.tolist() == [1, 5, -1] and not kept.queue
  kept.add(batch([1, 2, 3], [1, 0, 0]), 2)
  kept.take(EMPTY, 2)
  kept.calls = 0
  got, metrics = kept.take(EMPTY, 4)
  assert got is EMPTY and metrics['collect/dropped'] == 1 and metrics['collect/queued'] == 0


def test_two_visits_to_a_prompt_are_learned_in_two_batches():
  kept = Collector(dynamic_sampling.mixed(patience=9), P, G)
  kept.add(batch([1, 2], [1, 1]), 0)
  kept.add(batch([1, 4], [1, 1]), 1)
  got, metrics = kept.take(EMPTY, 1)
  assert said(got) == [[100, 101], [200, 201], [400, 401]] and metrics['collect/queued'] == 1
  kept.add(batch([1, 1], [1, 1], [0, 1]), 2)  # with another visit of its own there is no full batch
  assert kept.take(EMPTY, 2)[0] is EMPTY


def test_an_empty_slot_is_no_group():
  kept = Collector(dynamic_sampling.mixed(), P, G)
  kept.add(batch([1, 2, 3], [1, 1, 1], length=0), 0)
  assert not kept.queue


def test_the_papers_table_of_top_ups():
  """n = 8 and k = 0 … 4, as published: ET and HW before their caps."""
  et = [dynamic_sampling._equal_treatment(k, 8) for k in range(6)]
  assert [min(n, 24) for n in et] == [24, 11, 3, 1, 0, 0]
  # None right is taken for half a one: p = 1/16, 8 (7/8)² / (4 · 15/256) = 26.1 before the cap.
  assert et[0] == 27
  hw = [dynamic_sampling._hardness_weighted(k, 8) for k in range(6)]
  assert [min(n, 56) for n in hw] == [56, 24, 8, 3, 0, 0]


def test_hard_prompts_are_topped_up_in_a_later_call_and_learned_with_all_their_rows():
  # With G = 2: k = 0 lacks ⌈2·(1 − .5)²/(4·.25·.75)⌉ = 1 rollout, k = 1 none.
  kept = Collector(dynamic_sampling.dars(top_ups=2, most=3, patience=9), P, G)
  metrics = kept.add(batch([1, 2, 3], [0, 1, 0]), 0)
  assert metrics == {'collect/unmet_slots': 0, 'collect/lacking': 2}
  assert kept.waiting_prompts.tolist() == [1, 3]
  index, part = kept.requests()
  assert (index.tolist(), part.tolist()) == ([1, 3], [1, 1])
  assert kept.requests()[0].size == 0  # asked for once
  assert kept.take(EMPTY, 0)[0] is EMPTY
  kept.add(batch([1, 3, 4], [1, 0, 1], [1, 1, 0]), 1)
  got, _ = kept.take(EMPTY, 1)
  # 3 had no right row in four: it is left out. 1 stands with both slots.
  assert said(got) == [[200, 201], [100, 101], [110, 111]]
  assert got.prompts.index_P.tolist() == [2, 1, 1] and got.prompts.part_P.tolist() == [0, 0, 1]
  assert not kept.lacking and [g.step for g in kept.queue] == [1]


def test_a_group_whose_top_ups_came_to_nothing_is_learned_as_it_is():
  rule = dynamic_sampling.dars(top_ups=2, most=3, patience=9)._replace(lacks=lambda k, n: 2)
  kept = Collector(rule, P, G)
  kept.add(batch([1], [1]), 0)
  assert kept.requests()[0].tolist() == [1]
  kept.add(batch([1], [0], [1], length=0), 1)
  assert not kept.lacking and said(kept.queue[0].batch) == [[100, 101]]


def test_top_ups_that_find_no_room_are_counted_and_the_hardest_go_first():
  kept = Collector(dynamic_sampling.dars(top_ups=1, schedule='HW', most=3, patience=9), 4, G)
  # HW with k = 0 of 2: ⌈2·.5/.5⌉ = 2 rollouts, a slot.
  metrics = kept.add(batch([5, 1, 2, 3], [1, 0, 0, 0]), 0)
  assert metrics['collect/lacking'] == 3
  index, part = kept.requests()
  assert (index.tolist(), part.tolist()) == ([1], [1])
  assert kept.waiting_prompts.tolist() == [
    1
  ]  # 2 and 3 are learned as they are, which for none right is not at all
  assert [g.batch.prompts.index_P.tolist() for g in kept.queue] == [[5]]


def test_a_restored_collector_goes_on_as_the_other_would():
  kept = Collector(dynamic_sampling.dars(top_ups=2, most=3, patience=9), P, G)
  kept.add(batch([1, 2, 3], [0, 1, 0]), 0)
  kept.requests()
  kept.take(EMPTY, 0)
  other = Collector(dynamic_sampling.dars(top_ups=2, most=3, patience=9), P, G)
  other.load_state_dict(kept.state_dict())
  for one in (kept, other):
    one.add(batch([1, 3, 4], [1, 0, 1], [1, 1, 0]), 1)
  (a, metrics_a), (b, metrics_b) = kept.take(EMPTY, 1), other.take(EMPTY, 1)
  same(a, b)
  assert metrics_a == metrics_b and len(other.queue) == len(kept.queue) == 1


@pytest.mark.parametrize(
  'make, field',
  [
    (lambda: dynamic_sampling.mixed(patience=0), 'replay.collect.patience=0'),
    (lambda: dynamic_sampling.dars(top_ups=0), 'replay.collect.top_ups=0'),
    (lambda: dynamic_sampling.dars(top_ups=1, most=1), 'replay.collect.most=1'),
    (lambda: dynamic_sampling.dars(top_ups=1, schedule='XX'), "replay.collect.schedule='XX'"),
  ],
)
def test_bad_settings_are_named(make, field):
  with pytest.raises(UserError, match=field):
    make()


def dense(index_P, reward_PxG, success_PxG, part_P=None):
  """Groups of which no row is right."""
  plain = batch(index_P, [0] * len(index_P), part_P)
  return plain._replace(
    reward_B=np.ravel(reward_PxG).astype(np.float32),
    success_B=np.ravel(success_PxG).astype(np.float32),
  )


def test_groups_whose_scores_differ_are_mixed_although_no_row_is_right():
  kept = Collector(dynamic_sampling.mixed(patience=9), P, G)
  scores = [[0, 0.1], [0.2, 0.2], [0.2, 0.2 + 1e-7], [0.25, 0.24]]
  kept.add(dense([1, 2, 3, 4], scores, scores), 0)
  assert [int(g.batch.prompts.index_P[0]) for g in kept.queue] == [1, 4]
  kept.add(dense([5], [[0, 0.01]], [[0, 0.01]]), 1)
  got, _ = kept.take(EMPTY, 1)
  assert said(got) == [[100, 101], [400, 401], [500, 501]]
  assert got.success_B is None  # the device looks at rewards


def test_a_group_is_mixed_by_the_rewards_that_the_method_compares():
  kept = Collector(dynamic_sampling.mixed(patience=9), P, G, lambda batch: batch.parts_BxK[:, :1])
  kept.add(batch([1, 2, 3], [1, 0, 2])._replace(reward_B=np.ones(P * G, np.float32)), 0)
  assert [int(g.batch.prompts.index_P[0]) for g in kept.queue] == [1]


def test_top_ups_follow_the_mass_of_graded_scores():
  """ET: p = 0.8 / 2 = 0.4 lacks ⌈2·0.2² / (4·0.4·0.6)⌉ = 1 rollout, 0.5 none; 0.15 counts as 0.25 and lacks 1."""
  kept = Collector(dynamic_sampling.dars(top_ups=4, most=3, patience=9), P, G)
  assert [dynamic_sampling._equal_treatment(k, 8) for k in (0.2, 0.5, 0.75, 1.5, 4.5)] == [
    27,
    27,
    16,
    6,
    0,
  ]
  success = [[0.3, 0.5], [0.4, 0.6], [0.1, 0.2]]
  metrics = kept.add(dense([1, 2, 3], success, success), 0)
  assert metrics == {'collect/unmet_slots': 0, 'collect/lacking': 2}
  index, part = kept.requests()
  assert (index.tolist(), part.tolist()) == ([3, 1], [1, 1])  # the hardest first
  kept.load_state_dict(kept.state_dict())
  kept.add(dense([3, 1], [[0, 0], [0.4, 0.4]], [[0, 0], [0.4, 0.4]], [1, 1]), 1)
  assert not kept.lacking and [len(g.batch.prompts.index_P) for g in kept.queue] == [1, 2, 2]
