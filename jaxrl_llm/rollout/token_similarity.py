"""Similarity of two token windows of the same length, with fixed shapes for use inside the decode loop.

A window [W] ends with its last token; shorter windows are padded with −1 in front. Each function takes two windows of
n ≥ 1 real tokens and returns a share of n. It is one scan over W rows of W numbers: the recurrence along a row is a
cumulative maximum or minimum.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def suffix_match(a_W: jax.Array, b_W: jax.Array) -> jax.Array:
  """The longest suffix of one window that occurs anywhere in the other, over n; the larger of both directions.

  m[i, j] = [a_i = b_j]·(m[i−1, j−1] + 1) is the length of the common run that ends at i and j; the result is
  max(max_j m[n, j], max_i m[i, n]) / n. arXiv:2510.24302 (LATR, as in its code).
  """

  def row(before_W, a):
    longer_W = jnp.concatenate([jnp.zeros(1, jnp.int32), before_W[:-1]]) + 1
    agree_W = jnp.where((b_W == a) & (a >= 0), longer_W, 0)
    return agree_W, agree_W[-1]

  last_W, ends_W = jax.lax.scan(row, jnp.zeros_like(b_W), a_W)
  return jnp.maximum(last_W.max(), ends_W.max()) / _count(a_W)


def rouge_l(a_W: jax.Array, b_W: jax.Array) -> jax.Array:
  """ROUGE-L's F1, which at equal lengths is the longest common subsequence over n.

  arXiv:2510.24302 (LATR), its use; the measure is older.
  """

  def row(before_W1, a):
    diagonal_W = before_W1[:-1] + ((b_W == a) & (a >= 0))
    best_W = jax.lax.cummax(jnp.maximum(before_W1[1:], diagonal_W))
    return jnp.concatenate([before_W1[:1], best_W]), None

  last_W1, _ = jax.lax.scan(row, jnp.zeros(len(b_W) + 1, jnp.int32), a_W)
  return last_W1[-1] / _count(a_W)


def edit_distance(a_W: jax.Array, b_W: jax.Array) -> jax.Array:
  """Levenshtein distance over n; equal padding in front of both adds nothing to it.

  arXiv:2510.24302 (LATR), its use; the measure is older.
  """
  index_W1 = jnp.arange(len(b_W) + 1)

  def row(before_W1, a):
    swap_W = before_W1[:-1] + (b_W != a)
    first = before_W1[:1] + 1
    best_W1 = jnp.concatenate([first, jnp.minimum(before_W1[1:] + 1, swap_W)])
    # An insertion costs 1 per column: the cumulative minimum of the cost minus its column.
    return jax.lax.cummin(best_W1 - index_W1) + index_W1, None

  last_W1, _ = jax.lax.scan(row, index_W1, a_W)
  return last_W1[-1] / _count(a_W)


def _count(a_W: jax.Array) -> jax.Array:
  return jnp.maximum((a_W >= 0).sum(), 1)
