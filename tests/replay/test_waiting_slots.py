"""Groups that wait for an empty slot come out of it as they went in."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl_llm.replay import WaitingSlots, group_batches
from jaxrl_llm.replay.rollout_buffer import cut
from jaxrl_llm.types import STOPPED, Batch, Prompts, Rollout

G, L, T = 2, 4, 3


def rollout(tokens_BxT, length_B):
  count = len(length_B)
  return Rollout(
    np.array(tokens_BxT, np.int32),
    np.zeros((count, T), np.float32),
    np.array(length_B, np.int32),
    np.full(count, STOPPED, np.int8),
    np.zeros((count, T), np.int32),
    np.ones(count, np.float32),
    np.zeros((count, 0), np.float32),
  )


def batch(index_P, length_B, demonstrated: bool):
  """Rows that say the index of their prompt, each with a demonstration that says ten times as much."""
  index_P = np.array(index_P, np.int32)
  says = lambda x: np.repeat(x, T).reshape(-1, T)  # noqa: E731
  prompts = Prompts(
    np.repeat(index_P, L).reshape(-1, L),
    np.full(len(index_P), L, np.int32),
    index_P,
    index_P,
    np.zeros(len(index_P), np.float32),
  )
  reward_B = np.repeat(index_P, G).astype(np.float32)
  demo = rollout(says(10 * index_P), np.full(len(index_P), T)) if demonstrated else None
  rows = rollout(says(np.repeat(index_P, G)), length_B)
  return Batch(prompts, rows, reward_B, reward_B, demo=demo)


@pytest.mark.parametrize('demonstrated', [False, True])
def test_whole_groups_fill_empty_slots_in_order_and_keep_their_demonstrations(demonstrated):
  waiting = WaitingSlots()
  for index in (7, 8, 9):
    waiting.groups.append(cut(batch([index], [T, T], demonstrated)))
  filled = waiting.fill(batch([1, 2, 3], [0, 0, 2, 2, 0, 0], demonstrated), {})
  assert filled.prompts.index_P.tolist() == [7, 2, 8] and len(waiting) == 1
  assert filled.reward_B.tolist() == [7, 7, 2, 2, 8, 8]
  assert filled.rollout.length_B.tolist() == [T, T, 2, 2, T, T]
  if demonstrated:
    assert filled.demo.tokens_BxT[:, 0].tolist() == [70, 20, 80]
    assert filled.demo.length_B.tolist() == [T, T, T]
  else:
    assert filled.demo is None


def test_nothing_that_waits_leaves_an_empty_slot_of_no_prompt():
  filled = WaitingSlots().fill(batch([1, 2], [0, 0, 1, 1], True), {})
  assert filled.prompts.index_P.tolist() == [-1, 2]
  assert group_batches.slots(filled, np.array([0])).rollout.length_B.tolist() == [0, 0]
