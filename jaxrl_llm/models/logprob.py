"""Token log-probabilities through a chunked head, so that [B, T, V] float32 logits are never in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_llm.models import activation_sharding, decoder
from jaxrl_llm.types import ModelConfig, Params

# From logits [B, C, V] and arrays [B, C] to arrays [B, C].
_LogitsFn = Callable[..., tuple[jax.Array, ...]]


def token_logp(
  config: ModelConfig,
  params: Params,
  hidden_BxTxD: jax.Array,
  targets_BxT: jax.Array,
  *,
  temperature: float,
  chunk_tokens: int,
  dtype: str = 'float32',
  top: int = 0,
) -> tuple[jax.Array, ...]:
  """log softmax(logits / temperature)[target] and the entropy (nats, no gradient), both [B, T].

  With `top`, a third array [B, T]: the mean of the min(top, V) largest probabilities (no gradient).
  """

  def pick(logits_BxCxV, targets_BxC):
    logits_BxCxV = logits_BxCxV / temperature
    total_BxC = jax.nn.logsumexp(logits_BxCxV, axis=-1)
    picked_BxC = jnp.take_along_axis(logits_BxCxV, targets_BxC[..., None], axis=-1)[..., 0]
    frozen = jax.lax.stop_gradient(logits_BxCxV - total_BxC[..., None])
    entropy_BxC = -(jnp.exp(frozen) * frozen).sum(-1)
    logp_BxC = picked_BxC - total_BxC
    if not top:
      return logp_BxC, entropy_BxC
    largest_BxCxK = jax.lax.top_k(frozen, min(top, frozen.shape[-1]))[0]
    return logp_BxC, entropy_BxC, jnp.exp(largest_BxCxK).mean(-1)

  return over_logits(
    pick, config, params, hidden_BxTxD, targets_BxT, chunk_tokens=chunk_tokens, dtype=dtype
  )


def over_logits(
  fn: _LogitsFn,
  config: ModelConfig,
  params: Params,
  hidden_BxTxD: jax.Array,
  *columns: jax.Array,
  chunk_tokens: int,
  dtype: str = 'float32',
) -> tuple[jax.Array, ...]:
  """fn(logits [B, C, V], columns [B, C]…) over chunks of T, with its results concatenated to [B, T].

  The chunk size keeps about `chunk_tokens` rows of logits in memory per device; the backward pass recomputes them.
  If rows or tokens are sharded, each device runs its own loop: the head is gathered once before the loop and its
  gradient summed once after it, and not per chunk.
  """
  B, T, _ = hidden_BxTxD.shape
  rows, tokens = (
    activation_sharding.axes_that_divide(activation_sharding.ROWS, B),
    activation_sharding.axes_that_divide(activation_sharding.TOKENS, T),
  )
  head_params = {name: params[name] for name in (('embed',) if config.tied else ('head',))}
  local = functools.partial(_chunked, fn, config, chunk_tokens, dtype)
  if not rows + tokens:
    return local(head_params, hidden_BxTxD, *columns)
  spec = PartitionSpec(rows or None, tokens or None)
  return jax.shard_map(
    local,
    in_specs=(PartitionSpec(), spec, *[spec] * len(columns)),
    out_specs=spec,
    axis_names={*rows, *tokens},
    check_vma=False,
  )(head_params, hidden_BxTxD, *columns)


@jax.named_scope('head')
def _chunked(
  fn: _LogitsFn,
  config: ModelConfig,
  chunk_tokens: int,
  dtype: str,
  params: Params,
  hidden_BxTxD: jax.Array,
  *columns: jax.Array,
) -> tuple[jax.Array, ...]:
  """`over_logits` for the rows and tokens of one device."""
  B, T, _ = hidden_BxTxD.shape
  width = min(T, max(1, chunk_tokens // B))
  chunks = -(-T // width)
  pad = chunks * width - T

  def split(x):
    x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(B, chunks, width, *x.shape[2:]).swapaxes(0, 1)

  @jax.checkpoint
  def chunk(pieces):
    hidden_BxCxD, *columns = pieces
    return fn(decoder.head(config, params, hidden_BxCxD, dtype), *columns)

  out = jax.lax.map(chunk, tuple(map(split, (hidden_BxTxD, *columns))))
  return tuple(x.swapaxes(0, 1).reshape(B, chunks * width)[:, :T] for x in out)
