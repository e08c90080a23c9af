"""A teacher with another tokenizer: its forward pass over its own tokens, and the advantages of spans of text."""

from __future__ import annotations

import jax

from jaxrl_llm import objective
from jaxrl_llm.learner.microbatch import all_log_probs, pack
from jaxrl_llm.learner.step_spec import StepSpec, teacher_spec
from jaxrl_llm.objective import token_spans
from jaxrl_llm.objective.token_inputs import present
from jaxrl_llm.types import Batch, TrainState


def distill(
  spec: StepSpec, state: TrainState, batch: Batch, target: objective.Targets
) -> objective.Targets:
  """Targets with the advantages of spans."""
  tokens = present(batch.teacher_tokens)
  teacher_BxT = token_spans.at_first_tokens(log_probs(spec, state, batch), tokens)
  target = target.with_arrays(teacher_BxT=teacher_BxT)
  return objective.distill(spec.objective.method, target, tokens.own_span_BxT)


def log_probs(spec: StepSpec, state: TrainState, batch: Batch) -> jax.Array:
  """The teacher's log-probs of its tokens: [B, E], 0 behind the last one."""
  tokens, own = present(batch.teacher_tokens), teacher_spec(spec)
  by_prompt = slice(None, None, spec.layout.group)
  prompts = batch.prompts._replace(
    tokens_PxL=tokens.prompt_BxL[by_prompt], length_P=tokens.prompt_length_B[by_prompt]
  )
  rollout = batch.rollout._replace(
    tokens_BxT=tokens.tokens_BxE, length_B=tokens.length_B, expert_BxTxNxk=None
  )
  packed = pack(own, batch._replace(prompts=prompts, rollout=rollout))
  return all_log_probs(own, state.teacher, packed)[0]
