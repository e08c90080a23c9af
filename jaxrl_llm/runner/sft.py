"""Supervised start: the update on demonstrations, each of them a completion with advantage 1."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from jaxrl_llm import data
from jaxrl_llm.checkpointing import metrics_log
from jaxrl_llm.config.schema import Config, EnvironmentConfig, replace, typed
from jaxrl_llm.config.section import stage
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.monitoring import console
from jaxrl_llm.types import Batch, TrainState

_CONSOLE_INTERVAL_S = 10.0  # between two lines on the console
# A = 1, no ratio and no trust region: the coefficient form is token-mean maximum likelihood.
_LIKELIHOOD = {
  'objective.advantage': stage('raw'),
  'objective.credit_assignment': stage('row'),
  'objective.auxiliary_model': stage('none'),
  'objective.importance_correction': stage('none'),
  'objective.old_policy': stage('auto'),
  'objective.ratio': stage('one'),
  'objective.trust_region': stage('none'),
  'objective.token_weighting': stage('none'),
  'objective.kl': stage('none'),
  'objective.kl_aggregation': stage('auto'),
  'objective.kl_scale': stage('none'),
  'objective.lr_scale': stage('none'),
  'objective.distillation': stage('none'),
  'objective.divergence': stage('none'),
  'objective.score_centering': stage('none'),
  'objective.sft_loss': stage('none'),
  'objective.teacher': '',
  'objective.aggregation': stage('token_mean'),
  'objective.reward_shaping': stage('none'),
  'objective.zero_variance': stage('keep'),
  'objective.activation_noise': stage('none'),
  'objective.entropy_bonus': stage('none'),
  'objective.reference': stage('frozen'),
  'objective.reward_kl': stage('none'),
}
# Nothing is sampled, and a group of one row has no room for others.
_NO_ROLLOUTS = {
  'replay.reuse': stage('none'),
  'replay.collect': stage('none'),
  'environment': EnvironmentConfig(),
  'curriculum.hint': stage('none'),
  'curriculum.slots_per_prompt': 1,
  'curriculum.allocation': stage('equal'),
  'rollout.pruning': stage('none'),
  'rollout.length_head': stage('none'),
  'rollout.draft_head': stage('none'),
  'rollout.tree': stage('none'),
  'rollout.early_exit': stage('none'),
  'rollout.carry_cache': False,
}


def run(
  config: Config,
  spec: StepSpec,
  state: TrainState,
  table: data.PromptTable,
  tokenizer: Tokenizer,
  on_loss: Callable[[float], None],
) -> TrainState:
  """Take `config.sft.steps` supervised steps on `table`; the returned state has a fresh optimizer.

  `on_loss` is called after each step with its loss in nats per token. Batches are drawn uniformly by (seed, step).
  """
  supervised = likelihood(config, spec)
  update = programs.compile_update(supervised)
  teacher = state.teacher
  state = train_state.init_state(supervised, state.params)
  for index in range(config.sft.steps):
    random = np.random.default_rng((config.seed, index))
    state, metrics = update(state, batch(config, random, table, tokenizer))
    # Recorded log-probs are 0 here, so this divergence is the negative log-likelihood.
    on_loss(float(metrics['actor/ppo_kl']))
  return train_state.init_state(spec, state.params, teacher)


class LossLogger:
  """Writes a row for every supervised step, and in a long start a line on the console for every tenth of them."""

  def __init__(self, steps: int, write: Callable[[dict], None], screen: console.Console):
    """`write` takes a row of sft.jsonl."""
    self._steps, self._write, self._screen = steps, write, screen
    self._done, self._first, self._printed_s = 0, 0.0, time.monotonic()

  def __call__(self, loss: float) -> None:
    self._write({metrics_log.STEP: self._done, 'sft/loss': loss})
    self._first = self._first if self._done else loss
    self._done += 1
    if self._done == self._steps:
      self._screen.info(f'warm start: loss {self._first:.2f} -> {loss:.2f} nats per token')
    elif (
      not self._done % max(self._steps // 10, 1)
      and time.monotonic() > self._printed_s + _CONSOLE_INTERVAL_S
    ):
      self._printed_s = time.monotonic()
      self._screen.info(
        f'warm start: {self._done} of {self._steps} steps, {loss:.2f} nats per token'
      )


def likelihood(config: Config, spec: StepSpec) -> StepSpec:
  """The step specification of a run with maximum likelihood of demonstrations as its objective."""
  config = typed(config)
  changes = _LIKELIHOOD | _NO_ROLLOUTS
  changes |= {'prompts': config.sft.prompts, 'rollouts': 1, 'temperature': 1.0}
  changes |= {'steps': config.sft.steps, 'learner.minibatches': 1, 'learner.passes': 1}
  changes |= {'optimizer.learning_rate': config.sft.learning_rate}
  changes |= {'optimizer.decay': 'cosine', 'optimizer.warmup_steps': 0}
  changes |= {'optimizer.outer': stage('none')}
  if not config.learner.quantize:  # with it, the update reads the rounded weights here, too
    changes['rollout.weights_dtype'] = 'auto'
  sft = replace(config, changes)
  return make_spec(sft, spec.model.config, spec.rollout.decode.end_ids, spec.layout.mesh)


def batch(
  config: Config, random: np.random.Generator, table: data.PromptTable, tokenizer: Tokenizer
) -> Batch:
  """Demonstrations as completions of reward 1, one for each prompt."""
  size = config.sft.prompts
  chosen = random.choice(len(table), size, replace=len(table) < size)
  rows = [table.rows[i] for i in chosen]
  rollout = data.as_rollout(*data.answer_tokens(rows, tokenizer, config.completion_tokens))
  prompts = table.prompts(chosen)
  ones_B = np.ones(size, np.float32)
  return Batch(prompts, rollout, ones_B, ones_B)
