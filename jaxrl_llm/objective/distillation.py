"""Advantages of tokens from a teacher: tokens → advantage_BxT.

They are computed before the update, with log π_old for log π. Every public function may be named in
`config.objective.distillation.fn`. Detached.
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
