"""A teacher with another tokenizer: its forward pass over its own tokens, and its log-probs of spans of text."""

from __future__ import annotations

import jax
import jax.numpy as jnp

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
  span_BxT = present(batch.teacher_tokens).own_span_BxT
  sums_BxT = log_probs(spec, state, batch)
  first_BxT = jnp.where(
    token_spans.is_first(span_BxT), token_spans.of_tokens(sums_BxT, span_BxT), 0.0
  )
  target = target.with_arrays(teacher_BxT=first_BxT)
  return objective.distill(spec.objective.method, target, span_BxT)


def log_probs(spec: StepSpec, state: TrainState, batch: Batch) -> jax.Array:
  """The teacher's log-probs of the spans of each row: [B, T], 0 behind the last one."""
  tokens, own = present(batch.teacher_tokens), teacher_spec(spec)
  by_prompt = slice(None, None, spec.layout.group)
  prompts = batch.prompts._replace(
    tokens_PxL=tokens.prompt_BxL[by_prompt], length_P=tokens.prompt_length_B[by_prompt]
  )
  rollout = batch.rollout._replace(
    tokens_BxT=tokens.tokens_BxE, length_B=tokens.length_B, expert_BxTxNxk=None
  )
  packed = pack(own, batch._replace(prompts=prompts, rollout=rollout))
  logp_BxE, *_ = all_log_probs(own, state.teacher, packed)
  return token_spans.sums(logp_BxE, tokens.span_BxE, batch.rollout.tokens_BxT.shape[1])
