"""Optimizer passes over one turn of multi-turn rows: targets of a turn, and the multiplier of earlier turns.

`learner.update` runs the passes where `config.optimizer.outer` chooses them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.method_spec import Method
from jaxrl_llm.objective.policy_gradient import Targets
from jaxrl_llm.objective.token_inputs import present, row_mean
from jaxrl_llm.types import Rollout


def turn_targets(
  method: Method, target: Targets, rollout: Rollout, turn: jax.Array, multiplier_B: jax.Array
) -> Targets:
  """Targets of turn `turn` alone: A ← M·A, denominators over its tokens. arXiv:2602.06554 (SeeUPO).

  Rows without that turn do not count.
  """
  own_BxT = (present(rollout.turns).number_BxT == turn).astype(target.mask_BxT.dtype)
  mask_BxT = target.mask_BxT * own_BxT
  weight_BxT, kl_weight_BxT = method.denominators(mask_BxT, target.group_B, rollout)
  return target._replace(
    mask_BxT=mask_BxT,
    advantage_BxT=target.advantage_BxT * own_BxT * multiplier_B[:, None],
    weight_BxT=weight_BxT,
    kl_weight_BxT=kl_weight_BxT,
    sampled_BxT=present(target.sampled_BxT) * own_BxT,
  )


def multiplier(
  multiplier_B: jax.Array,
  logp_BxT: jax.Array,
  before_BxT: jax.Array,
  turn_mask_BxT: jax.Array,
  *,
  eps: float = 0.2,
) -> jax.Array:
  """M ← clip(M·clip(e^{mean(log π_new − log π_before)}, 1±eps), 1±eps) after the update on a turn.

  The mean is over its tokens. Rows without the turn keep their multiplier. arXiv:2602.06554 (SeeUPO).
  """
  moved = jnp.exp(row_mean(logp_BxT - before_BxT, turn_mask_BxT)[:, 0])
  return jnp.clip(multiplier_B * jnp.clip(moved, 1 - eps, 1 + eps), 1 - eps, 1 + eps)
