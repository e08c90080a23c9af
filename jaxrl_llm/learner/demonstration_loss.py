"""Demonstrations beside rollouts: what a minibatch asks of them, and their gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm import objective
from jaxrl_llm.learner.microbatch import policy, reference, rescore, scores, slices
from jaxrl_llm.learner.step_spec import StepSpec, demonstration_spec
from jaxrl_llm.types import Batch, TrainState


def planned(spec: StepSpec, state: TrainState, batch: Batch, target: objective.Targets):
  """Targets with their share, and what demonstrations ask; None where the method has none. Source: none."""
  if not spec.objective.method.needs_demo:
    return target, None
  rollouts = spec.layout.group
  target, *taught = objective.plan_demonstrations(
    spec.objective.method, target, batch, rollouts, state.step
  )
  return target, taught


def added(spec: StepSpec, state: TrainState, batch: Batch, taught, grads: Any):
  """The gradient with that of the demonstrations in it, slice by slice of one row a prompt; metrics. Source: none."""
  if taught is None:
    return grads, {}
  terms, weigh, share = taught
  # Their prompts are encoded once more: for a slice of their own, no larger than one of the rollouts.
  single = demonstration_spec(spec, batch.prompts.length_P.shape[0])
  shown = batch._replace(rollout=batch.demo, demo=None)
  if 'demo_reference' in spec.objective.method.needs:
    terms = objective.fill_behavior(terms, scores(single, reference(state), shown)[0])

  def accumulate(carry, piece):

    def loss(params):
      return demonstration_loss(single, weigh, policy(spec, state.base, params), *piece)

    found = jax.grad(loss, has_aux=True)(state.params)
    return jax.tree.map(jnp.add, carry, found), None

  start = grads, jnp.float32(0)
  (grads, surprise), _ = jax.lax.scan(accumulate, start, slices(single, shown, terms))
  loss = surprise / jnp.maximum(terms.mask_PxT.sum(), 1)
  return grads, {'actor/sft_loss': loss, 'actor/sft_share': share}


def demonstration_loss(spec: StepSpec, weigh, params: Any, prompts, tokens_PxT, length_P, terms):
  """−Σ c·log π of a slice of demonstrations; and −Σ log π of their tokens, without a gradient. Source: none."""
  del length_P  # the mask says more
  logp_PxT, _ = rescore(spec, params, prompts, tokens_PxT)
  c_PxT = objective.demonstration_coefficients(weigh, terms, logp_PxT)
  logp_PxT = jnp.where(terms.mask_PxT > 0, logp_PxT, 0.0)
  return -(c_PxT * logp_PxT).sum(), jax.lax.stop_gradient(-logp_PxT.sum())
