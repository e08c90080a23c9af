"""Attention of whole rows by the TPU kernel that never writes scores to memory; `attention` is what it computes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as tpu
from jax.sharding import PartitionSpec

from jaxrl_llm.models import activation_sharding

_LANES, _BLOCK = (
  128,
  512,
)  # tokens are padded to whole lanes; a block is as many as divide them, at most so many


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
  """`attention.attend` of rows that are causal: (k, v) own [B, K, Q, d], shared [P, K, L, d] → [B, Q, H, d].

  Row b sees its own tokens up to each, those of its segment where there are some, and the real ones of prompt
  b // (B / P), whose keys are laid before its own: B / P copies of them, where scores would be Q times H as many.
  `interpret` runs it on a CPU. Source: none (the kernel is jax's; arXiv:2205.14135, FlashAttention).
  """
  B, _, _, d = q_BxQxHxd.shape
  K = own[0].shape[1]
  q_BxHxQxd = q_BxQxHxd.swapaxes(1, 2) * jnp.asarray(scale or d**-0.5, q_BxQxHxd.dtype)
  segments = None if segment_BxQ is None else (segment_BxQ, segment_BxQ)
  if shared is not None:
    segments, own = _behind(own, shared, prompt_mask_PxL)
  rows, heads = (
    activation_sharding.axes_that_divide(activation_sharding.ROWS, B),
    activation_sharding.axes_that_divide(activation_sharding.FEATURES, K),
  )
  run = functools.partial(_run, cap=cap, interpret=interpret)
  if activation_sharding.free_axes():  # all of them: the compiler cannot cut a kernel itself
    at = PartitionSpec(rows or None, heads or None)
    cut = None if segments is None else PartitionSpec(rows or None)
    run = jax.shard_map(
      run,
      in_specs=(at, (at, at), cut),
      out_specs=at,
      axis_names=activation_sharding.free_axes(),
      check_vma=False,
    )
  return run(q_BxHxQxd, own, segments).swapaxes(1, 2)


def _behind(own, shared, prompt_mask_PxL):
  """Keys and values with a prompt's before each row's, and segments that hide what the prompt does not fill."""
  B, P = len(own[0]), len(prompt_mask_PxL)
  each = lambda x: jnp.repeat(x, B // P, axis=0)  # noqa: E731
  joined = tuple(
    jnp.concatenate([each(a), b.astype(a.dtype)], axis=2) for a, b in zip(shared, own, strict=True)
  )
  ones_BxQ = jnp.ones((B, own[0].shape[2]), jnp.int32)
  seen_BxS = jnp.concatenate([each(prompt_mask_PxL).astype(jnp.int32), ones_BxQ], axis=1)
  return (ones_BxQ, seen_BxS), joined


def _run(q_BxHxQxd, kv, segments, *, cap: float, interpret: bool):
  """The kernel, on the rows and heads of one device."""
  (_, H, Q, _), S = q_BxHxQxd.shape, kv[0].shape[2]
  # Padding stands behind all: no real token looks that far, and a segment of its own hides it, too.
  q, k, v = _padded(q_BxHxQxd, 2), _padded(kv[0], 2), _padded(kv[1], 2)
  ids = (
    None if segments is None else tpu.SegmentIds(_padded(segments[0], 1), _padded(segments[1], 1))
  )
  kernel = _kernel(H, q.shape[2], k.shape[2], S - Q, cap, interpret)
  out = jax.vmap(lambda q, k, v, ids: kernel(q, k, v, segment_ids=ids))(q, k, v, ids)
  return out[:, :, :Q]


def _padded(x: jax.Array, axis: int) -> jax.Array:
  missing = [-n % _LANES if i == axis else 0 for i, n in enumerate(x.shape)]
  return jnp.pad(x, [(0, more) for more in missing])


def _kernel(heads: int, queries: int, keys: int, before: int, cap: float, interpret: bool):
  """For queries at `before` and on, among `keys` tokens."""
  mask = tpu.CausalMask((queries, keys), offset=before)
  block_q, block_kv = (
    max(b for b in range(_LANES, _BLOCK + 1, _LANES) if n % b == 0) for n in (queries, keys)
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
