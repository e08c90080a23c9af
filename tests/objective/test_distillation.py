"""Advantages from a teacher: the written loss, the role of the scale, and the gradient."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_table import METHODS, G, batch, data, settings, tok

from jaxrl_llm import objective
from jaxrl_llm.objective import token_spans
from jaxrl_llm.types import TeacherTokens


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
  d.parts, d.tokens = d.parts[:4], d.tokens[:4, :2]
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


SPANS = dict(fn='on_policy_spans', teacher_prompt_tokens=4, teacher_completion_tokens=4)


def over_spans(d, teacher_BxE, span_BxE, span_BxT):
  """Coefficients of a teacher whose tokens have these log-probs and spans."""
  own = METHODS['opsd'].settings | dict(distillation=SPANS)
  method = objective.method(settings(**own))
  assert method.needs_teacher and method.needs_spans and not method.needs_reference
  none_BxE, none_B = np.zeros(span_BxE.shape, int), np.zeros(len(span_BxE), int)
  tokens = TeacherTokens(none_BxE, none_B, none_BxE, none_B, span_BxE, span_BxT)
  target = objective.targets(method, batch(d)._replace(teacher_tokens=tokens), G)
  first_BxT = token_spans.at_first_tokens(jnp.asarray(teacher_BxE), tokens)
  target = objective.distill(method, target.with_arrays(teacher_BxT=first_BxT), span_BxT)
  advantage = np.asarray(target.advantage_BxT)
  assert (advantage[span_BxT < 0] == 0).all()
  return np.asarray(objective.coefficients(method, target, d.x)[0]), advantage


def test_spans_of_single_tokens_are_plain_distillation_bit_for_bit():
  d = taught()
  d.old = d.behavior  # the opsd row has no other old policy
  span_BxT = np.where(d.mask > 0, np.arange(d.x.shape[1]), -1)
  more = ((0, 0), (0, 2))  # padding of any value
  teacher_BxE = np.pad(d.teacher, more, constant_values=5.0)
  c, advantage = over_spans(d, teacher_BxE, np.pad(span_BxT, more, constant_values=-1), span_BxT)
  gap = np.where(d.mask > 0, d.teacher - d.old, 0)
  np.testing.assert_array_equal(advantage, gap)
  np.testing.assert_array_equal(c, gap * (d.mask / d.mask.sum()))


def test_the_tokens_of_a_span_have_its_difference_and_others_leave_the_denominator():
  d, r = taught(), np.random.default_rng(4)
  d.old = d.behavior
  span_BxT = np.where(d.mask > 0, np.arange(d.x.shape[1]) // 2, -1)
  span_BxT[:2] = -1
  span_BxE = np.sort(r.integers(-1, 2, (len(d.x), 9)))[:, ::-1]
  span_BxE = np.where(span_BxE < 0, -1, 1 - span_BxE)  # zeros, ones, then padding
  teacher_BxE = r.normal(size=span_BxE.shape)
  c, _ = over_spans(d, teacher_BxE, span_BxE, span_BxT)
  want = np.zeros_like(d.x)
  for b, t in zip(*np.nonzero(span_BxT >= 0), strict=True):
    k = span_BxT[b, t]
    want[b, t] = teacher_BxE[b, span_BxE[b] == k].sum() - d.old[b, span_BxT[b] == k].sum()
  np.testing.assert_allclose(c, want / (span_BxT >= 0).sum(), atol=1e-12)
  assert np.abs(c).max() > 1e-3


def test_on_average_a_span_of_two_tokens_is_the_gradient_of_the_reverse_kl_of_its_text():
  """All answers of two tokens; the teacher has one token for each, or three whose log-probs sum to that of the text."""
  z = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2)))
  teacher = jax.nn.log_softmax(jnp.asarray(np.random.default_rng(2).normal(size=4)))
  answers = list(itertools.product((0, 1), (0, 1)))

  def logp(z):
    rows = jax.nn.log_softmax(z)
    return jnp.stack([jnp.stack([rows[0, a], rows[1 + a, b]]) for a, b in answers])

  d = data()
  d.x = d.old = d.behavior = np.asarray(logp(z))
  d.length, d.mask = np.full(4, 2, np.int32), np.ones((4, 2))
  d.reward, d.correct, d.context, d.parts = np.ones(4), np.ones(4), d.context[:4], d.parts[:4]
  d.tokens = d.tokens[:4, :2]
  kl = lambda z: (jnp.exp(logp(z).sum(1)) * (logp(z).sum(1) - teacher)).sum()  # noqa: E731
  want = jax.grad(kl)(z)
  chance = np.exp(d.x.sum(1))[:, None]
  for share in (np.array([[1.0]]), np.array([[0.5, 0.2, 0.3]])):
    span_BxE = np.zeros((4, share.shape[1]), int)
    c, _ = over_spans(d, np.asarray(teacher)[:, None] * share, span_BxE, np.zeros((4, 2), int))
    got = jax.grad(lambda z, c=c * 8: -(chance * c * logp(z)).sum())(z)
    np.testing.assert_allclose(got, want, atol=1e-12)
  assert np.abs(want).max() > 1e-3
