"""Small minibatches and states for tests of packed rows, and their gradient as the optimizer gets it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from objective_table import settings

from jaxrl_llm import data, objective
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import microbatch, minibatch
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.packing import PackingSpec
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.learner.step_spec import ObjectiveSpec
from jaxrl_llm.models import decoder
from jaxrl_llm.types import Batch, ModelConfig, Prompts
from tests.learner import plain_gradient

MODEL = ModelConfig(
  vocab=20, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp=16, max_tokens=32
)
DEEP = dict(layers=2, window=4, sliding=(True, False))
P, G, L, T = 4, 4, 5, 6
B = P * G
# A row at a time; several microbatches of several bins; everything in one bin.
SINGLE = PackingSpec(bins=1, tokens=L + T - 1, predicted=T, rows=1, shares_prompt=True)
SEVERAL = PackingSpec(bins=2, tokens=17, predicted=11, rows=3, shares_prompt=True)
WHOLE = PackingSpec(bins=1, tokens=P * L + B * T, predicted=B * T, rows=B, shares_prompt=True)


def make(model=MODEL, devices=1, mesh=None, **changes):
  c = configs.default()
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = P, G, L, T
  c.optimizer.clip_norm = 1e9
  with c.ignore_type():
    c.update(changes)
  c.mesh.update(mesh or {})
  return make_spec(c, model, (3,), sharding.make_mesh(c.mesh, jax.devices()[:devices]))


def with_method(spec, **choices):
  method = objective.method(settings(**choices))
  return spec._replace(objective=ObjectiveSpec(method, None, None))


def make_batch(seed=0, vocab=20, rows=B):
  """Rows of all lengths, one of them empty; all right in the second group, all wrong in the last one."""
  r = np.random.default_rng(seed)
  length_B = r.integers(1, T + 1, rows).astype(np.int32)
  length_B[[5, 2]] = 0, T
  length_P = r.integers(1, L + 1, P).astype(np.int32)
  zeros_P, group = np.zeros(P, np.int32), rows // P
  correct_B = (np.arange(rows) % 2).astype(np.float32)
  correct_B[group : 2 * group], correct_B[-group:] = 1, 0
  varied = np.where(np.arange(rows) // group % 2 == 0, r.random(rows), 0.2)
  prompts = Prompts(
    r.integers(0, vocab, (P, L)).astype(np.int32), length_P, np.arange(P, dtype=np.int32),
    zeros_P, zeros_P.astype('f4'), context_P=np.array([0, -1, 1, 0], np.int32),
  )  # fmt: skip
  rollout = data.as_rollout(r.integers(0, vocab, (rows, T)).astype(np.int32), length_B)
  rollout = rollout._replace(
    logp_BxT=(np.log(1 / vocab) + 0.4 * r.normal(size=(rows, T))).astype(np.float32),
    version_BxT=r.integers(1, 5, (rows, T)).astype(np.int32),
  )
  reward_B = (correct_B + 0.3 * varied).astype(np.float32)
  parts_BxK = np.stack([correct_B, 9 * varied], 1).astype(np.float32)
  return Batch(prompts, rollout, reward_B, correct_B, parts_BxK=parts_BxK)


def near_policy(batch, logp_BxT, seed=0):
  """The batch as sampled by a policy whose log-probabilities are near these."""
  noise = np.random.default_rng(seed).normal(size=logp_BxT.shape).astype(logp_BxT.dtype)
  return batch._replace(rollout=batch.rollout._replace(logp_BxT=logp_BxT + 0.25 * noise))


def weights(seed, model=MODEL):
  return jax.tree.map(lambda x: 1.5 * x, decoder.init(model, seed))


def make_state(spec, params, **more):
  """A state in the middle of a run, whose other policies are none of them the present one."""
  state = train_state.init_state(spec, params)._replace(step=jnp.int32(5))
  near = jax.tree.map(lambda x, y: x + 0.1 * y, params, weights(7, spec.model.config))
  method = spec.objective.method
  if method.needs_average:
    state = state._replace(average=near)
  if method.needs_reference and state.base is None:
    state = state._replace(reference=near)
  return state._replace(**more)


def packed(spec, state, batch, signal=None):
  """(gradient, metrics, microbatches): as the optimizer gets it."""

  @sharding.on_mesh
  def run(spec, state, batch, signal):
    inputs = minibatch.MinibatchInputs(jnp.int32(5), signal=signal)
    if spec.objective.method.needs_old and not spec.objective.method.needs_average:
      first = microbatch.pack(spec, batch)
      now = plain_gradient.weights_of(spec, state, state.params)
      inputs = inputs._replace(old=microbatch.all_log_probs(spec, now, first)[0])
    after, metrics = minibatch.minibatch_step(spec, state, batch, inputs)
    return after.opt_state, metrics

  state, batch = jax.tree.map(jnp.asarray, (state, batch))
  return jax.jit(functools.partial(run, spec))(state, batch, signal)
