"""Old log-probabilities of replayed rows: those of the weights at the start of the step, arXiv:2507.07451 (RLEP)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.types import Batch


def rescored(batch: Batch, before_BxT: jax.Array) -> Batch:
  """The batch with `before_BxT`, scored before the first of several optimizer steps, recorded for its replayed rows.

  All its rows have old log-probs then, and ratios that trust regions bound. Leading axes are the batch's.
  """
  recorded_BxT = batch.rollout.logp_BxT
  replayed = batch.replayed_B[..., None]
  logp_BxT = jnp.where(replayed > 0, before_BxT, recorded_BxT)
  return batch._replace(rollout=batch.rollout._replace(logp_BxT=logp_BxT), replayed_B=None)


def behavior(
  replayed_B: jax.Array | None, recorded_BxT: jax.Array, logp_BxT: jax.Array
) -> jax.Array:
  """The recorded log-probs; for replayed rows those of the policy now, which is that before a lone step."""
  if replayed_B is None:
    return recorded_BxT
  return jnp.where(replayed_B[:, None] > 0, logp_BxT, recorded_BxT)
