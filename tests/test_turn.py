"""The host's turn: what the curriculum is told, and that a flight survives being packed."""

from __future__ import annotations

import types

import numpy as np

from jaxrl_llm import turn
from jaxrl_llm.types import ABORTED, STOPPED, TRUNCATED, UNFINISHED, Batch, Prompts, Rollout

P, G, T = 4, 4, 3
B = P * G


class Heard:
  """Stands for the curriculum and the lengths."""

  def observe(self, *told):
    self.told = told

  def metrics(self):
    return {}


def make_parts():
  config = types.SimpleNamespace(rollouts=G, generate=types.SimpleNamespace(draft=dict(fn='none')))
  config.generate.draft = types.SimpleNamespace(fn='none')
  return types.SimpleNamespace(config=config, curriculum=Heard(), lengths=Heard())


def make_batch(length_B, correct_B, reason_B, weight_B):
  zeros = np.zeros((B, T), np.int32)
  index_P = np.arange(P, dtype=np.int32) * 10
  prompts = Prompts(np.zeros((P, 2), np.int32), np.ones(P, np.int32), index_P, index_P, index_P)
  rollout = Rollout(
    zeros,
    zeros.astype(np.float32),
    np.array(length_B, np.int32),
    np.array(reason_B, np.int8),
    zeros,
    np.array(weight_B, np.float32),
    np.zeros((B, 0), np.float32),
  )
  correct_B = np.array(correct_B, np.float32)
  return Batch(prompts, rollout, correct_B, correct_B)


def test_the_curriculum_hears_of_whole_groups_rows_that_exist_and_weights():
  length_B = [3, 2, 1, 2] + [3, 3, 3, 3] + [2, 0, 0, 1] + [0, 0, 0, 0]
  correct_B = [1, 0, 1, 0] + [1, 1, 0, 0] + [1, 0, 0, 0] + [0, 0, 0, 0]
  reason_B = [STOPPED, TRUNCATED, STOPPED, STOPPED] + [STOPPED] * 4
  reason_B += [STOPPED, ABORTED, ABORTED, STOPPED] + [ABORTED] * 4
  # Right rows of group 0 were three times as likely to be kept: one in four is nearer the truth.
  weight_B = [1, 3, 1, 3] + [1] * 12
  parts = make_parts()
  batch = make_batch(length_B, correct_B, reason_B, weight_B)
  turn._observe(parts, batch, np.array([True, False, True, True]))
  index, right, count, truncated = (x.tolist() for x in parts.curriculum.told)
  assert index == [0, 20]  # 10 is unfinished; of 30 nothing is left
  assert (right, count, truncated) == ([1, 1], [4, 2], [1, 0])
  assert parts.lengths.told[1].tolist() == [2.0, 1.5]


def test_aborted_rows_are_blank_and_counted():
  reason_B = [STOPPED, ABORTED, STOPPED, STOPPED] + [STOPPED] * 8 + [UNFINISHED] + [STOPPED] * 3
  batch = make_batch([2] * B, [0] * B, reason_B, [1] * B)
  parts = make_parts()
  parts.unfinished = turn.replay.Unfinished(G, max_age=3)
  rollout, whole_P, told = turn._hold(parts, batch.prompts, batch.rollout, 30)
  assert whole_P.tolist() == [True, True, True, False]
  assert rollout.length_B.tolist() == [2, 0, 2, 2] + [2] * 8 + [0] * 4
  assert told['generate/aborted_rows'] == 1 and told['generate/unfinished_groups'] == 1


def test_a_packed_flight_is_the_flight():
  batch = make_batch([2] * B, [0] * B, [1] * B, [1] * B)
  flight = turn.Flight(7, batch.prompts, batch.rollout, {'a': np.float32(0.1)})
  back = turn.unpacked(turn.packed(flight))
  assert (back.index, back.device) == (7, {'a': float(np.float32(0.1))})
  for a, b in zip((*flight.prompts, *flight.rollout), (*back.prompts, *back.rollout), strict=True):
    np.testing.assert_array_equal(a, b)
