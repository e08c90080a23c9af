"""What the update keeps beside the weights: averages, windows, noise; against definitions, and on any mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_step import MODEL, G, assert_close, config, graded, gradient_of, spec

from jaxrl_llm import objective
from jaxrl_llm.checkpointing import checkpoint
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import empty_records, inner_steps, leverage, microbatch
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import decoder
from jaxrl_llm.types import UserError
from tests.learner.test_step_methods import PLAIN, chosen, off_policy, updated


def averaged(decay, **more):
  return chosen(old_policy=dict(fn='average', decay=decay), **more)


def trained(p, batch, count):
  """The states after each of `count` updates on the same batch, the first being the start."""
  update, state = programs.compile_update(p), train_state.init_state(p, decoder.init(MODEL, 0))
  history = [jax.device_get(state)]
  for _ in range(count):
    state, _ = update(state, batch)
    history.append(jax.device_get(state))
  return history


def assert_equal(first, second):
  assert jax.tree.structure(first) == jax.tree.structure(second)
  jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.fixture(scope='module')
def batch():
  return off_policy(graded(spec(), decoder.init(MODEL, 0)))


@pytest.mark.parametrize('decay', [0.0, 0.7])
def test_the_average_is_that_of_all_weights_so_far(batch, decay):
  """Σ decay^{n−i}·θ_i / Σ decay^{n−i} after every step, so also after the first; decay 0: the weights themselves."""
  p = spec(objective=averaged(decay))
  assert train_state.init_state(spec(), decoder.init(MODEL, 0)).average is None
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
  apart = jax.tree.map(lambda a, b: np.abs(a - b).max(), history[3].params, history[0].params)
  assert max(jax.tree.leaves(apart)) > 1e-3


def test_the_reference_moves_toward_the_policy_after_every_second_step(batch):
  how = dict(fn='refreshed', every=2, mixup=0.25)
  history = trained(spec(objective=chosen(kl=dict(fn='k3'), reference=how)), batch, 3)
  start, moved = history[0].params, history[2].params
  want = jax.tree.map(lambda x, y: 0.75 * x + 0.25 * y, start, moved)
  assert_equal(history[1].reference, start)
  assert_close(history[2].reference, want, 1e-6)
  assert_equal(history[3].reference, history[2].reference)
  apart = jax.tree.map(lambda a, b: np.abs(a - b).max(), history[2].reference, start)
  assert max(jax.tree.leaves(apart)) > 1e-4


def test_the_reference_is_replaced_by_the_policy_once(batch):
  how = dict(fn='reincarnated', after=2)
  history = trained(spec(objective=chosen(kl=dict(fn='k3'), reference=how)), batch, 4)
  assert_equal(history[1].reference, history[0].params)
  assert_equal(history[2].reference, history[2].params)
  assert_equal(history[4].reference, history[2].reference)
  apart = jax.tree.map(lambda a, b: np.abs(a - b).max(), history[4].params, history[2].params)
  assert max(jax.tree.leaves(apart)) > 1e-4


def test_a_reference_cannot_be_replaced_before_the_first_step():
  with pytest.raises(
    UserError, match='config.objective.reference.after=0 must be an optimizer step'
  ):
    spec(objective=chosen(kl=dict(fn='k3'), reference=dict(fn='reincarnated', after=0)))


def test_a_refreshed_reference_needs_a_use():
  with pytest.raises(UserError, match="reference.fn='refreshed' has no use"):
    spec(objective=chosen(reference=dict(fn='refreshed')))


def test_ratios_are_to_the_average_of_before_this_minibatch(batch):
  """Against the definition: its log-probs scored apart, the gradient's coefficients made of them."""
  p = spec(objective=averaged(0.7, importance_correction=dict(fn='token'), trust_region=PLAIN))
  states = trained(p, batch, 2)
  state = jax.tree.map(jnp.asarray, states[1])
  tokens_BxT = jnp.asarray(batch.rollout.tokens_BxT)
  score = lambda q: microbatch.log_probs(p, q, batch.prompts, tokens_BxT)[0]  # noqa: E731
  target = objective.targets(p.objective.method, batch, G).with_arrays(old_BxT=score(state.average))
  c_BxT, _ = objective.coefficients(p.objective.method, target, score(state.params))
  masked = np.asarray(target.mask_BxT) > 0
  want = jax.grad(lambda q: -jnp.where(masked, c_BxT * score(q), 0).sum())(state.params)
  _, metrics = programs.compile_update(p)(
    train_state.init_state(p, state.params)._replace(average=state.average, step=state.step), batch
  )
  norm = float(jnp.sqrt(sum((x**2).sum() for x in jax.tree.leaves(want))))
  np.testing.assert_allclose(float(metrics['actor/grad_norm']), norm, rtol=1e-4)


