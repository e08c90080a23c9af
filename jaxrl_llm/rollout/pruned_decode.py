"""Sampling in two legs: all candidates for a few tokens, then those of each group that are chosen to their ends."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models import shared_prompt_forward
from jaxrl_llm.rollout import correctness_head, ring_decode, sampling
from jaxrl_llm.types import ModelConfig, Prompts, Rollout

_SMALL = 1e-6
_CHOICE = 2**31 - 3  # folded into a prompt's key: the choice has noise of its own


def generate(
  model: ModelConfig,
  params: Any,
  state: correctness_head.CorrectnessHead,
  prompts: Prompts,
  key: jax.Array,
  version: jax.Array,
  spec: ring_decode.DecodeSettings,
  prune: Any,
  cap: jax.Array,
) -> tuple[Rollout, jax.Array, jax.Array]:
  """As `engine.generate`, with the survivors' weights and features; and the tokens that were sampled in all.

  A survivor says what it would have said unpruned. Candidates that ended before they were judged are
  judged by their last token. Source: arXiv:2603.24840 (ARRoL).
  """
  P, C, G, n = len(prompts.index_P), prune.candidates, spec.rollouts, prune.at_tokens
  first, legs = ring_decode.generate(
    model, params, prompts, key, version, spec._replace(rollouts=C), cap=cap, pause=n
  )
  p_B, feature_BxF = predict_success(model, params, state, prompts, first, spec.dtype, prune)
  keys_P = sampling.prompt_keys(jax.random.fold_in(key, _CHOICE), prompts)
  index_PxG, s_PxG = sample_survivors(keys_P, prune.survival(p_B.reshape(P, C), G), G)
  row_B = (jnp.arange(P)[:, None] * C + index_PxG).reshape(-1)
  begun = jax.tree.map(lambda x: x[row_B], first)
  begun = begun._replace(
    weight_B=begun.weight_B / s_PxG.reshape(-1), feature_BxF=feature_BxF[row_B]
  )
  rollout, more = ring_decode.generate(
    model, params, prompts, key, version, spec, begun=begun, cap=cap, member_B=index_PxG.reshape(-1)
  )
  tokens = first.length_B.sum() + rollout.length_B.sum() - begun.length_B.sum()
  return rollout, legs + more, tokens


def predict_success(
  model: ModelConfig,
  params: Any,
  state: correctness_head.CorrectnessHead,
  prompts: Prompts,
  rollout: Rollout,
  dtype: str,
  prune: Any,
) -> tuple[jax.Array, jax.Array]:
  """(p_B, feature_BxF): the judge's probability that rows will be right, and the hidden state it goes by.

  Of each row that at token `prune.at_tokens`, or at its last. Source: arXiv:2603.24840 (ARRoL).
  """
  n = prune.at_tokens
  hidden_BxnxD = shared_prompt_forward.hidden(
    model, params, prompts, rollout.tokens_BxT[:, :n], dtype=dtype
  )
  last_B = jnp.clip(jnp.minimum(rollout.length_B, n) - 1, 0)
  feature_BxF = jnp.take_along_axis(hidden_BxnxD, last_B[:, None, None], axis=1)[:, 0]
  feature_BxF = feature_BxF.astype(jnp.float32)
  return correctness_head.probability(state, feature_BxF, prune.warmup_steps), feature_BxF


def survival_probabilities(p_PxC: jax.Array, keep: int, *, share: float, floor: float) -> jax.Array:
  """s_PxC with Σ_c s = keep and floor ≤ s ≤ 1; see `prune.quality`. Source: arXiv:2603.24840 (reconstructed)."""
  mean_Px1 = jnp.clip(p_PxC.mean(1, keepdims=True), _SMALL, 1 - _SMALL)
  wish = share * p_PxC / mean_Px1 + (1 - share) * (1 - p_PxC) / (1 - mean_Px1)
  wish = jnp.maximum(wish, _SMALL)

  def halve(_, bounds):
    low, high = bounds
    middle = jnp.sqrt(low * high)
    enough = jnp.clip(middle * wish, floor, 1.0).sum(1, keepdims=True) >= keep
    return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

  ones = jnp.ones_like(mean_Px1)
  _, scale = jax.lax.fori_loop(0, 60, halve, (ones * _SMALL, ones / _SMALL))
  return jnp.clip(scale * wish, floor, 1.0)


def sample_survivors(keys_P: jax.Array, s_PxC: jax.Array, keep: int) -> tuple[jax.Array, jax.Array]:
  """Exactly `keep` of each group, candidate c with probability s_c: (index, s), both [P, keep], in order.

  Systematic sampling over a random order: with sums F of s, the candidates whose interval
  [F_{c−1}, F_c) holds u, u + 1, u + 2, … So Σ r/s over the chosen is an unbiased sum of r. Source: none
  (Madow 1949).
  """

  def group(key, s_C):
    order_C = jax.random.permutation(jax.random.fold_in(key, 0), len(s_C))
    edges_C = jnp.cumsum(s_C[order_C])
    points_K = jax.random.uniform(jax.random.fold_in(key, 1)) + jnp.arange(keep)
    # Rounding must not fall off the end.
    points_K = jnp.minimum(points_K, edges_C[-1] * (1 - _SMALL))
    return jnp.sort(order_C[jnp.searchsorted(edges_C, points_K, side='right')])

  index_PxK = jax.vmap(group)(keys_P, s_PxC)
  return index_PxK, jnp.take_along_axis(s_PxC, index_PxK, axis=1)
