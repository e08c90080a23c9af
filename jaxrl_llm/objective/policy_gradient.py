"""Policy-gradient losses as one coefficient per token: the gradient of every method is that of −Σ sg(c)·log π."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.objective import record_checks, replayed_log_probs
from jaxrl_llm.objective.batch_targets import Targets
from jaxrl_llm.objective.method_spec import Method
from jaxrl_llm.objective.token_inputs import Tokens, present
from jaxrl_llm.types import Array

SUMS = ('pg_loss', 'clipped', 'rejected', 'kl', 'kl_loss')  # keys of the sums of `coefficients`


def distill(method: Method, target: Targets) -> Targets:
  """Targets with the advantages that the stage `distillation` computes from frozen policies."""
  tokens = _tokens(method, target, _old_log_probs(target))
  return target._replace(advantage_BxT=present(method.token_stages.distillation)(tokens))


def coefficients(
  method: Method,
  target: Targets,
  logp_BxT: Array,
  entropy_BxT: jax.Array | None = None,
  confidence_BxT: jax.Array | None = None,
  collision_BxT: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """c = correction · token weight · W(r, A) · A / denominator + KL coefficient / its denominator, detached.

  Returns c_BxT and sums for the log, with the keys `SUMS`. The loss is −Σ c·log π. `logp_BxT` may be NaN or infinite
  where the mask is 0. The sums add up over microbatches. A method that `needs_rows` needs all rows of a minibatch.
  """
  others = entropy_BxT, confidence_BxT, collision_BxT
  record_checks.tokens(target.mask_BxT, logp_BxT, *others)
  stages = method.token_stages
  tokens = _tokens(method, target, logp_BxT, *others)
  if stages.advantage_modulation is not None:
    tokens = tokens._replace(advantage_BxT=stages.advantage_modulation(tokens))
  masked_in, has_advantage = tokens.mask_BxT > 0, tokens.advantage_BxT != 0
  trust_BxT, surrogate_BxT = stages.trust_region(stages.ratio(tokens), tokens)
  sums = {name: jnp.float32(0) for name in SUMS}
  factor = 1.0
  if stages.importance_correction is not None:
    weight, keep = stages.importance_correction(tokens)
    factor = weight * keep
    sums['rejected'] = (masked_in & (keep == 0) & has_advantage).sum().astype(jnp.float32)
  if stages.token_weighting is not None:
    factor *= stages.token_weighting(tokens._replace(clipped_BxT=trust_BxT == 0))
  c_BxT = target.weight_BxT * factor * trust_BxT * tokens.advantage_BxT
  if stages.kl is not None:
    kl_BxT, kl_value_BxT = stages.kl(tokens)
    kl_weight_BxT = target.weight_BxT if target.kl_weight_BxT is None else target.kl_weight_BxT
    c_BxT += kl_weight_BxT * kl_BxT
    sums['kl_loss'] = jnp.where(masked_in, kl_weight_BxT * kl_value_BxT, 0.0).sum()
  sums |= {
    'pg_loss': -(target.weight_BxT * factor * surrogate_BxT).sum(),
    'clipped': (masked_in & (trust_BxT == 0) & has_advantage).sum().astype(jnp.float32),
    'kl': jnp.where(masked_in, tokens.behavior_BxT - tokens.logp_BxT, 0.0).sum(),
  }
  return jax.lax.stop_gradient(jnp.where(masked_in, c_BxT, 0.0)), sums


def learning_rate_scale(method: Method, target: Targets, logp_BxT: jax.Array) -> jax.Array:
  """A factor on the learning rate of a minibatch, from all its rows at once: []."""
  return present(method.token_stages.lr_scale)(_tokens(method, target, logp_BxT))


def _old_log_probs(target: Targets) -> Array:
  old_BxT = target.policies.old_BxT
  return target.behavior_BxT if old_BxT is None else old_BxT


def _tokens(
  method: Method,
  target: Targets,
  logp_BxT: Array,
  entropy_BxT: jax.Array | None = None,
  confidence_BxT: jax.Array | None = None,
  collision_BxT: jax.Array | None = None,
) -> Tokens:
  """Inputs of the token stages: no gradients, and 0 where the mask is 0."""
  masked_in = target.mask_BxT > 0
  behavior_BxT, old_BxT = target.behavior_BxT, _old_log_probs(target)
  if target.replayed_B is not None:
    fill = replayed_log_probs.behavior_log_probs
    behavior_BxT = fill(target.replayed_B, behavior_BxT, logp_BxT)
    old_BxT = fill(target.replayed_B, old_BxT, logp_BxT)

  def masked(x_BxT: Array) -> jax.Array:
    return jnp.where(masked_in, jax.lax.stop_gradient(x_BxT), 0.0)

  def masked_or_none(x_BxT: jax.Array | None) -> jax.Array | None:
    return None if x_BxT is None else masked(x_BxT)

  tokens = Tokens(
    logp_BxT=masked(logp_BxT),
    old_BxT=masked(old_BxT),
    behavior_BxT=masked(behavior_BxT),
    mask_BxT=target.mask_BxT,
    advantage_BxT=target.advantage_BxT,
    correct_B=target.correct_B,
    group_B=target.group_B,
    reference_BxT=masked_or_none(target.policies.reference_BxT),
    teacher_BxT=masked_or_none(target.policies.teacher_BxT),
    entropy_BxT=masked_or_none(entropy_BxT),
    confidence_BxT=masked_or_none(confidence_BxT),
    collision_BxT=masked_or_none(collision_BxT),
    steps=target.steps,
  )
  if method.token_stages.old_policy is None:
    return tokens
  return tokens._replace(old_BxT=method.token_stages.old_policy(tokens))