def test_the_exact_old_policy_is_the_interpolated_one_for_a_fresh_batch(batch):
  """All tokens by the weights of step 0: two minibatches of both methods are the same, one without a pass."""
  fresh = batch._replace(rollout=graded(spec(), decoder.init(MODEL, 0)).rollout)
  two = dict(learner=dict(minibatches=2))
  exact, interpolated = (
    updated(
      spec(objective=chosen(old_policy=dict(fn=fn), importance_correction=dict(fn='token')), **two),
      fresh,
      decoder.init(MODEL, 0),
    )[0]
    for fn in ('before', 'interpolated')
  )
  assert int(exact.step) == 2
  assert_close(exact.params, interpolated.params, 1e-5)


def test_the_age_of_tokens_is_counted_from_the_present_step(batch):
  """After a step on it, the same batch is one old: α = 0 with one minibatch taken from it would be 1 with none."""
  p = spec(
    objective=chosen(
      old_policy=dict(fn='interpolated'), importance_correction=dict(fn='token'), trust_region=PLAIN
    )
  )
  params = decoder.init(MODEL, 0)
  state = train_state.init_state(p, params)._replace(step=jnp.int32(3))
  old = batch._replace(
    rollout=batch.rollout._replace(version_BxT=np.full_like(batch.rollout.version_BxT, 1))
  )
  _, stale = programs.compile_update(p)(state, old)
  # α = 1: r = 1, ρ = π/π_b: as exact log-probs before the only minibatch.
  exact = spec(
    objective=chosen(
      old_policy=dict(fn='before'), importance_correction=dict(fn='token'), trust_region=PLAIN
    )
  )
  _, want = updated(exact, batch, params)
  np.testing.assert_allclose(float(stale['actor/grad_norm']), want['actor/grad_norm'], rtol=1e-4)


def looped(**settings):
  c = config().optimizer
  c.outer = dict(fn='slow_fast', **settings)
  return dict(optimizer=c)


def noisy(sigma=1e-6, **more):
  return chosen(activation_noise=dict(fn='layerwise', sigma=sigma, learning_rate=0.1), **more)


def everything():
  """All that the update may keep, and the norms of rows, in one program."""
  method = noisy(
    1e-3,
    advantage=dict(fn='least_variance'),
    ratio=dict(fn='direct_product'),
    importance_correction=dict(fn='second_moment_mask', budget=100.0),
    old_policy=dict(fn='average', decay=0.7),
  )
  return dict(objective=method) | looped(fast_steps=1, alpha=0.5, window=2)


def on(devices, mesh, **changes):
  c = config(**changes)
  c.mesh.update(mesh)
  return make_spec(c, MODEL, (3, 7), sharding.make_mesh(c.mesh, jax.devices()[:devices]))


def test_eight_devices_agree_with_one_and_what_is_kept_comes_back_exactly(batch, tmp_path):
  """Layouts like those of the weights, a checkpoint bit for bit, and an empty batch that changes none of it."""
  mesh = dict(data=2, fsdp=2, tensor=2)
  single, many = on(1, dict(data=1, fsdp=1, tensor=1), **everything()), on(8, mesh, **everything())
  want = trained(single, batch, 1)[-1]
  state = train_state.init_state(many, decoder.init(MODEL, 0))
  update = programs.compile_update(many)
  state, _ = update(state, batch)
  after = jax.device_get(state)
  assert int(after.step) == 2 and int(after.inner_steps.observed) == 1
  assert_close(after, want, 1e-4)
  checkpoint.save(str(tmp_path), 1, state, {}, keep=1)
  got, _ = checkpoint.restore(str(tmp_path), 1, train_state.abstract_state(many))
  assert_equal(jax.device_get(got), after)
  kernel = lambda tree: tree['layers'][0]['q']['kernel'].sharding  # noqa: E731
  assert (
    kernel(got.average) == kernel(got.params) == kernel(train_state.abstract_state(many).params)
  )
  got, metrics = update(got, empty_records.empty_batch(many))
  assert_equal(jax.device_get(got), after)
  assert all(np.isfinite(float(v)) for v in metrics.values())


def test_state_that_no_method_needs_is_none():
  state = train_state.abstract_state(spec())
  assert state.average is state.inner_steps is state.activation_noise is None


def test_with_alpha_0_a_batch_takes_one_plain_step(batch):
  plain, slow = (trained(spec(**c), batch, 2)[-1] for c in ({}, looped(fast_steps=1, alpha=0.0)))
  assert int(slow.step) == 2
  assert_close(slow._replace(inner_steps=None), plain, 1e-7)


