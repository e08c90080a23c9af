"""Reliance on hints: the mean log-ratio of hinted rows alone, by whole passes; and its way through a checkpoint."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from jaxrl_llm.config import loading
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import empty_records, microbatch
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.runner import hint_reliance, host_step, setup
from jaxrl_llm.runner.context import PendingStep
from jaxrl_llm.types import PLAIN, REQUEST

P, G, L, T = 4, 4, 24, 8


@functools.cache
def context_on(devices):
  c = loading.load('hill')
  c.model, c.dtype = 'scratch', 'float32'
  c.scratch.update(width=16, layers=1, heads=2, kv_heads=1, mlp=32, max_tokens=64, experts=0)
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = P, G, L, T
  c.learner.microbatch_tokens = c.sft.steps = c.evaluation.prompts = 0
  c.data.update(source='digits', path='', size=40, chat=False, template='{question}')
  c.data.tasks = (dict(name='copy', min_length=1, max_length=3),)
  return setup.build_context(c, sharding.make_mesh(c.mesh, jax.devices()[:devices]))


@pytest.fixture(params=[1, 2])
def context(request):
  """On one device, and with the prompts on two."""
  return context_on(request.param)


def sampled(context):
  """Prompts of which the first and the third have a hint, and rows of every length for them."""
  table, random = context.tables.train, np.random.default_rng(0)
  prompts = table.prompts([7, 3, 3, 0])
  tokens_PxL, length_P = prompts.tokens_PxL.copy(), prompts.length_P + [5, 0, 9, 2]
  for tokens_L, length in zip(tokens_PxL, length_P, strict=True):
    plain = np.count_nonzero(tokens_L)
    tokens_L[plain:length] = random.integers(2, 20, length - plain)
  context_P = np.array([2, PLAIN, 0, REQUEST], np.int32)
  hint_P = (context_P != PLAIN).astype(np.float32)
  prompts = prompts._replace(
    tokens_PxL=tokens_PxL, length_P=length_P.astype(np.int32), context_P=context_P, hint_P=hint_P
  )
  rollout = empty_records.empty_rollout(context.spec)
  length_B = np.tile([T, 1, 0, 5], P).astype(np.int32)
  real_BxT = np.arange(T)[None] < length_B[:, None]
  tokens_BxT = np.where(real_BxT, random.integers(2, 20, (P * G, T)), 0).astype(np.int32)
  return prompts, rollout._replace(tokens_BxT=tokens_BxT, length_B=length_B)


def whole_rows(prompts, tokens_BxT):
  """Log-probs of each row behind its prompt, on one device and without packing."""
  spec, params = context_on(1).spec, context_on(1).models.policy.params
  repeated = jax.tree.map(lambda x: np.repeat(x, G, axis=0), prompts)
  return np.asarray(microbatch.log_probs(spec, params, repeated, tokens_BxT)[0], float)


def test_reliance_is_the_mean_log_ratio_of_hinted_rows(context):
  state = train_state.init_state(context.spec, context.models.policy.params)
  prompts, rollout = sampled(context)
  measure = hint_reliance.compile_call(context)
  got_B = np.asarray(measure(state, prompts, rollout))
  plain = context.tables.train.prompts(prompts.index_P)
  bare = prompts._replace(tokens_PxL=plain.tokens_PxL, length_P=plain.length_P)
  change_BxT = whole_rows(bare, rollout.tokens_BxT)
  change_BxT -= whole_rows(prompts, rollout.tokens_BxT)
  want_B = np.array(
    [x[:n].mean() if n else 0 for x, n in zip(change_BxT, rollout.length_B, strict=True)]
  )
  want_B[G : 2 * G] = want_B[3 * G :] = 0  # a plain prompt, and a request
  np.testing.assert_allclose(got_B, want_B, atol=2e-5)
  assert np.abs(want_B[[0, 1, 3, 8, 9, 11]]).min() > 1e-3


def test_steps_without_a_hinted_prompt_need_no_pass(context):
  prompts, rollout = sampled(context)
  prompts = prompts._replace(context_P=np.array([PLAIN, REQUEST, PLAIN, PLAIN], np.int32))
  assert hint_reliance.compile_call(context)(None, prompts, rollout) is None
  others = context._replace(selection=context.selection._replace(hints=None))
  assert hint_reliance.compile_call(others) is None


def test_a_pending_step_carries_it_through_a_checkpoint(context):
  prompts, rollout = sampled(context)
  reliance_B = np.linspace(-1, 0, P * G, dtype=np.float32)
  for value in (reliance_B, None):
    pending = PendingStep(3, prompts, rollout, {}, reliance_B=value)
    back = host_step.unpacked(host_step.packed(pending)).reliance_B
    np.testing.assert_array_equal(back, value)
