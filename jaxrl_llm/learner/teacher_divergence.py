"""The teacher's side of a divergence over the vocabulary: its forward pass over the tokens of a microbatch."""

from __future__ import annotations

from jaxrl_llm.learner.microbatch import Microbatch, packed_hidden_states
from jaxrl_llm.learner.step_spec import StepSpec, teacher_spec
from jaxrl_llm.models import logprob
from jaxrl_llm.objective.token_inputs import present
from jaxrl_llm.types import TrainState


def comparison(spec: StepSpec, state: TrainState, microbatch: Microbatch) -> logprob.Comparison:
  """The divergence of the loss, and the teacher at the predicted tokens.

  Hidden states are kept, and logits of both models exist for a chunk of tokens at a time.
  """
  divergence = present(spec.objective.divergence)
  own = teacher_spec(spec)
  # The experts of these tokens are the policy's.
  hidden_ZxUxD = packed_hidden_states(own, state.teacher, microbatch._replace(expert_RxSxNxk=None))
  head = logprob.FrozenHead(own.model.config, state.teacher, hidden_ZxUxD)
  return logprob.Comparison(divergence.between, head)
