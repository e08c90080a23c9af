"""Factors on the KL term by the difficulty of a prompt: correct, length [P, N], context → scale [P, N].

The weight of each token of a row in the stage `kl` is multiplied by the scale of its row. `context_PxN` is
`Prompts.context_P` of the row's slot, or None. Every public function may be named in `config.objective.kl_scale.fn`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.types import FROM_HARD, PLAIN


def none() -> None:
  """The KL term counts alike for all prompts."""


def by_difficulty(
  correct_PxN: jax.Array,
  length_PxN: jax.Array,
  context_PxN: jax.Array | None,
  *,
  hard: float = 0.3,
  hard_scale: float = 0.5,
  other_scale: float = 1.0,
) -> jax.Array:
  """`hard_scale` for rows of hard prompts, `other_scale` for all others.

  A prompt is hard where at most a share `hard` of its group is right. A rewritten one is hard where the prompt that it
  was made from was, see `config.curriculum.hint.fn=rewritten`. arXiv:2509.25004 (CLPO).
  """
  exists_PxN = length_PxN > 0
  right_Px1 = (correct_PxN * exists_PxN).sum(1, keepdims=True)
  rate_Px1 = right_Px1 / jnp.maximum(exists_PxN.sum(1, keepdims=True), 1)
  hard_PxN = jnp.broadcast_to(rate_Px1 <= hard, correct_PxN.shape)
  if context_PxN is not None:
    rewritten_PxN = context_PxN < PLAIN
    hard_PxN = jnp.where(rewritten_PxN, context_PxN == FROM_HARD, hard_PxN)
  return jnp.where(hard_PxN, hard_scale, other_scale)
