"""A run of few and short episodes, for tests: `made` builds it, `run` takes its steps."""

from __future__ import annotations

import string

import jax
import numpy as np

from jaxrl_llm import environments, objective, rewards
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import empty_records, microbatch
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.runner import host_step, multi_turn, setup

P, G, T = 2, 4, 24
Result = environments.Result


class Talks:
  """Answers with words that hang on the row, the seed and all turns; pays for even lengths."""

  def __init__(self, turns: int = 99):
    self.turns = turns

  def reset(self, row, seed):
    self.heard = [str(seed % 97)]

  def step(self, text):
    self.heard.append(text)
    total = sum(map(ord, ''.join(self.heard)))
    return Result(f'<{total % 7}>', float(len(text) % 2 == 0), len(self.heard) > self.turns)


def config(**changes):
  c = configs.default()
  c.model, c.mode, c.steps = 'scratch', 'split', 3
  c.scratch.update(width=16, layers=1, heads=2, kv_heads=1, mlp=32, max_tokens=64)
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = P, G, 12, T
  c.data.source, c.data.size, c.data.chat = 'digits', 8, False
  c.data.tasks = (dict(name='copy', min_length=1, max_length=3),)
  c.environment.fn, c.environment.judge, c.evaluation.prompts = 'guess', 'environment', 0
  c.optimizer.learning_rate = 1e-2
  for name, value in changes.items():
    part, _, leaf = name.rpartition('__')
    (c[part] if part else c)[leaf] = value
  return c


def made(make=None, ends=tuple(range(0, 90, 4)), **changes):
  """A run context; `make` stands for what config.environment names. One token of four ends a turn: they are short."""
  c = config(**changes)
  context = setup.build_context(c, sharding.make_mesh(c.mesh, jax.devices()[:1]))
  if make is not None:
    context.episodes.environments.factory = context.episodes.environments.factory._replace(
      make=make
    )
  return with_ends(context, ends)


def with_ends(context, ends=tuple(range(0, 90, 4))):
  """The run with other tokens that end a turn."""
  if context.episodes is not None:
    context.episodes.tokenizer = context.models.policy.tokenizer._replace(end_ids=ends)
  rollout = context.spec.rollout
  rollout = rollout._replace(decode=rollout.decode._replace(end_ids=ends))
  return context._replace(spec=context.spec._replace(rollout=rollout))


def run(context, count=1, state=None, batch=None, start=0, call=None):
  """`count` calls as train makes them → states, batches and rollouts after each."""
  call = call or multi_turn.compile_call(context)
  state = state or train_state.init_state(context.spec, context.models.policy.params)
  batch, history = batch or empty_records.empty_batch(context.spec), []
  for index in range(start, start + count):
    prompts, *more = host_step.build_inputs(context, index)
    state, rollout, device = call(state, batch, prompts, *more)
    landed = host_step.land(context, Pool(), host_step.PendingStep(index, prompts, rollout, device))
    batch = landed.batch
    history.append((prompts, sharding.fetch(rollout), landed))
  return jax.device_get(state), batch, history


# Characters that end no turn, whatever else of them graders see.
LETTERS = sorted(set(string.ascii_letters + string.digits + string.punctuation + ' \n'))[1::4]


def right(text: str) -> float:
  return float(text[:1] in LETTERS)


class Pool:
  """Stands for the grading pool."""

  def score(self, rows, texts):
    right_B = np.array(list(map(right, texts)), np.float32)
    counts = dict.fromkeys(('grade/timeouts', 'grade/crashes', 'grade/errors'), 0)
    return rewards.Scores(right_B[:, None], np.zeros(len(texts), np.int8), counts, '')


def check_log_probs(context, prompts, rollout, atol):
  """One pass over the whole row, as the update makes, for every token that was sampled and for no other."""
  state = train_state.init_state(context.spec, context.models.policy.params)
  logp_BxT, _ = jax.jit(
    lambda p: microbatch.log_probs(context.spec, p, prompts, rollout.tokens_BxT)
  )(state.params)
  sampled = np.asarray(objective.sampled_mask(rollout)) > 0
  assert P * G < sampled.sum() < rollout.length_B.sum()
  np.testing.assert_allclose(np.asarray(logp_BxT)[sampled], rollout.logp_BxT[sampled], atol=atol)
