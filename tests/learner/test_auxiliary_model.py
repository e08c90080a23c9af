"""The second model in the compiled update: what it says first, that it learns, and that no arrangement matters."""

from __future__ import annotations

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.checkpointing import checkpoint
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import auxiliary_model, empty_records, microbatch
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import decoder
from jaxrl_llm.runner import validate
from jaxrl_llm.types import Batch, ModelConfig, Prompts, Rollout, UserError

CONFIGS = pathlib.Path(__file__).parents[2] / 'configs'
MODEL = ModelConfig(
  vocab=12, width=16, layers=1, heads=2, kv_heads=2, head_dim=8, mlp=16, max_tokens=16
)
P, G, L, T = 4, 4, 4, 4
B = P * G


def spec(name, devices=1, **sections):
  """The spec of a config of configs/ for a tiny model, with a high learning rate of the auxiliary model."""
  c = configs.load(name)
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = P, G, L, T
  c.objective.auxiliary_model.learning_rate = 1e-2
  c.optimizer.decay, c.optimizer.learning_rate = 'constant', 1e-4
  for section, changes in sections.items():
    c[section].update(changes)
  if devices == 8:
    c.mesh.update(data=2, fsdp=2, tensor=2)
  validate.validate(c)
  return make_spec(c, MODEL, (3,), sharding.make_mesh(c.mesh, jax.devices()[:devices]))


def batch():
  """Answers of all lengths, right where the last token is even; in group 1 all are right."""
  r = np.random.default_rng(0)
  length_B = 1 + np.arange(B).astype(np.int32) % T
  tokens_BxT = r.integers(0, 12, (B, T)).astype(np.int32)
  correct_B = (tokens_BxT[np.arange(B), length_B - 1] % 2 == 0).astype(np.float32)
  correct_B[:2], correct_B[G : 2 * G] = [0, 1], 1
  prompts = Prompts(
    r.integers(0, 12, (P, L)).astype(np.int32),
    r.integers(1, L + 1, P).astype(np.int32),
    np.arange(P, dtype=np.int32),
    np.zeros(P, np.int32),
    np.zeros(P, np.float32),
  )
  rollout = Rollout(
    tokens_BxT,
    np.log(r.uniform(0.02, 0.3, (B, T))).astype(np.float32),
    length_B,
    np.ones(B, np.int8),
    np.zeros((B, T), np.int32),
    np.ones(B, np.float32),
    np.zeros((B, 0), np.float32),
  )
  return Batch(prompts, rollout, correct_B, correct_B)


@functools.lru_cache
def learned(name, devices=1, bins=0, count=2):
  """The state and the metrics after `count` updates on one batch."""
  p, update = compiled(name, devices, bins)
  state, history = train_state.init_state(p, decoder.init(MODEL, 0)), []
  for _ in range(count):
    state, metrics = update(state, batch())
    history.append({k: float(v) for k, v in metrics.items()})
  return jax.device_get(state), history


@functools.lru_cache
def compiled(name, devices=1, bins=0):
  """With `bins`, in microbatches of so many bins, of which each holds a prompt and all its rows."""
  p = spec(name, devices)
  if bins:
    whole = dict(tokens=L + G * (T - 1), predicted=G * T, rows=G)
    size = p.update.packing._replace(bins=bins, **whole)
    p = p._replace(update=p.update._replace(packing=size))
  return p, programs.compile_update(p)


def moved(first, second):
  return max(
    np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (first, second)), strict=True)
  )


@pytest.mark.parametrize('name', ['ppo', 'prime', 'oprl'])
def test_two_steps_of_each_config_train_both_models_and_keep_the_reference(name):
  first = decoder.init(MODEL, 0)
  state, history = learned(name)
  assert int(state.step) == 2 and all(np.isfinite(v) for m in history for v in m.values())
  assert (
    moved(state.params, first) > 1e-5
    and moved(state.auxiliary_model.params['decoder'], first) > 1e-3
  )
  assert (state.reference is not None) == (name == 'prime')
  if name == 'prime':
    assert moved(state.reference, first) == 0
    np.testing.assert_allclose(history[0]['companion/loss'], np.log(2), atol=1e-5)
  if name != 'ppo':
    assert history[1]['companion/loss'] < history[0]['companion/loss'] - 1e-3


def test_a_critic_starts_at_0_and_learns_the_returns():
  """Its values are of before the batch is learned, so the first advantages are whitened rewards."""
  state, history = learned('ppo', count=80)
  reward = np.repeat(batch().reward_B, batch().rollout.length_B)
  z = (reward - reward.mean()) / reward.std(ddof=1)
  assert history[0]['critic/values/mean'] == 0 and abs(history[0]['critic/vf_explained_var']) < 1e-3
  np.testing.assert_allclose(history[0]['critic/vf_loss'], (reward**2).mean() / 2, rtol=1e-5)
  np.testing.assert_allclose(history[0]['critic/advantages/max'], z.max(), rtol=1e-4)
  np.testing.assert_allclose(history[0]['critic/advantages/min'], z.min(), rtol=1e-4)
  np.testing.assert_allclose(history[0]['critic/returns/mean'], reward.mean(), rtol=1e-5)
  assert history[-1]['critic/vf_explained_var'] > 0.6
  np.testing.assert_allclose(history[-1]['critic/values/mean'], reward.mean(), atol=0.05)
  assert state.auxiliary_model.params['value']['kernel'].shape == (MODEL.width,)


