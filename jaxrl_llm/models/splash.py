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
  prompt_mask: jax.Array | None = None,
  segment_BxQ: jax.Array | None = None,
  *,
  mask_BxQxS: object = None,
  window: int = 0,
  slides: bool | jax.Array = False,
  sink_H: jax.Array | None = None,
  scale: float = 0.0,
  cap: float = 0.0,
  interpret: bool = False,
) -> jax.Array:
  """`attention.attend` for causal rows: (k, v) own [B, K, Q, d], shared [P, K, L, d] → [B, Q, H, d].

  Row b attends causally to its own tokens, within a segment where segments are given, and to the tokens of prompt
  b // (B / P) that the mask [P, L] or [P, G, Q, L] shows; where a window slides, to the nearest `window` of all these,
  itself included. The prompt's keys are copied before each row's own: B / P copies of them, still far fewer than Q·H
  scores. A sink is one more score of each head, whose value is 0. `interpret` runs the kernel on a CPU. The kernel is
  part of jax; arXiv:2205.14135 (FlashAttention).
  """
  del mask_BxQxS  # causal, with segments and windows: the kernel makes it block by block
  q_BxHxQxd = q_BxQxHxd.swapaxes(1, 2)
  q_BxHxQxd *= jnp.asarray(scale or q_BxQxHxd.shape[-1] ** -0.5, q_BxQxHxd.dtype)
  segments = None if segment_BxQ is None else (segment_BxQ, segment_BxQ)
  if shared is not None:
    segments, own = _join(own, shared, prompt_mask)
  run = functools.partial(_on_all_devices, cap=cap, interpret=interpret)
  arrays = q_BxHxQxd, own, segments, sink_H
  if isinstance(slides, jax.Array):  # layers of both kinds are one loop
    branches = (functools.partial(run, window=n) for n in (window, 0))
    return jax.lax.cond(slides, *branches, *arrays).swapaxes(1, 2)
  return run(*arrays, window=window if slides else 0).swapaxes(1, 2)


def _join(
  own: tuple[jax.Array, jax.Array], shared: tuple[jax.Array, jax.Array], prompt_mask: jax.Array
) -> tuple[_Segments, tuple[jax.Array, jax.Array]]:
  """Segments that mask the prompt's padding, and keys and values with the prompt's before each row's.

  Padding is moved before the prompt, so that tokens in neighboring columns are neighbors.
  """
  # Tokens that a window hides from all queries are none that any of them needs.
  mask_PxL = prompt_mask.any((1, 2)) if prompt_mask.ndim == 4 else prompt_mask
  B, (P, L) = len(own[0]), mask_PxL.shape
  padding_Px1 = jnp.argmax(mask_PxL[:, ::-1], axis=1)[:, None]
  column_PxL = (jnp.arange(L)[None] - padding_Px1) % L
  repeat = lambda x: jnp.repeat(x, B // P, axis=0)  # noqa: E731
  aligned = lambda x: jnp.take_along_axis(x, column_PxL[:, None, :, None], axis=2)  # noqa: E731
  joined = tuple(
    jnp.concatenate([repeat(aligned(a)), b.astype(a.dtype)], axis=2)
    for a, b in zip(shared, own, strict=True)
  )
  ones_BxQ = jnp.ones((B, own[0].shape[2]), jnp.int32)
  shown_PxL = jnp.take_along_axis(mask_PxL, column_PxL, axis=1).astype(jnp.int32)
  return (ones_BxQ, jnp.concatenate([repeat(shown_PxL), ones_BxQ], axis=1)), joined


def _on_all_devices(
  q_BxHxQxd: jax.Array,
  kv: tuple[jax.Array, jax.Array],
  segments: _Segments | None,
  sink_H: jax.Array | None,
  **options: float,
) -> jax.Array:
  """`_run` where rows and heads lie on several devices."""
  run = functools.partial(_run, **options)
  if not sharding.free_axes():
    return run(q_BxHxQxd, kv, segments, sink_H)
  # All axes must become manual: the compiler cannot partition a kernel.
  rows = sharding.axes_that_divide(sharding.UPDATE_ROWS, len(q_BxHxQxd)) or None
  heads = sharding.axes_that_divide(sharding.FEATURES, kv[0].shape[1]) or None
  spec = PartitionSpec(rows, heads)
  segment_spec = None if segments is None else PartitionSpec(rows)
  sink_spec = None if sink_H is None else PartitionSpec(heads)
  return jax.shard_map(
    run,
    in_specs=(spec, (spec, spec), segment_spec, sink_spec),
    out_specs=spec,
    axis_names=sharding.free_axes(),
    check_vma=False,
  )(q_BxHxQxd, kv, segments, sink_H)


def _run(
  q_BxHxQxd: jax.Array,
  kv: tuple[jax.Array, jax.Array],
  segments: _Segments | None,
  sink_H: jax.Array | None,
  *,
  window: int,
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
  shape = q.shape[2], k.shape[2]
  mask = tpu.LocalMask(shape, (window - 1, 0), S - Q) if window else tpu.CausalMask(shape, S - Q)
  kernel = _kernel(H, mask, cap, interpret)
  out = jax.vmap(lambda q, k, v, ids: kernel(q, k, v, segment_ids=ids, sinks=sink_H))(q, k, v, ids)
  return out[:, :, :Q]


def _padded(x: jax.Array, axis: int) -> jax.Array:
  missing = [-n % _LANES if i == axis else 0 for i, n in enumerate(x.shape)]
  return jnp.pad(x, [(0, n) for n in missing])


def _kernel(heads: int, mask: tpu.Mask, cap: float, interpret: bool) -> Callable[..., jax.Array]:
  block_q, block_kv = (
    max(b for b in range(_LANES, _MAX_BLOCK + 1, _LANES) if n % b == 0) for n in mask.shape
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
