"""Advantages of tokens from a teacher: tokens → advantage_BxT.

They are computed before the update, with log π_old for log π. Where the teacher reads a solution, rows without one, or
with a prompt of more than `prompt_tokens` together with it, leave the loss and its denominator. Every public function
may be named in `config.objective.distillation.fn`. Detached.
"""

from __future__ import annotations

import jax

from jaxrl_llm.objective.token_inputs import Tokens, needs, present, requires


def none() -> None:
  """A from rewards."""


@needs('teacher', 'reference')
@requires(
  'rewards are ignored',
  credit_assignment=('row',),
  reward_shaping=('none',),
  zero_variance=('keep',),
)
def on_policy(tokens: Tokens, *, scale: float = 1.0) -> jax.Array:
  """A = scale·(log π_T − log π_base) − (log π_old − log π_base) of each token; rewards are ignored.

  The base is the reference policy. Scale 1 is plain on-policy distillation: A = log π_T − log π_old for any base, with
  the gradient of −KL(π ‖ π_T) token by token. A scale above 1 extrapolates beyond the teacher, away from the base
  (ExOPD: 1.25). arXiv:2602.12125 (G-OPD).
  """
  base_BxT = present(tokens.reference_BxT)
  return scale * (present(tokens.teacher_BxT) - base_BxT) - (tokens.old_BxT - base_BxT)


@needs('teacher', 'spans')
@requires(
  'rewards are ignored',
  credit_assignment=('row',),
  reward_shaping=('none',),
  zero_variance=('keep',),
)
def on_policy_spans(
  tokens: Tokens, *, teacher_prompt_tokens: int, teacher_completion_tokens: int
) -> jax.Array:
  """A = Σ log π_T − Σ log π_old, summed over the tokens of each side in the token's span; rewards are ignored.

  The teacher has another tokenizer, and a span is a shortest piece of text that is whole tokens of both. A is the
  same for all tokens of a span, whose log-probs sum to that of its text, so that the gradient is that of
  −KL(π ‖ π_T) span by span. Tokens outside of spans leave the loss: incomplete characters, and text behind the
  teacher's last token. Here `tokens` holds the teacher's sum at the first token of a span and 0 at the others;
  `objective.distill` sums the differences of a span. arXiv:2306.13649 (GKD), its divergence for β → 1.
  """
  del teacher_prompt_tokens, teacher_completion_tokens  # read on the host, which encodes the text
  return _toward_teacher(tokens)


@needs('solution')
@requires(
  'rewards choose the solutions alone',
  credit_assignment=('row',),
  reward_shaping=('none',),
  zero_variance=('keep',),
)
def solved_by_group(tokens: Tokens, *, prompt_tokens: int) -> jax.Array:
  """A = log π_T(y | x, s) − log π_old(y | x) of each token, π_T the reference model and s a solution by the group.

  s is the first right completion of another row. With objective.reference.fn=refreshed the reference is a running mean
  of the policy, as in the official code. This is its form for sampled tokens. arXiv:2601.20802 (SDPO).
  """
  del prompt_tokens  # read on the host, which writes the prompts
  return _toward_teacher(tokens)


@needs('solution')
@requires(
  'rewards are ignored',
  credit_assignment=('row',),
  reward_shaping=('none',),
  zero_variance=('keep',),
)
def solved_by_data(tokens: Tokens, *, prompt_tokens: int) -> jax.Array:
  """A = log π_T(y | x, s) − log π_old(y | x) of each token, π_T the reference model and s the data's solution.

  The form for sampled tokens of arXiv:2601.18734 (OPSD).
  """
  del prompt_tokens
  return _toward_teacher(tokens)


def _toward_teacher(tokens: Tokens) -> jax.Array:
  return present(tokens.teacher_BxT) - tokens.old_BxT
