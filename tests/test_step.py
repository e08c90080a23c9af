"""The compiled step: what it learns, what it leaves alone, and that no arrangement of rows or devices matters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objective
from jaxrl_llm import step as steps
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import empty_records, microbatch, minibatch
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import decoder
from jaxrl_llm.types import Batch, ModelConfig, Prompts, UserError

MODEL = ModelConfig(
  vocab=50, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_tokens=64
)
P, G, L, T = 4, 4, 8, 6


def config(**changes):
  c = configs.default()
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = P, G, L, T
  c.optimizer.learning_rate = 1e-2
  with c.ignore_type():
    for name, value in changes.items():
      c[name] = value
  return c


def spec(**changes):
  c = config(**changes)
  return make_spec(c, MODEL, (3, 7), sharding.make_mesh(c.mesh, jax.devices()[:1]))


def in_bins(spec, bins, tokens=L + G * (T - 1)):
  """Microbatches of so many bins, of which each holds a prompt and all its rows."""
  size = spec.update.packing._replace(bins=bins, tokens=tokens, predicted=G * T, rows=G)
  return spec._replace(update=spec.update._replace(packing=size))


def make_prompts(seed=0):
  r = np.random.default_rng(seed)
  length_P = r.integers(1, L + 1, P).astype(np.int32)
  index_P = (seed * P + np.arange(P)).astype(np.int32)
  born_P, expected_P = np.full(P, seed, np.int32), np.zeros(P, np.float32)
  tokens_PxL = r.integers(0, 50, (P, L)).astype(np.int32)
  return Prompts(tokens_PxL, length_P, index_P, born_P, expected_P)


def grade(prompts, rollout):
  """A rule that a model can learn: even last tokens are right."""
  rollout = jax.tree.map(np.asarray, rollout)
  last = rollout.tokens_BxT[np.arange(P * G), rollout.length_B - 1]
  correct_B = ((last + rollout.length_B) % 2).astype(np.float32)
  return Batch(prompts, rollout, correct_B, correct_B)


def train(spec, count=4, params=None):
  """`count` steps; returns every rollout's tokens, the metrics, and the last state."""
  state = train_state.init_state(spec, params or decoder.init(MODEL, 0))
  fn, batch, history = steps.compile_step(spec), empty_records.empty_batch(spec), []
  for index in range(count):
    prompts = make_prompts(index)
    state, rollout, metrics = fn(state, batch, prompts, None, None, np.int32(T))
    batch = grade(prompts, rollout)
    history.append((np.asarray(rollout.tokens_BxT), {k: float(v) for k, v in metrics.items()}))
  assert fn._cache_size() == 1, 'one compile serves every step, the first and the empty one too'
  return history, state


def gradient(spec, batch, params):
  """The sum over microbatches of all rows, without the optimizer."""
  return gradient_of(spec, batch, train_state.init_state(spec, params))[0].params


def gradient_of(spec, batch, state):
  """The gradient of all that is trained, and the sums for the metrics."""

  @sharding.on_mesh
  def run(spec, state, batch):
    target = objective.targets(spec.objective.method, batch, spec.layout.group)
    return minibatch.gradient(spec, state, microbatch.pack(spec, batch), target)

  return jax.jit(lambda state, batch: run(spec, state, batch))(state, batch)


def graded(spec, params, seed=0):
  prompts = make_prompts(seed)
  rollout = jax.jit(lambda p: steps.generate(spec, train_state.sampling_state(p), prompts)[0])(
    params
  )
  return grade(prompts, rollout)


def assert_close(a, b, atol):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), a, b)