@pytest.mark.parametrize('alpha', [1.0, 0.3])
def test_fast_steps_are_interpolated_and_one_more_step_follows(batch, alpha):
  """Against K plain steps, the weights put back by hand, and one more: moments and counters run on."""
  p = spec()
  states = trained(p, batch, 2)
  back = jax.tree.map(lambda x, y: x + alpha * (y - x), states[0].params, states[2].params)
  state = jax.tree.map(jnp.asarray, states[2]._replace(params=back))
  want = jax.device_get(programs.compile_update(p)(state, batch)[0])
  got, metrics = updated(spec(**looped(fast_steps=2, alpha=alpha)), batch, decoder.init(MODEL, 0))
  assert int(got.step) == 3 and metrics['actor/fast_steps'] == 2
  assert_close(got._replace(inner_steps=None), want, 1e-6)
  if alpha == 1:
    assert_close(got.params, trained(p, batch, 3)[-1].params, 1e-6)


def test_reposition_is_exact_for_alpha_0_and_1():
  r = np.random.default_rng(0)
  x, y = r.normal(size=9).astype(np.float32), r.normal(size=9).astype(np.float32)
  full, half = inner_steps.slow_fast(alpha=1.0), inner_steps.slow_fast(alpha=0.7)
  np.testing.assert_array_equal(full.reposition(x, y), y)
  np.testing.assert_array_equal(half.reposition(x, x), x)
  np.testing.assert_allclose(half.reposition(x, y), 0.3 * x + 0.7 * y, atol=1e-6)


def test_fast_steps_end_once_the_entropy_rises_above_its_window():
  """Against numpy: the mean and std over n of the window that ends with a value; a fall ends nothing."""
  rule = inner_steps.slow_fast(fast_steps=4, window=4, threshold=1.2)
  entropy = [1.0, 1.2, 0.9, 1.1, 1.0, 0.4, 1.6, 1.0, 1.0]
  state, ends = rule.init(), []
  for index, value in enumerate(entropy):
    last = np.array(entropy[max(index - 3, 0) : index + 1])
    ends.append(len(last) == 4 and value - last.mean() >= 1.2 * last.std())
    assert int(rule.steps(state)) == (0 if any(ends[:-1]) else 4)
    state = rule.observe(state, jnp.float32(value), jnp.bool_(True))
    nothing = rule.observe(state, jnp.float32(99), jnp.bool_(False))
    assert_equal(jax.device_get(nothing), jax.device_get(state))
  assert ends.index(True) == 6 and int(rule.steps(state)) == 0
  assert int(inner_steps.slow_fast(alpha=0.0).steps(inner_steps.slow_fast(alpha=0.0).init())) == 0


def test_the_window_holds_the_entropy_of_the_outer_step(batch):
  p = spec(**looped(fast_steps=2, alpha=0.5, window=3))
  first = updated(spec(), batch, decoder.init(MODEL, 0))[1]['actor/entropy']
  state, metrics = updated(p, batch, decoder.init(MODEL, 0))
  np.testing.assert_allclose(
    state.inner_steps.entropy_W, [metrics['actor/entropy'], 0, 0], rtol=1e-6
  )
  assert abs(metrics['actor/entropy'] - first) > 1e-6


def test_the_schedule_lasts_for_fast_and_slow_steps():
  c = looped(fast_steps=3)['optimizer']
  c.decay = 'linear'
  p = spec(optimizer=c, steps=5)
  np.testing.assert_allclose(p.update.schedule(10) / p.update.schedule(0), 0.5)


@pytest.mark.parametrize(
  'settings, message',
  [
    (dict(fast_steps=0), 'fast_steps=0 must be at least 1'),
    (dict(alpha=1.1), 'alpha=1.1 must be from 0 to 1'),
    (dict(window=1), 'window=1 must be at least 2'),
    (dict(threshold=0.0), 'threshold=0.0 must be above 0'),
  ],
)
def test_settings_out_of_range_are_refused(settings, message):
  with pytest.raises(UserError, match=f'config.optimizer.outer.{message}'):
    spec(**looped(**settings))


def forward(p, params, batch, noise=None):
  """Log-probabilities of packed rows, without a gradient."""
  packed = microbatch.pack(p, jax.tree.map(jnp.asarray, batch))
  return microbatch.all_log_probs(p, params, packed, noise)[0]


