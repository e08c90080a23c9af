"""Old log-probabilities of replayed rows: those of the weights at the start of the step, arXiv:2507.07451 (RLEP)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.token_inputs import present
from jaxrl_llm.types import Array, Batch


def fill_replayed_log_probs(batch: Batch, before_BxT: jax.Array) -> Batch:
  """The batch with `before_BxT`, log-probs before the first optimizer step, recorded for its replayed rows.

  All rows then have old log-probs, and trust regions bound their ratios. Leading axes are those of the batch.
  """
  recorded_BxT = batch.rollout.logp_BxT
  replayed = present(batch.replayed_B)[..., None]
  logp_BxT = jnp.where(replayed > 0, before_BxT, recorded_BxT)
  return batch._replace(rollout=batch.rollout._replace(logp_BxT=logp_BxT), replayed_B=None)


def behavior_log_probs(replayed_B: Array, recorded_BxT: Array, logp_BxT: Array) -> Array:
  """The recorded log-probs; for replayed rows `logp_BxT`, exact where a batch has one optimizer step."""
  return jnp.where(replayed_B[:, None] > 0, logp_BxT, recorded_BxT)