def test_gradient_is_the_weighted_gradient_of_the_log_probability():
  """Against repeated prompts and a plain forward pass: nothing is shared, nothing chunked."""
  p, params = spec(), decoder.init(MODEL, 0)
  batch = graded(p, params)
  target = objective.targets(p.objective.method, batch, G)
  weight_BxT = np.asarray(target.weight_BxT * target.advantage_BxT)
  assert np.abs(weight_BxT).max() > 0

  rows = np.zeros((P * G, L + T), np.int32)
  weights = np.zeros((P * G, L + T))
  length_B = np.repeat(batch.prompts.length_P, G) + batch.rollout.length_B
  for b, end in enumerate(length_B):
    start = batch.prompts.length_P[b // G]
    rows[b, :start] = batch.prompts.tokens_PxL[b // G, :start]
    rows[b, start:end] = batch.rollout.tokens_BxT[b, : end - start]
    weights[b, start:end] = weight_BxT[b, : end - start]

  def loss(params):
    mask = np.arange(L + T)[None] < length_B[:, None]
    logp = jax.nn.log_softmax(decoder.forward(MODEL, params, rows, mask))
    picked = jnp.take_along_axis(logp[:, :-1], rows[:, 1:, None], axis=-1)[..., 0]
    return -(weights[:, 1:] * picked).sum()

  assert_close(gradient(p, batch, params), jax.jit(jax.grad(loss))(params), 1e-5)


@pytest.fixture(scope='module', params=['token_mean', 'sequence_mean'])
def in_one_piece(request):
  """An objective, weights, a batch that they sampled, and its gradient."""
  c, params = config().objective, decoder.init(MODEL, 0)
  c.aggregation, c.zero_variance = dict(fn=request.param), dict(fn='mask')
  full = spec(objective=c)
  batch = graded(full, params)
  return c, params, batch, gradient(full, batch, params)


@pytest.mark.parametrize('bins', [1, 2, 3])
def test_microbatches_of_any_size_sum_to_the_same_gradient(bins, in_one_piece):
  objective, params, batch, want = in_one_piece
  cut = in_bins(spec(objective=objective), bins)
  assert int(microbatch.pack(cut, jax.tree.map(jnp.asarray, batch)).microbatches) > 1
  assert_close(gradient(cut, batch, params), want, 1e-6)


def test_two_slices_sum_the_gradient_of_one_device():
  """With noise, which depends on a token's place in the whole batch, and all sums and maxima for the metrics."""
  c, params = config().objective, decoder.init(MODEL, 0)
  c.activation_noise = dict(fn='layerwise', sigma=0.1, learning_rate=0.1)
  batch = graded(spec(objective=c), params)
  of_slices = config(objective=c)
  of_slices.mesh.slices = 2
  mesh = sharding.make_mesh(dict(slices=2, fsdp=2), jax.devices()[:4])
  two = make_spec(of_slices, MODEL, (3, 7), mesh)
  assert two.layout.slices == 2
  results = []
  for p in (spec(objective=c), two):
    p = in_bins(p, 1, tokens=L + T - 1)  # a row a microbatch
    results.append(jax.device_get(gradient_of(p, batch, train_state.init_state(p, params))))
  assert_close(*results, 2e-5)


def test_order_of_groups_leaves_the_gradient_alone():
  p, params = spec(), decoder.init(MODEL, 0)
  batch = graded(p, params)
  order = np.array([2, 0, 3, 1])
  rows = (order[:, None] * G + np.arange(G)).ravel()
  moved = Batch(
    jax.tree.map(lambda x: x[order], batch.prompts),
    jax.tree.map(lambda x: x[rows], batch.rollout),
    batch.reward_B[rows],
    batch.correct_B[rows],
  )
  assert_close(gradient(p, moved, params), gradient(p, batch, params), 1e-6)


def test_head_chunks_of_any_size_give_the_same_gradient_and_no_logits_of_all_tokens():
  params = decoder.init(MODEL, 0)
  batch, results = None, []
  for chunk in (16, 32, 1000):
    c = config().objective
    c.head_chunk_tokens = chunk
    p = spec(objective=c)
    batch = batch or graded(p, params)
    results.append(gradient(p, batch, params))
    state = train_state.init_state(p, params)
    jaxpr = str(jax.make_jaxpr(lambda state, p=p, b=batch: gradient_of(p, b, state))(state))
    size = p.update.packing
    tokens = size.bins * size.predicted
    assert 64 < tokens < 1000 and (f'f32[1,{tokens},50]' in jaxpr) == (chunk == 1000)
  assert_close(results[0], results[2], 1e-6)
  assert_close(results[1], results[2], 1e-6)


def test_remat_changes_no_gradient():
  params = decoder.init(MODEL, 0)
  batch = graded(spec(), params)
  plain, remat = spec(learner=dict(remat=False)), spec(learner=dict(remat=True))
  assert_close(gradient(remat, batch, params), gradient(plain, batch, params), 1e-6)


def test_an_empty_batch_touches_neither_weights_nor_optimizer():
  c = config()
  c.optimizer.weight_decay = 0.1
  p = make_spec(c, MODEL, (3,), sharding.make_mesh(c.mesh, jax.devices()[:1]))
  before = jax.tree.map(np.asarray, train_state.init_state(p, decoder.init(MODEL, 0)))
  state, _, metrics = steps.compile_step(p)(
    train_state.init_state(p, decoder.init(MODEL, 0)),
    empty_records.empty_batch(p),
    make_prompts(),
    None,
    None,
    T,
  )
  jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state), before)
  assert all(np.isfinite(float(v)) for v in metrics.values())


