"""Denominators as weights: mask_BxT, max_tokens, group_B → weight_BxT, so that the loss is −Σ weight·objective.

Sums run over the whole (global) batch before it is cut into microbatches; a mean of shard means never occurs.
Tokens that a correction or a trust region drops later stay in the denominator. Every public function here may be
named in `config.objective.aggregation.fn`. `group_B` numbers the prompts that rows answer. A row with an
empty mask is no row, a group of such rows no prompt.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def token_mean(mask_BxT: jax.Array, max_tokens: int, group_B: jax.Array) -> jax.Array:
  """w = m / Σm: every token counts the same. Source: arXiv:2503.14476 (DAPO)."""
  del max_tokens, group_B
  return mask_BxT / jnp.maximum(mask_BxT.sum(), 1)


def sequence_mean(mask_BxT: jax.Array, max_tokens: int, group_B: jax.Array) -> jax.Array:
  """w = m / (|y|·rows): every rollout counts the same. Source: arXiv:2402.03300 (GRPO)."""
  del max_tokens, group_B
  length_Bx1 = mask_BxT.sum(1, keepdims=True)
  return mask_BxT / jnp.maximum(length_Bx1, 1) / _rows(mask_BxT)


def prompt_mean(mask_BxT: jax.Array, max_tokens: int, group_B: jax.Array) -> jax.Array:
  """w = m / (Σ_g|y|·prompts): every prompt counts the same. Source: arXiv:2510.13786 (ScaleRL)."""
  del max_tokens
  tokens_P = jax.ops.segment_sum(mask_BxT.sum(1), group_B, num_segments=len(group_B))
  prompts = jnp.maximum((tokens_P > 0).sum(), 1)
  return mask_BxT / jnp.maximum(tokens_P[group_B], 1)[:, None] / prompts


def fixed(mask_BxT: jax.Array, max_tokens: int, group_B: jax.Array) -> jax.Array:
  """w = m / (max_tokens·rows): no bias to short answers. Source: arXiv:2503.20783 (Dr.GRPO)."""
  del group_B
  return mask_BxT / (max_tokens * _rows(mask_BxT))


def sequence_sum(mask_BxT: jax.Array, max_tokens: int, group_B: jax.Array) -> jax.Array:
  """w = m / rows: the log-probability of whole answers. Source: arXiv:2402.14740 (RLOO)."""
  del max_tokens, group_B
  return mask_BxT / _rows(mask_BxT)


def _rows(mask_BxT: jax.Array) -> jax.Array:
  return jnp.maximum((mask_BxT.sum(1) > 0).sum(), 1)
