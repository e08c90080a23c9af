"""Attention of whole rows by a TPU kernel that never writes scores to memory: splash attention.

`attention.attend` computes the same function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as tpu
from jax.sharding import PartitionSpec

from jaxrl_llm.distributed import sharding

_LANES = 128  # tokens are padded to a multiple of it
_MAX_BLOCK = 512  # a block is the largest multiple of _LANES up to this that divides the tokens

_Segments = tuple[jax.Array, jax.Array]  # of queries [B, Q] and keys [B, S]


@jax.named_scope('attention')
def attend(
  q_BxQxHxd: jax.Array,
  own: tuple[jax.Array, jax.Array],
  shared: tuple[jax.Array, jax.Array] | None = None,
  prompt_mask_PxL: jax.Array | None = None,
  segment_BxQ: jax.Array | None = None,
  *,
  scale: float = 0.0,
  cap: float = 0.0,
  interpret: bool = False,
) -> jax.Array:
  """`attention.attend` for causal rows: (k, v) own [B, K, Q, d], shared [P, K, L, d] → [B, Q, H, d].

  Row b attends causally to its own tokens, within a segment where segments are given, and to the unpadded tokens of
  prompt b // (B / P). The prompt's keys are copied before each row's own: B / P copies of them, still far fewer than
  Q·H scores. `interpret` runs the kernel on a CPU. The kernel is part of jax; arXiv:2205.14135 (FlashAttention).
  """
  B, _, _, d = q_BxQxHxd.shape
  K = own[0].shape[1]
  q_BxHxQxd = q_BxQxHxd.swapaxes(1, 2) * jnp.asarray(scale or d**-0.5, q_BxQxHxd.dtype)
  segments = None if segment_BxQ is None else (segment_BxQ, segment_BxQ)
  if shared is not None:
    segments, own = _join(own, shared, prompt_mask_PxL)
  rows, heads = (
    sharding.axes_that_divide(sharding.UPDATE_ROWS, B),
    sharding.axes_that_divide(sharding.FEATURES, K),
  )
  run = functools.partial(_run, cap=cap, interpret=interpret)
  if sharding.free_axes():  # all must become manual: the compiler cannot partition a kernel
    spec = PartitionSpec(rows or None, heads or None)
    segment_spec = None if segments is None else PartitionSpec(rows or None)
    run = jax.shard_map(
      run,
      in_specs=(spec, (spec, spec), segment_spec),
      out_specs=spec,
      axis_names=sharding.free_axes(),
      check_vma=False,
    )
  return run(q_BxHxQxd, own, segments).swapaxes(1, 2)


def _join(
  own: tuple[jax.Array, jax.Array], shared: tuple[jax.Array, jax.Array], prompt_mask_PxL: jax.Array
) -> tuple[_Segments, tuple[jax.Array, jax.Array]]:
  """Segments that mask the prompt's padding, and keys and values with the prompt's before each row's."""
  B, P = len(own[0]), len(prompt_mask_PxL)
  repeat = lambda x: jnp.repeat(x, B // P, axis=0)  # noqa: E731
  joined = tuple(
    jnp.concatenate([repeat(a), b.astype(a.dtype)], axis=2)
    for a, b in zip(shared, own, strict=True)
  )
  ones_BxQ = jnp.ones((B, own[0].shape[2]), jnp.int32)
  segment_BxS = jnp.concatenate([repeat(prompt_mask_PxL).astype(jnp.int32), ones_BxQ], axis=1)
  return (ones_BxQ, segment_BxS), joined


def _run(
  q_BxHxQxd: jax.Array,
  kv: tuple[jax.Array, jax.Array],
  segments: _Segments | None,
  *,
  cap: float,
  interpret: bool,
) -> jax.Array:
  """The kernel on the rows and heads of one device."""
  (_, H, Q, _), S = q_BxHxQxd.shape, kv[0].shape[2]
  # Padding stands at the end, where the causal mask hides it, and has a segment of its own.
  q, k, v = _padded(q_BxHxQxd, 2), _padded(kv[0], 2), _padded(kv[1], 2)
  ids = (
    None if segments is None else tpu.SegmentIds(_padded(segments[0], 1), _padded(segments[1], 1))
  )
  kernel = _kernel(H, q.shape[2], k.shape[2], S - Q, cap, interpret)
  out = jax.vmap(lambda q, k, v, ids: kernel(q, k, v, segment_ids=ids))(q, k, v, ids)
  return out[:, :, :Q]


def _padded(x: jax.Array, axis: int) -> jax.Array:
  missing = [-n % _LANES if i == axis else 0 for i, n in enumerate(x.shape)]
  return jnp.pad(x, [(0, n) for n in missing])


def _kernel(
  heads: int, queries: int, keys: int, offset: int, cap: float, interpret: bool
) -> Callable[..., jax.Array]:
  """The kernel for queries at positions `offset` and up, among `keys` tokens."""
  mask = tpu.CausalMask((queries, keys), offset=offset)
  block_q, block_kv = (
    max(b for b in range(_LANES, _MAX_BLOCK + 1, _LANES) if n % b == 0) for n in (queries, keys)
  )
  sizes = tpu.BlockSizes(
    block_q=block_q,
    block_kv=block_kv,
    block_kv_compute=block_kv,
    block_q_dkv=block_q,
    block_kv_dkv=block_kv,
    block_kv_dkv_compute=block_kv,
    block_q_dq=block_q,
    block_kv_dq=block_kv,
  )
  return tpu.make_splash_mha(
    tpu.MultiHeadMask([mask] * heads),
    head_shards=1,
    q_seq_shards=1,
    block_sizes=sizes,
    attn_logits_soft_cap=cap or None,
    interpret=interpret,
  )
