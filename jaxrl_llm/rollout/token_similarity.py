"""How alike two token windows of the same length are: fixed shapes, so that they may run inside the decode loop.

A window [W] ends in its last token; where it holds fewer than W, −1 stands in front. Each function takes two
windows of n ≥ 1 real tokens each and returns a share of n. One scan over W rows of W numbers each: the
recurrence along a row is a running maximum or minimum.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def suffix_match(a_W: jax.Array, b_W: jax.Array) -> jax.Array:
  """The longest suffix of one window that occurs anywhere in the other, over n; the larger of both ways.

  m[i, j] = [a_i = b_j]·(m[i−1, j−1] + 1) is how long the pieces that end at i and j agree; the answer is
  max(max_j m[n, j], max_i m[i, n]) / n. Source: arXiv:2510.24302 (LATR, as in its code).
  """

  def row(before_W, a):
    longer_W = jnp.concatenate([jnp.zeros(1, jnp.int32), before_W[:-1]]) + 1
    agree_W = jnp.where((b_W == a) & (a >= 0), longer_W, 0)
    return agree_W, agree_W[-1]

  last_W, ends_W = jax.lax.scan(row, jnp.zeros_like(b_W), a_W)
  return jnp.maximum(last_W.max(), ends_W.max()) / _count(a_W)


def rouge_l(a_W: jax.Array, b_W: jax.Array) -> jax.Array:
  """ROUGE-L's F1, which at equal lengths is the longest common subsequence over n.

  Source: arXiv:2510.24302 (LATR), its use; the measure is older.
  """

  def row(before_W1, a):
    diagonal_W = before_W1[:-1] + ((b_W == a) & (a >= 0))
    best_W = jax.lax.cummax(jnp.maximum(before_W1[1:], diagonal_W))
    return jnp.concatenate([before_W1[:1], best_W]), None

  last_W1, _ = jax.lax.scan(row, jnp.zeros(len(b_W) + 1, jnp.int32), a_W)
  return last_W1[-1] / _count(a_W)


def edit_distance(a_W: jax.Array, b_W: jax.Array) -> jax.Array:
  """Levenshtein's distance over n; equal padding in front of both adds nothing to it.

  Source: arXiv:2510.24302 (LATR), its use; the measure is older.
  """
  place_W1 = jnp.arange(len(b_W) + 1)

  def row(before_W1, a):
    swap_W = before_W1[:-1] + (b_W != a)
    first = before_W1[:1] + 1
    best_W1 = jnp.concatenate([first, jnp.minimum(before_W1[1:] + 1, swap_W)])
    # An insertion costs 1 a step along the row: a running minimum of what is left after taking j off.
    return jax.lax.cummin(best_W1 - place_W1) + place_W1, None

  last_W1, _ = jax.lax.scan(row, place_W1, a_W)
  return last_W1[-1] / _count(a_W)


def _count(a_W: jax.Array) -> jax.Array:
  return jnp.maximum((a_W >= 0).sum(), 1)
