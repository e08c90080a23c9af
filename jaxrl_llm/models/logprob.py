"""Token log-probabilities through a chunked head, so that [B, T, V] float32 logits are never in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_llm.distributed import sharding
from jaxrl_llm.models import decoder, exact, linear
from jaxrl_llm.types import ModelConfig, Params

# From logits [B, C, V], those of a frozen model where there is one, and arrays [B, C] to arrays [B, C].
_LogitsFn = Callable[..., tuple[jax.Array, ...]]

# Where columns may be skipped: the number of chunks, and the rows of logits that a product should have at least.
_CHUNKS, _LEAST_ROWS = 16, 64
_NARROW = (
  'bfloat16',
  'float16',
)  # dtypes of products, in which the head is rounded once for all chunks


class FrozenHead(NamedTuple):
  """A second model at the same positions. Its logits exist beside the first one's in a chunk, without a gradient."""

  config: ModelConfig
  params: Params
  hidden_BxTxD: jax.Array


class VocabularyTerm(NamedTuple):
  """A function of the distributions of tokens: log-probs [B, C, V], then those of the second model, then columns."""

  of: Callable[..., jax.Array]  # → [B, C]
  head: FrozenHead | None = None  # None: there is no second model
  columns: tuple[jax.Array, ...] = ()  # [B, T, …], without a gradient


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
  term: VocabularyTerm | None = None,
) -> tuple[jax.Array, ...]:
  """log softmax(logits / temperature)[target] and the entropy (nats), both [B, T].

  The entropy has a gradient only with `entropy_gradient`. With `top`, a further array [B, T]: the mean of the
  min(top, V) largest probabilities. With `collision`, one more: Σ_v π_v². Neither has a gradient. With `term`, the last
  array is its function of these distributions and of those of a second model over the same V tokens, at the same
  temperature. Columns from `used` on may be skipped, and are then 0.
  """

  partition = exact.partition_and_entropy if config.is_exact else _log_partition
  if entropy_gradient and config.is_exact:
    partition = lambda x: (exact.partition_and_entropy(x)[0], partition_and_entropy(x)[1])  # noqa: E731
  elif entropy_gradient:
    partition = partition_and_entropy

  head, columns = (None, ()) if term is None else (term.head, term.columns)
  models = 0 if head is None else 1

  def pick(logits_BxCxV, *columns):
    others, (targets_BxC, *inputs) = columns[:models], columns[models:]
    divide = exact.tempered if config.is_exact else jnp.divide
    logits_BxCxV = divide(logits_BxCxV, temperature)
    total_BxC, entropy_BxC = partition(logits_BxCxV)
    picked_BxC = jnp.take_along_axis(logits_BxCxV, targets_BxC[..., None], axis=-1)[..., 0]
    logp_BxC = picked_BxC - total_BxC
    found: tuple[jax.Array, ...] = (logp_BxC, entropy_BxC)
    if top or collision:
      found += _statistics(*jax.lax.stop_gradient((logits_BxCxV, total_BxC)), top, collision)
    if term is not None:
      # A larger vocabulary ends with rows that no tokenizer writes.
      others = [x[..., : logits_BxCxV.shape[-1]] / temperature for x in others]
      own_BxCxV = logits_BxCxV - total_BxC[..., None]
      found += (term.of(own_BxCxV, *map(jax.nn.log_softmax, others), *inputs),)
    return found

  chunks = functools.partial(over_logits, chunk_tokens=chunk_tokens, dtype=dtype, used=used)
  return chunks(pick, config, params, hidden_BxTxD, targets_BxT, *columns, frozen=head)


def _statistics(
  logits_BxCxV: jax.Array, total_BxC: jax.Array, top: int, collision: bool
) -> tuple[jax.Array, ...]:
  """The mean of the `top` largest probabilities and Σ_v π_v², [B, C], as far as they are needed."""
  found: tuple[jax.Array, ...] = ()
  if top:
    largest_BxCxK = jax.lax.top_k(logits_BxCxV, min(top, logits_BxCxV.shape[-1]))[0]
    found += (jnp.exp(largest_BxCxK - total_BxC[..., None]).mean(-1),)
  if collision:
    found += (jnp.exp(2 * (logits_BxCxV - total_BxC[..., None])).sum(-1),)
  return found


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
  frozen: FrozenHead | None = None,
) -> tuple[jax.Array, ...]:
  """fn(logits [B, C, V], columns [B, C, …]…) over chunks of T, with its results concatenated to [B, T].

  The chunk size keeps about `chunk_tokens` rows of logits in memory per device; the backward pass recomputes them.
  If rows or tokens are sharded, each device runs its own loop: the head is gathered once before the loop and its
  gradient summed once after it, and not per chunk. Chunks of columns from `used` [] on are skipped: their results
  are 0. With `frozen`, the logits of that model follow as the second argument of `fn`.
  """
  B, T, _ = hidden_BxTxD.shape
  rows = sharding.axes_that_divide(sharding.UPDATE_ROWS, B)
  tokens = sharding.axes_that_divide(sharding.TOKENS, T)
  head_params, others = _head_of(config, params), None
  configs = (config,)
  if frozen is not None:
    others = jax.lax.stop_gradient(_head_of(frozen.config, frozen.params))
    columns = (jax.lax.stop_gradient(frozen.hidden_BxTxD), *columns)
    configs += (frozen.config,)
  local = functools.partial(_chunked, fn, configs, chunk_tokens, dtype)
  if not rows + tokens:
    return local(head_params, others, used, hidden_BxTxD, *columns)
  # The head and its gradient cross links in the dtype of the products.
  head_params, others = linear.cast((head_params, others), dtype)
  spec = PartitionSpec(rows or None, tokens or None)
  if tokens:  # each device holds a part of the columns, and runs as many chunks as the others
    used = None
  whole = PartitionSpec()
  return jax.shard_map(
    local,
    in_specs=(whole, whole, whole, spec, *[spec] * len(columns)),
    out_specs=spec,
    axis_names={*rows, *tokens},
    check_vma=False,
  )(head_params, others, used, hidden_BxTxD, *columns)


