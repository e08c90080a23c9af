"""What the update keeps beside the weights: averages, windows, noise; against definitions, and on any mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_step import MODEL, G, assert_close, config, graded, make_prompts, program
from test_step_methods import PLAIN, chosen, off_policy, updated

from jaxrl_llm import checkpoint, objective, shard
from jaxrl_llm import step as steps
from jaxrl_llm import update as updates
from jaxrl_llm.models import decoder
from jaxrl_llm.program import make_program


def averaged(decay, **more):
  return chosen(proximal=dict(fn='average', decay=decay), **more)


def trained(p, batch, count):
  """The states after each of `count` updates on the same batch, the first being the start."""
  update, state = steps.compile_update(p), steps.init_state(p, decoder.init(MODEL, 0))
  history = [jax.device_get(state)]
  for _ in range(count):
    state, _ = update(state, batch)
    history.append(jax.device_get(state))
  return history


def assert_equal(one, other):
  assert jax.tree.structure(one) == jax.tree.structure(other)
  jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.fixture(scope='module')
def batch():
  return off_policy(graded(program(), decoder.init(MODEL, 0)))


@pytest.mark.parametrize('decay', [0.0, 0.7])
def test_the_average_is_that_of_all_weights_so_far(batch, decay):
  """Σ decay^{n−i}·θ_i / Σ decay^{n−i} after every step, so also after the first; decay 0: the weights themselves."""
  p = program(objective=averaged(decay))
  assert steps.init_state(program(), decoder.init(MODEL, 0)).average is None
  history = trained(p, batch, 3)
  for n, state in enumerate(history):
    if not decay:
      assert_equal(state.average, state.params)
      continue
    share = decay ** np.arange(n, -1.0, -1)
    share /= share.sum()
    want = jax.tree.map(
      lambda *x: sum(w * y for w, y in zip(share, x, strict=True)),  # noqa: B023
      *[s.params for s in history[: n + 1]],
    )
    assert_close(state.average, want, 1e-6)
  apart = jax.tree.map(
    lambda a, b: float(jnp.abs(a - b).max()), history[3].params, want_of(history)
  )
  assert max(jax.tree.leaves(apart)) > 1e-3


def want_of(history):
  return history[0].params


def test_ratios_are_to_the_average_of_before_this_minibatch(batch):
  """Against the definition: its log-probs scored apart, the gradient's coefficients made of them."""
  p = program(objective=averaged(0.7, correction=dict(fn='token'), trust=PLAIN))
  states = trained(p, batch, 2)
  state = jax.tree.map(jnp.asarray, states[1])
  score = lambda q: updates.rescore(p, q, batch.prompts, jnp.asarray(batch.rollout.tokens_BxT))[0]  # noqa: E731
  target = objective.targets(p.method, batch, G)._replace(old_BxT=score(state.average))
  c_BxT, _ = objective.coefficients(p.method, target, score(state.params))
  seen = np.asarray(target.mask_BxT) > 0
  want = jax.grad(lambda q: -jnp.where(seen, c_BxT * score(q), 0).sum())(state.params)
  _, metrics = steps.compile_update(p)(
    steps.init_state(p, state.params)._replace(average=state.average, step=state.step), batch
  )
  norm = float(jnp.sqrt(sum((x**2).sum() for x in jax.tree.leaves(want))))
  np.testing.assert_allclose(float(metrics['actor/grad_norm']), norm, rtol=1e-4)


def test_the_exact_old_policy_is_the_interpolated_one_for_a_fresh_batch(batch):
  """All tokens by the weights of step 0: two minibatches of both methods are the same, one without a pass."""
  fresh = batch._replace(rollout=graded(program(), decoder.init(MODEL, 0)).rollout)
  two = dict(updates_per_rollout=2)
  exact, interpolated = (
    updated(
      program(objective=chosen(proximal=dict(fn=fn), correction=dict(fn='token')), **two),
      fresh,
      decoder.init(MODEL, 0),
    )[0]
    for fn in ('before', 'interpolated')
  )
  assert int(exact.step) == 2
  assert_close(exact.params, interpolated.params, 1e-5)


def test_the_age_of_tokens_is_counted_from_the_present_step(batch):
  """After a step on it, the same batch is one old: α = 0 with one minibatch taken from it would be 1 with none."""
  p = program(
    objective=chosen(proximal=dict(fn='interpolated'), correction=dict(fn='token'), trust=PLAIN)
  )
  params = decoder.init(MODEL, 0)
  state = steps.init_state(p, params)._replace(step=jnp.int32(3))
  old = batch._replace(
    rollout=batch.rollout._replace(version_BxT=np.full_like(batch.rollout.version_BxT, 1))
  )
  _, stale = steps.compile_update(p)(state, old)
  # α = 1: r = 1, ρ = π/π_b: as exact log-probs before the only minibatch.
  exact = program(
    objective=chosen(proximal=dict(fn='before'), correction=dict(fn='token'), trust=PLAIN)
  )
  _, want = updated(exact, batch, params)
  np.testing.assert_allclose(float(stale['actor/grad_norm']), want['actor/grad_norm'], rtol=1e-4)


KEPT = {'average': dict(objective=averaged(0.7, correction=dict(fn='token_truncate', high=100.0)))}


def on(devices, mesh, changes):
  c = config(**changes)
  if mesh:
    c.mesh = mesh
  return make_program(c, MODEL, (3, 7), shard.make_mesh(c.mesh, jax.devices()[:devices]))


EIGHT = dict(data=2, fsdp=2, tensor=2)


@pytest.mark.parametrize('name', KEPT)
def test_one_device_and_eight_agree(batch, name):
  one, many = (
    trained(on(n, mesh, KEPT[name]), batch, 2)[-1] for n, mesh in ((1, None), (8, EIGHT))
  )
  assert_close(one, many, 1e-4)


@pytest.mark.parametrize('name', KEPT)
def test_what_is_kept_is_laid_out_like_weights_and_restored_exactly(batch, name, tmp_path):
  p = on(8, EIGHT, KEPT[name])
  state = steps.init_state(p, decoder.init(MODEL, 0))
  state, _ = steps.compile_update(p)(state, batch)
  checkpoint.save(str(tmp_path), 1, state, {}, keep=1)
  got, _ = checkpoint.restore(str(tmp_path), 1, steps.abstract_state(p))
  assert_equal(jax.device_get(got), jax.device_get(state))
  for x, want in zip(jax.tree.leaves(got), jax.tree.leaves(state), strict=True):
    assert x.sharding.is_equivalent_to(want.sharding, x.ndim)
  if state.average is not None:
    kernel = lambda tree: tree['layers'][0]['q']['kernel'].sharding  # noqa: E731
    assert kernel(state.average) == kernel(state.params)


@pytest.mark.parametrize('name', KEPT)
def test_an_empty_batch_changes_nothing(name):
  p = program(**KEPT[name])
  state = steps.init_state(p, decoder.init(MODEL, 0))
  before = jax.device_get(state)
  after, metrics = steps.compile_update(p)(state, steps.empty_batch(p))
  assert_equal(jax.device_get(after), before)
  assert all(np.isfinite(float(v)) for v in metrics.values())
