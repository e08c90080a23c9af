"""Log-probabilities of given tokens through a chunked head: [B, T, V] float32 logits never exist."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_llm.models import activation_sharding, decoder
from jaxrl_llm.types import ModelConfig


def token_logp(
  config: ModelConfig,
  params: Any,
  hidden_BxTxD: jax.Array,
  targets_BxT: jax.Array,
  *,
  temperature: float,
  chunk_tokens: int,
  dtype: str = 'float32',
  top: int = 0,
) -> tuple[jax.Array, ...]:
  """log softmax(logits / temperature)[target] and the entropy (nats, no gradient), both [B, T].

  With `top`, a third: the mean of the `top` largest probabilities (no gradient), of all where there are fewer.
  Source: none.
  """

  def pick(logits_BxCxV, targets_BxC):
    logits_BxCxV = logits_BxCxV / temperature
    total_BxC = jax.nn.logsumexp(logits_BxCxV, axis=-1)
    picked_BxC = jnp.take_along_axis(logits_BxCxV, targets_BxC[..., None], axis=-1)[..., 0]
    frozen = jax.lax.stop_gradient(logits_BxCxV - total_BxC[..., None])
    entropy_BxC = -(jnp.exp(frozen) * frozen).sum(-1)
    told = picked_BxC - total_BxC, entropy_BxC
    if not top:
      return told
    largest_BxCxK = jax.lax.top_k(frozen, min(top, frozen.shape[-1]))[0]
    return *told, jnp.exp(largest_BxCxK).mean(-1)

  return over_logits(
    pick, config, params, hidden_BxTxD, targets_BxT, chunk_tokens=chunk_tokens, dtype=dtype
  )


def over_logits(
  fn: Callable[..., tuple[jax.Array, ...]],
  config: ModelConfig,
  params: Any,
  hidden_BxTxD: jax.Array,
  *columns: jax.Array,
  chunk_tokens: int,
  dtype: str = 'float32',
) -> tuple[jax.Array, ...]:
  """fn(logits [B, C, V], columns [B, C]…) over the columns of T, its results joined to [B, T].

  Columns are taken so many at a time that about `chunk_tokens` rows of logits exist at once on a device, and
  are recomputed in the backward pass. Where rows or tokens lie on several devices each has a loop of its own: the
  head is gathered once before it and its gradient summed once behind it, not for every chunk. Source: none.
  """
  B, T, _ = hidden_BxTxD.shape
  rows, tokens = (
    activation_sharding.axes_that_divide(activation_sharding.ROWS, B),
    activation_sharding.axes_that_divide(activation_sharding.TOKENS, T),
  )
  used = {name: params[name] for name in (('embed',) if config.tied else ('head',))}
  local = functools.partial(_chunked, fn, config, chunk_tokens, dtype)
  if not rows + tokens:
    return local(used, hidden_BxTxD, *columns)
  cut = PartitionSpec(rows or None, tokens or None)
  return jax.shard_map(
    local,
    in_specs=(PartitionSpec(), cut, *[cut] * len(columns)),
    out_specs=cut,
    axis_names={*rows, *tokens},
    check_vma=False,
  )(used, hidden_BxTxD, *columns)


@jax.named_scope('head')
def _chunked(
  fn, config: ModelConfig, chunk_tokens: int, dtype: str, params, hidden_BxTxD, *columns
):
  """`over_logits` of the rows and tokens of one device."""
  B, T, _ = hidden_BxTxD.shape
  width = min(T, max(1, chunk_tokens // B))
  chunks = -(-T // width)
  pad = chunks * width - T

  def split(x):
    x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(B, chunks, width, *x.shape[2:]).swapaxes(0, 1)

  @jax.checkpoint
  def chunk(pieces):
    hidden_BxCxD, *rest = pieces
    return fn(decoder.head(config, params, hidden_BxCxD, dtype), *rest)

  out = jax.lax.map(chunk, tuple(map(split, (hidden_BxTxD, *columns))))
  return tuple(x.swapaxes(0, 1).reshape(B, chunks * width)[:, :T] for x in out)
