"""An agent written against OpenAI's client is trained: its rows hold the ids that were sampled, and nothing else learns."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxrl_llm import rewards
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import empty_records
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.models import decoder
from jaxrl_llm.runner import endpoint, host_step, request_chains, setup
from jaxrl_llm.serving.episodes import Recorded

pytest.importorskip('starlette')
pytest.importorskip('uvicorn')
pytest.importorskip('openai')

P, G, L, T = 2, 3, 40, 40


def config(**changes):
  c = configs.default()
  c.model, c.mode, c.steps = 'scratch', 'split', 3
  c.scratch.update(width=16, layers=1, heads=2, kv_heads=1, mlp=32, max_tokens=96)
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = P, G, L, T
  c.data.source, c.data.size, c.data.chat = 'digits', 8, False
  c.data.tasks = (dict(name='copy', min_length=1, max_length=3),)
  c.environment.fn, c.environment.judge, c.evaluation.prompts = 'endpoint', 'environment', 0
  c.environment.update(harness='agents:asks_twice', workers=2, deadline_s=60.0, cpu_s=60.0)
  c.optimizer.learning_rate = 1e-1
  for name, value in changes.items():
    part, _, leaf = name.rpartition('__')
    (c[part] if part else c)[leaf] = value
  return c


def made(**changes):
  c = config(**changes)
  return setup.build_context(c, sharding.make_mesh(c.mesh, jax.devices()[:1]))


def run(context, count, state=None, batch=None, start=0):
  """`count` steps as train takes them → the state and batch behind them, and what each step sampled and landed."""
  call, history = endpoint.compile_call(context), []
  state = state or train_state.init_state(context.spec, context.models.policy.params)
  batch = batch or empty_records.empty_batch(context.spec)
  for index in range(start, start + count):
    inputs = host_step.build_inputs(context, index)
    state, rollout, device = call(state, batch, *inputs)
    prompts = context.episodes.prompts_of(inputs[0])
    landed = host_step.land(
      context, None, host_step.PendingStep(index, prompts, rollout, device)
    )
    batch = landed.batch
    history.append((jax.device_get(state.params), prompts, rollout, landed))
  return jax.device_get(state), batch, history


@pytest.fixture(autouse=True)
def importable(monkeypatch, request):
  monkeypatch.syspath_prepend(str(request.path.parent))
  monkeypatch.setenv('PYTHONPATH', str(request.path.parent), prepend=':')


@pytest.fixture(scope='module')
def trained(request):
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(request.path.parent))
    patch.setenv('PYTHONPATH', str(request.path.parent), prepend=':')
    context = made()
    result = run(context, 2)
    yield context, *result
    context.episodes.close()


def log_probs(context, params, prompts, rollout, b):
  """The log-probs of a row's tokens by one plain forward pass over prompt and completion."""
  prompt = prompts.tokens_PxL[b // G][: prompts.length_P[b // G]]
  tokens = np.concatenate([prompt, rollout.tokens_BxT[b][: rollout.length_B[b]]])[None]
  positions = np.arange(tokens.shape[1])[None]
  mask = decoder.causal(positions >= 0)
  model = context.spec.model.config
  hidden, _, _ = decoder.apply(model, params, tokens, positions, mask, dtype='float32')
  logits = decoder.head(model, params, hidden[0], 'float32')
  logp = np.asarray(jax.nn.log_softmax(logits / context.config.temperature))
  at = np.arange(len(prompt), tokens.shape[1])
  return logp[at - 1, tokens[0, at]]


def test_log_probs_are_those_of_the_policy_of_the_step(trained):
  """The second step is served with the updated weights: their log-probs agree, those of the first weights do not."""
  context, _, _, history = trained
  for step, (params, prompts, rollout, _) in enumerate(history):
    for b in range(P * G):
      sampled = rollout.turns.number_BxT[b, : rollout.length_B[b]] >= 0
      recorded = rollout.logp_BxT[b, : rollout.length_B[b]][sampled]
      assert sampled.sum() > 1
      again = log_probs(context, params, prompts, rollout, b)[sampled]
      np.testing.assert_allclose(recorded, again, atol=1e-4)
      if step == 1:
        old = log_probs(context, history[0][0], prompts, rollout, b)[sampled]
        assert np.abs(recorded - old).max() > 1e-2
