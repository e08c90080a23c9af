"""Rows of every kind have the gradient of plain passes over whole rows, whatever is packed, and on any mesh."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_table import METHODS

from jaxrl_llm import data, objective
from jaxrl_llm.learner import lora, microbatch, minibatch
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.types import Turns
from tests.learner import plain_gradient
from tests.learner.packed_jobs import (
  DEEP,
  MODEL,
  SEVERAL,
  SINGLE,
  WHOLE,
  B,
  G,
  P,
  T,
  make,
  make_batch,
  make_state,
  packed,
  weights,
  with_method,
)
from tests.learner.test_step_methods import SLOTS, in_halves


@pytest.fixture(scope='module')
def job():
  return make_batch(), weights(0)


def check(spec, state, batch, sizes=(SEVERAL,)):
  """The gradient in microbatches of these sizes is that of whole rows; returns the gradient and the coefficients."""
  state, batch = jax.tree.map(jnp.asarray, (state, batch))
  want, c_BxT, *_ = jax.jit(functools.partial(plain_gradient.gradient, spec))(state, batch)
  for size in sizes:
    cut = plain_gradient.recording(spec, size)
    got, _ = packed(cut, state._replace(opt_state=state.params), batch)
    assert plain_gradient.distance(got, want) < 1e-5, size
  return want, np.asarray(c_BxT)


@pytest.mark.parametrize('shares', [True, False])
def test_windows_layers_and_bins_of_every_size(shares, job):
  """Window layers see positions and not columns; a bin of one row, and everything in one bin."""
  batch, _ = job
  deep = dataclasses.replace(MODEL, **DEEP)
  spec = with_method(make(deep), **METHODS['dapo'].settings)
  sizes = [size._replace(shares_prompt=shares) for size in (SINGLE, SEVERAL, WHOLE)]
  check(spec, make_state(spec, weights(0, deep)), batch, sizes)


def test_replayed_rows_have_the_log_probs_of_this_pass(job):
  batch, params = job
  spec = make(rollouts=2, replay=dict(reuse=dict(fn='successes', count=2)))
  assert spec.layout.group == G
  spec = with_method(spec, **METHODS['dapo'].settings)
  replayed_B = np.tile(np.array([0, 0, 1, 1], np.float32), P)
  unknown = np.where(replayed_B[:, None] > 0, -7.0, batch.rollout.logp_BxT).astype(np.float32)
  batch = batch._replace(
    replayed_B=replayed_B, rollout=batch.rollout._replace(logp_BxT=unknown), parts_BxK=None
  )
  check(spec, make_state(spec, params), batch)


def test_rows_of_a_prompt_in_several_slots_are_one_group(job):
  batch, params = job
  spec = with_method(make(**SLOTS), **METHODS['dapo'].settings)
  assert spec.layout.slots_per_prompt == 2 and spec.layout.group == G // 2
  halves = in_halves(batch, np.array([5, 0, 3, 6, 1, 7, 2, 4]))
  check(spec, make_state(spec, params), halves)


def test_observations_between_turns_are_read_and_not_learned(job):
  batch, params = job
  number_BxT = np.random.default_rng(2).integers(-1, 2, (B, T)).astype(np.int32)
  zeros = np.zeros((B, T), np.float32)
  turns = Turns(number_BxT, zeros, zeros.astype(np.int32), np.zeros(B, np.int8))
  batch = batch._replace(rollout=batch.rollout._replace(turns=turns))
  spec = with_method(make(), **METHODS['dapo'].settings)
  _, c_BxT = check(spec, make_state(spec, params), batch)
  assert (c_BxT[number_BxT < 0] == 0).all() and (c_BxT != 0).any()


@pytest.mark.parametrize('fn', ['likelihood', 'suffix_weighted'])
def test_demonstrations_have_microbatches_of_their_own(fn, job):
  """Some prompts have none; with suffix_weighted a reference scores them first."""
  batch, params = job
  tokens_PxT = np.random.default_rng(4).integers(0, 20, (P, T)).astype(np.int32)
  batch = batch._replace(demo=data.as_rollout(tokens_PxT, np.array([3, 0, 6, 1], np.int32)))
  spec = with_method(make(), **METHODS['k3'].settings, sft_loss=dict(fn=fn))
  check(spec, make_state(spec, params), batch)


def test_an_adapter_learns_beside_its_base(job):
  batch, params = job
  spec = make(lora=dict(rank=2, alpha=4.0, targets='(q|v|up)$'))
  spec = with_method(spec, **METHODS['k3'].settings)
  r = np.random.default_rng(1)
  fresh = lora.init(spec.model.lora, params, 0)
  adapter = jax.tree.map(lambda x: np.float32(x + 0.3 * r.normal(size=x.shape)), fresh)
  check(spec, train_state.init_state(spec, params, adapter=adapter), batch)


def test_recorded_experts_follow_their_tokens(job):
  """Random experts, so that no router agrees by chance; prompts and the reference go where their routers say."""
  batch, _ = job
  mixture = dataclasses.replace(MODEL, layers=2, experts=6, experts_per_token=2, norm_top_k=True)
  r = np.random.default_rng(6)
  expert = r.permuted(np.broadcast_to(np.arange(6), (B, T, 2, 6)), axis=-1)[..., :2]
  params = weights(0, mixture)
  spec = make(mixture, learner=dict(replay_experts=True))
  spec = with_method(spec, **METHODS['k3'].settings)
  routed = batch._replace(rollout=batch.rollout._replace(expert_BxTxNxk=expert.astype(np.uint8)))
  state = make_state(spec, params)
  want, _ = check(spec, state, routed)
  free = jax.jit(functools.partial(plain_gradient.gradient, spec))(state, batch)[0]
  assert plain_gradient.distance(free, want) > 0.1


def test_noise_of_a_token_is_the_same_wherever_it_stands(job):
  """The gradient of weights and of log σ, against rows beside a prompt each whose tokens are numbered by hand."""
  batch, _ = job
  deep = dataclasses.replace(MODEL, **DEEP)
  noise = dict(fn='layerwise', sigma=0.2, learning_rate=0.1)
  spec = with_method(make(deep, objective=dict(activation_noise=noise)))
  state, batch = jax.tree.map(jnp.asarray, (make_state(spec, weights(0, deep)), batch))
  key = jax.random.fold_in(jax.random.key(state.seed), state.step)
  target = objective.targets(spec.objective.method, batch, G)

  @jax.jit
  def plain(params, log_sigma_L):
    noise = jnp.exp(log_sigma_L), key
    scored = plain_gradient.scores(spec, params, batch, noise)
    c_BxT, _ = objective.coefficients(spec.objective.method, target, *scored)
    return plain_gradient.minus_sum(jax.lax.stop_gradient(c_BxT), scored.logp)

  log_sigma_L = state.activation_noise.log_sigma_L
  want = jax.grad(plain, argnums=(0, 1))(state.params, log_sigma_L)
  for size in (SINGLE, SEVERAL, WHOLE):
    cut = plain_gradient.recording(spec, size)
    run = lambda state, cut=cut: minibatch.gradient(  # noqa: E731
      cut, state, microbatch.pack(cut, batch), target
    )
    got, _ = jax.jit(run)(state)
    assert plain_gradient.distance(got.params, want[0]) < 1e-5
    assert plain_gradient.distance(got.log_sigma_L, want[1]) < 1e-5
  quiet = plain(state.params, log_sigma_L - 20)
  assert abs(float(plain(state.params, log_sigma_L)) / float(quiet) - 1) > 1e-3


@pytest.mark.parametrize(
  'mesh', [dict(data=2, fsdp=2, tensor=2), dict(data=2, context=2, tensor=2)]
)
@pytest.mark.parametrize('name', ['k3', 'm2po_mask'])
def test_eight_devices_have_the_gradient_of_whole_rows(mesh, name, job):
  """Prompts are dealt to the shards by their tokens, and a shard may need more microbatches than another."""
  batch, params = job
  batch = batch._replace(reward_B=np.random.default_rng(8).random(B).astype(np.float32))
  single = with_method(make(), **METHODS[name].settings)
  state = make_state(single, params)
  want = jax.jit(functools.partial(plain_gradient.gradient, single))(state, batch)[0]
  many = with_method(make(devices=8, mesh=mesh), **METHODS[name].settings)
  many = plain_gradient.recording(many, SEVERAL._replace(bins=1))
  got, _ = packed(many, make_state(many, params), batch)
  assert plain_gradient.distance(got, want) < 1e-5
