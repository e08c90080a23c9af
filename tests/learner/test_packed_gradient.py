"""The update of packed rows has the gradient of plain passes over whole rows, for every method."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_table import METHODS

from jaxrl_llm import objective
from jaxrl_llm.learner import microbatch, minibatch
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.update import update
from jaxrl_llm.models import logprob
from tests.learner import plain_gradient
from tests.learner.packed_jobs import (
  DEEP,
  MODEL,
  SEVERAL,
  B,
  G,
  T,
  make,
  make_batch,
  make_state,
  near_policy,
  packed,
  weights,
  with_method,
)


@pytest.fixture(scope='module')
def job():
  return make_batch(), weights(0)


SEED = 1


class Passes:
  """Passes over the model compiled once for all methods; what is a method's own is computed operation by operation."""

  def __init__(self, spec, params):
    self.spec, self.params = spec, params
    self.state = train_state.init_state(spec, params)._replace(step=jnp.int32(5))
    compiled = lambda fn, **more: jax.jit(functools.partial(fn, spec), **more)  # noqa: E731
    self.pack, self.take = compiled(microbatch.pack), compiled(microbatch.take_microbatch)
    self.rows = jax.jit(lambda one, arrays: one.take_rows(jax.tree.map(lambda x: x[None], arrays)))
    self.log_probs = compiled(
      microbatch.packed_log_probs, static_argnames=('top', 'entropy_gradient', 'collision')
    )
    self.all_log_probs = compiled(microbatch.all_log_probs, static_argnames=('top', 'collision'))
    self.scores = compiled(plain_gradient.scores)
    self.slope = jax.jit(
      jax.grad(lambda q, batch, c_BxT: plain_gradient.minus_sum(c_BxT, self.scores(q, batch).logp))
    )

  def accumulate(self, _, packed, arrays, add, start):
    for number in range(int(packed.microbatches)):
      one = self.take(packed, number)
      start = add(start, one, self.rows(one, arrays))
    return start

  def install(self, monkeypatch):
    """In place of the functions that they compile."""
    rest = lambda fn: lambda spec, *rest, **more: fn(*rest, **more)  # noqa: E731
    monkeypatch.setattr(minibatch, 'accumulate', self.accumulate)
    for name, fn in dict(
      pack=self.pack, packed_log_probs=self.log_probs, all_log_probs=self.all_log_probs
    ).items():
      monkeypatch.setattr(minibatch, name, rest(fn))
    monkeypatch.setattr(plain_gradient, 'scores', rest(self.scores))

  @functools.cache  # noqa: B019
  def batch(self):
    """Ratios are near 1. No quantile falls among equal entropies, as tokens have that follow the same prompt."""
    batch = jax.tree.map(jnp.asarray, make_batch(SEED))
    return near_policy(batch, self.scores(self.params, batch).logp)

  def compare(self, batch, limit, **choices):
    """Asserts that the gradients agree; (method, targets, coefficients, sums, metrics of the update)."""
    spec = with_method(self.spec, **choices)
    method, state = spec.objective.method, self.state
    near = jax.tree.map(lambda x, y: x + 0.1 * y, self.params, weights(7, spec.model.config))
    state = state._replace(average=near, reference=near)
    r, signal = np.random.default_rng(3), None
    if method.auxiliary_model is not None:
      signal = jnp.asarray(0.3 * r.normal(size=(B, T)), batch.rollout.logp_BxT.dtype)
    inputs = minibatch.MinibatchInputs(jnp.int32(5), signal=signal)
    scored = self.scores(self.params, batch)
    target = plain_gradient.targets(spec, state, batch, scored, inputs)
    c_BxT, sums = objective.coefficients(method, target, *scored)
    if method.needs_old and not method.needs_average:
      inputs = inputs._replace(old=self.all_log_probs(self.params, self.pack(batch))[0])
    after, metrics = minibatch.minibatch_step(spec, state, batch, inputs)
    want = self.slope(self.params, batch, c_BxT)
    assert plain_gradient.distance(after.opt_state, want) < limit
    return method, target, np.asarray(c_BxT), sums, metrics


@pytest.fixture(scope='module')
def passes(job):
  return Passes(plain_gradient.recording(make(), SEVERAL), job[1])


@pytest.mark.parametrize('name', METHODS)
def test_every_method_has_the_gradient_of_whole_rows(name, passes, monkeypatch):
  """Half of the groups have no variance, and statistics of a minibatch count them as they always did."""
  passes.install(monkeypatch)
  batch = passes.batch()
  method, target, c_BxT, sums, metrics = passes.compare(batch, 1e-5, **METHODS[name].settings)

  # Rows are left out where they have no coefficient, and never where they have one.
  length_B = np.asarray(batch.rollout.length_B)
  tokens, trained = (c_BxT != 0).any(1) @ length_B, metrics['training/trained_tokens']
  may_learn = np.asarray((target.advantage_BxT != 0) & (target.mask_BxT > 0)).any(1)
  if method.learns_without_advantage:
    may_learn = length_B > 0
  assert trained == (tokens if method.needs_rows else may_learn @ length_B) >= tokens > 0
  for key in ('pg_loss', 'kl_loss'):
    np.testing.assert_allclose(metrics[f'actor/{key}'], sums[key], rtol=2e-4, atol=1e-6)
  assert 0 <= metrics['actor/pg_clipfrac'] <= 1 and 0 <= metrics['actor/rejected_frac'] <= 1


