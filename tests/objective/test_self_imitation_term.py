"""The self-imitation term beside masks, KL penalties and denominators. Its formula: official/spear.py."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl_llm import objective
from jaxrl_llm.config import stages
from jaxrl_llm.objective import aggregation
from tests.objective.official import lib

TERM_B = np.arange(lib.B) // lib.G >= 3  # the last two groups, one of which is all wrong


def coefficients(changes, imitation_B=None, **arrays):
  """Coefficients [B, T] of the draw of seed 0."""
  data = lib.draw(0) | arrays
  method = objective.method(lib.settings(dict(advantage='group_centered') | changes))
  batch = lib.batch(data, needs_old=False)._replace(imitation_B=imitation_B)
  policies = objective.OtherPolicies(None, data['reference'] if method.needs_reference else None)
  target = objective.targets(method, batch, lib.G, policies=policies)
  return np.asarray(objective.coefficients(method, target, data['logp'], data['entropy'])[0])


def advantages():
  """Advantages of the rows of the term."""
  return np.where(TERM_B, np.linspace(0.2, 0.9, lib.B), 0)


def test_rows_of_equal_rewards_stay_in_the_loss():
  """Their group has no variance, and it is no part of their advantage."""
  kept, masked = (
    coefficients(dict(zero_variance=fn, aggregation='sequence_sum'), advantages())
    for fn in ('keep', 'mask')
  )
  np.testing.assert_array_equal(masked[TERM_B], kept[TERM_B])
  real_B = lib.draw(0)['length'] > 0
  assert (masked != 0).any(1)[TERM_B & real_B].all()
  # Sampled rows of group 1 leave, which are all right, and those of the others count more.
  assert not masked[lib.G : 2 * lib.G].any() and (masked[: lib.G] != kept[: lib.G]).any()


def test_a_kl_penalty_is_of_the_sampled_rows_alone():
  kl = dict(kl=dict(fn='k3', coef=0.1), aggregation='token_mean')
  one, other = (
    coefficients(kl, advantages(), reference=lib.draw(0)['reference'] + shift) for shift in (0, 0.5)
  )
  np.testing.assert_array_equal(one[TERM_B], other[TERM_B])
  assert (one[~TERM_B] != other[~TERM_B]).any()


@pytest.mark.parametrize('name', sorted(stages.choices(aggregation)))
def test_each_term_has_the_denominator_of_its_own_rows(name):
  """As if the rows of the other term were empty."""
  whole = coefficients(dict(aggregation=name), advantages())
  length_B = lib.draw(0)['length']
  sampled = coefficients(dict(aggregation=name), None, length=np.where(TERM_B, 0, length_B))
  term = coefficients(dict(aggregation=name), advantages(), length=np.where(TERM_B, length_B, 0))
  np.testing.assert_allclose(whole, sampled + term, rtol=1e-6, atol=1e-9)
  assert sampled.any() and term.any()


def test_a_batch_without_rows_of_the_term_has_the_loss_without_it():
  clip = dict(fn='covariance_clip_by_term', share=0.1, low=0.05, high=1.0)
  changes = dict(aggregation='token_mean', token_weighting=clip)
  none = coefficients(changes, np.zeros(lib.B))
  np.testing.assert_allclose(none, coefficients(changes), rtol=1e-6, atol=1e-9)
