"""The old policy, the denominator of ratios and the numerator of corrections: tokens → old_BxT.

The input `tokens.old_BxT` holds the log-probs recomputed for this choice, or the recorded ones where none were
recomputed; a function without inputs keeps them. With `auto` the importance correction decides whether they are
recomputed. Every public function may be named in `config.objective.old_policy.fn`. Detached.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.token_inputs import Tokens, needs, present, requires


def auto() -> None:
  """log π before the first minibatch where a correction needs it, else log π_b as recorded."""


@requires(
  'the old policy is then the behavior policy, and its correction is 1',
  importance_correction=('none', 'divergent_negatives'),
)
def recorded(tokens: Tokens) -> jax.Array:
  """log π_b as recorded at sampling, without a forward pass (bypass)."""
  return tokens.behavior_BxT


@needs('old')
def before() -> None:
  """log π of the weights before the first minibatch: one forward pass over the batch. arXiv:1707.06347 (PPO)."""


@needs('old', 'average')
def average(*, decay: float) -> None:
  """log π of the weights Σ_i decay^{n−i}·θ_i / Σ_i decay^{n−i}, i from 0 to the n optimizer steps taken.

  The initial weights count as one step, as in the paper's code. Costs one forward pass over each minibatch and one
  more copy of the weights. arXiv:2110.00641 (PPO-EWMA).
  """
  del decay  # read by the update, which averages the weights


@needs('versions')
def interpolated(tokens: Tokens) -> jax.Array:
  """log π_b + α·(log π − log π_b), α = (age − batch_steps) / age: no forward pass.

  `age` is the number of optimizer steps since a token was sampled, `batch_steps` the number taken on this batch. Exact
  before the first of these, and for tokens sampled by the weights at the start of the batch. The official α is
  (d − 1) / d throughout a batch, for a token d training steps old. arXiv:2505.24298 (AReaL).
  """
  steps = tokens.steps
  age_BxT, batch_steps_BxT = present(steps.age_BxT), present(steps.batch_steps_BxT)
  alpha = jnp.where(age_BxT > 0, (age_BxT - batch_steps_BxT) / jnp.maximum(age_BxT, 1), 0.0)
  step = tokens.logp_BxT - tokens.behavior_BxT
  return tokens.behavior_BxT + jnp.clip(alpha, 0.0, 1.0).astype(step.dtype) * step
