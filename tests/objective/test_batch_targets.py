"""A prompt with several slots: all its rows are one group, whatever the positions of its slots."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest
from objective_table import (
  METHODS,
  ORDERED,
  B,
  G,
  P,
  batch,
  data,
  known,
  leverage,
  policies,
  settings,
  signal,
)

from jaxrl_llm import objective
from jaxrl_llm.objective import advantage
from jaxrl_llm.types import UserError

HALF = G // 2
# Slots in any order; the last two are empty, and name no prompt.
ORDER = np.array([5, 0, 3, 6, 1, 7, 2, 4])
ROWS = np.concatenate([np.arange(s * HALF, (s + 1) * HALF) for s in ORDER])
BLANK = 2


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def coefficients(name, d, slotted, rollouts, parts=1):
  method = objective.method(settings(**METHODS[name].settings))
  target = objective.targets(
    method, slotted, rollouts, signal(method, d), leverage(d), parts, policies(method, d)
  )
  target = target.with_arrays(**known(method, d))
  c, sums = objective.coefficients(method, target, d.x, d.entropy, d.confidence, d.collision)
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
  slotted = batch(d)
  slots = np.zeros((len(index_P), 3), np.int32)
  prompts = type(slotted.prompts)(slots, slots[:, 0] + 3, index_P, index_P, index_P, part_P)
  prompts = prompts._replace(context_P=d.context[::HALF])
  return slotted._replace(prompts=prompts)


# An auxiliary model that compares pairs does so within a slot.
@pytest.mark.parametrize('name', [n for n in METHODS if n not in ('oprl', *ORDERED)])
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
  slotted = in_slots(moved(d))
  own = objective.group_rows(slotted.prompts, HALF, 2)
  score_Bx1 = np.zeros((len(slotted.correct_B), 1))
  score_Bx1[:HALF] = (
    0.1  # the first slot is the second of prompt 2, whose other slot has other scores
  )
  mixed_B = np.asarray(objective.mixed_group_mask(score_Bx1, slotted.rollout.length_B, own))
  slots = mixed_B.reshape(-1, HALF)
  at = slotted.prompts.index_P == ORDER[0] // 2
  assert slots[at].all() and not slots[~at].any()


def test_two_strategies_for_a_prompt_are_compared_with_each_other_and_within():
  """NudgeRL: 1 is GRPO whatever the contexts; more favours the rows of the better one."""
  d = data(3)
  split = moved(d)
  context = np.where(np.tile([0, 1], P)[ORDER] == 1, 1, np.array([0, -1, 0, 0])[ORDER // 2])
  split.context = np.concatenate([np.repeat(context, HALF), np.full(BLANK * HALF, -1)])
  slotted = in_slots(split)
  for between in (1.0, 2.0):
    chosen = dict(advantage=dict(fn='nudged', between=between, eps=0.0))
    method = objective.method(settings(**chosen))
    target = objective.targets(method, slotted, HALF, parts=2)
    got = np.zeros(B)
    got[ROWS] = np.asarray(target.advantage_BxT)[: len(ROWS), 0]
    given = np.zeros(B, int)
    given[ROWS] = split.context[: len(ROWS)]
    for p in range(P):
      rows = np.arange(p * G, (p + 1) * G)
      reward, raw = d.reward[rows], d.reward[rows] - d.reward[rows].mean()
      for c in {*given[rows]} - {-1}:
        at = given[rows] == c
        raw[at] = reward[at] - reward[at].mean() + between * (reward[at].mean() - reward.mean())
      want = (raw - raw.mean()) / raw.std(ddof=1)
      np.testing.assert_allclose(got[rows], want, rtol=1e-9)


@pytest.mark.parametrize(
  'value, alpha', [('mean', 1.0), ('mean', 0.5), ('most', 1.0), ('least', 1.0)]
)
def test_a_stage_is_compared_with_the_rows_that_begin_with_its_prefix(value, alpha):
  """Tree-OPO: two slots of a prompt are of one stage, or the second begins where the first may lead."""
  d = data(3)
  split = moved(d)
  split.context = np.concatenate(
    [np.repeat(np.where(ORDER == 5, 0, ORDER % 2), HALF), np.zeros(BLANK * HALF, int)]
  )
  method = objective.method(settings(advantage=dict(fn='staged', value=value, alpha=alpha)))
  target = objective.targets(method, in_slots(split), HALF, parts=2)
  got, stage = np.zeros(B), np.zeros(B, int)
  got[ROWS], stage[ROWS] = (
    np.asarray(target.advantage_BxT)[: len(ROWS), 0],
    split.context[: len(ROWS)],
  )
  of = dict(mean=np.mean, most=np.max, least=np.min)[value]
  for p in range(P):
    rows = np.arange(p * G, (p + 1) * G)
    apart = [d.reward[b] - alpha * of(d.reward[rows][stage[rows] >= stage[b]]) for b in rows]
    np.testing.assert_allclose(got[rows], apart - np.mean(apart), atol=1e-12)
  assert {*stage} == {0, 1}


def test_a_wrong_value_of_stages_is_refused():
  with pytest.raises(
    UserError, match="advantage.value='max' is unknown; choose one of: mean, most, least"
  ):
    advantage.staged(np.ones((1, 2)), np.ones((1, 2)), np.ones((1, 2)), value='max')
