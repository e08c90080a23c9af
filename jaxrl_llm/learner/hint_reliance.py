"""How much completions rely on the hint in their prompt: a pass over them without it, and one with it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner.microbatch import all_log_probs, pack, policy_weights
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.types import Batch, Prompts, Rollout, TrainState


@sharding.on_mesh
def hint_reliance(
  spec: StepSpec, state: TrainState, plain: Prompts, hinted: Prompts, rollout: Rollout
) -> jax.Array:
  """`mean_log_ratio` [B] of the completions of prompts with a hint, `context_P` ≥ 0; 0 for others."""
  assert hinted.context_P is not None
  rows = rollout.length_B.shape[0] // hinted.length_P.shape[0]
  read_B = jnp.repeat(hinted.context_P >= 0, rows) & (rollout.length_B > 0)
  weights = policy_weights(spec, state.base, state.params)
  zeros_B = jnp.zeros_like(rollout.weight_B)

  def log_probs(prompts: Prompts) -> jax.Array:
    packed = pack(spec, Batch(prompts, rollout, zeros_B, zeros_B), read_B)
    return all_log_probs(spec, weights, packed)[0]

  length_B = jnp.where(read_B, rollout.length_B, 0)
  return mean_log_ratio(log_probs(plain), log_probs(hinted), length_B)


def mean_log_ratio(plain_BxT: jax.Array, hinted_BxT: jax.Array, length_B: jax.Array) -> jax.Array:
  """float32 [B], the mean over tokens of log π(y | x) − log π(y | x, hint); 0 without tokens. arXiv:2604.00698."""
  real_BxT = jnp.arange(plain_BxT.shape[1])[None] < length_B[:, None]
  total_B = jnp.where(real_BxT, plain_BxT - hinted_BxT, 0).sum(1)
  return total_B / jnp.maximum(length_B, 1)
