"""Advantages changed by statistics of the policy: tokens → advantage_BxT, before the trust region.

Unlike `token_weighting` this may change the sign of an advantage, and give one to a row with advantage 0. Logged
advantages are those before it. Every public function may be named in `config.objective.advantage_modulation.fn`.
Detached.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.token_inputs import (
  Tokens,
  batch_mean,
  group_sum,
  needs,
  present,
  requires,
  row_sum,
)


def none() -> None:
  """A unchanged."""


@needs('rows', 'entropy', 'confidence')
def unsure(
  tokens: Tokens, *, multiply: float = 0.1, add: float = 0.0, most: float = 2.0, eps: float = 1e-8
) -> jax.Array:
  """A·(1 + multiply·S) + add·(S − mean_g S), S = clip(z(H) + z(1 − C), ±most), z(x) = (x − mean) / √(var + eps).

  H is the entropy, C the mean of the five largest probabilities, z over all tokens of the minibatch (var unbiased),
  mean_g over all tokens of the group. Defaults are the official code's, which takes H and C of the policy before the
  batch and z over the batch: the same with one minibatch. arXiv:2602.02150 (ECHO).
  """
  mask_BxT = tokens.mask_BxT

  def standard(x_BxT: jax.Array) -> jax.Array:
    return _standard(x_BxT, mask_BxT, eps)

  score = standard(present(tokens.entropy_BxT)) + standard(1 - present(tokens.confidence_BxT))
  score = jnp.clip(score, -most, most)
  mean_B = group_sum(row_sum(score, mask_BxT)[:, 0], tokens.group_B)
  mean_B /= jnp.maximum(group_sum(mask_BxT.sum(1), tokens.group_B), 1)
  tilted = tokens.advantage_BxT * (1 + multiply * score) + add * (score - mean_B[:, None])
  return jnp.where(mask_BxT > 0, tilted, 0.0)


@needs('rows', 'collision')
@requires('its baseline is subtracted from R itself', advantage=('raw',))
def token_baseline(tokens: Tokens, *, eps: float = 1e-8, cut_tail: bool = False) -> jax.Array:
  """A_t = R − Σ_g R·W_t / (Σ_g W_t + eps), W_t = Σ_{j≤t} (1 − 2π_j + Σ_v π_v²), sums over rows with a token t.

  W_t estimates the squared norm of the gradient of the row's log-prob up to t; the baseline weighs rewards by it, as
  the one of least variance. A single row keeps R. With `cut_tail` the only row with a token t keeps R, too, which is
  0 otherwise. π is that of the current policy, in the official code of the policy before the batch: the same with one
  minibatch. No paper: verl's `optimal_token_baseline`.
  """
  mask_BxT, group_B = tokens.mask_BxT, tokens.group_B
  energy_BxT = 1 - 2 * jnp.exp(tokens.logp_BxT) + present(tokens.collision_BxT)
  weight_BxT = jnp.cumsum(energy_BxT * mask_BxT, axis=1) * mask_BxT
  total_BxT = group_sum(weight_BxT, group_B)
  baseline_BxT = group_sum(tokens.advantage_BxT * weight_BxT, group_B) / (total_BxT + eps)
  rows_B = group_sum((mask_BxT.sum(1) > 0).astype(mask_BxT.dtype), group_B)
  alone_BxT = rows_B[:, None] < 2
  if cut_tail:
    alone_BxT |= group_sum(mask_BxT, group_B) < 2
  baseline_BxT = jnp.where(alone_BxT, 0.0, baseline_BxT)
  return (tokens.advantage_BxT - baseline_BxT) * mask_BxT


def _standard(x_BxT: jax.Array, mask_BxT: jax.Array, eps: float) -> jax.Array:
  off = x_BxT - batch_mean(x_BxT, mask_BxT)
  n = mask_BxT.sum()
  return off / jnp.sqrt(row_sum(off**2, mask_BxT).sum() / jnp.maximum(n - 1, 1) + eps)
