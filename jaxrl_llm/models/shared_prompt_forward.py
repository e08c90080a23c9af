"""Hidden states of completions whose group shares a prompt: it is encoded once, and every row attends to it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models import decoder
from jaxrl_llm.types import ModelConfig, Prompts


def hidden(
  model: ModelConfig,
  params: Any,
  prompts: Prompts,
  tokens_BxT: jax.Array,
  *,
  dtype: str = 'float32',
  remat: bool = False,
  noise: tuple[jax.Array, jax.Array] | None = None,
  gather: Callable[[Any], Any] | None = None,
  expert_BxTxNxk: jax.Array | None = None,
  attend: Callable[..., jax.Array] | None = None,
) -> jax.Array:
  """The hidden state [B, T, D] that predicts each token; row b belongs to prompt b // (B / P).

  The prompt's last hidden state predicts token 0 of all its rows; the completion's own hidden
  states predict the rest. `noise`, `gather`, `attend` are those of `decoder.apply`, noise of its own for prompts and
  completions. With `expert`, tokens of completions go to these experts, those of prompts where their routers like
  best. Rows of several segments: see `_packed`. Source: none.
  """
  if prompts.segment_PxT is not None:
    if attend is not None:
      attend = functools.partial(attend, segment_BxQ=prompts.segment_PxT)
    how = dict(dtype=dtype, remat=remat, noise=noise, gather=gather, attend=attend)
    return _packed(model, params, tokens_BxT, prompts.segment_PxT, how)
  of_prompt, of_rows = _apart(noise)
  P, L = prompts.tokens_PxL.shape
  B, T = tokens_BxT.shape
  positions_PxL = jnp.broadcast_to(jnp.arange(L), (P, L))
  mask_PxL = positions_PxL < prompts.length_P[:, None]
  causal_PxLxL = decoder.causal(mask_PxL)
  hidden_PxLxD, cache, _ = decoder.apply(
    model,
    params,
    prompts.tokens_PxL,
    positions_PxL,
    causal_PxLxL,
    dtype=dtype,
    remat=remat,
    noise=of_prompt,
    gather=gather,
    attend=attend,
  )
  last_Px1xD = jnp.take_along_axis(
    hidden_PxLxD, jnp.maximum(prompts.length_P - 1, 0)[:, None, None], axis=1
  )
  start_Bx1 = jnp.repeat(prompts.length_P, B // P)[:, None]
  hidden_BxT1xD, *_ = decoder.apply(
    model,
    params,
    tokens_BxT[:, :-1],
    start_Bx1 + jnp.arange(T - 1)[None],
    jnp.broadcast_to(jnp.tril(jnp.ones((T - 1, T - 1), bool)), (B, T - 1, T - 1)),
    shared=(cache, mask_PxL),
    dtype=dtype,
    remat=remat,
    noise=of_rows,
    gather=gather,
    attend=attend,
    expert_BxQxNxk=None if expert_BxTxNxk is None else expert_BxTxNxk[:, :-1],
  )
  return jnp.concatenate([jnp.repeat(last_Px1xD, B // P, axis=0), hidden_BxT1xD], axis=1)


def _packed(
  model: ModelConfig, params: Any, tokens_BxT: jax.Array, segment_BxT: jax.Array, how: dict
) -> jax.Array:
  """As `hidden`, of rows that hold several segments: positions begin anew, and none sees another.

  The first token of a segment is predicted by nobody: what stands there is of the token before.
  """
  at_T = jnp.arange(segment_BxT.shape[1])
  new_BxT = jnp.diff(segment_BxT, axis=1, prepend=-1) != 0
  began_BxT = jax.lax.cummax(jnp.where(new_BxT, at_T[None], 0), axis=1)
  same_BxTxT = segment_BxT[:, :, None] == segment_BxT[:, None, :]
  mask_BxTxT = decoder.causal(segment_BxT > 0) & same_BxTxT
  hidden_BxTxD, *_ = decoder.apply(
    model, params, tokens_BxT, at_T[None] - began_BxT, mask_BxTxT, **how
  )
  return jnp.roll(hidden_BxTxD, 1, axis=1)


def _apart(noise):
  """The same loudness with two keys."""
  if noise is None:
    return None, None
  sigma_L, key = noise
  return tuple((sigma_L, key) for key in jax.random.split(key))
