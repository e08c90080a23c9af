"""Coefficients of a batch's demonstrations, for the stage `sft_loss`."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.method_spec import Method
from jaxrl_llm.objective.policy_gradient import Targets
from jaxrl_llm.objective.sft_loss import DemonstrationTokens, TokenWeight
from jaxrl_llm.objective.token_inputs import present
from jaxrl_llm.types import Array, Batch


class DemonstrationTerms(NamedTuple):
  """The loss terms of demonstrations, before the policy is evaluated. Every array leads with P."""

  mask_PxT: jax.Array  # 1 for tokens of prompts that have rollouts in this batch, too
  weight_PxT: jax.Array  # share / denominator where the mask is 1
  behavior_PxT: Array  # log-probs of the policy that wrote them


def plan_demonstrations(
  method: Method, target: Targets, batch: Batch, rollouts: int, step: jax.Array
) -> tuple[Targets, DemonstrationTerms, TokenWeight, jax.Array]:
  """(targets with their share, terms of the demonstrations, their token weights, their part of all shares in [0, 1]).

  The demonstration of a prompt without rollouts in this batch, such as an unfinished one, does not count.
  """
  demo, dtype = present(batch.demo), target.weight_BxT.dtype
  exists_PxG = (batch.rollout.length_B > 0).reshape(-1, rollouts)
  right_P = ((batch.correct_B.reshape(-1, rollouts) > 0.5) & exists_PxG).sum(1)
  sampled_P = exists_PxG.any(1)
  has_P = (sampled_P & (demo.length_B > 0)).astype(dtype)
  plan = present(method.batch_stages.sft_loss)(right_P, has_P, step)
  T = demo.tokens_BxT.shape[1]
  mask_PxT = (jnp.arange(T)[None] < demo.length_B[:, None]).astype(dtype) * has_P[:, None]
  counted_PxT = jnp.where(plan.demo_weight_P[:, None] > 0, mask_PxT, 0.0)
  weight_PxT = plan.demo_weight_P[:, None] * counted_PxT / jnp.maximum(counted_PxT.sum(), 1)
  on_B = jnp.repeat(plan.rollout_weight_P, rollouts)
  both_P = plan.demo_weight_P + plan.rollout_weight_P
  share = (plan.demo_weight_P * sampled_P).sum() / jnp.maximum((both_P * sampled_P).sum(), 1e-30)
  kl_weight_BxT = target.kl_weight_BxT
  target = target._replace(
    weight_BxT=target.weight_BxT * on_B[:, None],
    kl_weight_BxT=None if kl_weight_BxT is None else kl_weight_BxT * on_B[:, None],
  )
  terms = DemonstrationTerms(mask_PxT, weight_PxT, demo.logp_BxT)
  return target, terms, plan.token_weight, share


def fill_behavior(terms: DemonstrationTerms, reference_PxT: jax.Array) -> DemonstrationTerms:
  """The terms with the reference policy's log-probs in rows without recorded ones."""
  recorded_Px1 = (terms.behavior_PxT != 0).any(1, keepdims=True)
  return terms._replace(behavior_PxT=jnp.where(recorded_Px1, terms.behavior_PxT, reference_PxT))


def demonstration_coefficients(
  token_weight: TokenWeight, terms: DemonstrationTerms, logp_PxT: jax.Array
) -> jax.Array:
  """c = weight · w, detached: the loss of the demonstrations is −Σ c·log π."""

  def masked(x_PxT: Array) -> jax.Array:
    return jnp.where(terms.mask_PxT > 0, jax.lax.stop_gradient(x_PxT), 0.0)

  w = token_weight(
    DemonstrationTokens(masked(logp_PxT), masked(terms.behavior_PxT), terms.mask_PxT)
  )
  return jax.lax.stop_gradient(masked(terms.weight_PxT * w))
