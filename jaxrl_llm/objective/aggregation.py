"""Denominators as weights: mask_BxT, max_tokens, group_B → weight_BxT, so that the loss is −Σ weight·objective.

Sums run over the whole global batch before it is cut into microbatches, so that no mean of shard means occurs. Tokens
that a correction or a trust region drops later stay in the denominator. `group_B` numbers the groups of rows. Rows with
an empty mask and groups of such rows do not count. Every public function may be named in
`config.objective.aggregation.fn`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def token_mean(mask_BxT: jax.Array, max_tokens: int, group_B: jax.Array) -> jax.Array:
  """w = m / Σm: equal weight of tokens. arXiv:2503.14476 (DAPO)."""
  del max_tokens, group_B
  return mask_BxT / jnp.maximum(mask_BxT.sum(), 1)


def sequence_mean(mask_BxT: jax.Array, max_tokens: int, group_B: jax.Array) -> jax.Array:
  """w = m / (|y|·rows): equal weight of rollouts. arXiv:2402.03300 (GRPO)."""
  del max_tokens, group_B
  length_Bx1 = mask_BxT.sum(1, keepdims=True)
  return mask_BxT / jnp.maximum(length_Bx1, 1) / _rows(mask_BxT)


def prompt_mean(mask_BxT: jax.Array, max_tokens: int, group_B: jax.Array) -> jax.Array:
  """w = m / (Σ_g|y|·prompts): equal weight of prompts. arXiv:2510.13786 (ScaleRL)."""
  del max_tokens
  tokens_P = jax.ops.segment_sum(mask_BxT.sum(1), group_B, num_segments=len(group_B))
  prompts = jnp.maximum((tokens_P > 0).sum(), 1)
  return mask_BxT / jnp.maximum(tokens_P[group_B], 1)[:, None] / prompts


def fixed(mask_BxT: jax.Array, max_tokens: int, group_B: jax.Array) -> jax.Array:
  """w = m / (max_tokens·rows): no bias toward short answers. arXiv:2503.20783 (Dr.GRPO)."""
  del group_B
  return mask_BxT / (max_tokens * _rows(mask_BxT))


def sequence_sum(mask_BxT: jax.Array, max_tokens: int, group_B: jax.Array) -> jax.Array:
  """w = m / rows: the log-probability of whole answers. arXiv:2402.14740 (RLOO)."""
  del max_tokens, group_B
  return mask_BxT / _rows(mask_BxT)


def _rows(mask_BxT: jax.Array) -> jax.Array:
  return jnp.maximum((mask_BxT.sum(1) > 0).sum(), 1)
