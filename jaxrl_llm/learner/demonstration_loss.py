"""Demonstrations beside rollouts: their loss terms in a minibatch, and their gradient."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm import objective
from jaxrl_llm.learner.microbatch import (
  Microbatch,
  accumulate,
  all_log_probs,
  pack,
  packed_log_probs,
  policy_weights,
  reference_weights,
)
from jaxrl_llm.learner.slice_sums import accumulate_sums
from jaxrl_llm.learner.step_spec import StepSpec, demonstration_spec
from jaxrl_llm.objective.sft_loss import TokenWeight
from jaxrl_llm.types import Batch, Metrics, Params, TrainState


class PlannedDemonstrations(NamedTuple):
  """The demonstrations of a minibatch, before their forward pass."""

  terms: objective.DemonstrationTerms
  token_weight: TokenWeight
  share: jax.Array  # of the loss, in [0, 1]


def plan(
  spec: StepSpec, state: TrainState, batch: Batch, target: objective.Targets
) -> tuple[objective.Targets, PlannedDemonstrations]:
  """Targets scaled by the share of the rollouts, and the demonstrations."""
  method = spec.objective.method
  target, terms, token_weight, share = objective.plan_demonstrations(
    method, target, batch, spec.layout.group, state.step
  )
  return target, PlannedDemonstrations(terms, token_weight, share)


def add_gradient(
  spec: StepSpec,
  state: TrainState,
  batch: Batch,
  demonstrations: PlannedDemonstrations,
  grads: Params,
) -> tuple[Params, Metrics]:
  """`grads` plus the gradient of the demonstrations that count; and metrics."""
  assert batch.demo is not None
  terms, token_weight, share = demonstrations
  # Their prompts are encoded a second time.
  single = demonstration_spec(spec)
  demo_batch = batch._replace(rollout=batch.demo, demo=None)
  packed = pack(single, demo_batch, (terms.mask_PxT > 0).any(1))
  if 'demo_reference' in spec.objective.method.needs:
    reference_PxT = all_log_probs(single, reference_weights(state), packed.without_routes())[0]
    terms = objective.fill_behavior(terms, reference_PxT)

  def add(total, microbatch, terms):

    def loss(params):
      weights = policy_weights(spec, state.base, params)
      return demonstration_loss(single, token_weight, weights, microbatch, terms)

    return jax.tree.map(jnp.add, total, jax.grad(loss, has_aux=True)(state.params))

  start = grads, jnp.float32(0)
  over_rows = accumulate_sums if spec.layout.slices > 1 else accumulate
  grads, negative_logp = over_rows(single, packed, terms, add, start)
  loss = negative_logp / jnp.maximum(terms.mask_PxT.sum(), 1)
  metrics = {'actor/sft_loss': loss, 'actor/sft_share': share}
  return grads, metrics | {'training/demonstration_tokens': (terms.weight_PxT != 0).sum()}


def demonstration_loss(
  spec: StepSpec,
  token_weight: TokenWeight,
  params: Params,
  microbatch: Microbatch,
  terms: objective.DemonstrationTerms,
) -> tuple[jax.Array, jax.Array]:
  """−Σ c·log π of a microbatch of demonstrations, and −Σ log π of their tokens without a gradient."""
  logp_PxT = microbatch.to_rows(packed_log_probs(spec, params, microbatch)[0])
  c_PxT = objective.demonstration_coefficients(token_weight, terms, logp_PxT)
  logp_PxT = jnp.where(terms.mask_PxT > 0, logp_PxT, 0.0)
  return -(c_PxT * logp_PxT).sum(), jax.lax.stop_gradient(-logp_PxT.sum())
