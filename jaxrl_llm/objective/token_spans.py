"""Sums over spans of tokens. Spans are numbered from 0 in each row, their tokens are neighbors; −1 is no span."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.types import Array, TeacherTokens


def at_first_tokens(logp_BxE: jax.Array, tokens: TeacherTokens) -> jax.Array:
  """The teacher's log-prob of each span, at the policy's first token of the span and 0 at others: [B, T].

  `logp_BxE` are those of the teacher's tokens.
  """
  span_BxT = tokens.own_span_BxT
  before_BxT = jnp.pad(span_BxT, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
  sums_BxT = _sums(logp_BxE, tokens.span_BxE, span_BxT.shape[1])
  return jnp.where(span_BxT != before_BxT, _of_tokens(sums_BxT, span_BxT), 0.0)


def summed(x_BxT: jax.Array, span_BxT: Array) -> jax.Array:
  """The sum over the tokens of each token's span: [B, T], 0 for tokens without one."""
  return _of_tokens(_sums(x_BxT, span_BxT, x_BxT.shape[1]), span_BxT)


def _sums(x_BxN: jax.Array, span_BxN: Array, spans: int) -> jax.Array:
  """[B, spans], 0 for spans without tokens."""
  place_BxN = jnp.where(span_BxN < 0, spans, span_BxN)  # beyond the end, where it is dropped
  add = lambda x_N, place_N: jnp.zeros(spans, x_N.dtype).at[place_N].add(x_N, mode='drop')  # noqa: E731
  return jax.vmap(add)(x_BxN, place_BxN)


def _of_tokens(x_BxK: jax.Array, span_BxT: Array) -> jax.Array:
  x_BxT = jnp.take_along_axis(x_BxK, jnp.maximum(span_BxT, 0), axis=1)
  return jnp.where(span_BxT < 0, 0.0, x_BxT)
