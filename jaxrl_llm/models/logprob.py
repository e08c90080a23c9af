"""Token log-probabilities through a chunked head, so that [B, T, V] float32 logits are never in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_llm.distributed import sharding
from jaxrl_llm.models import decoder, exact, linear
from jaxrl_llm.types import ModelConfig, Params

# From logits [B, C, V] and arrays [B, C] to arrays [B, C].
_LogitsFn = Callable[..., tuple[jax.Array, ...]]

# Where columns may be skipped: the number of chunks, and the rows of logits that a product should have at least.
_CHUNKS, _LEAST_ROWS = 16, 64


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
  used: jax.Array | None = None,
  entropy_gradient: bool = False,
  collision: bool = False,
) -> tuple[jax.Array, ...]:
  """log softmax(logits / temperature)[target] and the entropy (nats), both [B, T].

  The entropy has a gradient only with `entropy_gradient`. With `top`, a further array [B, T]: the mean of the
  min(top, V) largest probabilities. With `collision`, one more: Σ_v π_v². Neither has a gradient. Columns from `used`
  on may be skipped, and are then 0.
  """

  partition = exact.partition_and_entropy if config.is_exact else _log_partition
  if entropy_gradient and config.is_exact:
    partition = lambda x: (exact.partition_and_entropy(x)[0], partition_and_entropy(x)[1])  # noqa: E731
  elif entropy_gradient:
    partition = partition_and_entropy

  def pick(logits_BxCxV, targets_BxC):
    if config.is_exact:
      logits_BxCxV = exact.tempered(logits_BxCxV, temperature)
    else:
      logits_BxCxV = logits_BxCxV / temperature
    total_BxC, entropy_BxC = partition(logits_BxCxV)
    picked_BxC = jnp.take_along_axis(logits_BxCxV, targets_BxC[..., None], axis=-1)[..., 0]
    logp_BxC = picked_BxC - total_BxC
    found: tuple[jax.Array, ...] = (logp_BxC, entropy_BxC)
    if not top and not collision:
      return found
    frozen, total_BxC = jax.lax.stop_gradient((logits_BxCxV, total_BxC))
    if top:
      largest_BxCxK = jax.lax.top_k(frozen, min(top, frozen.shape[-1]))[0]
      found += (jnp.exp(largest_BxCxK - total_BxC[..., None]).mean(-1),)
    if collision:
      found += (jnp.exp(2 * (frozen - total_BxC[..., None])).sum(-1),)
    return found

  chunks = functools.partial(over_logits, chunk_tokens=chunk_tokens, dtype=dtype, used=used)
  return chunks(pick, config, params, hidden_BxTxD, targets_BxT)


@jax.custom_jvp
def _log_partition(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
  """log Σ e^logit and the entropy in nats over the last axis; the entropy has no gradient.

  Both sums are one reduction, which reads the logits once: separate ones take several times as long on a CPU.
  """
  top = logits.max(-1)
  shifted = logits - top[..., None]
  weight = jnp.exp(shifted)
  zero = jnp.zeros((), logits.dtype)
  add = lambda a, b: (a[0] + b[0], a[1] + b[1])  # noqa: E731
  total, product = jax.lax.reduce((weight, weight * shifted), (zero, zero), add, (logits.ndim - 1,))
  return top + jnp.log(total), jnp.log(total) - product / total


@_log_partition.defjvp
def _log_partition_jvp(primals, tangents):
  (logits,), (change,) = primals, tangents
  total, entropy = _log_partition(logits)
  slope = (jnp.exp(logits - total[..., None]) * change).sum(-1)
  return (total, entropy), (slope, jnp.zeros_like(entropy))


def partition_and_entropy(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
  """log Σ e^logit and the entropy in nats over the last axis; both have gradients."""
  top = jax.lax.stop_gradient(logits.max(-1))
  shifted = logits - top[..., None]
  log_total = jnp.log(jnp.exp(shifted).sum(-1))
  mean = (jnp.exp(shifted - log_total[..., None]) * shifted).sum(-1)
  return top + log_total, log_total - mean


def over_logits(
  fn: _LogitsFn,
  config: ModelConfig,
  params: Params,
  hidden_BxTxD: jax.Array,
  *columns: jax.Array,
  chunk_tokens: int,
  dtype: str = 'float32',
  used: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
  """fn(logits [B, C, V], columns [B, C]…) over chunks of T, with its results concatenated to [B, T].

  The chunk size keeps about `chunk_tokens` rows of logits in memory per device; the backward pass recomputes them.
  If rows or tokens are sharded, each device runs its own loop: the head is gathered once before the loop and its
  gradient summed once after it, and not per chunk. Chunks of columns from `used` [] on are skipped: their results
  are 0.
  """
  B, T, _ = hidden_BxTxD.shape
  rows = sharding.axes_that_divide(sharding.UPDATE_ROWS, B)
  tokens = sharding.axes_that_divide(sharding.TOKENS, T)
  head_params = {name: params[name] for name in (('embed',) if config.tied else ('head',))}
  local = functools.partial(_chunked, fn, config, chunk_tokens, dtype)
  if not rows + tokens:
    return local(head_params, used, hidden_BxTxD, *columns)
  # The head and its gradient cross links in the dtype of the products.
  head_params = linear.cast(head_params, dtype)
  spec = PartitionSpec(rows or None, tokens or None)
  if tokens:  # each device holds a part of the columns, and runs as many chunks as the others
    used = None
  return jax.shard_map(
    local,
    in_specs=(PartitionSpec(), PartitionSpec(), spec, *[spec] * len(columns)),
    out_specs=spec,
    axis_names={*rows, *tokens},
    check_vma=False,
  )(head_params, used, hidden_BxTxD, *columns)


@jax.named_scope('head')
def _chunked(
  fn: _LogitsFn,
  config: ModelConfig,
  chunk_tokens: int,
  dtype: str,
  params: Params,
  used: jax.Array | None,
  hidden_BxTxD: jax.Array,
  *columns: jax.Array,
) -> tuple[jax.Array, ...]:
  """`over_logits` for the rows and tokens of one device."""
  B, T, _ = hidden_BxTxD.shape
  if B * T <= chunk_tokens:  # all logits may exist at once, from the forward to the backward pass
    return fn(decoder.head(config, params, hidden_BxTxD, dtype), *columns)
  width = min(T, max(1, chunk_tokens // B))
  if used is not None:  # small chunks, so that the last one in use has little that is not
    width = min(width, max(_LEAST_ROWS, -(-T // _CHUNKS)))
  chunks = -(-T // width)
  pad = chunks * width - T

  def split(x):
    x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(B, chunks, width, *x.shape[2:]).swapaxes(0, 1)

  def of_chunk(params, hidden_BxCxD, *columns):
    return fn(decoder.head(config, params, hidden_BxCxD, dtype), *columns)

  hidden, *columns = map(split, (hidden_BxTxD, *columns))
  count = jnp.int32(chunks) if used is None else -(-used // width)
  out = _over_chunks(of_chunk, params, count, hidden, tuple(columns))
  return tuple(x.swapaxes(0, 1).reshape(B, chunks * width)[:, :T] for x in out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_chunks(
  fn: Callable[..., tuple[jax.Array, ...]],
  params: Params,
  count: jax.Array,
  hidden_NxBxCxD: jax.Array,
  columns: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
  """fn(params, hidden, *columns) of the first `count` [] of N chunks, arrays [N, …] that are 0 for the others.

  The backward pass computes each chunk again, and has one gradient of `params`, to which each chunk adds. Columns have
  no gradient. A loop that JAX differentiates would keep a copy of `params` for each chunk that may be skipped.
  """
  shapes = jax.eval_shape(fn, params, hidden_NxBxCxD[0], *(x[0] for x in columns))
  start = tuple(jnp.zeros((len(hidden_NxBxCxD), *x.shape), x.dtype) for x in shapes)

  def body(n, total):
    found = fn(params, hidden_NxBxCxD[n], *(x[n] for x in columns))
    return tuple(x.at[n].set(new) for x, new in zip(total, found, strict=True))

  return jax.lax.fori_loop(0, count, body, start)


def _over_chunks_forward(fn, *inputs):
  return _over_chunks(fn, *inputs), inputs


def _over_chunks_backward(fn, inputs, gradient):
  params, count, hidden_NxBxCxD, columns = inputs

  def body(n, total):
    chunk = lambda params, hidden: fn(params, hidden, *(x[n] for x in columns))  # noqa: E731
    of_params, of_hidden = jax.vjp(chunk, params, hidden_NxBxCxD[n])[1](
      tuple(x[n] for x in gradient)
    )
    return jax.tree.map(jnp.add, total[0], of_params), total[1].at[n].set(of_hidden)

  # Chunks add up in float32, also to the gradient of weights in bfloat16.
  wide = lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))  # noqa: E731
  zeros = jax.tree.map(wide, params), jnp.zeros_like(hidden_NxBxCxD)
  of_params, of_hidden = jax.lax.fori_loop(0, count, body, zeros)
  of_params = jax.tree.map(lambda total, x: total.astype(x.dtype), of_params, params)
  return of_params, None, of_hidden, None


_over_chunks.defvjp(_over_chunks_forward, _over_chunks_backward)
