"""Sums over spans of tokens. Spans are numbered from 0 in each row; −1 is no span."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.types import Array


def sums(x_BxN: Array, span_BxN: Array, spans: int) -> jax.Array:
  """The sum over the tokens of each span: [B, spans], 0 for spans without tokens."""
  place_BxN = jnp.where(span_BxN < 0, spans, span_BxN)  # beyond the end, where it is dropped
  zeros = jnp.zeros(spans, jnp.result_type(x_BxN))
  add = lambda x_N, place_N: zeros.at[place_N].add(x_N, mode='drop')  # noqa: E731
  return jax.vmap(add)(jnp.asarray(x_BxN), place_BxN)


def of_tokens(x_BxK: jax.Array, span_BxT: Array) -> jax.Array:
  """The value of each token's span: [B, T], 0 for tokens without one."""
  x_BxT = jnp.take_along_axis(x_BxK, jnp.maximum(span_BxT, 0), axis=1)
  return jnp.where(span_BxT < 0, 0, x_BxT)


def is_first(span_BxT: Array) -> jax.Array:
  """Whether a token is the first one of its span: bool [B, T]. The tokens of a span are neighbors."""
  before_BxT = jnp.pad(span_BxT, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
  return (span_BxT >= 0) & (span_BxT != before_BxT)