def test_noise_of_sigma_0_equals_the_clean_forward_pass(batch):
  """Operation by operation: programs with and without noise may be fused differently, in the last digit."""
  p, params = spec(), decoder.init(MODEL, 0)
  first = microbatch.take_microbatch(p, microbatch.pack(p, jax.tree.map(jnp.asarray, batch)), 0)
  run = lambda *noise: microbatch.packed_hidden_states(p, params, first, noise or None)  # noqa: E731
  clean, key = run(), jax.random.key(3)
  np.testing.assert_array_equal(run(jnp.zeros(MODEL.layers), key), clean)
  loud = jnp.full(MODEL.layers, 0.1)
  different = [clean, run(loud, key), run(jnp.array([0.0, 0.1]), key), run(loud, jax.random.key(4))]
  for index, one in enumerate(different):
    for other in different[:index]:
      assert float(jnp.abs(one - other).max()) > 1e-3


def test_both_ways_to_run_the_layers_add_the_same_noise(batch):
  params, noise = decoder.init(MODEL, 0), (jnp.array([0.1, 0.3]), jax.random.key(3))
  first, second = (
    forward(spec(learner=dict(remat=r)), params, batch, noise) for r in (False, True)
  )
  np.testing.assert_allclose(first, second, atol=1e-5)


def test_the_gradient_of_sigma_agrees_with_finite_differences(batch):
  """Of the surrogate's own value: log σ is learned through log π, with the coefficients held."""
  p = spec(objective=noisy(0.1, ratio=dict(fn='direct'), trust_region=PLAIN))
  params = decoder.init(MODEL, 0)
  state = train_state.init_state(p, params)
  key = jax.random.fold_in(jax.random.key(state.seed), state.step)
  target = objective.targets(p.objective.method, batch, G)
  masked = np.asarray(target.mask_BxT) > 0
  start = jnp.log(jnp.array([0.1, 0.2]))
  logp = jax.jit(lambda log_sigma: forward(p, params, batch, (jnp.exp(log_sigma), key)))
  c_BxT, _ = objective.coefficients(p.objective.method, target, logp(start))
  loss = lambda log_sigma: -float(jnp.where(masked, c_BxT * logp(log_sigma), 0).sum())  # noqa: E731
  noise = state.activation_noise._replace(log_sigma_L=start)
  got = gradient_of(p, batch, state._replace(activation_noise=noise))[0].log_sigma_L
  for layer in range(MODEL.layers):
    nudge = jnp.zeros(MODEL.layers).at[layer].set(0.02)
    slope = (loss(start + nudge) - loss(start - nudge)) / 0.04
    np.testing.assert_allclose(got[layer], slope, rtol=2e-2, atol=1e-4)
  assert float(jnp.abs(got).min()) > 1e-4


def test_an_update_moves_sigma_by_its_own_rate_and_is_deterministic(batch):
  p, params = spec(objective=noisy(0.05, ratio=dict(fn='direct'))), decoder.init(MODEL, 0)
  update = programs.compile_update(p)
  run = lambda step: jax.device_get(  # noqa: E731
    update(train_state.init_state(p, params)._replace(step=jnp.int32(step)), batch)
  )
  (first, metrics), (again, _), (_, later) = run(0), run(0), run(1)
  assert_equal(first, again)
  moved = first.activation_noise.log_sigma_L - np.log(0.05)
  np.testing.assert_allclose(np.abs(moved), 0.1, rtol=1e-3)  # the first step of Adam
  assert abs(later['actor/grad_norm'] / metrics['actor/grad_norm'] - 1) > 1e-4  # other noise


def test_leverage_is_the_norm_of_the_rows_own_gradient(batch):
  """Each row's answer differentiated apart; an empty row pulls nowhere."""
  p, params = spec(), decoder.init(MODEL, 0)
  length_B = np.array(batch.rollout.length_B)
  length_B[3] = 0
  batch = batch._replace(rollout=batch.rollout._replace(length_B=length_B))
  got = jax.jit(lambda q: leverage.row_leverage(p, q, jax.tree.map(jnp.asarray, batch)))(params)
  assert float(got[3]) == -np.inf
  real = np.arange(batch.rollout.tokens_BxT.shape[1])[None] < length_B[:, None]
  tokens_BxT = jnp.asarray(batch.rollout.tokens_BxT)
  score = lambda q: microbatch.log_probs(p, q, batch.prompts, tokens_BxT)[0]  # noqa: E731
  answers = jax.jit(lambda q: jnp.where(real, score(q), 0).sum(1))
  jacobian = jax.jit(lambda q, b: jax.grad(lambda q: answers(q)[b])(q))
  log_w = answers(params) - np.where(real, batch.rollout.logp_BxT, 0).sum(1)
  for b in (0, 7, 14):
    norm = np.sqrt(sum(float((x**2).sum()) for x in jax.tree.leaves(jacobian(params, b))))
    np.testing.assert_allclose(float(got[b]), float(log_w[b]) + np.log(norm), atol=1e-4)
