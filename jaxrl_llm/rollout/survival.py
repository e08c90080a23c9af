"""Survivors of pruning: their probabilities, and a draw of exactly so many of each group."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_EPSILON = 1e-6


def probabilities(p_PxC: jax.Array, survivors: int, *, share: float, floor: float) -> jax.Array:
  """s_PxC with Σ_c s = survivors and floor ≤ s ≤ 1, as in `pruning.quality`. arXiv:2603.24840 (reconstructed)."""
  mean_Px1 = jnp.clip(p_PxC.mean(1, keepdims=True), _EPSILON, 1 - _EPSILON)
  wish = share * p_PxC / mean_Px1 + (1 - share) * (1 - p_PxC) / (1 - mean_Px1)
  wish = jnp.maximum(wish, _EPSILON)

  def bisect(_, bounds):
    low, high = bounds
    middle = jnp.sqrt(low * high)
    enough = jnp.clip(middle * wish, floor, 1.0).sum(1, keepdims=True) >= survivors
    return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

  ones = jnp.ones_like(mean_Px1)
  _, scale = jax.lax.fori_loop(0, 60, bisect, (ones * _EPSILON, ones / _EPSILON))
  return jnp.clip(scale * wish, floor, 1.0)


def sample_survivors(
  keys_P: jax.Array, s_PxC: jax.Array, survivors: int
) -> tuple[jax.Array, jax.Array]:
  """Exactly `survivors` of each group, candidate c with probability s_c: (index, s), both [P, survivors], ascending.

  Systematic sampling (Madow 1949) over a random order, with cumulative sums F of s. Candidates survive whose interval
  [F_{c−1}, F_c) contains u, u + 1, u + 2 and so on. Σ r/s over the survivors is an unbiased estimate of Σ r.
  """

  def group(key, s_C):
    order_C = jax.random.permutation(jax.random.fold_in(key, 0), len(s_C))
    edges_C = jnp.cumsum(s_C[order_C])
    points_K = jax.random.uniform(jax.random.fold_in(key, 1)) + jnp.arange(survivors)
    # Rounding must not put the last point behind the last interval.
    points_K = jnp.minimum(points_K, edges_C[-1] * (1 - _EPSILON))
    return jnp.sort(order_C[jnp.searchsorted(edges_C, points_K, side='right')])

  index_PxK = jax.vmap(group)(keys_P, s_PxC)
  return index_PxK, jnp.take_along_axis(s_PxC, index_PxK, axis=1)
