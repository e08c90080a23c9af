"""A supervised warm start through the same update: a demonstration is a rollout whose advantage is one."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_llm import data
from jaxrl_llm import step as steps
from jaxrl_llm.checkpointing import metrics_log
from jaxrl_llm.learner.step_spec import StepSpec, make_spec
from jaxrl_llm.types import Batch, TrainState

_QUIET_S = 10.0  # between two lines on the screen
# With A = 1, no ratio and no trust region the coefficient form is token-mean maximum likelihood.
_LIKELIHOOD = dict(
  advantage=dict(fn='raw'),
  credit=dict(fn='row'),
  companion=dict(fn='none'),
  correction=dict(fn='none'),
  proximal=dict(fn='auto'),
  ratio=dict(fn='one'),
  trust=dict(fn='none'),
  emphasis=dict(fn='none'),
  kl=dict(fn='none'),
  kl_aggregate=dict(fn='auto'),
  lr_scale=dict(fn='none'),
  distill=dict(fn='none'),
  auxiliary=dict(fn='none'),
  teacher='',
  aggregate=dict(fn='token_mean'),
  shape=dict(fn='none'),
  zero_variance=dict(fn='keep'),
  perturb=dict(fn='none'),
)


def run(
  config: Any,
  spec: StepSpec,
  state: TrainState,
  table: Any,
  tokenizer: Any,
  tell: Callable[[float], None],
) -> TrainState:
  """Takes `config.sft.steps` supervised steps on `table`; fresh optimizer state for what follows.

  After each, `tell` hears its loss, nats per token. Batches are drawn uniformly, keyed by (seed, step).
  Source: none.
  """
  supervised = likelihood(config, spec)
  update = steps.compile_update(supervised)
  teacher = state.teacher
  state = steps.init_state(supervised, state.params)
  for index in range(config.sft.steps):
    random = np.random.default_rng((config.seed, index))
    state, told = update(state, batch(config, random, table, tokenizer))
    # Recorded log-probabilities are 0 here, so this divergence is the negative log-likelihood.
    tell(float(told['actor/ppo_kl']))
  return steps.init_state(spec, state.params, teacher)


class Losses:
  """What `run` tells: a row to `write` for every step and, in a start that takes long, a line for every tenth of them.

  Source: none.
  """

  def __init__(self, steps: int, write: Callable[[dict], None], screen: Any):
    self._steps, self._write, self._screen = steps, write, screen
    self._done, self._first, self._said = 0, 0.0, time.monotonic()

  def __call__(self, loss: float) -> None:
    self._write({metrics_log.STEP: self._done, 'sft/loss': loss})
    self._first = self._first if self._done else loss
    self._done += 1
    if self._done == self._steps:
      self._screen.say(f'warm start: loss {self._first:.2f} -> {loss:.2f} nats per token')
    elif not self._done % max(self._steps // 10, 1) and time.monotonic() > self._said + _QUIET_S:
      self._said = time.monotonic()
      self._screen.say(
        f'warm start: {self._done} of {self._steps} steps, {loss:.2f} nats per token'
      )


def likelihood(config: Any, spec: StepSpec) -> StepSpec:
  """The program of a run with maximum likelihood of demonstrations in the place of its objective. Source: none."""
  sft = copy.deepcopy(config)
  sft.prompts, sft.rollouts, sft.temperature = config.sft.prompts, 1, 1.0
  sft.steps, sft.learner.minibatches, sft.learner.microbatch_rollouts = config.sft.steps, 1, 0
  sft.optimizer.learning_rate = config.sft.learning_rate
  sft.optimizer.decay, sft.optimizer.warmup_steps = 'cosine', 0
  sft.optimizer.outer = dict(fn='none')
  # Nothing is generated, and one row a prompt has no room for others.
  sft.replay.reuse = sft.replay.collect = dict(fn='none')
  sft.curriculum.hint = sft.environment = dict(fn='none')
  sft.curriculum.slots_per_prompt, sft.curriculum.allocation = 1, dict(fn='equal')
  sft.rollout.pruning = sft.rollout.tree = sft.rollout.early_exit = dict(fn='none')
  sft.rollout.carry_cache = False
  if not sft.learner.quantize:  # else rounded weights are what learns here, too
    sft.rollout.weights_dtype = 'auto'
  for stage, settings in _LIKELIHOOD.items():
    sft.objective[stage] = settings
  return make_spec(sft, spec.model.config, spec.rollout.decode.end_ids, spec.layout.mesh)


def batch(config: Any, random: np.random.Generator, table: Any, tokenizer: Any) -> Batch:
  """Demonstrations as rollouts of one per prompt, or packed, all of reward 1. Source: none."""
  size, width = config.sft.prompts, config.sft.pack_tokens
  if width:
    # Far more than fit; none twice, as long as there are others.
    order = np.concatenate(
      [random.permutation(len(table)) for _ in range(-(-size * width // len(table)))]
    )
    drawn = ((table.tokens[i], table.rows[i]) for i in order)
    prompts, rollout, _ = data.packed(drawn, tokenizer, config.completion_tokens, size, width)
  else:
    chosen = random.choice(len(table), size, replace=len(table) < size)
    rows = [table.rows[i] for i in chosen]
    rollout = data.supervised(*data.answer_tokens(rows, tokenizer, config.completion_tokens))
    prompts = table.prompts(chosen)
  ones_B = np.ones(size, np.float32)
  return Batch(prompts, rollout, ones_B, ones_B)