def test_a_non_finite_gradient_is_skipped_and_counted():
  p, params = spec(), decoder.init(MODEL, 0)
  batch = graded(p, params)
  bad = batch._replace(reward_B=np.where(np.arange(P * G) == 3, np.inf, batch.reward_B))
  update = programs.compile_update(p)
  state, _ = update(train_state.init_state(p, params), bad)
  assert int(state.skipped) == 1 and int(state.step) == 0
  jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state.params), params)
  state, _ = update(state, batch)
  assert int(state.skipped) == 0 and int(state.step) == 1


def test_sampler_and_trainer_are_the_same_policy_and_fresh_noise_every_step():
  history, state = train(spec(), 5)
  gaps = [m['training/rollout_probs_diff_max'] for _, m in history]
  assert gaps[0] == 0 and all(0 <= g < 1e-5 for g in gaps) and max(gaps) > 0
  assert int(state.step) == 4
  assert abs(history[2][1]['actor/ppo_kl']) < 1e-5
  same = train(spec(), 1)[0][0][0]
  np.testing.assert_array_equal(history[0][0], same)
  again = spec(seed=1)
  assert (train(again, 1)[0][0][0] != same).any()


def test_the_rewarded_behavior_becomes_more_likely():
  p, params = spec(), decoder.init(MODEL, 0)
  batch = graded(p, params)
  state, _ = programs.compile_update(p)(train_state.init_state(p, params), batch)
  advantage = np.asarray(objective.targets(p.objective.method, batch, G).advantage_BxT)
  logp = lambda q: np.asarray(  # noqa: E731
    microbatch.log_probs(p, q, batch.prompts, jnp.asarray(batch.rollout.tokens_BxT))[0]
  )
  assert (advantage * (logp(state.params) - logp(params))).sum() > 0


def test_several_updates_per_rollout_take_that_many_optimizer_steps():
  history, state = train(spec(learner=dict(minibatches=2)), 3)
  assert int(state.step) == 4
  assert history[2][1]['training/rollout_probs_diff_max'] > 1e-4, (
    'the second minibatch is off-policy'
  )


@pytest.mark.parametrize('lockstep, tensor', [(True, 2), (False, 1)])
def test_slots_of_every_device_refill_from_its_own_rows(lockstep, tensor):
  """Half as many slots as rows, on four shards of two: the tokens are those of one device, no slots."""
  single, _ = train(spec(), 2)
  many, _ = train(_on_eight(dict(data=2, fsdp=2, tensor=tensor), slots=8, lockstep=lockstep), 2)
  for (tokens, metrics), (tokens8, metrics8) in zip(single, many, strict=True):
    np.testing.assert_array_equal(tokens, tokens8)
    assert T - 1 <= metrics['generate/rounds'] < metrics8['generate/rounds'] <= 2 * (T - 1)


def test_loops_without_lockstep_need_unsharded_weights():
  with pytest.raises(
    UserError, match='config.rollout.lockstep=False does not go with config.mesh.tensor=2'
  ):
    _on_eight(dict(data=2, fsdp=2, tensor=2), lockstep=False)


@pytest.mark.parametrize('slots', [6, 20])
def test_slots_that_do_not_fit_are_refused(slots):
  with pytest.raises(
    UserError,
    match=f'config.rollout.slots={slots} must be a multiple of data × fsdp × context × expert = 4',
  ):
    _on_eight(dict(data=2, fsdp=2, tensor=2), slots=slots)


def _on_eight(mesh, slots=0, lockstep=True):
  c = config()
  c.mesh.update(mesh)
  c.rollout.slots, c.rollout.lockstep = slots, lockstep
  return make_spec(c, MODEL, (3, 7), sharding.make_mesh(c.mesh, jax.devices()[:8]))


def test_one_compiled_program_serves_every_seed():
  lowered, tokens = [], []
  for seed in (0, 1):
    p = spec(seed=seed)
    fn, batch = steps.compile_step(p), empty_records.empty_batch(p)
    arguments = (
      train_state.init_state(p, decoder.init(MODEL, 0)),
      batch,
      make_prompts(),
      None,
      None,
      T,
    )
    lowered.append(fn.lower(*arguments).as_text())
    tokens.append(np.asarray(fn(*arguments)[1].tokens_BxT))
  assert lowered[0] == lowered[1] and (tokens[0] != tokens[1]).any()


def test_the_learning_rate_falls_over_all_optimizer_steps_of_the_run():
  decay = dict(configs.default().optimizer) | dict(learning_rate=1.0, decay='linear')
  for count in (1, 4):
    schedule = spec(steps=10, learner=dict(minibatches=count), optimizer=decay).update.schedule
    got = [float(schedule(count * step)) for step in (0, 5, 10)]
    np.testing.assert_allclose(got, [1.0, 0.5, 0.0], atol=1e-6)
