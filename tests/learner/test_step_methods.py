"""Methods that need more than one pass, in the compiled update: old log-probs, whole minibatches, a reference."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_step import MODEL, G, P, assert_close, config, graded, in_bins, spec

from jaxrl_llm import objective
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import empty_records, microbatch
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import decoder
from jaxrl_llm.replay import reuse
from jaxrl_llm.types import UserError

PLAIN = dict(fn='none')


def chosen(**changes):
  c = config().objective
  for name, value in changes.items():
    c[name] = value
  return c


def off_policy(batch, seed=0):
  """The same rollouts, said to be sampled by another policy, with rewards that are all different."""
  r = np.random.default_rng(seed)
  logp_BxT = batch.rollout.logp_BxT + 0.3 * r.normal(size=batch.rollout.logp_BxT.shape)
  rollout = batch.rollout._replace(logp_BxT=logp_BxT.astype(np.float32))
  return batch._replace(rollout=rollout, reward_B=r.random(P * G).astype(np.float32))


def updated(p, batch, params):
  """The parameters after one compiled update, and its metrics."""
  state, metrics = programs.compile_update(p)(train_state.init_state(p, params), batch)
  return jax.device_get(state), {k: float(v) for k, v in metrics.items()}


def test_log_probs_of_microbatches_of_any_size_are_in_the_order_of_rows():
  params = decoder.init(MODEL, 0)
  batch = graded(spec(), params)
  tokens_BxT = jnp.asarray(batch.rollout.tokens_BxT)
  real = np.arange(tokens_BxT.shape[1])[None] < batch.rollout.length_B[:, None]
  want = microbatch.log_probs(spec(), params, batch.prompts, tokens_BxT)
  batch = jax.tree.map(jnp.asarray, batch)
  for bins in (1, 2, 3):
    cut = in_bins(spec(), bins)
    got = microbatch.all_log_probs(cut, params, microbatch.pack(cut, batch))
    for x, y in zip(got, want, strict=True):
      np.testing.assert_allclose(np.where(real, x, 0), np.where(real, y, 0), atol=1e-5)


WHOLE = dict(trust_region=dict(fn='second_moment_mask', budget=0.01), kl=dict(fn='k3', coef=0.1))


def test_coefficients_of_a_minibatch_are_the_same_for_microbatches_of_any_size():
  """Against the definition: coefficients from all log-probs at once, then the gradient of −Σ c·log π."""
  params = decoder.init(MODEL, 0)
  batch = off_policy(graded(spec(), params))
  cut = in_bins(spec(objective=chosen(**WHOLE)), 1)
  assert cut.objective.method.needs_rows and not cut.objective.method.needs_old

  def score(q):
    return microbatch.log_probs(cut, q, batch.prompts, jnp.asarray(batch.rollout.tokens_BxT))[0]

  target = objective.targets(cut.objective.method, batch, G).with_arrays(
    reference_BxT=score(params)
  )
  c_BxT, sums = objective.coefficients(cut.objective.method, target, score(params))
  assert 0 < float(sums['clipped'])
  masked = np.asarray(target.mask_BxT) > 0
  want = jax.grad(lambda q: -jnp.where(masked, c_BxT * score(q), 0).sum())(params)
  state, metrics = updated(cut, batch, params)
  norm = float(jnp.sqrt(sum((x**2).sum() for x in jax.tree.leaves(want))))
  np.testing.assert_allclose(metrics['actor/grad_norm'], norm, rtol=1e-4)
  counted = masked.sum()
  np.testing.assert_allclose(
    metrics['actor/pg_clipfrac'], float(sums['clipped']) / counted, rtol=1e-6
  )
  np.testing.assert_allclose(metrics['actor/pg_loss'], float(sums['pg_loss']), atol=1e-5)


def test_old_log_probs_are_those_before_the_first_of_several_minibatches():
  """r is 1 in the first of two minibatches, row for row, and moves in the second; ρ is what was made up."""
  params = decoder.init(MODEL, 0)
  batch = off_policy(graded(spec(), params))
  tight = dict(
    importance_correction=dict(fn='token_truncate', high=1e6),
    trust_region=dict(fn='clip', low=1e-3, high=1e-3),
  )
  once = spec(objective=chosen(**tight))
  assert once.objective.method.needs_old and not once.objective.method.needs_rows
  _, metrics = updated(once, batch, params)
  assert metrics['actor/pg_clipfrac'] == 0
  twice = in_bins(spec(objective=chosen(**tight), learner=dict(minibatches=2)), 1)
  state, metrics = updated(twice, batch, params)
  assert int(state.step) == 2 and metrics['actor/pg_clipfrac'] > 0.05
  # The product of both corrections is π/π_b, whatever lies between.
  free = dict(trust_region=PLAIN, importance_correction=dict(fn='token'))
  direct = dict(trust_region=PLAIN, ratio=dict(fn='direct'))
  both = [updated(spec(objective=chosen(**c)), batch, params)[1] for c in (free, direct)]
  np.testing.assert_allclose(both[0]['actor/grad_norm'], both[1]['actor/grad_norm'], rtol=1e-4)


def test_a_reference_never_moves_and_exists_only_for_methods_that_need_it():
  params = decoder.init(MODEL, 0)
  plain = spec()
  batch = graded(plain, params)
  assert train_state.init_state(plain, params).reference is None
  p = spec(objective=chosen(kl=dict(fn='k3', coef=0.1)))
  update, state = programs.compile_update(p), train_state.init_state(p, params)
  state, first = update(state, batch)
  state, second = update(state, batch)
  assert abs(float(first['actor/kl_loss'])) < 1e-6 < 1e-4 < float(second['actor/kl_loss'])
  assert_close(state.reference, params, 0)
  with pytest.raises(AssertionError):
    assert_close(state.params, params, 1e-6)
  strong = spec(objective=chosen(kl=dict(fn='k2', coef=1e3)))
  state, update = train_state.init_state(strong, params), programs.compile_update(strong)
  for _ in range(8):
    state, metrics = update(state, batch)
  assert float(metrics['actor/kl_loss']) < float(second['actor/kl_loss'])


@pytest.mark.parametrize(
  'mesh',
  [
    dict(data=2, fsdp=1, tensor=1),
    dict(data=1, fsdp=4, tensor=1),
    dict(data=1, fsdp=1, tensor=3),  # cuts 32 columns unevenly
    dict(data=2, fsdp=2, tensor=2),
  ],
)
def test_any_mesh_agrees_with_one_device_on_a_method_of_whole_batches(mesh):
  """Sorting, group sums and old log-probs across shards of rows."""
  params = decoder.init(MODEL, 0)
  c = config(
    objective=chosen(
      **WHOLE, importance_correction=dict(fn='token_truncate'), token_weighting=dict(fn='sharpen')
    )
  )
  single = make_spec(c, MODEL, (3, 7), sharding.make_mesh(c.mesh, jax.devices()[:1]))
  batch = off_policy(graded(single, params))
  c.mesh.update(mesh)
  devices = jax.devices()[: math.prod(mesh.values())]
  many = make_spec(c, MODEL, (3, 7), sharding.make_mesh(c.mesh, devices))
  (state, metrics), (state8, metrics8) = (updated(p, batch, params) for p in (single, many))
  for name, value in metrics.items():
    np.testing.assert_allclose(metrics8[name], value, atol=1e-4, rtol=1e-4, err_msg=name)
  assert_close(state.params, state8.params, 1e-4)


def test_the_effective_sample_size_scales_the_step_and_nothing_else():
  params = decoder.init(MODEL, 0)
  batch = off_policy(graded(spec(), params))
  vcpo = dict(ratio=dict(fn='direct_product'), trust_region=PLAIN)
  plain, plain_metrics = updated(spec(objective=chosen(**vcpo)), batch, params)
  p = spec(objective=chosen(**vcpo, lr_scale=dict(fn='effective_sample_size')))
  scaled, metrics = updated(p, batch, params)
  factor = metrics['actor/lr'] / plain_metrics['actor/lr']
  assert 0.1 < factor < 0.95
  moved = lambda state: jax.tree.map(jnp.subtract, state.params, params)  # noqa: E731
  assert_close(moved(scaled), jax.tree.map(lambda x: x * factor, moved(plain)), 1e-5)
  assert_close(scaled.opt_state, plain.opt_state, 1e-5)


def fast():
  """One fast step: two optimizer steps on a minibatch."""
  c = config().optimizer
  c.outer = dict(fn='slow_fast', fast_steps=1)
  return dict(optimizer=c)


@pytest.mark.parametrize(
  'how', [{}, dict(learner=dict(minibatches=2)), fast()], ids=['one', 'minibatches', 'fast']
)
def test_replayed_rows_are_learned_like_rows_sampled_now(how):
  """Two sampled and two marked rows a group, nothing known of how these came about: the update of four sampled."""
  params = decoder.init(MODEL, 0)
  batch = graded(spec(), params)
  want, want_metrics = updated(spec(**how), batch, params)
  replayed_B = np.tile(np.array([0, 0, 1, 1], np.float32), P)
  logp_BxT = np.where(replayed_B[:, None] > 0, -7.0, batch.rollout.logp_BxT).astype(np.float32)
  unknown = batch._replace(rollout=batch.rollout._replace(logp_BxT=logp_BxT))
  half = in_bins(spec(rollouts=2, replay=dict(reuse=dict(fn='successes', count=2)), **how), 1)
  assert empty_records.empty_batch(half).replayed_B.shape == (P * G,)
  state, metrics = updated(half, unknown._replace(replayed_B=replayed_B), params)
  assert_close(state.params, want.params, 1e-5)
  for name in ('actor/grad_norm', 'actor/ppo_kl', 'training/rollout_probs_diff_max'):
    np.testing.assert_allclose(metrics[name], want_metrics[name], rtol=1e-4, atol=1e-5)
  _, unmarked = updated(spec(**how), unknown, params)
  assert abs(unmarked['actor/grad_norm'] / want_metrics['actor/grad_norm'] - 1) > 0.05


def test_without_replay_a_batch_has_no_replayed_rows():
  off = spec(replay=dict(reuse=dict(fn='none')))
  assert off.layout.group == off.rollout.decode.rollouts == G
  assert empty_records.empty_batch(off).replayed_B is None
  with pytest.raises(UserError, match='config.replay.reuse.fn=.successes. does not go with'):
    spec(replay=dict(reuse=dict(fn='successes', count=1)), rollout=pruned())
  with pytest.raises(
    UserError,
    match='config.replay.reuse.fn=.successes. does not go with .*decoupled.* reads the sum',
  ):
    spec(
      replay=dict(reuse=dict(fn='successes', count=1)),
      objective=chosen(advantage=dict(fn='decoupled')),
    )


SLOTS = dict(
  prompts=2 * P, rollouts=G // 2, replay=dict(collect=dict(fn='dars', top_ups=1, most=2))
)


def in_halves(batch, order):
  """Each group in two slots of half its rows, in this order."""
  rows = (order[:, None] * (G // 2) + np.arange(G // 2)).ravel()
  prompts = jax.tree.map(lambda x: np.repeat(x, 2, axis=0)[order], batch.prompts)
  prompts = prompts._replace(part_P=np.tile([0, 1], P)[order].astype(np.int32))
  cut = jax.tree.map(lambda x: np.asarray(x)[rows], batch._replace(prompts=None))
  return cut._replace(prompts=prompts)


@pytest.mark.parametrize('mesh', [None, dict(data=2, fsdp=2, tensor=2)])
def test_a_prompt_in_two_slots_is_learned_as_in_one(mesh):
  params = decoder.init(MODEL, 0)
  c = config().objective
  c.aggregation, c.zero_variance = dict(fn='prompt_mean'), dict(fn='mask')
  batch = graded(spec(), params)
  want, want_metrics = updated(spec(objective=c), batch, params)
  assert want_metrics['actor/grad_norm'] > 0
  halves = in_halves(batch, np.array([5, 0, 3, 6, 1, 7, 2, 4]))
  p = spec(objective=c, **SLOTS)
  if mesh:
    sharded = config(objective=c, **SLOTS)
    sharded.mesh.update(mesh)
    p = make_spec(sharded, MODEL, (3, 7), sharding.make_mesh(sharded.mesh))
  state, metrics = updated(p, halves, params)
  assert_close(state.params, want.params, 1e-5)
  for name in ('actor/grad_norm', 'frac_reward_zero_std', 'critic/advantages/max'):
    np.testing.assert_allclose(metrics[name], want_metrics[name], rtol=1e-4, atol=1e-5)


def test_dynamic_sampling_skips_the_update_of_an_empty_batch():
  p, params = spec(replay=dict(collect=dict(fn='mixed'))), decoder.init(MODEL, 0)
  before = jax.tree.map(np.asarray, train_state.init_state(p, params))
  state, metrics = updated(p, empty_records.empty_batch(p), params)
  jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state), before)
  assert set(metrics) == set(updated(spec(), empty_records.empty_batch(p), params)[1])
  assert 'conditional' in programs.compile_update(p).lower(
    state, empty_records.empty_batch(p)
  ).as_text('hlo')
  batch = graded(spec(), params)
  assert_close(updated(p, batch, params)[0].params, updated(spec(), batch, params)[0].params, 0)


def pruned():
  c = config().rollout
  c.pruning = dict(fn='uniform', candidates=8, at_tokens=2)
  return c


@pytest.mark.parametrize(
  'changes, message',
  [
    (
      dict(replay=dict(collect=dict(fn='dars', top_ups=4))),
      'config.replay.collect.top_ups=4 leaves no slot',
    ),
    (
      dict(replay=dict(collect=dict(fn='dars', top_ups=1)), learner=dict(minibatches=2)),
      'config.learner.minibatches',
    ),
    (
      dict(
        curriculum=dict(hint=dict(fn='prefix')),
        replay=dict(reuse=dict(fn='successes', count=1)),
      ),
      'does not go with config.replay.reuse',
    ),
    (
      dict(
        curriculum=dict(hint=dict(fn='guide')),
        rewards=dict(fn='exact', truncate=dict(fn='outliers')),
      ),
      'does not go with config.rewards.truncate',
    ),
  ],
)
def test_settings_that_need_one_slot_per_group_or_plain_prompts_are_refused(changes, message):
  with pytest.raises(UserError, match=message):
    spec(**changes)


@pytest.mark.parametrize(
  'average, allocation, message',
  [
    (9, 'equal', 'slots_per_prompt=9 slots a prompt'),
    (1, 'neyman', 'there is nothing to allocate'),
  ],
)
def test_slots_that_cannot_be_allocated_are_refused(average, allocation, message):
  c = config().curriculum
  c.slots_per_prompt, c.allocation = average, dict(fn=allocation)
  with pytest.raises(UserError, match=message):
    spec(curriculum=c)


@pytest.mark.parametrize(
  'how', [{}, dict(learner=dict(minibatches=2)), fast()], ids=['one', 'minibatches', 'fast']
)
def test_a_group_with_an_injected_row_is_learned_as_one_in_which_that_row_was_sampled(how):
  """The cache's row is one of the group that these weights sampled, and the update is that of this group."""
  params = decoder.init(MODEL, 0)
  injected = spec(replay=dict(reuse=dict(fn='cached')), **how)
  assert injected.layout.group == injected.rollout.decode.rollouts == G
  assert empty_records.empty_batch(injected).replayed_B.shape == (P * G,)
  batch = graded(spec(), params)
  right_B = np.tile(np.arange(G) == 0, P)
  whole = batch._replace(reward_B=right_B.astype(np.float32), correct_B=right_B.astype(np.float32))
  store = reuse.cached()
  store.keep(whole, np.zeros(0, bool), 0)
  # The fresh groups: their right row is another wrong one instead, the last one of the group.
  rows = np.arange(P * G).reshape(P, G)
  rows[:, 0] = rows[:, -1]
  fresh = jax.tree.map(lambda x: np.asarray(x)[rows.ravel()], whole._replace(prompts=None))
  got = store.join(fresh._replace(prompts=whole.prompts), 0, 1)
  assert got.replayed_B.reshape(P, G).sum(1).tolist() == [1] * P
  # The same rows in the order of `got`, with what these weights recorded.
  source = np.where(got.replayed_B > 0, np.repeat(np.arange(P) * G, G), rows.ravel())
  sampled = jax.tree.map(lambda x: np.asarray(x)[source], whole._replace(prompts=None))
  sampled = sampled._replace(prompts=whole.prompts)
  np.testing.assert_array_equal(got.rollout.tokens_BxT, sampled.rollout.tokens_BxT)
  state, metrics = updated(injected, got, params)
  want, want_metrics = updated(spec(**how), sampled, params)
  assert want_metrics['actor/grad_norm'] > 0
  # Moments and not weights: Adam divides gradients by their size, so that roundings of the smallest ones grow.
  assert_close(state.opt_state, want.opt_state, 1e-6)
  for name in ('actor/grad_norm', 'actor/ppo_kl', 'training/rollout_probs_diff_max'):
    np.testing.assert_allclose(metrics[name], want_metrics[name], rtol=1e-4, atol=1e-5)
