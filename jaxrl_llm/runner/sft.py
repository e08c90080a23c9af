"""Supervised start: the update on demonstrations, each of them a completion with advantage 1."""

from __future__ import annotations

import time
from collections.abc import Callable

import ml_collections
import numpy as np

from jaxrl_llm import data
from jaxrl_llm.checkpointing import metrics_log
from jaxrl_llm.config.schema import Config
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.monitoring import console
from jaxrl_llm.types import Batch, TrainState

_CONSOLE_INTERVAL_S = 10.0  # between two lines on the console
# A = 1, no ratio and no trust region: the coefficient form is token-mean maximum likelihood.
_LIKELIHOOD = dict(
  advantage=dict(fn='raw'),
  credit_assignment=dict(fn='row'),
  auxiliary_model=dict(fn='none'),
  importance_correction=dict(fn='none'),
  old_policy=dict(fn='auto'),
  ratio=dict(fn='one'),
  trust_region=dict(fn='none'),
  token_weighting=dict(fn='none'),
  kl=dict(fn='none'),
  kl_aggregation=dict(fn='auto'),
  lr_scale=dict(fn='none'),
  distillation=dict(fn='none'),
  sft_loss=dict(fn='none'),
  teacher='',
  aggregation=dict(fn='token_mean'),
  reward_shaping=dict(fn='none'),
  zero_variance=dict(fn='keep'),
  activation_noise=dict(fn='none'),
)


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
  sft = ml_collections.ConfigDict(config.to_dict())
  sft.prompts, sft.rollouts, sft.temperature = config.sft.prompts, 1, 1.0
  sft.steps, sft.learner.minibatches, sft.learner.microbatch_rollouts = config.sft.steps, 1, 0
  sft.optimizer.learning_rate = config.sft.learning_rate
  sft.optimizer.decay, sft.optimizer.warmup_steps = 'cosine', 0
  sft.optimizer.outer = dict(fn='none')
  # Nothing is sampled, and a group of one row has no room for others.
  sft.replay.reuse = sft.replay.collect = dict(fn='none')
  sft.curriculum.hint = sft.environment = dict(fn='none')
  sft.curriculum.slots_per_prompt, sft.curriculum.allocation = 1, dict(fn='equal')
  sft.rollout.pruning = sft.rollout.tree = sft.rollout.early_exit = dict(fn='none')
  sft.rollout.carry_cache = False
  if not sft.learner.quantize:  # with it, the update reads the rounded weights here, too
    sft.rollout.weights_dtype = 'auto'
  for stage, settings in _LIKELIHOOD.items():
    sft.objective[stage] = settings
  return make_spec(sft, spec.model.config, spec.rollout.decode.end_ids, spec.layout.mesh)


def batch(
  config: Config, random: np.random.Generator, table: data.PromptTable, tokenizer: Tokenizer
) -> Batch:
  """Demonstrations as completions of reward 1, one for each prompt, or packed into rows."""
  size, width = config.sft.prompts, config.sft.pack_tokens
  if width:
    # Far more than fit; none twice, as long as there are others.
    epochs = -(-size * width // len(table))
    order = np.concatenate([random.permutation(len(table)) for _ in range(epochs)])
    drawn = ((table.tokens[i], table.rows[i]) for i in order)
    prompts, rollout, _ = data.pack_demonstrations(drawn, tokenizer, config.completion_tokens, size, width)
  else:
    chosen = random.choice(len(table), size, replace=len(table) < size)
    rows = [table.rows[i] for i in chosen]
    rollout = data.as_rollout(*data.answer_tokens(rows, tokenizer, config.completion_tokens))
    prompts = table.prompts(chosen)
  ones_B = np.ones(size, np.float32)
  return Batch(prompts, rollout, ones_B, ones_B)
