"""Demonstrations beside rollouts: their loss terms in a minibatch, and their gradient."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm import objective
from jaxrl_llm.learner.microbatch import (
  log_probs,
  microbatched_log_probs,
  microbatches,
  policy_weights,
  reference_weights,
)
from jaxrl_llm.learner.step_spec import StepSpec, demonstration_spec
from jaxrl_llm.objective.sft_loss import TokenWeight
from jaxrl_llm.types import Batch, Metrics, Params, Prompts, TrainState


class PlannedDemonstrations(NamedTuple):
  """The demonstrations of a minibatch, before their forward pass."""

  terms: objective.DemonstrationTerms
  token_weight: TokenWeight
  share: jax.Array  # of the loss, in [0, 1]


def plan(
  spec: StepSpec, state: TrainState, batch: Batch, target: objective.Targets
) -> tuple[objective.Targets, PlannedDemonstrations | None]:
  """Targets scaled by the share of the rollouts, and the demonstrations; None for a method without any."""
  method = spec.objective.method
  if not method.needs_demo:
    return target, None
  target, terms, token_weight, share = objective.plan_demonstrations(
    method, target, batch, spec.layout.group, state.step
  )
  return target, PlannedDemonstrations(terms, token_weight, share)


def add_gradient(
  spec: StepSpec,
  state: TrainState,
  batch: Batch,
  demonstrations: PlannedDemonstrations | None,
  grads: Params,
) -> tuple[Params, Metrics]:
  """`grads` plus the gradient of the demonstrations, in microbatches of one row a prompt; and metrics."""
  if demonstrations is None or batch.demo is None:
    return grads, {}
  terms, token_weight, share = demonstrations
  # Their prompts are encoded a second time, in microbatches no larger than those of the rollouts.
  single = demonstration_spec(spec, batch.prompts.length_P.shape[0])
  demo_batch = batch._replace(rollout=batch.demo, demo=None)
  if 'demo_reference' in spec.objective.method.needs:
    reference_PxT = microbatched_log_probs(single, reference_weights(state), demo_batch)[0]
    terms = objective.fill_behavior(terms, reference_PxT)

  def accumulate(carry, microbatch):

    def loss(params):
      weights = policy_weights(spec, state.base, params)
      return demonstration_loss(single, token_weight, weights, *microbatch)

    grads_and_loss = jax.grad(loss, has_aux=True)(state.params)
    return jax.tree.map(jnp.add, carry, grads_and_loss), None

  start = grads, jnp.float32(0)
  (grads, negative_logp), _ = jax.lax.scan(
    accumulate, start, microbatches(single, demo_batch, terms)
  )
  loss = negative_logp / jnp.maximum(terms.mask_PxT.sum(), 1)
  return grads, {'actor/sft_loss': loss, 'actor/sft_share': share}


def demonstration_loss(
  spec: StepSpec,
  token_weight: TokenWeight,
  params: Params,
  prompts: Prompts,
  tokens_PxT: jax.Array,
  length_P: jax.Array,
  terms: objective.DemonstrationTerms,
) -> tuple[jax.Array, jax.Array]:
  """−Σ c·log π of a microbatch of demonstrations, and −Σ log π of their tokens without a gradient."""
  del length_P  # part of the mask
  logp_PxT, _ = log_probs(spec, params, prompts, tokens_PxT)
  c_PxT = objective.demonstration_coefficients(token_weight, terms, logp_PxT)
  logp_PxT = jnp.where(terms.mask_PxT > 0, logp_PxT, 0.0)
  return -(c_PxT * logp_PxT).sum(), jax.lax.stop_gradient(-logp_PxT.sum())
