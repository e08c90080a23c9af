"""What a batch's demonstrations ask of the policy, for the stage `auxiliary`: before and after it is looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.policy_gradient import Method, Targets
from jaxrl_llm.objective.sft_loss import Shown
from jaxrl_llm.types import Batch


class Lesson(NamedTuple):
  """What demonstrations ask of the policy. Every array leads with P."""

  mask_PxT: jax.Array  # 1 for tokens of prompts that have rollouts too
  weight_PxT: jax.Array  # share / denominator where the mask is 1
  behavior_PxT: jax.Array  # log-probs of what wrote them


def plan_lesson(
  method: Method, target: Targets, batch: Batch, rollouts: int, step: jax.Array
) -> tuple[Targets, Lesson, Callable, jax.Array]:
  """(targets with their share, the lesson, how its tokens are weighed, its part of all shares in [0, 1]).

  A prompt without rollouts in this batch, as one that is still unfinished, shows nothing. Source: by the functions
  chosen.
  """
  demo, dtype = batch.demo, target.weight_BxT.dtype
  exists_PxG = (batch.rollout.length_B > 0).reshape(-1, rollouts)
  right_P = ((batch.correct_B.reshape(-1, rollouts) > 0.5) & exists_PxG).sum(1)
  seen_P = exists_PxG.any(1)
  has_P = (seen_P & (demo.length_B > 0)).astype(dtype)
  plan = method.sft_loss(right_P, has_P, step)
  T = demo.tokens_BxT.shape[1]
  mask_PxT = (jnp.arange(T)[None] < demo.length_B[:, None]).astype(dtype) * has_P[:, None]
  counted_PxT = jnp.where(plan.on_demo_P[:, None] > 0, mask_PxT, 0.0)
  weight_PxT = plan.on_demo_P[:, None] * counted_PxT / jnp.maximum(counted_PxT.sum(), 1)
  on_B = jnp.repeat(plan.on_rollouts_P, rollouts)
  both_P = plan.on_demo_P + plan.on_rollouts_P
  share = (plan.on_demo_P * seen_P).sum() / jnp.maximum((both_P * seen_P).sum(), 1e-30)
  shared = lambda x: None if x is None else x * on_B[:, None]  # noqa: E731
  target = target._replace(
    weight_BxT=shared(target.weight_BxT), kl_weight_BxT=shared(target.kl_weight_BxT)
  )
  return target, Lesson(mask_PxT, weight_PxT, demo.logp_BxT), plan.weigh, share


def recorded_or(lesson: Lesson, reference_PxT: jax.Array) -> Lesson:
  """The same with the reference policy's log-probs in rows where none were recorded. Source: none."""
  known_Px1 = (lesson.behavior_PxT != 0).any(1, keepdims=True)
  return lesson._replace(behavior_PxT=jnp.where(known_Px1, lesson.behavior_PxT, reference_PxT))


def lesson_coefficients(weigh: Callable, lesson: Lesson, logp_PxT: jax.Array) -> jax.Array:
  """c = weight · w, detached: the loss is −Σ c·log π over the demonstrations. Source: by the functions chosen."""

  def clean(x):
    return jnp.where(lesson.mask_PxT > 0, jax.lax.stop_gradient(x), 0.0)

  w = weigh(Shown(clean(logp_PxT), clean(lesson.behavior_PxT), lesson.mask_PxT))
  return jax.lax.stop_gradient(clean(lesson.weight_PxT * w))
