"""Advantages changed by statistics of the policy: tokens → advantage_BxT, before the trust region.

Unlike `token_weighting` this may change the sign of an advantage, and give one to a row with advantage 0. Logged
advantages are those before it. Every public function may be named in `config.objective.advantage_modulation.fn`.
Detached.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.token_inputs import Tokens, batch_mean, group_sum, needs, present, row_sum


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


def _standard(x_BxT: jax.Array, mask_BxT: jax.Array, eps: float) -> jax.Array:
  off = x_BxT - batch_mean(x_BxT, mask_BxT)
  n = mask_BxT.sum()
  return off / jnp.sqrt(row_sum(off**2, mask_BxT).sum() / jnp.maximum(n - 1, 1) + eps)
