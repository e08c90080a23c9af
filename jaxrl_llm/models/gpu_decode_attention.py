"""Attention of decoding by a GPU kernel that reads each row's own columns of the ring, and no others.

`decode_attention` has the same kernel for TPUs, and all that surrounds both. From jax 0.11.2 on, Pallas warns that its
Triton backend will be removed: before jax 0.13 is allowed, the kernel needs another one.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxrl_llm.models import attention, decode_attention
from jaxrl_llm.models.mixer import LayerCache

# Keys of one step of a program, of which some are in flight while one is computed: shared memory holds as many values.
_BLOCK_BYTES, _STAGES, _WARPS = 2**14, 3, 4
_MAX_BLOCK = 128
# Programs that fill a GPU: eight for each of the 132 multiprocessors of an H200. Counted, not measured.
_PROGRAMS = 1056
_MOST_INT8 = 2**31 - 1  # Pallas counts in int32 below 4 GiB; wider numbers are fewer by then
_LEAST = 16  # sizes of a matrix product of a program: powers of two from here on


def attend(*args: object, **options: object) -> jax.Array:
  """`decode_attention.attend` by the kernel for GPUs: the same arguments and result."""
  return decode_attention.attend(*args, run=_run, **options)


def block_columns(width: int, column_bytes: int) -> int:
  """Columns of a block of a ring of `width` columns, each with `column_bytes` of keys of one head: a power of two."""
  fitting = min(_BLOCK_BYTES // column_bytes, _MAX_BLOCK, pl.next_power_of_2(width))
  return max(pl.next_power_of_2(fitting + 1) // 2, _LEAST)


def _run(
  q_SxKxRxd: jax.Array,
  kv: LayerCache,
  columns: decode_attention.Columns,
  *,
  cap: float,
  interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Σ weights·v [S, K, R, d], largest score and Σ weights [S, K, R, 1] of the heads of one device.

  Program (s, k, n) of S × K × N takes every N-th block of row s and head k, from block n on. Softmaxes of programs
  are joined by their largest scores. arXiv:1805.02867 (its section 3.1).
  """
  S, K, R, d = q_SxKxRxd.shape
  k, v = kv
  numbers = jax.tree.leaves(k)[0]
  if numbers.dtype.itemsize == 1 and numbers.size > _MOST_INT8:
    raise ValueError(
      f'the kernel cannot address {numbers.size} keys of one byte, more than {_MOST_INT8}; set '
      '--config.rollout.attention=xla, or lower --config.rollout.slots.'
    )
  W, features = numbers.shape[2], jax.tree.leaves(v)[0].shape[3]
  C = block_columns(W, _padded(d) * numbers.dtype.itemsize)
  N = min(pl.cdiv(_PROGRAMS, S * K), pl.cdiv(W, C))
  sizes = (R, features), (R, 1), (R, 1)
  value, top, total = pl.pallas_call(
    functools.partial(_kernel, block=C, width=W, cap=cap),
    out_shape=[jax.ShapeDtypeStruct((S, K, N, *size), jnp.float32) for size in sizes],
    grid=(S, K, N),
    compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
    interpret=interpret,
    name='decode_attention',
  )(*columns, *decode_attention.blocks_of_rows(columns, W, C), q_SxKxRxd, *jax.tree.leaves((k, v)))
  reference = top.max(2)
  factor = jnp.exp(top - reference[:, :, None])
  return (factor * value).sum(2), reference, (factor * total).sum(2)


def _kernel(
  array_S, newest_S, live_S, first_S, count_S, q, *refs, block: int, width: int, cap: float
):
  """Sums of a program's blocks, in registers, and written once: (Σ weights·v, the largest score, Σ weights)."""
  *cache, value, top, total = refs
  k, k_scale, v, v_scale = cache if len(cache) == 4 else (cache[0], None, cache[1], None)
  s, head, n = (pl.program_id(axis) for axis in range(3))
  first, count, programs = first_S[s], count_S[s], pl.num_programs(2)
  newest, live, array = newest_S[s], live_S[s], array_S[s]
  R, heads = q.shape[2], _padded(q.shape[2])
  query_Rx1 = _places(heads, 0)
  q_RxD = _load(q, (s, head), query_Rx1, query_Rx1 < R)

  def add(i, sums):
    value_RxD, top_Rx1, total_Rx1 = sums
    start = (first + n + i * programs) % pl.cdiv(width, block) * block
    is_live = functools.partial(decode_attention.is_live, start, newest, live, width)
    live_1xC, live_Cx1 = is_live((1, block), 1), is_live((block, 1), 0)
    column_1xC, column_Cx1 = (start + _places(block, axis) for axis in (1, 0))
    # Columns that are not live are not read, and 0.
    cached = lambda x: _load(x, (array, head), column_Cx1, live_Cx1)  # noqa: E731
    scale = lambda x: plgpu.load(x.at[array, head, column_1xC], mask=live_1xC, other=0)  # noqa: E731
    score = _product(q_RxD, cached(k), 1)
    score = score if k_scale is None else score * scale(k_scale)
    score = cap * jnp.tanh(score / cap) if cap else score
    score = jnp.where(live_1xC, score, attention.MASKED_SCORE)
    reference = jnp.maximum(top_Rx1, score.max(1, keepdims=True))
    weight = jnp.where(live_1xC, jnp.exp(score - reference), 0.0)
    factor = jnp.exp(top_Rx1 - reference)
    total_Rx1 = factor * total_Rx1 + weight.sum(1, keepdims=True)
    weight = weight if v_scale is None else weight * scale(v_scale)
    value_RxD = factor * value_RxD + _product(weight.astype(q_RxD.dtype), cached(v), 0)
    return value_RxD, reference, total_Rx1

  fill = lambda columns, x: jnp.full((heads, columns), x, jnp.float32)  # noqa: E731
  empty = fill(_padded(v.shape[3]), 0.0), fill(1, attention.MASKED_SCORE), fill(1, 0.0)
  sums = jax.lax.fori_loop(0, pl.cdiv(count - n, programs), add, empty)
  for out, x in zip((value, top, total), sums, strict=True):
    feature_1xD = _places(x.shape[1], 1)
    place = out.at[s, head, n, query_Rx1, feature_1xD]
    plgpu.store(place, x, mask=(query_Rx1 < R) & (feature_1xD < out.shape[4]))


def _padded(size: int) -> int:
  return max(pl.next_power_of_2(size), _LEAST)


def _places(size: int, axis: int) -> jax.Array:
  """0, 1, … `size` - 1 along an axis of two."""
  return jax.lax.broadcasted_iota(jnp.int32, (size, 1) if axis == 0 else (1, size), axis)


def _load(array, place: tuple, row_Nx1: jax.Array, mask_Nx1: jax.Array) -> jax.Array:
  """Rows of array[place], 0 where the mask says no and behind the last feature, up to a power of two of them."""
  d = array.shape[-1]
  feature_1xD = _places(_padded(d), 1)
  at = array.at[(*place, row_Nx1, feature_1xD)]
  return plgpu.load(at, mask=mask_Nx1 & (feature_1xD < d), other=0)


def _product(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
  """Σ over the last axis of x [R, ·] and axis `axis` of y, in float32."""
  dimensions = ((1,), (axis,)), ((), ())
  return jax.lax.dot_general(x, y.astype(x.dtype), dimensions, preferred_element_type=jnp.float32)
