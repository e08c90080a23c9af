"""Attention of decoding by a TPU kernel that reads each row's own columns of the ring, and no others.

`attention.attend` computes the same function and reads all columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from jaxrl_llm.distributed import sharding
from jaxrl_llm.models import attention
from jaxrl_llm.models.mixer import CacheArray, Int8, LayerCache

# Columns of a block: as many as reach this size for all heads of a device, in steps of a tile's width. About one block
# more than a row's own columns is read, so that small ones waste less, but short transfers are slow.
_BLOCK_BYTES, _LANES, _MAX_BLOCK = 2**19, 128, 512


class Columns(NamedTuple):
  """Of which array each row reads which columns: the `live_S` ≥ 0 up to `newest_S`, modulo the width."""

  array_S: jax.Array
  newest_S: jax.Array
  live_S: jax.Array


@jax.named_scope('attention')
def attend(
  q_Sx1xHxd: jax.Array,
  own: LayerCache,
  shared: LayerCache | None = None,
  prompt_mask: jax.Array | None = None,
  *,
  mask_BxQxS: object = None,
  column: jax.Array,
  live_S: jax.Array,
  prompt_S: jax.Array | None = None,
  scale: float = 0.0,
  cap: float = 0.0,
  sink_H: jax.Array | None = None,
  interpret: bool = False,
  run: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None = None,
) -> jax.Array:
  """`attention.attend` for one query a row: (k, v) own [S, K, W, d], shared [P, K, L, d] → [S, 1, H, d].

  Row s attends to the `live_S[s]` youngest columns of a ring whose youngest is `column` (modulo W), and to those of its
  prompt that the mask shows: prompt s // (S / P), read once for its rows, or `prompt_S[s]`, with a mask of each row
  that shows consecutive columns. Of the ring, and of the prompts in the second form, only blocks with columns of the
  row are read. `interpret` runs the kernel on a CPU, and `run` is another one, with the arguments and
  results of `_run`. arXiv:1805.02867 (softmax block by block).
  """
  del mask_BxQxS  # `column` and `live_S` say the same
  S = len(q_Sx1xHxd)
  K, W = jax.tree.leaves(own)[0].shape[1:3]
  groups = S if prompt_mask is None else len(prompt_mask)
  q = attention.group_queries(q_Sx1xHxd, groups, K, scale)
  rows_S, live_S = jnp.arange(S), jnp.minimum(live_S, W)
  newest_S = jnp.full_like(live_S, column % W)
  run = functools.partial(run or _run, cap=cap, interpret=interpret)
  parts = [_part(q, own, Columns(rows_S, newest_S, live_S), run)]
  if shared is not None and prompt_S is None:
    parts.append(attention.shared_part(q, attention.KeyValues(*shared, prompt_mask), cap))
  elif shared is not None:
    parts.append(_part(q, shared, _shown(prompt_S, prompt_mask.reshape(S, -1)), run))
  return attention.combine(parts, q_Sx1xHxd.dtype, sink_H)


def _shown(array_S: jax.Array, mask_SxL: jax.Array) -> Columns:
  """The columns that a mask shows."""
  newest_S = mask_SxL.shape[1] - 1 - jnp.argmax(mask_SxL[:, ::-1], axis=1)
  return Columns(array_S, newest_S, mask_SxL.sum(1))


def _part(q: jax.Array, kv: LayerCache, columns: Columns, run: Callable) -> attention.Part:
  """The part of the softmax over `columns` of kv; q is of `attention.group_queries`."""
  P, G, _, K, R, d = q.shape
  if sharding.free_axes():  # all must become manual: the compiler cannot partition a kernel
    spec = PartitionSpec(None, sharding.axes_that_divide(sharding.FEATURES, K) or None)
    run = jax.shard_map(
      run,
      in_specs=(spec, spec, PartitionSpec()),
      out_specs=spec,
      axis_names=sharding.free_axes(),
      check_vma=False,
    )
  value, top, total = run(q.reshape(P * G, K, R, d), kv, columns)
  top, total = (x.reshape(P, G, K, 1, R) for x in (top, total))
  value = value.reshape(P, G, K, 1, R, -1)

  def weighted_sum(reference):
    factor = jnp.exp(top - reference)
    return factor * total, factor[..., None] * value

  return top, weighted_sum


def _run(
  q_SxKxRxd: jax.Array, kv: LayerCache, columns: Columns, *, cap: float, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Σ weights·v [S, K, R, d], largest score and Σ weights [S, K, R, 1] of the heads of one device.

  The kernel goes row after row, and block after block from the oldest column on.
  """
  S, K, R, d = q_SxKxRxd.shape
  k, v = kv
  numbers = jax.tree.leaves(k)[0]
  W = numbers.shape[2]
  C = block_columns(W, K * d * numbers.dtype.itemsize)
  blocks = pl.cdiv(W, C)
  first_S, count_S = blocks_of_rows(columns, W, C)

  def at(s, b, array_S, newest_S, live_S, first_S, count_S):
    del newest_S, live_S
    # Where a row has no more blocks the last one stays, which is not fetched again.
    return array_S[s], 0, (first_S[s] + jnp.minimum(b, count_S[s] - 1)) % blocks

  def cached(x: CacheArray):
    """Blocks of the array's numbers, and of their scales."""
    whole = (1, K, C, jax.tree.leaves(x)[0].shape[3])
    specs = [pl.BlockSpec(whole, lambda *place: (*at(*place), 0))]
    return specs + [pl.BlockSpec((1, K, C), at)] * isinstance(x, Int8)

  def row(*shape):
    return pl.BlockSpec((1, *shape), lambda s, *_: (s,) + (0,) * len(shape))

  outputs = (K, R, jax.tree.leaves(v)[0].shape[3]), (K, R, 1), (K, R, 1)
  return pl.pallas_call(
    functools.partial(_kernel, blocks=blocks, width=W, cap=cap),
    out_shape=[jax.ShapeDtypeStruct((S, *shape), jnp.float32) for shape in outputs],
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=5,
      grid=(S, blocks),
      in_specs=[row(K, R, d), *cached(k), *cached(v)],
      out_specs=[row(*shape) for shape in outputs],
    ),
    interpret=interpret,
    name='decode_attention',
  )(*columns, first_S, count_S, q_SxKxRxd, *jax.tree.leaves((k, v)))


