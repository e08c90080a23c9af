"""A divergence from a teacher in the update: its gradient through all logits of all rows, in chunks of them."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_table import METHODS

from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.update import update
from jaxrl_llm.models import decoder
from jaxrl_llm.objective import divergence
from jaxrl_llm.types import UserError
from tests.learner import plain_gradient
from tests.learner.packed_jobs import (
  MODEL,
  SEVERAL,
  B,
  make,
  make_batch,
  make_state,
  packed,
  weights,
  with_method,
)
from tests.learner.test_packed_rows import check

# Deeper and wider than the policy, and with rows of the vocabulary that no tokenizer writes.
TEACHER = dataclasses.replace(MODEL, vocab=24, width=24, layers=2, heads=3, tied=False)
TERMS = dict(
  forward=divergence.forward_kl(),
  reverse=divergence.reverse_kl(),
  middle=divergence.jensen_shannon(beta=0.3),
  top_k=divergence.jensen_shannon(beta=0.5, top_k=3),
  with_rewards=divergence.reverse_kl(top_k=4, reward_weight=0.5),
)


def spec(term, name='opsd', devices=1, mesh=None, chunk=10**6, teacher=TEACHER):
  plain = with_method(make(devices=devices, mesh=mesh), **METHODS[name].settings)
  return plain._replace(
    objective=plain.objective._replace(divergence=term),
    model=plain.model._replace(teacher=teacher, head_chunk_tokens=chunk),
  )


def taught(chosen, **more):
  return make_state(chosen, weights(0), teacher=decoder.init(TEACHER, 3), **more)


@pytest.mark.parametrize('name', ['forward', 'middle', 'top_k', 'with_rewards'])
def test_the_gradient_is_that_of_whole_rows(name):
  """Direct autodiff of the term over all logits of both models; rows without an advantage have a gradient, too."""
  chosen = spec(TERMS[name], 'grpo', chunk=5)
  _, c_BxT = check(chosen, taught(chosen), make_batch())
  assert (np.abs(c_BxT).max() > 0) == (TERMS[name].reward_weight > 0)


def test_a_method_of_whole_minibatches_keeps_its_coefficients():
  chosen = spec(TERMS['with_rewards'], 'm2po_mask')
  _, c_BxT = check(chosen, taught(chosen), make_batch())
  assert np.abs(c_BxT).max() > 1e-4


def test_one_device_and_four_agree():
  batch = make_batch()
  single = plain_gradient.recording(spec(TERMS['top_k'], chunk=5), SEVERAL)
  many = spec(TERMS['top_k'], devices=4, mesh=dict(data=2, fsdp=2), chunk=5)
  many = plain_gradient.recording(many, SEVERAL)
  (got, ours), (want, theirs) = (packed(x, taught(x), batch) for x in (many, single))
  assert plain_gradient.distance(got, want) < 1e-5
  np.testing.assert_allclose(ours['actor/divergence'], theirs['actor/divergence'], rtol=1e-5)


def test_the_metric_is_the_mean_over_tokens_and_padding_has_none():
  chosen = plain_gradient.recording(spec(TERMS['reverse']), SEVERAL)
  batch, state = make_batch(), taught(chosen)
  gradient, metrics = packed(chosen, state, batch)
  ours, theirs = (
    plain_gradient.distributions(spec, w, batch)
    for spec, w in (
      (chosen, state.params),
      (chosen._replace(model=chosen.model._replace(config=TEACHER)), state.teacher),
    )
  )
  theirs = jax.nn.log_softmax(theirs[..., : MODEL.vocab])
  mask = np.arange(ours.shape[1]) < batch.rollout.length_B[:, None]
  want = np.asarray((np.exp(ours) * (ours - theirs)).sum(-1))[mask].mean()
  np.testing.assert_allclose(metrics['actor/divergence'], want, rtol=1e-5)
  assert want > 0.1 and metrics['training/trained_tokens'] == mask.sum()
  tokens = np.where(mask, batch.rollout.tokens_BxT, 11)
  changed = batch._replace(rollout=batch.rollout._replace(tokens_BxT=tokens))
  assert (tokens != batch.rollout.tokens_BxT).any()
  same, _ = packed(chosen, state, changed)
  jax.tree.map(np.testing.assert_array_equal, same, gradient)


@pytest.mark.parametrize('name', ['middle', 'top_k'])
def test_a_teacher_that_is_the_policy_teaches_nothing(name):
  chosen = plain_gradient.recording(spec(TERMS[name], teacher=MODEL), SEVERAL)
  state = make_state(chosen, weights(0), teacher=weights(0))
  gradient, metrics = packed(chosen, state, make_batch())
  assert max(np.abs(x).max() for x in jax.tree.leaves(gradient)) < 1e-6
  assert abs(metrics['actor/divergence']) < 1e-6


def test_steps_toward_a_teacher_lower_the_divergence():
  chosen = spec(TERMS['middle'])
  run, batch = jax.jit(functools.partial(update, chosen)), make_batch()
  state, found = train_state.init_state(chosen, weights(0), decoder.init(TEACHER, 3)), []
  for _ in range(20):
    state, metrics = run(state, batch)
    found.append(float(metrics['actor/divergence']))
  assert found[-1] < found[0] and metrics['critic/advantages/max'] == 0


def random_pair(seed=0, V=9):
  r = np.random.default_rng(seed)
  return [jax.nn.log_softmax(jnp.asarray(2 * r.normal(size=(B, 3, V)))) for _ in range(2)]


@pytest.mark.parametrize('make_term', [divergence.forward_kl, divergence.jensen_shannon])
def test_a_bucket_of_one_token_is_that_token_and_fewer_tokens_never_raise_the_divergence(make_term):
  with jax.enable_x64(True):
    pair = random_pair()
    whole, values = make_term().between(*pair), []
    for k in (1, 4, 8, 9, 50):
      value, slope = jax.value_and_grad(
        lambda x, k=k: make_term(top_k=k).between(x, pair[1]).sum()
      )(pair[0])
      values.append(make_term(top_k=k).between(*pair))
      assert np.isfinite(value) and np.isfinite(slope).all()
    for same in values[2:]:  # eight tokens and a bucket of one are all nine
      np.testing.assert_allclose(same, whole, rtol=1e-12)
    assert (values[0] <= values[1] + 1e-12).all() and (values[1] <= whole + 1e-12).all()
    assert (values[0] < whole - 1e-3).any()


def test_between_its_limits_the_divergence_becomes_the_kl_of_either_side():
  with jax.enable_x64(True):
    pair = random_pair()
    for beta, make_term in ((1e-6, divergence.forward_kl), (1 - 1e-6, divergence.reverse_kl)):
      near = divergence.jensen_shannon(beta=beta).between(*pair) / 1e-6
      np.testing.assert_allclose(near, make_term().between(*pair), rtol=1e-3)
    most = divergence.jensen_shannon(beta=0.5).between(*[60 * x for x in pair])
    assert (most <= np.log(2) + 1e-9).all()


def test_a_bucket_of_nearly_no_probability_has_its_own_and_not_what_rounding_leaves():
  logp = jax.nn.log_softmax(jnp.array([[30.0, 1.0, 0.0, -1.0]]))
  found = divergence._buckets(logp, jnp.array([[0, 1]]))[0, -1]
  np.testing.assert_allclose(found, jnp.logaddexp(0.0, -1.0) - 30, rtol=1e-5)
  slope = jax.grad(lambda x: divergence._buckets(x, jnp.array([[0, 1]]))[0, -1])(logp)
  assert np.isfinite(slope).all()


@pytest.mark.parametrize(
  'make_term, message',
  [
    (lambda: divergence.jensen_shannon(beta=0.0), 'beta=0.0 must be above 0 and below 1'),
    (lambda: divergence.jensen_shannon(beta=1.0), 'beta=1.0 must be above 0 and below 1'),
    (lambda: divergence.forward_kl(top_k=-1), 'top_k=-1 must be at least 0'),
    (lambda: divergence.reverse_kl(reward_weight=-0.5), 'reward_weight=-0.5 must be at least 0'),
  ],
)
def test_settings_out_of_range_are_refused(make_term, message):
  with pytest.raises(UserError, match=f'config.objective.divergence.{message}'):
    make_term()
