"""Routing replay: where sampling sent a token is recorded, and the update sends it there whatever its routers say."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import microbatch, minibatch
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import decoder, moe
from jaxrl_llm.rollout import ring_decode
from jaxrl_llm.rollout.decode_records import DecodeInputs
from jaxrl_llm.types import UNFINISHED, Batch, ModelConfig, Prompts, UserError

MODEL = ModelConfig(
  vocab=40, width=32, layers=3, heads=4, kv_heads=2, head_dim=8, mlp=24, max_tokens=64, qk_norm='head',
  experts=6, experts_per_token=2, norm_top_k=True,
)  # fmt: skip
P, G, L, T = 4, 3, 8, 9
END = (3, 11)


def step_spec(**changes):
  c = configs.default()
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = P, G, L, T
  c.learner.replay_experts = True
  with c.ignore_type():
    for name, value in changes.items():
      c[name] = value
  return make_spec(c, MODEL, END, sharding.make_mesh(c.mesh, jax.devices()[:1]))


def make_prompts():
  r = np.random.default_rng(0)
  tokens_PxL, length_P = r.integers(0, 40, (P, L)), np.array([4, 8, 1, 6])
  index_P, zeros_P = np.arange(P), np.zeros(P)
  return Prompts(
    *(x.astype(np.int32) for x in (tokens_PxL, length_P, index_P, zeros_P)), zeros_P.astype('f4')
  )


@pytest.fixture(scope='module')
def params():
  return jax.tree.map(lambda x: x * 1.5, decoder.init(MODEL, 0))


@pytest.fixture(scope='module')
def others(params):
  """Weights whose routers like other experts."""
  return jax.tree.map(lambda x: x + 0.3 * jnp.roll(x, 1, -1), params)


def sampled(params, begun=None, cap=None, pause=None, **changes):
  spec = step_spec().rollout.decode._replace(**changes)
  run = jax.jit(
    lambda p, begun: ring_decode.generate(
      MODEL,
      spec,
      DecodeInputs(p, make_prompts(), jax.random.key(0), 4, continued=begun, cap=cap, pause=pause),
    )[0]
  )
  return jax.tree.map(np.asarray, run(params, begun))


@pytest.fixture(scope='module')
def rollout(params):
  found = sampled(params)
  assert {*found.length_B} - {T} and T in found.length_B, 'rows must end in both ways'
  return found


def full_pass(params, prompts, rollout):
  """Where each row's completion tokens go, [B, T, N, k], by one forward pass over prompt and completion in a row."""
  start_B = np.repeat(prompts.length_P, G)
  at_BxS = np.arange(L + T)[None]
  said_BxS = at_BxS - start_B[:, None]
  prompt_BxS = np.repeat(np.pad(prompts.tokens_PxL, ((0, 0), (0, T))), G, axis=0)
  reply_BxS = np.take_along_axis(rollout.tokens_BxT, np.clip(said_BxS, 0, T - 1), 1)
  tokens_BxS = np.where(said_BxS < 0, prompt_BxS, reply_BxS)
  mask = decoder.causal(np.ones(tokens_BxS.shape, bool))
  told = _through(params, tokens_BxS, np.broadcast_to(at_BxS, tokens_BxS.shape), mask)
  return np.stack([x[n : n + T] for x, n in zip(told, start_B, strict=True)])


@jax.jit
def _through(params, *given):
  return decoder.apply(MODEL, params, *given)[2]


@pytest.mark.parametrize('how', ['whole', 'slots', 'resumed'])
def test_the_experts_of_every_token_but_the_last_are_recorded(params, rollout, how):
  if how == 'slots':
    rollout = sampled(params, slots=5)
  if how == 'resumed':
    part = sampled(params, pause=4)
    assert (part.reason_B == UNFINISHED).any()
    rollout = sampled(params, begun=part, slots=5)
  assert rollout.expert_BxTxNxk.shape == (P * G, T, 3, 2)
  read = np.arange(T)[None] < rollout.length_B[:, None] - 1
  assert not rollout.expert_BxTxNxk[~read].any()
  expert = full_pass(params, make_prompts(), rollout)
  np.testing.assert_array_equal(np.sort(rollout.expert_BxTxNxk)[read], np.sort(expert)[read])
  assert len(np.unique(rollout.expert_BxTxNxk)) == 6


def test_a_continued_row_keeps_its_experts_although_the_weights_have_changed(params, others):
  """Rows continued by other weights keep what was recorded, and their keys are made of the same experts."""
  part = sampled(params, pause=4)
  went = sampled(others, begun=part)
  begun = np.arange(T)[None] < part.length_B[:, None] - 1
  np.testing.assert_array_equal(went.expert_BxTxNxk[begun], part.expert_BxTxNxk[begun])
  logp_BxT = rescored(others, went, went.expert_BxTxNxk)
  fresh = (np.arange(T)[None] >= part.length_B[:, None]) & (
    np.arange(T)[None] < went.length_B[:, None]
  )
  assert fresh.sum() > 10
  np.testing.assert_allclose(went.logp_BxT[fresh], logp_BxT[fresh], atol=1e-4)
  unreplayed = full_pass(others, make_prompts(), went)
  assert (unreplayed[begun] != went.expert_BxTxNxk[begun]).any(-1).mean() > 0.2


@functools.partial(jax.jit, static_argnames='remat')
def _rescored(params, tokens_BxT, expert_BxTxNxk, remat):
  p = step_spec()
  p = p._replace(update=p.update._replace(remat=remat))
  return microbatch.log_probs(p, params, make_prompts(), tokens_BxT, expert_BxTxNxk=expert_BxTxNxk)[
    0
  ]