def block_columns(width: int, column_bytes: int) -> int:
  """Columns of a block of a ring of `width` columns, each with `column_bytes` of keys on a device."""
  fitting = _BLOCK_BYTES // column_bytes // _LANES * _LANES
  return min(max(fitting, _LANES), _MAX_BLOCK, width)


def blocks_of_rows(columns: Columns, W: int, C: int) -> tuple[jax.Array, jax.Array]:
  """The block of each row's oldest column, and how many there are up to that of the newest: at least 1."""
  blocks = pl.cdiv(W, C)
  oldest_S = (columns.newest_S - columns.live_S + 1) % W
  first_S, last_S = oldest_S // C, columns.newest_S // C
  last_S += blocks * (oldest_S > columns.newest_S)
  # Where a row's columns end on the other side of the block in which they began, it is read once.
  return first_S, jnp.clip(last_S - first_S + 1, 1, blocks)


def _kernel(
  array_S, newest_S, live_S, first_S, count_S, q, *refs, blocks: int, width: int, cap: float
):
  """Adds a block's columns to (Σ weights·v, the largest score, Σ weights) of a row, which stay in fast memory."""
  del array_S
  *cache, value, top, total = refs
  k, k_scale, v, v_scale = cache if len(cache) == 4 else (cache[0], None, cache[1], None)
  s, b = pl.program_id(0), pl.program_id(1)
  C = k.shape[2]

  @pl.when(b == 0)
  def start():
    value[...] = jnp.zeros(value.shape, value.dtype)
    top[...] = jnp.full(top.shape, attention.MASKED_SCORE, top.dtype)
    total[...] = jnp.zeros(total.shape, total.dtype)

  @pl.when(b < count_S[s])
  def add():
    live = functools.partial(is_live, (first_S[s] + b) % blocks * C, newest_S[s], live_S[s], width)
    live_1x1xC = live((1, 1, C), 2)
    score = _product(q[0], k[0], 2)
    score = score if k_scale is None else score * k_scale[0][:, None]
    score = cap * jnp.tanh(score / cap) if cap else score
    reference = jnp.maximum(
      top[0], jnp.where(live_1x1xC, score, attention.MASKED_SCORE).max(-1, keepdims=True)
    )
    weight = jnp.where(live_1x1xC, jnp.exp(score - reference), 0.0)
    factor = jnp.exp(top[0] - reference)
    total[0] = factor * total[0] + weight.sum(-1, keepdims=True)
    if v_scale is not None:
      weight = jnp.where(live_1x1xC, weight * v_scale[0][:, None], 0.0)
    numbers = v[0].astype(q.dtype)
    if width % C:  # behind the end of the array, in its last block, stands anything
      numbers = jnp.where(live((1, C, 1), 1), numbers, jnp.zeros_like(numbers))
    value[0] = factor * value[0] + _product(weight.astype(q.dtype), numbers, 1)
    top[0] = reference


def is_live(start, newest, live, width: int, shape: tuple[int, ...], axis: int):
  """Which columns of the block at `start` are among the `live` ones up to `newest`."""
  at = start + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
  age = newest - at
  return (jnp.where(age < 0, age + width, age) < live) & (at < width)


def _product(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
  """Σ over the last axis of x [K, R, ·] and axis `axis` of y [K, ·, ·], for each head, in float32."""
  dimensions = ((2,), (axis,)), ((0,), (0,))
  return jax.lax.dot_general(x, y.astype(x.dtype), dimensions, preferred_element_type=jnp.float32)
