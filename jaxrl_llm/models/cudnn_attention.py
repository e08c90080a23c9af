"""Attention of whole rows by cuDNN's kernel on NVIDIA GPUs, which writes no scores to memory.

`attention.attend` computes the same function.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_llm.distributed import sharding
from jaxrl_llm.models.mixer import Array

LARGEST_HEAD = 256  # features, on Hopper; a multiple of 8
ALIGNMENT = 8  # tokens of a row, which tensor cores read without a remainder; odd ones are padded in every layer


@jax.named_scope('attention')
def attend(
  q_BxQxHxd: jax.Array,
  own: tuple[jax.Array, jax.Array],
  shared: tuple[jax.Array, jax.Array] | None = None,
  prompt_mask: jax.Array | None = None,
  *,
  mask_BxQxS: jax.Array,
  scale: float = 0.0,
  interpret: bool = False,
  **described: object,
) -> jax.Array:
  """`attention.attend` for causal rows: (k, v) own [B, K, Q, d], shared [P, K, L, d] → [B, Q, H, d].

  Row b attends to the keys of its own that the mask shows, none of them behind the query, and to those of prompt
  b // (B / P) that the mask [P, L] or [P, G, Q, L] shows. The prompt's keys are copied before each row's own.
  `described` are segments and windows, which the masks hold, too. The masks are added to scores: memory of Q·S numbers
  a row, once for all heads. `interpret` computes the same without cuDNN. arXiv:2205.14135 (FlashAttention). Raises
  ValueError for caps and sinks, which the kernel does not know.
  """
  if described.get('cap') or described.get('sink_H') is not None:
    raise ValueError('the kernel knows neither caps of scores nor sinks')
  mask = mask_BxQxS
  if shared is not None:
    mask, own = _join(mask, own, shared, prompt_mask)
  kv = tuple(x.swapaxes(1, 2).astype(q_BxQxHxd.dtype) for x in own)
  options = dict(
    scale=scale or q_BxQxHxd.shape[-1] ** -0.5,
    is_causal=shared is None,  # the kernel skips blocks behind all queries
    implementation='xla' if interpret else 'cudnn',
  )
  return _on_all_devices(functools.partial(_run, options), q_BxQxHxd, kv, mask)


def _join(
  mask_BxQxS: jax.Array,
  own: tuple[jax.Array, jax.Array],
  shared: tuple[jax.Array, jax.Array],
  prompt_mask: Array,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  """Masks, keys and values with those of the prompt before each row's own."""
  B, Q, _ = mask_BxQxS.shape
  P, L = prompt_mask.shape[0], prompt_mask.shape[-1]
  mask_PxGxQxL = prompt_mask[:, None, None] if prompt_mask.ndim == 2 else prompt_mask
  before_BxQxL = jnp.broadcast_to(mask_PxGxQxL, (P, B // P, Q, L)).reshape(B, Q, L)
  repeat = lambda x: jnp.repeat(x, B // P, axis=0)  # noqa: E731
  joined = tuple(
    jnp.concatenate([repeat(a), b.astype(a.dtype)], axis=2)
    for a, b in zip(shared, own, strict=True)
  )
  return jnp.concatenate([before_BxQxL, mask_BxQxS], axis=2), joined


def _on_all_devices(run, q_BxQxHxd: jax.Array, kv: tuple[jax.Array, ...], mask_BxQxS: jax.Array):
  """`run` where rows and heads lie on several devices."""
  if not sharding.free_axes():
    return run(q_BxQxHxd, kv, mask_BxQxS)
  rows = sharding.axes_that_divide(sharding.UPDATE_ROWS, len(q_BxQxHxd)) or None
  heads = sharding.axes_that_divide(sharding.FEATURES, kv[0].shape[2]) or None
  spec = PartitionSpec(rows, None, heads)
  return jax.shard_map(
    run,
    in_specs=(spec, (spec, spec), PartitionSpec(rows)),
    out_specs=spec,
    axis_names=sharding.free_axes(),
    check_vma=False,
  )(q_BxQxHxd, kv, mask_BxQxS)


def _run(
  options: dict, q_BxQxHxd: jax.Array, kv: tuple[jax.Array, jax.Array], mask_BxQxS: jax.Array
) -> jax.Array:
  """The kernel on the rows and heads of one device."""
  Q = q_BxQxHxd.shape[1]
  # Its gradient takes even numbers of queries and keys.
  q, k, v, mask = _even(q_BxQxHxd, 1), _even(kv[0], 1), _even(kv[1], 1), _even(mask_BxQxS, 1, 2)
  return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], **options)[:, :Q]


def _even(x: jax.Array, *axes: int) -> jax.Array:
  return jnp.pad(x, [(0, n % 2 if i in axes else 0) for i, n in enumerate(x.shape)])