def rescored(params, rollout, expert, remat=False):
  return np.asarray(_rescored(params, rollout.tokens_BxT, expert, remat=remat))


@pytest.mark.parametrize('remat', [False, True])
def test_replayed_experts_change_nothing_on_policy_and_decide_off_policy(
  params, others, rollout, remat
):
  real = np.arange(T)[None] < rollout.length_B[:, None]
  gap = lambda a, b: np.abs(a - b)[real].max()  # noqa: E731
  unreplayed = rescored(params, rollout, None, remat)
  assert gap(unreplayed, rescored(params, rollout, rollout.expert_BxTxNxk, remat)) < 1e-5
  theirs = sampled(others, begun=None).expert_BxTxNxk
  assert gap(unreplayed, rescored(params, rollout, theirs, remat)) > 1e-2


@pytest.mark.parametrize('norm', [False, True])
def test_a_given_choice_is_a_softmax_over_it_and_the_router_learns_by_it(norm):
  """Against all experts worked out for all tokens, those that were not chosen with weight 0."""
  config = dataclasses.replace(MODEL, norm_top_k=norm)
  r = np.random.default_rng(1)
  x = jnp.asarray(r.normal(size=(2, 5, 32)))
  expert = np.stack([r.permutation(6)[:2] for _ in range(10)]).reshape(2, 5, 2)
  layer = {k: v['kernel'] for k, v in decoder.init(MODEL, 1)['layers'][0]['experts'].items()}
  chosen = np.zeros((2, 5, 6))
  np.put_along_axis(chosen, expert, 1.0, -1)

  def dense(layer):
    weight = jax.nn.softmax(x @ layer['router']) * chosen
    weight = weight / weight.sum(-1, keepdims=True) if norm else weight
    hidden = jax.nn.silu(jnp.einsum('bqd,edf->bqef', x, layer['gate']))
    hidden = hidden * jnp.einsum('bqd,edf->bqef', x, layer['up'])
    return jnp.einsum('bqef,efd,bqe->bqd', hidden, layer['down'], weight)

  def given(layer):
    weight, at = moe.route(config, x @ layer['router'], jnp.asarray(expert, jnp.uint8))
    return moe.mixture(
      config, x, weight, at, moe.Weights(layer['gate'], layer['up'], layer['down'])
    )

  score = lambda f: jax.value_and_grad(lambda layer: jnp.sin(f(layer)).sum())(layer)  # noqa: E731
  (a, slope_a), (b, slope_b) = score(dense), score(given)
  np.testing.assert_allclose(a, b, atol=1e-5)
  for name, slope in slope_a.items():
    assert np.abs(slope).max() > 1e-3, name
    np.testing.assert_allclose(slope, slope_b[name], atol=1e-5, err_msg=name)


def test_the_update_reads_the_batch_by_what_was_recorded(params, others, rollout):
  """Its log-probabilities of the old policy and its loss are those of the recorded way."""
  p = step_spec()
  correct_B = (np.arange(P * G) % 2).astype(np.float32)
  batch = jax.tree.map(jnp.asarray, Batch(make_prompts(), rollout, correct_B, correct_B))
  score = jax.jit(lambda packed: microbatch.all_log_probs(p, others, packed)[0])
  packed = microbatch.pack(p, batch)
  scores, anew = score(packed), score(packed.without_routes())
  real = np.arange(T)[None] < rollout.length_B[:, None]
  recorded, routed = (rescored(others, rollout, x) for x in (rollout.expert_BxTxNxk, None))
  np.testing.assert_allclose(scores, np.where(real, recorded, 0), atol=1e-4)
  np.testing.assert_allclose(anew, np.where(real, routed, 0), atol=1e-4)
  assert np.abs(scores - anew)[real].max() > 1e-2

  @jax.jit
  def lost(batch):
    state = train_state.init_state(p, others)
    inputs = minibatch.MinibatchInputs(jnp.int32(0))
    target = minibatch.minibatch_targets(p, state, batch, inputs)
    return minibatch.gradient(p, state, microbatch.pack(p, batch), target)[1]['probs_diff']

  gap = np.abs(np.exp(np.asarray(scores)) - np.exp(rollout.logp_BxT))[real].sum()
  np.testing.assert_allclose(lost(batch), gap, rtol=1e-3)


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(rollout=dict(draft=dict(fn='coupled'))), 'config.rollout.draft'),
    (dict(rollout=dict(tree=dict(fn='latr'))), 'config.rollout.tree'),
    (dict(rollout=dict(ngram=dict(draft=2, match=3))), 'config.rollout.ngram'),
    (dict(replay=dict(reuse=dict(fn='successes', count=1))), 'config.replay.reuse'),
    (dict(environment=dict(fn='calculator')), 'config.environment'),
  ],
)
def test_tokens_without_recorded_experts_are_refused(changes, message):
  c = configs.default()
  c.prompts, c.learner.replay_experts = P, True
  with c.ignore_type():
    c.update(changes)
  with pytest.raises(
    UserError, match=f'config.learner.replay_experts=True does not go with {message}'
  ):
    make_spec(c, MODEL, END, sharding.make_mesh(c.mesh, jax.devices()[:1]))


def test_a_model_without_experts_has_nothing_to_replay():
  c = configs.default()
  c.prompts, c.learner.replay_experts = P, True
  dense = dataclasses.replace(MODEL, experts=0)
  with pytest.raises(
    UserError, match='config.learner.replay_experts=True does not go with a model with experts=0'
  ):
    make_spec(c, dense, END, sharding.make_mesh(c.mesh, jax.devices()[:1]))