@pytest.fixture
def float64(monkeypatch):
  """All that is computed in float32 is computed in float64."""
  with jax.enable_x64(True):
    monkeypatch.setattr(jnp, 'float32', jnp.float64)
    yield


@functools.cache
def wide_passes():
  model = dataclasses.replace(MODEL, vocab=21, **DEEP)
  spec = plain_gradient.recording(make(model), SEVERAL)
  spec = spec._replace(model=spec.model._replace(dtype='float64'))
  return Passes(spec, jax.tree.map(widened, weights(0, model)))


def widened(x):
  return jnp.asarray(x, jnp.float64) if np.asarray(x).dtype.kind == 'f' else jnp.asarray(x)


@pytest.mark.parametrize('name', ['grpo', 'dapo', 'gspo', 'k3', 'm2po_mask'])
def test_in_float64_the_gradients_agree_to_ten_digits(name, float64, monkeypatch):
  wide_passes().install(monkeypatch)
  batch = jax.tree.map(widened, wide_passes().batch())
  _, _, c_BxT, *_ = wide_passes().compare(batch, 1e-10, **METHODS[name].settings)
  assert c_BxT.dtype == np.float64


def test_a_minibatch_without_variance_needs_no_pass_and_a_step_of_zero_gradient(job, passes):
  batch, params = job
  spec = with_method(make(), **METHODS['dapo'].settings)
  run = jax.jit(functools.partial(update, spec))
  state, _ = run(train_state.init_state(spec, params), batch)
  counts = {}
  for flat in (False, True):
    if flat:
      ones_B = np.ones(B, np.float32)
      batch = batch._replace(reward_B=ones_B, correct_B=ones_B)
    target = objective.targets(spec.objective.method, batch, G)
    learned_B = minibatch.learned_rows(spec, batch, target)
    arrays = jax.tree.map(jnp.asarray, batch)
    pack = lambda *rows, arrays=arrays: passes.pack(arrays, *rows)  # noqa: E731
    counts[flat] = [int(pack(*rows).microbatches) for rows in ((), (learned_B,))]
  assert counts[False][0] > counts[False][1] > 0 and counts[True][1] == 0 < counts[True][0]

  after, metrics = run(state, batch)
  zeros = jax.tree.map(jnp.zeros_like, state.params)
  updates, opt_state = jax.jit(spec.update.optimizer.update)(zeros, state.opt_state, state.params)
  moved = jax.tree.map(jnp.add, state.params, updates)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-9)
  jax.tree.map(close, (after.params, after.opt_state), (moved, opt_state))
  assert int(after.step) == int(state.step) + 1 and int(after.skipped) == 0
  assert plain_gradient.distance(after.params, state.params) > 1e-5, 'moments move the weights'
  assert all(np.isfinite(v) for v in metrics.values()) and metrics['actor/grad_norm'] == 0
  assert metrics['training/trained_tokens'] == 0


@pytest.mark.parametrize('name', ['grpo', 'm2po_mask'])
def test_a_loop_of_inner_steps_observes_all_rows(name, job, passes):
  batch, params = job
  spec = make(optimizer=dict(outer=dict(fn='slow_fast', fast_steps=1)))
  spec = with_method(plain_gradient.recording(spec, SEVERAL), **METHODS[name].settings)
  state = make_state(spec, params)
  _, metrics = packed(spec, state, batch)
  real_BxT = np.arange(T) < batch.rollout.length_B[:, None]
  want = np.asarray(passes.scores(params, batch).entropy)[real_BxT].mean()
  np.testing.assert_allclose(metrics['actor/entropy'], want, rtol=1e-5)


def test_head_chunks_that_are_skipped_change_nothing():
  """Values and gradients of columns in use are those of a pass over all; from the next chunk on all are 0."""
  r = np.random.default_rng(0)
  params, hidden = weights(0), r.normal(size=(2, 300, 16)).astype(np.float32)
  targets, c = r.integers(0, 20, (2, 300)), r.normal(size=(2, 300)).astype(np.float32)

  @jax.jit
  def run(count, used):
    in_use = jnp.arange(300) < count

    def loss(params, hidden):
      found = logprob.token_logp(
        MODEL, params, hidden, targets, temperature=0.7, chunk_tokens=200, top=5, used=used
      )
      return -jnp.where(in_use, c * found[0], 0.0).sum(), found

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, hidden)

  for used in (0, 1, 99, 100, 101, 300):
    (want, whole), (got, part) = run(used, None), run(used, used)
    assert plain_gradient.distance((1.0, got), (1.0, want)) < 1e-6
    for x, y in zip(whole, part, strict=True):
      np.testing.assert_allclose(x[:, :used], y[:, :used], rtol=1e-5)
      assert x.all() and y[:, used:].all() == (used == 300)
      assert ((y == 0) | (np.abs(x - y) < 1e-5)).all()
