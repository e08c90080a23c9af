"""Which policy is the old one, that ratios move away from and corrections move towards: tokens → old_BxT.

`tokens.old_BxT` comes in as what was scored for this choice, and as the recorded log-probabilities where nothing was.
Every public function here may be named in `config.objective.old_policy.fn`; only `auto` leaves it to a correction's
@needs('old') whether anything is scored. Detached.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.token_inputs import Tokens, needs, requires


def auto(tokens: Tokens) -> jax.Array:
  """log π before the first minibatch where a correction asks for it, else log π_b as recorded. Source: none."""
  return tokens.old_BxT


@requires('it leaves nothing to correct', importance_correction=('none', 'divergent_negatives'))
def recorded(tokens: Tokens) -> jax.Array:
  """log π_b as recorded at sampling: no pass, and nothing for a correction to correct. Source: none (bypass)."""
  return tokens.behavior_BxT


@needs('old')
def before(tokens: Tokens) -> jax.Array:
  """log π of the weights before the first minibatch: one pass over the batch. Source: arXiv:1707.06347 (PPO)."""
  return tokens.old_BxT


@needs('old', 'average')
def average(tokens: Tokens, *, decay: float) -> jax.Array:
  """log π of the weights Σ_i decay^{n−i}·θ_i / Σ_i decay^{n−i}, i from 0 to the n optimizer steps taken.

  The weights at the start count as a step's, as in the code of the paper, so that no step needs a correction of its
  own. One pass over each minibatch and one more copy of the weights. Source: arXiv:2110.00641 (PPO-EWMA).
  """
  del decay  # of the weights, which `update` averages
  return tokens.old_BxT


@needs('versions')
def interpolated(tokens: Tokens) -> jax.Array:
  """log π_b + α·(log π − log π_b), α = (age − moved) / age: no pass at all.

  `age` is how many optimizer steps ago a token was sampled, `moved` how many this batch has taken: exact before the
  first of them, and for tokens sampled by the weights that the batch began with. Source: arXiv:2505.24298 (AReaL).
  """
  age_BxT = tokens.age_BxT
  alpha = jnp.where(age_BxT > 0, (age_BxT - tokens.batch_steps_BxT) / jnp.maximum(age_BxT, 1), 0.0)
  step = tokens.logp_BxT - tokens.behavior_BxT
  return tokens.behavior_BxT + jnp.clip(alpha, 0.0, 1.0).astype(step.dtype) * step
