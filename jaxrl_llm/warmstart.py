"""A supervised warm start through the same update: an answer is a rollout whose advantage is one."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from jaxrl_llm import data
from jaxrl_llm import step as steps
from jaxrl_llm.program import Program, make_program
from jaxrl_llm.types import Batch, TrainState

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
  config: Any, program: Program, state: TrainState, table: Any, tokenizer: Any
) -> tuple[TrainState, list[float]]:
  """Takes `config.sft.steps` supervised steps on `table`; fresh optimizer state for what follows.

  Returns the state and the loss (nats per token) of each step. Batches are drawn uniformly, keyed by
  (seed, step). Source: none.
  """
  sft = copy.deepcopy(config)
  sft.prompts, sft.rollouts, sft.temperature = config.sft.prompts, 1, 1.0
  sft.steps, sft.updates_per_rollout, sft.microbatch_rollouts = config.sft.steps, 1, 0
  sft.optimizer.learning_rate = config.sft.learning_rate
  sft.optimizer.decay, sft.optimizer.warmup_steps = 'cosine', 0
  sft.optimizer.outer = dict(fn='none')
  # Nothing is generated, and one row a prompt has no room for others.
  sft.replay = sft.collect = sft.hint = sft.environment = dict(fn='none')
  sft.curriculum.each, sft.curriculum.allocate = 1, dict(fn='equal')
  sft.generate.prune = sft.generate.tree = sft.generate.exit = dict(fn='none')
  sft.generate.carry_cache = False
  if not sft.quantize_update:  # else rounded weights are what learns here, too
    sft.generate.weights_dtype = 'auto'
  for stage, spec in _LIKELIHOOD.items():
    sft.objective[stage] = spec
  end_ids = program.generate.end_ids
  supervised = make_program(sft, program.model, end_ids, program.mesh)
  update = steps.compile_update(supervised)
  teacher = state.teacher
  state, losses = steps.init_state(supervised, state.params), []
  for index in range(config.sft.steps):
    random = np.random.default_rng((config.seed, index))
    chosen = random.choice(len(table), sft.prompts, replace=len(table) < sft.prompts)
    state, metrics = update(state, _batch(table, chosen, tokenizer, config.completion_tokens))
    # Recorded log-probabilities are 0 here, so this divergence is the negative log-likelihood.
    losses.append(float(metrics['actor/ppo_kl']))
  return steps.init_state(program, state.params, teacher), losses


def _batch(table: Any, chosen: np.ndarray, tokenizer: Any, max_tokens: int) -> Batch:
  """The right answers as rollouts of one per prompt, reward 1."""
  rows = [table.rows[i] for i in chosen]
  tokens_BxT, length_B = data.answer_tokens(rows, tokenizer, max_tokens)
  ones_B = np.ones(len(rows), np.float32)
  return Batch(table.prompts(chosen), data.supervised(tokens_BxT, length_B), ones_B, ones_B)
