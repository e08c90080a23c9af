"""A teacher's word as the advantage of every token: tokens → advantage_BxT.

Worked out before the weights move, so that log π is log π_old here. Every public function here may be named in
`config.objective.distillation.fn`. Detached.
"""

from __future__ import annotations

import jax

from jaxrl_llm.objective.token_inputs import Tokens, needs, requires


def none(tokens: Tokens) -> jax.Array:
  """A as it is, of rewards. Source: none."""
  return tokens.advantage_BxT


@needs('teacher', 'reference')
@requires(
  'rewards count for nothing',
  credit_assignment=('row',),
  reward_shaping=('none',),
  zero_variance=('keep',),
)
def on_policy(tokens: Tokens, *, scale: float = 1.0) -> jax.Array:
  """A = scale·(log π_T − log π_base) − (log π_old − log π_base) of each token; rewards count for nothing.

  The base is the reference policy. Scale 1 is plain on-policy distillation, A = log π_T − log π_old, whatever the
  base, with the gradient of −KL(π ‖ π_T) token by token; beyond 1 goes on past the teacher, away from the base (ExOPD:
  1.25). Source: arXiv:2602.12125 (G-OPD).
  """
  base_BxT = tokens.reference_BxT
  return scale * (tokens.teacher_BxT - base_BxT) - (tokens.old_BxT - base_BxT)
