"""Advantages from a teacher: the written loss, the role of the scale, and the gradient."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_table import METHODS, G, batch, data, settings, tok

from jaxrl_llm import objective


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def coefficients(d, scale):
  """Those of ExOPD's row, taught."""
  own = METHODS['exopd'].settings | dict(distillation=dict(fn='on_policy', scale=scale))
  method = objective.method(settings(**own))
  assert method.needs_teacher and method.needs_reference and not method.needs_rows
  target = objective.targets(method, batch(d), G).with_arrays(
    old_BxT=d.old if method.needs_old else None, reference_BxT=d.reference, teacher_BxT=d.teacher
  )
  target = objective.distill(method, target)
  advantage = np.asarray(target.advantage_BxT)
  assert (advantage[d.mask == 0] == 0).all()  # what the metrics look at
  return np.asarray(objective.coefficients(method, target, d.x)[0])


def taught(seed=0):
  d = data(seed)
  d.teacher = d.x + 0.5 * np.random.default_rng(seed + 9).normal(size=d.x.shape)
  return d


@pytest.mark.parametrize('scale', [1.0, 1.25])
def test_coefficients_are_the_gradient_of_the_written_loss(scale):
  d = taught()
  weight = np.minimum(np.exp(d.old - d.behavior), 1.1)
  a = scale * (d.teacher - d.reference) - (d.old - d.reference)
  want = jax.grad(lambda x: -(tok(d) * weight * a * x).sum())(jnp.asarray(d.x))
  c = coefficients(d, scale)
  np.testing.assert_allclose(c, -want, atol=1e-10)
  assert np.abs(c).max() > 1e-3


def test_scale_1_forgets_the_base_and_no_scale_looks_at_rewards():
  d, other = taught(), taught()
  other.reference = d.reference - 1.0
  np.testing.assert_allclose(coefficients(d, 1.0), coefficients(other, 1.0), atol=1e-12)
  assert np.abs(coefficients(d, 1.25) - coefficients(other, 1.25)).max() > 1e-3
  other.reference, other.reward = d.reference, 1 - d.reward
  np.testing.assert_array_equal(coefficients(d, 1.25), coefficients(other, 1.25))


def test_a_teacher_that_is_the_policy_teaches_nothing_and_padding_does_not_matter():
  d = taught()
  c = coefficients(d, 1.25)
  for poison in (-np.inf, np.nan):
    bad = taught()
    for name in ('teacher', 'reference', 'old', 'behavior'):
      setattr(bad, name, np.where(d.mask > 0, getattr(d, name), poison))
    np.testing.assert_array_equal(coefficients(bad, 1.25), c)
  d.teacher = d.old
  assert np.abs(coefficients(d, 1.0)).max() == 0


def test_on_average_it_is_the_gradient_of_the_reverse_kl_of_every_token():
  """All answers of two tokens over a vocabulary of two, each weighed with its probability.

  Logits z[0] are of the first token, z[1 + first] of the second. Token by token: Σ_t E_{y<t} KL(π(·|y<t) ‖ π_T), the
  prefix's own probability held fixed.
  """
  z, base, teacher = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3, 2)))
  answers = list(itertools.product((0, 1), (0, 1)))

  def logp(z):
    rows = jax.nn.log_softmax(z)
    return jnp.stack([jnp.stack([rows[0, a], rows[1 + a, b]]) for a, b in answers])

  x = np.asarray(logp(z))
  d = data()
  d.x = d.old = d.behavior = x
  d.reference, d.teacher = np.asarray(logp(base)), np.asarray(logp(teacher))
  d.length, d.mask = np.full(4, 2, np.int32), np.ones((4, 2))
  d.reward, d.correct, d.context = np.ones(4), np.ones(4), d.context[:4]
  d.parts = d.parts[:4]
  c = coefficients(d, 1.0) * d.mask.sum()  # of each answer: weights of a mean, not of 8 tokens
  chance = np.exp(x.sum(1))[:, None]
  got = jax.grad(lambda z: -(chance * c * logp(z)).sum())(z)

  def kl(z):
    prefix = jnp.concatenate(
      [jnp.ones(1), jnp.exp(jax.nn.log_softmax(jax.lax.stop_gradient(z))[0])]
    )
    ours, theirs = jax.nn.log_softmax(z), jax.nn.log_softmax(teacher)
    return (prefix * (jnp.exp(ours) * (ours - theirs)).sum(1)).sum()

  np.testing.assert_allclose(got, jax.grad(kl)(z), atol=1e-12)
  assert np.abs(got).max() > 1e-3