def test_a_flow_learns_the_latents_of_right_rows_and_its_signal_waits():
  (state, history), first = learned('rlfr', count=6), learned('rlfr', count=1)[0]
  loss = [row['companion/loss'] for row in history]
  assert min(loss[1:]) < loss[0] - 0.05 and all(
    np.isfinite(list(row.values())).all() for row in history
  )
  assert set(state.auxiliary_model.params) == {'flow'}
  assert (
    moved(
      first.auxiliary_model.params,
      train_state.init_state(compiled('rlfr')[0], decoder.init(MODEL, 0)).auxiliary_model.params,
    )
    > 1e-3
  )
  # Rewards of tokens would give those of a row different advantages.
  batch_, wrong = batch(), batch()._replace(correct_B=np.zeros(B, np.float32))
  p, update = compiled('rlfr')
  none, _ = update(train_state.init_state(p, decoder.init(MODEL, 0)), wrong)
  started = train_state.init_state(p, decoder.init(MODEL, 0)).auxiliary_model
  assert moved(none.auxiliary_model.opt_state, started.opt_state) <= 1  # the count alone
  assert moved(none.auxiliary_model.params, started.params) == 0
  waits = p.objective.method.auxiliary_model.flow
  assert waits.after == 20
  prompts = jax.tree.map(lambda x: x[None], microbatch.by_prompt(p, batch_))
  for step, is_zero in ((19, True), (20, False)):
    later = jax.device_get(state)._replace(step=np.int32(step))
    run = jax.jit(lambda s, b: auxiliary_model.run(p, s, b)[1])
    with jax.set_mesh(p.layout.mesh):
      signal = np.asarray(run(later, prompts))[0]
    assert (signal == 0).all() == is_zero
  assert (signal[np.arange(T) >= batch_.rollout.length_B[:, None]] == 0).all()


@pytest.mark.parametrize('name', ['ppo', 'oprl', 'rlfr'])
def test_an_empty_batch_leaves_both_models_alone(name):
  p, update = compiled(name)
  before = jax.device_get(learned(name)[0])
  placed = jax.tree.map(
    lambda x, s: jax.device_put(x, s.sharding), before, train_state.abstract_state(p)
  )
  after, metrics = update(placed, empty_records.empty_batch(p))
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), before)
  assert all(np.isfinite(float(v)) for v in metrics.values())


@pytest.mark.parametrize('name, bins', [('ppo', 1), ('oprl', 1), ('oprl', 2), ('rlfr', 2)])
def test_microbatches_of_any_size_train_the_same_auxiliary_model(name, bins):
  """oprl compares rows of a group, which may be in different microbatches."""
  (full, history), (cut, history_cut) = (
    learned(name),
    learned(name, bins=bins),
  )
  for key, value in history[0].items():
    np.testing.assert_allclose(history_cut[0][key], value, rtol=1e-4, atol=1e-5, err_msg=key)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4),
    (cut.auxiliary_model.opt_state, cut.opt_state),
    (full.auxiliary_model.opt_state, full.opt_state),
  )


@pytest.mark.parametrize('name', ['ppo', 'rlfr'])
def test_one_device_and_eight_train_the_same_model(name):
  (single, history), (many, history8) = learned(name), learned(name, devices=8)
  for key, value in history[0].items():
    np.testing.assert_allclose(history8[0][key], value, rtol=1e-4, atol=1e-4, err_msg=key)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4),
    many.auxiliary_model.opt_state,
    single.auxiliary_model.opt_state,
  )


def test_an_auxiliary_model_is_sharded_like_the_policy():
  state = train_state.abstract_state(spec('ppo', devices=8))
  q = lambda tree: tree['layers'][0]['q']['kernel'].sharding  # noqa: E731
  assert q(state.auxiliary_model.params['decoder']) == q(state.params)
  assert not q(state.params).is_fully_replicated


def test_a_checkpoint_holds_the_auxiliary_model(tmp_path):
  state, p = learned('ppo')[0], spec('ppo')
  assert moved(
    state.auxiliary_model.opt_state, jax.tree.map(jnp.zeros_like, state.auxiliary_model.opt_state)
  )
  checkpoint.save(str(tmp_path), 2, state, {}, keep=1)
  again, _ = checkpoint.restore(str(tmp_path), 2, train_state.abstract_state(p))
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), state)


def test_a_preference_needs_rows_to_compare():
  c = configs.load('oprl')
  c.rollouts, c.objective.advantage = 1, dict(fn='raw')
  with pytest.raises(UserError, match="fn='preference' does not go with config.rollouts=1"):
    validate.validate(c)
