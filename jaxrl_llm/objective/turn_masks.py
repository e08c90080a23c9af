"""One turn of many-turn rows at a time: what an optimizer pass for it is asked, and what earlier turns count after it.

Pure functions of arrays; `update` runs the passes where `config.optimizer.outer` says so.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.policy_gradient import Method, Targets
from jaxrl_llm.objective.token_inputs import row_mean
from jaxrl_llm.types import Rollout


def of_turn(
  method: Method, target: Targets, rollout: Rollout, turn: jax.Array, multiplier_B: jax.Array
) -> Targets:
  """The targets of turn `turn` alone, as if its tokens were all of a row: A ← M·A, denominators of these rows.

  A row that has no such turn is no row here. Source: arXiv:2602.06554 (SeeUPO).
  """
  own_BxT = (rollout.turns.number_BxT == turn).astype(target.mask_BxT.dtype)
  mask_BxT = target.mask_BxT * own_BxT
  weight_BxT, kl_weight_BxT = method.denominators(mask_BxT, target.group_B, rollout)
  return target._replace(
    mask_BxT=mask_BxT,
    advantage_BxT=target.advantage_BxT * own_BxT * multiplier_B[:, None],
    weight_BxT=weight_BxT,
    kl_weight_BxT=kl_weight_BxT,
    said_BxT=target.said_BxT * own_BxT,
  )


def multiplier(
  multiplier_B: jax.Array,
  logp_BxT: jax.Array,
  before_BxT: jax.Array,
  turn_mask_BxT: jax.Array,
  *,
  eps: float = 0.2,
) -> jax.Array:
  """M ← clip(M·clip(e^{mean(log π_new − log π_before)}, 1±eps), 1±eps) after a turn was learned; mean over its tokens.

  Rows without the turn keep theirs. Source: arXiv:2602.06554 (SeeUPO).
  """
  moved = jnp.exp(row_mean(logp_BxT - before_BxT, turn_mask_BxT)[:, 0])
  return jnp.clip(multiplier_B * jnp.clip(moved, 1 - eps, 1 + eps), 1 - eps, 1 + eps)
