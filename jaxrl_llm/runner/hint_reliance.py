"""How much hinted completions rely on their hints: a program beside the step, whose results land with it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxrl_llm.learner import compile as programs
from jaxrl_llm.runner.context import RunContext
from jaxrl_llm.types import Array, Prompts, Rollout, TrainState

Measure = Callable[[TrainState, Prompts, Rollout], 'Array | None']


def compile_call(context: RunContext) -> Measure | None:
  """(state, the step's prompts, their rollout) → float32 [B]; None where no reward of hints reads it.

  A call without a hinted prompt returns None, too. Nothing waits for the device.
  """
  hints = context.selection.hints
  if hints is None or hints.rule.writing is None:
    return None
  measure, table = programs.compile_hint_reliance(context.spec), context.tables.train

  def call(state: TrainState, prompts: Prompts, rollout: Rollout) -> Array | None:
    if not (np.asarray(prompts.context_P) >= 0).any():
      return None
    plain = table.prompts(prompts.index_P)
    # Routers choose the experts of both passes: those of sampling are for the hinted prompt.
    rollout = rollout._replace(memory_BxM=None, noise_BxT=None, expert_BxTxNxk=None)
    return measure(state._replace(carried=()), plain, prompts, rollout)

  return call
