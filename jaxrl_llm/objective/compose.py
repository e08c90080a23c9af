"""From rewards to one coefficient per token: every method here has the gradient of −Σ sg(c)·log π."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.config import pick
from jaxrl_llm.objective import advantage, aggregate, ratio, shape, trust
from jaxrl_llm.types import Batch, UserError


class Method(NamedTuple):
  """A method is a choice of five small functions and one policy."""

  shape: Callable
  advantage: Callable
  ratio: Callable
  trust: Callable
  aggregate: Callable
  mask_zero_variance: bool  # all-equal groups: out of the mask and out of every denominator
  weigh_rows: (
    bool  # rows kept by chance count 1 / their probability in the loss, not in the denominator
  )


class Targets(NamedTuple):
  """What a batch asks of the policy, before the policy is looked at: [B, T] but for the last two."""

  mask_BxT: jax.Array  # float32, tokens that count
  advantage_BxT: jax.Array
  weight_BxT: jax.Array  # 1 / denominator where the mask is 1
  behaviour_BxT: jax.Array  # log-probabilities recorded at sampling


def method(config: Any) -> Method:
  """Reads `config.objective`. Raises UserError for a name or keyword that does not exist. Source: none."""
  policy = config.zero_variance['fn']
  if policy not in ('keep', 'mask'):
    raise UserError(
      f'config.objective.zero_variance.fn={policy!r} is unknown; choose one of: keep, mask.'
    )
  return Method(
    shape=pick(shape, config.shape, 'objective.shape'),
    advantage=pick(advantage, config.advantage, 'objective.advantage'),
    ratio=pick(ratio, config.ratio, 'objective.ratio'),
    trust=pick(trust, config.trust, 'objective.trust'),
    aggregate=pick(aggregate, config.aggregate, 'objective.aggregate'),
    mask_zero_variance=policy == 'mask',
    weigh_rows=config.weigh_rows,
  )


def targets(method: Method, batch: Batch, rollouts: int) -> Targets:
  """Advantages and denominators, from the whole batch at once. Source: by the functions chosen.

  Which groups are all-equal is judged by `correct_B`, before length shaping: a shaped reward always
  differs a little. The denominator counts what is left after masking them.
  """
  length_B = batch.rollout.length_B
  T = batch.rollout.tokens_BxT.shape[1]
  dtype = jnp.result_type(batch.reward_B)
  mask_BxT = (jnp.arange(T)[None] < length_B[:, None]).astype(dtype)
  reward_B = method.shape(batch.reward_B, length_B, T)
  count_PxG = (length_B > 0).astype(dtype).reshape(-1, rollouts)
  advantage_PxG = method.advantage(reward_B.reshape(-1, rollouts), count_PxG)
  if method.mask_zero_variance:
    mixed_P = mixed(batch.correct_B, length_B, rollouts)
    mask_BxT = mask_BxT * jnp.repeat(mixed_P, rollouts)[:, None]
  weight_BxT = method.aggregate(mask_BxT, T)
  if method.weigh_rows:
    weight_BxT *= batch.rollout.weight_B[:, None]
  return Targets(
    mask_BxT=mask_BxT,
    advantage_BxT=advantage_PxG.reshape(-1, 1) * mask_BxT,
    weight_BxT=weight_BxT,
    behaviour_BxT=batch.rollout.logp_BxT,
  )


def mixed(correct_B: jax.Array, length_B: jax.Array, rollouts: int) -> jax.Array:
  """1 for a group with both right and wrong answers, else 0: [P]. Source: arXiv:2503.14476 (DAPO)."""
  exists = (length_B > 0).reshape(-1, rollouts)
  correct = correct_B.reshape(-1, rollouts) > 0.5
  return ((correct & exists).any(1) & (~correct & exists).any(1)).astype(jnp.float32)


def coefficients(
  method: Method, target: Targets, logp_BxT: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """c = weight · W(r, A) · A, detached; and sums for the log, to be added over microbatches.

  The loss is −Σ c·log π. `logp_BxT` may be −inf or anything where the mask is 0. Source: by the
  functions chosen.
  """
  logp_BxT = jax.lax.stop_gradient(logp_BxT)
  seen = target.mask_BxT > 0
  logp_BxT = jnp.where(seen, logp_BxT, 0.0)
  behaviour_BxT = jnp.where(seen, target.behaviour_BxT, 0.0)
  log_ratio = method.ratio(logp_BxT, behaviour_BxT, target.mask_BxT)
  trust_BxT, surrogate_BxT = method.trust(log_ratio, target.advantage_BxT)
  c_BxT = jnp.where(seen, target.weight_BxT * trust_BxT * target.advantage_BxT, 0.0)
  held = seen & (trust_BxT == 0) & (target.advantage_BxT != 0)
  sums = {
    'pg_loss': -(target.weight_BxT * surrogate_BxT).sum(),
    'clipped': held.sum().astype(jnp.float32),
    'kl': jnp.where(seen, behaviour_BxT - logp_BxT, 0.0).sum(),
  }
  return jax.lax.stop_gradient(c_BxT), sums
