"""A second model beside the policy and what it learns: a critic, or a reward for each token.

Named in `config.objective.auxiliary_model.fn`. A function here returns a Companion: what the model gives to the credit of
tokens, what it is compared with, and the loss it learns by. It begins as a copy of the policy;
`jaxrl_llm/learner/auxiliary_model.py` runs it. A loss takes the model's output, values or log-probabilities, and a
Lesson, and returns a number and sums for the log; over slices of rows both add up, unless it looks at `whole`
minibatches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.token_inputs import row_sum


class Lesson(NamedTuple):
  """What a minibatch teaches a companion. Every array leads with B; every denominator is inside a weight."""

  mask_BxT: jax.Array  # float, 1 for real tokens
  weight_BxT: jax.Array  # mask / all tokens of the minibatch
  weight_B: jax.Array  # 1 / rows of the minibatch; 0 for an empty row
  correct_B: jax.Array
  base_BxT: jax.Array | None = None  # log-probabilities that the model's own are compared with
  old_BxT: jax.Array | None = None  # values before the batch was learned
  return_BxT: jax.Array | None = None
  # the loss's slope, where it was worked out from the whole minibatch
  c_BxT: jax.Array | None = None


class Companion(NamedTuple):
  """What is fixed when a companion is compiled."""

  # to the credit: 'values' of what is still to come, or 'process', a reward for each token
  gives: str
  base: str  # 'reference': the first weights; 'behavior': what sampled; '': nothing
  loss: Callable  # (output_BxT, lesson, rollouts) → (loss, sums)
  whole: bool  # the loss compares rows with each other
  beta: float
  learning_rate: float

  def signal(self, output_BxT: jax.Array, lesson: Lesson) -> jax.Array:
    """V, or q = beta·(log φ − log base), [B, T]; 0 where the mask is 0."""
    if self.gives == 'process':
      output_BxT = self.beta * (output_BxT - lesson.base_BxT)
    return jnp.where(lesson.mask_BxT > 0, output_BxT, 0.0)


def none() -> None:
  """No second model. Source: none."""
  return None


def critic(*, learning_rate: float = 1e-5, clip: float = 0.5) -> Companion:
  """V_t, a linear head on the hidden state; loss ½·max((V − R)², (clip(V, V_old ± clip) − R)²), mean over tokens.

  V is 0 at the start. The batch is credited with values from before it was learned. The defaults are
  verl's. Source: arXiv:1707.06347 (PPO; the clipped values are of its authors' code).
  """
  loss = functools.partial(_critic_loss, clip=clip)
  return Companion('values', '', loss, False, 1.0, learning_rate)


def outcome(*, learning_rate: float = 1e-6, beta: float = 0.05) -> Companion:
  """q = beta·(log φ − log π_first); loss: cross-entropy of σ(Σ_t q) and right or wrong, mean over rows.

  φ learns from a batch before it rewards it. The defaults are those of the paper's code.
  Source: arXiv:2502.01456 (PRIME).
  """
  loss = functools.partial(_outcome_loss, beta=beta)
  return Companion('process', 'reference', loss, False, beta, learning_rate)


def preference(*, learning_rate: float = 1e-6, beta: float = 0.05) -> Companion:
  """q = beta·(log φ − log π_b); loss −log σ(Σ q of a right row − Σ q of a wrong one), mean over all such pairs.

  Pairs are of one group, and every pair of the minibatch counts the same, as in the paper's code. φ learns
  from a batch before it rewards it. `learning_rate` is not from the paper. Source: arXiv:2509.19199 (iStar).
  """
  loss = functools.partial(_preference_loss, beta=beta)
  return Companion('process', 'behavior', loss, True, beta, learning_rate)


def _critic_loss(value_BxT, lesson: Lesson, rollouts: int, *, clip: float):
  del rollouts
  seen = lesson.mask_BxT > 0
  value_BxT = jnp.where(seen, value_BxT, 0.0)
  near_BxT = lesson.old_BxT + jnp.clip(value_BxT - lesson.old_BxT, -clip, clip)
  free_BxT = (value_BxT - lesson.return_BxT) ** 2
  held_BxT = (near_BxT - lesson.return_BxT) ** 2
  weigh = lambda x: jnp.where(seen, lesson.weight_BxT * x, 0.0).sum()  # noqa: E731
  loss = 0.5 * weigh(jnp.maximum(free_BxT, held_BxT))
  return loss, {'critic/vf_loss': loss, 'critic/vf_clipfrac': weigh(held_BxT > free_BxT)}


def _outcome_loss(logp_BxT, lesson: Lesson, rollouts: int, *, beta: float):
  del rollouts
  right_B, total_B = lesson.correct_B > 0.5, _total(logp_BxT, lesson, beta)
  loss_B = -jnp.where(right_B, jax.nn.log_sigmoid(total_B), jax.nn.log_sigmoid(-total_B))
  loss = (lesson.weight_B * loss_B).sum()
  accuracy = (lesson.weight_B * ((total_B > 0) == right_B)).sum()
  return loss, {'companion/loss': loss, 'companion/accuracy': accuracy}


def _preference_loss(logp_BxT, lesson: Lesson, rollouts: int, *, beta: float):
  group = lambda x: x.reshape(-1, rollouts)  # noqa: E731
  total_PxG = group(_total(logp_BxT, lesson, beta))
  right_PxG, exists_PxG = group(lesson.correct_B > 0.5), group(lesson.weight_B > 0)
  pairs_PxGxG = (right_PxG & exists_PxG)[:, :, None] & (~right_PxG & exists_PxG)[:, None, :]
  gap_PxGxG = total_PxG[:, :, None] - total_PxG[:, None, :]
  mean = lambda x: jnp.where(pairs_PxGxG, x, 0.0).sum() / jnp.maximum(pairs_PxGxG.sum(), 1)  # noqa: E731
  loss = mean(-jax.nn.log_sigmoid(gap_PxGxG))
  accuracy = mean((gap_PxGxG > 0).astype(gap_PxGxG.dtype))
  return loss, {'companion/loss': loss, 'companion/accuracy': accuracy}


def _total(logp_BxT: jax.Array, lesson: Lesson, beta: float) -> jax.Array:
  return beta * row_sum(logp_BxT - lesson.base_BxT, lesson.mask_BxT)[:, 0]
