"""The self-imitation term: replayed rows with an advantage and a denominator of their own. arXiv:2509.22601 (SPEAR).

loss = loss of the sampled rows + Σ_{i: A_i > 0} w_i·loss_i / (denominator of these rows), with A_i = `imitation_B` of
the batch and w_i the weight of the row. Rows with A_i = 0 are none of it. Functions without an `imitation_B` return
what they were given.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.method_spec import Method, Weights
from jaxrl_llm.types import Array, Batch


def learned(mixed_B: jax.Array, batch: Batch) -> jax.Array:
  """Rows in the loss [B]: those of mixed groups, and all of the term, whose advantages compare no rows of a group."""
  if batch.imitation_B is None:
    return mixed_B
  return jnp.maximum(mixed_B, _in_term(batch.imitation_B))


def advantages(advantage_B: jax.Array, batch: Batch) -> jax.Array:
  """Advantages of rows [B], those of the term from the batch."""
  if batch.imitation_B is None:
    return advantage_B
  return jnp.where(_in_term(batch.imitation_B) > 0, batch.imitation_B, advantage_B)


def denominators(method: Method, mask_BxT: jax.Array, group_B: jax.Array, batch: Batch) -> Weights:
  """`weight_BxT` and `kl_weight_BxT` of `Targets`; a KL penalty is of the sampled rows alone."""
  if batch.imitation_B is None:
    return method.denominators(mask_BxT, group_B, batch.rollout)
  in_term_Bx1 = _in_term(batch.imitation_B)[:, None]
  weight_BxT, kl_weight_BxT = method.denominators(
    mask_BxT * (1 - in_term_Bx1), group_B, batch.rollout
  )
  imitated_BxT, _ = method.denominators(mask_BxT * in_term_Bx1, group_B, batch.rollout)
  kl_weight_BxT = weight_BxT if kl_weight_BxT is None else kl_weight_BxT
  return weight_BxT + imitated_BxT, kl_weight_BxT


def _in_term(imitation_B: Array) -> jax.Array:
  """1 for rows of the term, else 0."""
  return (jnp.asarray(imitation_B) > 0).astype(jnp.float32)
