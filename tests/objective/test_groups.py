"""A prompt that fills several slots: all its rows are one group, wherever its slots stand."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest
from objective_table import METHODS, B, G, P, batch, data, known, leverage, settings, signal

from jaxrl_llm import objective

HALF = G // 2
# Slots in any order; the last two are empty, and name no prompt.
ORDER = np.array([5, 0, 3, 6, 1, 7, 2, 4])
ROWS = np.concatenate([np.arange(s * HALF, (s + 1) * HALF) for s in ORDER])
BLANK = 2


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def coefficients(name, d, told, rollouts, parts=1):
  method = objective.method(settings(**METHODS[name].settings))
  target = objective.targets(method, told, rollouts, signal(method, d), leverage(d), parts)
  target = target._replace(**known(method, d))
  c, sums = objective.coefficients(method, target, d.x, d.entropy, d.confidence)
  return np.asarray(c), {k: float(v) for k, v in sums.items()}


def moved(d):
  """The data's rows in the order of the slots, and empty rows after them."""

  def move(x):
    if not isinstance(x, np.ndarray) or x.shape[:1] != (B,):
      return x
    return np.concatenate([x[ROWS], np.zeros_like(x[: BLANK * HALF])])

  return types.SimpleNamespace(**{k: move(v) for k, v in vars(d).items()})


def in_slots(d):
  index_P = np.concatenate([np.repeat(np.arange(P), 2)[ORDER], np.full(BLANK, -1)])
  part_P = np.concatenate([np.tile([0, 1], P)[ORDER], np.zeros(BLANK, int)])
  told = batch(d)
  slots = np.zeros((len(index_P), 3), np.int32)
  prompts = type(told.prompts)(slots, slots[:, 0] + 3, index_P, index_P, index_P, part_P)
  return told._replace(prompts=prompts)


# A companion that compares pairs does so in a slot.
@pytest.mark.parametrize('name', [n for n in METHODS if n != 'oprl'])
def test_half_groups_in_two_slots_are_the_group(name):
  d = data(3)
  want, sums = coefficients(name, d, batch(d), G)
  split = moved(d)
  got, also = coefficients(name, split, in_slots(split), HALF, parts=2)
  np.testing.assert_allclose(got[: len(ROWS)], want[ROWS], rtol=1e-9, atol=1e-12)
  assert not got[len(ROWS) :].any()
  for name, value in sums.items():
    np.testing.assert_allclose(also[name], value, rtol=1e-9, atol=1e-12)


def test_a_group_is_mixed_by_all_its_slots():
  d = data(3)
  told = in_slots(moved(d))
  own = objective.groups(told.prompts, HALF, 2)
  right_B = np.zeros(len(told.correct_B))
  right_B[:HALF] = 1  # the first slot is the second of prompt 2, whose other slot has no right row
  mixed_B = np.asarray(objective.mixed(right_B, told.rollout.length_B, own))
  slots = mixed_B.reshape(-1, HALF)
  at = told.prompts.index_P == ORDER[0] // 2
  assert slots[at].all() and not slots[~at].any()
