"""Demonstrations beside rollouts: what a minibatch asks of them, and their gradient."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm import objective
from jaxrl_llm.learner.microbatch import policy, reference, rescore, scores, slices
from jaxrl_llm.learner.step_spec import Program
from jaxrl_llm.types import Batch, TrainState


def planned(program: Program, state: TrainState, batch: Batch, target: objective.Targets):
  """Targets with their share, and what demonstrations ask; None where the method has none. Source: none."""
  if not program.method.needs_demo:
    return target, None
  rollouts = program.generate.rollouts
  target, *taught = objective.plan_lesson(program.method, target, batch, rollouts, state.step)
  return target, taught


def added(program: Program, state: TrainState, batch: Batch, taught, grads: Any):
  """The gradient with that of the demonstrations in it, slice by slice of one row a prompt; metrics. Source: none."""
  if taught is None:
    return grads, {}
  lesson, weigh, share = taught
  # Their prompts are encoded once more: for a slice of their own, no larger than one of the rollouts.
  single = program._replace(
    generate=program.generate._replace(rollouts=1),
    slice_groups=math.gcd(program.slice_groups, batch.prompts.length_P.shape[0]),
    slice_rollouts=1,
  )
  shown = batch._replace(rollout=batch.demo, demo=None)
  if 'demo_reference' in program.method.needs:
    lesson = objective.recorded_or(lesson, scores(single, reference(state), shown)[0])

  def accumulate(carry, piece):

    def loss(params):
      return lesson_loss(single, weigh, policy(program, state.base, params), *piece)

    found = jax.grad(loss, has_aux=True)(state.params)
    return jax.tree.map(jnp.add, carry, found), None

  start = grads, jnp.float32(0)
  (grads, surprise), _ = jax.lax.scan(accumulate, start, slices(single, shown, lesson))
  loss = surprise / jnp.maximum(lesson.mask_PxT.sum(), 1)
  return grads, {'actor/sft_loss': loss, 'actor/sft_share': share}


def lesson_loss(program: Program, weigh, params: Any, prompts, tokens_PxT, length_P, lesson):
  """−Σ c·log π of a slice of demonstrations; and −Σ log π of their tokens, without a gradient. Source: none."""
  del length_P  # the mask says more
  logp_PxT, _ = rescore(program, params, prompts, tokens_PxT)
  c_PxT = objective.lesson_coefficients(weigh, lesson, logp_PxT)
  logp_PxT = jnp.where(lesson.mask_PxT > 0, logp_PxT, 0.0)
  return -(c_PxT * logp_PxT).sum(), jax.lax.stop_gradient(-logp_PxT.sum())
