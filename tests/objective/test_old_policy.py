"""Old policies: limits in which two choices are equal, and the inputs that each needs."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from objective_table import G, batch, data, known, settings

from jaxrl_llm import objective
from jaxrl_llm.types import UserError


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True), jax.disable_jit():
    yield


def coefficients(d, **choices):
  method = objective.method(settings(**choices))
  target = objective.targets(method, batch(d), G).with_arrays(**known(method, d))
  return np.asarray(objective.coefficients(method, target, d.x)[0])


def aged(age, moved, **changes):
  d = data()
  d.age, d.moved = np.full(d.x.shape, age), np.full(d.x.shape, moved)
  for name, value in changes.items():
    setattr(d, name, value)
  return d


TOKEN = dict(importance_correction='token', trust_region=dict(fn='clip', low=0.1, high=0.1))


def test_before_the_first_minibatch_interpolation_is_exact_for_every_token():
  """The old weights are then those that learn: r is 1 and ρ is π/π_b, as if they had been scored."""
  d = aged(age=3, moved=0)
  exact = aged(age=3, moved=0, old=d.x)
  want = coefficients(exact, old_policy='before', **TOKEN)
  assert np.abs(want).max() > 1e-3
  np.testing.assert_allclose(coefficients(d, old_policy='interpolated', **TOKEN), want, rtol=1e-12)


@pytest.mark.parametrize('age, moved', [(2, 2), (0, 0), (1, 3)])
def test_tokens_of_the_weights_that_the_batch_began_with_have_them_recorded(age, moved):
  """And nothing is extrapolated for tokens that are younger than the batch."""
  got = coefficients(aged(age, moved), old_policy='interpolated', **TOKEN)
  want = coefficients(data(), old_policy='recorded', trust_region=TOKEN['trust_region'])
  np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-16)


def test_halfway_in_age_is_halfway_in_log_probability():
  d = aged(age=4, moved=2)
  middle = aged(age=4, moved=2, old=(d.x + d.behavior) / 2)
  got = coefficients(d, old_policy='interpolated', **TOKEN)
  np.testing.assert_allclose(got, coefficients(middle, old_policy='before', **TOKEN), rtol=1e-12)
  assert np.abs(got - coefficients(aged(4, 1), old_policy='interpolated', **TOKEN)).max() > 1e-3


def test_automatic_is_recorded_without_a_correction_and_before_with_one():
  d = data()
  np.testing.assert_array_equal(coefficients(d), coefficients(d, old_policy='recorded'))
  np.testing.assert_array_equal(
    coefficients(d, **TOKEN), coefficients(d, old_policy='before', **TOKEN)
  )
  assert np.abs(coefficients(d) - coefficients(d, old_policy='before')).max() > 1e-3


NEEDS = [
  (dict(), set()),
  (dict(importance_correction='token'), {'old'}),
  (dict(old_policy='recorded'), set()),
  (dict(old_policy='before'), {'old'}),
  (dict(old_policy=dict(fn='average', decay=0.5)), {'old', 'average'}),
  (dict(old_policy='interpolated', importance_correction='token'), {'versions'}),
  (
    dict(old_policy='interpolated', importance_correction='second_moment_mask'),
    {'versions', 'rows'},
  ),
]


@pytest.mark.parametrize('choices, needs', NEEDS)
def test_a_step_prepares_what_is_asked_for_and_no_more(choices, needs):
  assert objective.method(settings(**choices)).needs == needs


@pytest.mark.parametrize('decay', [-0.1, 1.0])
def test_a_decay_that_keeps_nothing_or_everything_is_told(decay):
  with pytest.raises(
    UserError, match='config.objective.old_policy.decay=.* at least 0 and below 1'
  ):
    objective.method(settings(old_policy=dict(fn='average', decay=decay)))


def test_a_correction_without_anything_to_correct_is_told():
  with pytest.raises(
    UserError, match="fn='recorded' does not go with config.objective.importance_correction"
  ):
    objective.method(settings(old_policy='recorded', importance_correction='token'))
