"""Advantages among the nodes of a depth, with rows of unequal length, against a loop in plain Python and identities."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from objective_table import B, G, T, data, node_advantage

from jaxrl_llm.objective import credit_assignment
from jaxrl_llm.objective.token_inputs import CreditInputs


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def by_depth(reward, mask, group, tokens, **settings):
  inputs = CreditInputs(reward[:, None], mask, group, tokens_BxT=tokens)
  return np.asarray(credit_assignment.by_depth(inputs, **settings)[0])


@pytest.mark.parametrize('seed', range(4))
def test_it_is_the_loop_of_its_definition(seed):
  d = data(seed)
  want = node_advantage(d)
  assert (np.abs(want) > 0.1).sum() > B and len(np.unique(d.tokens)) == 2
  np.testing.assert_allclose(by_depth(d.reward, d.mask, d.group, d.tokens), want, atol=1e-9)


def test_rows_that_share_nothing_have_the_advantage_of_their_group():
  d = data()
  d.tokens[:, 0] = np.arange(B)
  whole = np.ones((B, T))
  got = by_depth(d.reward, whole, d.group, d.tokens)
  reward_PxG = d.reward.reshape(-1, G)
  off_PxG = reward_PxG - reward_PxG.mean(1, keepdims=True)
  want_B = (off_PxG / (reward_PxG.std(1, ddof=1, keepdims=True) + 1e-8)).ravel()
  np.testing.assert_allclose(got, np.repeat(want_B[:, None], T, axis=1), atol=1e-12)


def test_rows_that_are_there_twice_have_half_the_gradient_each():
  d = data(2)
  once = by_depth(d.reward, d.mask, d.group, d.tokens)
  twice = by_depth(*(np.concatenate([x, x]) for x in (d.reward, d.mask, d.group, d.tokens)))
  np.testing.assert_allclose(twice, np.concatenate([once, once]) / 2, atol=1e-12)


def test_equal_rewards_and_lonely_nodes_get_nothing():
  d = data(3)
  for rounding in (0.0, 1e-7):
    assert not by_depth(0.3 + rounding * d.reward, d.mask, d.group, d.tokens).any()
  assert not by_depth(d.reward, d.mask, np.arange(B), d.tokens).any()
  d.tokens[:] = 7  # one path
  assert not by_depth(d.reward, np.ones((B, T)), d.group, d.tokens).any()


def test_tokens_after_a_row_do_not_matter():
  d = data(1)
  want = by_depth(d.reward, d.mask, d.group, d.tokens)
  d.tokens[d.mask == 0] = 99
  np.testing.assert_array_equal(by_depth(d.reward, d.mask, d.group, d.tokens), want)
  assert not want[d.mask == 0].any()
