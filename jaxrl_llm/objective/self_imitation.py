"""The self-imitation term: replayed rows with an advantage and a denominator of their own. arXiv:2509.22601 (SPEAR).

loss = loss of the sampled rows + Σ_{i: A_i > 0} w_i·loss_i / (denominator of these rows), with A_i = `imitation_B` of
the batch and w_i the weight of the row. Rows with A_i = 0 are none of it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.method_spec import Method
from jaxrl_llm.objective.token_inputs import present, sampled_mask
from jaxrl_llm.types import Batch


def targets(
  method: Method, batch: Batch, mask_BxT: jax.Array, advantage_BxT: jax.Array, group_B: jax.Array
) -> dict[str, jax.Array]:
  """Arrays of `Targets` for a batch with the term, by name, from those of a batch without it.

  The rows of the term stay in the loss where their group has no variance: their advantages compare no rows of a group.
  A KL penalty is of the sampled rows alone.
  """
  imitation_Bx1 = present(batch.imitation_B)[:, None]
  in_term_Bx1 = (jnp.asarray(imitation_Bx1) > 0).astype(mask_BxT.dtype)
  fresh_BxT = mask_BxT * (1 - in_term_Bx1)
  imitated_BxT = sampled_mask(batch.rollout) * in_term_Bx1
  weight_BxT, kl_weight_BxT = method.denominators(fresh_BxT, group_B, batch.rollout)
  term_weight_BxT, _ = method.denominators(imitated_BxT, group_B, batch.rollout)
  return dict(
    mask_BxT=fresh_BxT + imitated_BxT,
    advantage_BxT=fresh_BxT * advantage_BxT + imitated_BxT * imitation_Bx1,
    weight_BxT=weight_BxT + term_weight_BxT,
    kl_weight_BxT=weight_BxT if kl_weight_BxT is None else kl_weight_BxT,
  )
