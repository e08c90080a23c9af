"""Terms of the loss over the vocabulary: a divergence from a teacher, or score centering by the sampler's records."""

from __future__ import annotations

import functools

from jaxrl_llm import objective
from jaxrl_llm.learner.microbatch import Microbatch, packed_hidden_states
from jaxrl_llm.learner.step_spec import StepSpec, teacher_spec
from jaxrl_llm.models import logprob
from jaxrl_llm.objective import score_centering
from jaxrl_llm.objective.token_inputs import present
from jaxrl_llm.types import TrainState


def term(
  spec: StepSpec, state: TrainState, microbatch: Microbatch, target: objective.Targets
) -> logprob.VocabularyTerm:
  """The term at the predicted tokens of a microbatch; `target` holds its rows."""
  if spec.objective.divergence is not None:
    return _divergence(spec, state, microbatch)
  return _centering(spec, microbatch, target)


def _divergence(
  spec: StepSpec, state: TrainState, microbatch: Microbatch
) -> logprob.VocabularyTerm:
  """Hidden states of the teacher are kept, and logits of both models exist for a chunk of tokens at a time."""
  divergence = present(spec.objective.divergence)
  own = teacher_spec(spec)
  # The experts of these tokens are the policy's.
  hidden_ZxUxD = packed_hidden_states(own, state.teacher, microbatch._replace(expert_RxSxNxk=None))
  head = logprob.FrozenHead(own.model.config, state.teacher, hidden_ZxUxD)
  return logprob.VocabularyTerm(divergence.between, head)


def _centering(
  spec: StepSpec, microbatch: Microbatch, target: objective.Targets
) -> logprob.VocabularyTerm:
  policies = target.policies
  arrays = present(policies.top_id_BxTxK), present(policies.top_logp_BxTxK), target.advantage_BxT
  of = functools.partial(score_centering.mean_score, spec.objective.method.token_stages)
  return logprob.VocabularyTerm(of, columns=tuple(map(microbatch.to_tokens, arrays)))