def _head_of(config: ModelConfig, params: Params) -> Params:
  return {name: params[name] for name in (('embed',) if config.tied else ('head',))}


def _rounded(config: ModelConfig, params: Params, dtype: str) -> Params | None:
  """The head in a smaller dtype, rounded once for all chunks; None where the chunks round it."""
  if config.is_exact or not isinstance(decoder.head_kernel(config, params), jax.Array):
    return None
  return jax.lax.stop_gradient(linear.cast(params, dtype))


@jax.named_scope('head')
def _chunked(
  fn: _LogitsFn,
  configs: tuple[ModelConfig, ...],
  chunk_tokens: int,
  dtype: str,
  params: Params,
  frozen: Params,
  used: jax.Array | None,
  hidden_BxTxD: jax.Array,
  *columns: jax.Array,
) -> tuple[jax.Array, ...]:
  """`over_logits` for the rows and tokens of one device; with two `configs`, columns begin with hidden states."""
  B, T, _ = hidden_BxTxD.shape

  def of_chunk(params, frozen, hidden_BxCxD, *columns):
    logits_BxCxV = decoder.head(configs[0], params, hidden_BxCxD, dtype, frozen[0])
    if len(configs) == 1:
      return fn(logits_BxCxV, *columns)
    other_BxCxV = decoder.head(configs[1], frozen[1], columns[0], dtype)
    return fn(logits_BxCxV, other_BxCxV, *columns[1:])

  frozen = (_rounded(configs[0], params, dtype) if dtype in _NARROW else None), frozen
  if B * T <= chunk_tokens:  # all logits may exist at once, from the forward to the backward pass
    return of_chunk(params, frozen, hidden_BxTxD, *columns)
  width = min(T, max(1, chunk_tokens // B))
  if used is not None:  # small chunks, so that the last one in use has little that is not
    width = min(width, max(_LEAST_ROWS, -(-T // _CHUNKS)))
  chunks = -(-T // width)
  pad = chunks * width - T

  def split(x):
    x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(B, chunks, width, *x.shape[2:]).swapaxes(0, 1)

  hidden, *columns = map(split, (hidden_BxTxD, *columns))
  count = jnp.int32(chunks) if used is None else -(-used // width)
  out = _over_chunks(of_chunk, params, frozen, count, hidden, tuple(columns))
  return tuple(x.swapaxes(0, 1).reshape(B, chunks * width)[:, :T] for x in out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_chunks(
  fn: Callable[..., tuple[jax.Array, ...]],
  params: Params,
  frozen: Params,
  count: jax.Array,
  hidden_NxBxCxD: jax.Array,
  columns: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
  """fn(params, frozen, hidden, *columns) of the first `count` [] of N chunks, arrays [N, …], 0 for the others.

  The backward pass computes each chunk again, and has one gradient of `params`, to which each chunk adds. `frozen` and
  columns have no gradient. A loop that JAX differentiates would keep a copy of `params` for each chunk that may be
  skipped.
  """
  shapes = jax.eval_shape(fn, params, frozen, hidden_NxBxCxD[0], *(x[0] for x in columns))
  start = tuple(jnp.zeros((len(hidden_NxBxCxD), *x.shape), x.dtype) for x in shapes)

  def body(n, total):
    found = fn(params, frozen, hidden_NxBxCxD[n], *(x[n] for x in columns))
    return tuple(x.at[n].set(new) for x, new in zip(total, found, strict=True))

  return jax.lax.fori_loop(0, count, body, start)


def _over_chunks_forward(fn, *inputs):
  return _over_chunks(fn, *inputs), inputs


def _over_chunks_backward(fn, inputs, gradient):
  params, frozen, count, hidden_NxBxCxD, columns = inputs

  def body(n, total):
    chunk = lambda params, hidden: fn(params, frozen, hidden, *(x[n] for x in columns))  # noqa: E731
    of_params, of_hidden = jax.vjp(chunk, params, hidden_NxBxCxD[n])[1](
      tuple(x[n] for x in gradient)
    )
    return jax.tree.map(jnp.add, total[0], of_params), total[1].at[n].set(of_hidden)

  # Chunks add up in float32, also to the gradient of weights in bfloat16.
  wide = lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))  # noqa: E731
  zeros = jax.tree.map(wide, params), jnp.zeros_like(hidden_NxBxCxD)
  of_params, of_hidden = jax.lax.fori_loop(0, count, body, zeros)
  of_params = jax.tree.map(lambda total, x: total.astype(x.dtype), of_params, params)
  return of_params, None, None, of_hidden, None


_over_chunks.defvjp(_over_chunks_forward, _over_chunks_backward)
