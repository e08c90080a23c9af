"""Hidden states of completions whose group shares a prompt, which is encoded once and attended to by every row."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.models import decoder
from jaxrl_llm.models.decoder import Attend, Noise
from jaxrl_llm.types import JsonObject, ModelConfig, Params, Prompts


def hidden(
  model: ModelConfig,
  params: Params,
  prompts: Prompts,
  tokens_BxT: jax.Array,
  *,
  dtype: str = 'float32',
  remat: bool = False,
  noise: Noise | None = None,
  gather: Callable[[Params], Params] | None = None,
  expert_BxTxNxk: jax.Array | None = None,
  attend: Attend | None = None,
) -> jax.Array:
  """The hidden state [B, T, D] that predicts each token; row b belongs to prompt b // (B / P).

  The prompt's last hidden state predicts token 0 of all its rows; the completion's own hidden
  states predict the rest. `noise`, `gather` and `attend` are those of `decoder.apply`, with independent noise for
  prompts and completions. `expert` fixes the experts of completion tokens; prompt tokens are routed. See `_packed`
  for rows of several segments.
  """
  options: JsonObject = dict(dtype=dtype, remat=remat, gather=gather, attend=attend)
  if prompts.segment_PxT is not None:
    if attend is not None:
      options['attend'] = functools.partial(attend, segment_BxQ=prompts.segment_PxT)
    options['noise'] = noise
    return _packed(model, params, tokens_BxT, prompts.segment_PxT, options)
  prompt_noise, completion_noise = _split_noise(noise)
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
    noise=prompt_noise,
    **options,
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
    noise=completion_noise,
    expert_BxQxNxk=None if expert_BxTxNxk is None else expert_BxTxNxk[:, :-1],
    **options,
  )
  return jnp.concatenate([jnp.repeat(last_Px1xD, B // P, axis=0), hidden_BxT1xD], axis=1)


def _packed(
  model: ModelConfig,
  params: Params,
  tokens_BxT: jax.Array,
  segment_BxT: jax.Array,
  options: JsonObject,
) -> jax.Array:
  """As `hidden`, for rows of several segments: positions restart at each, and tokens attend within their own.

  The entry of a segment's first token is meaningless: it belongs to the token before, and predicts nothing.
  """
  column_T = jnp.arange(segment_BxT.shape[1])
  is_first_BxT = jnp.diff(segment_BxT, axis=1, prepend=-1) != 0
  start_BxT = jax.lax.cummax(jnp.where(is_first_BxT, column_T[None], 0), axis=1)
  same_segment_BxTxT = segment_BxT[:, :, None] == segment_BxT[:, None, :]
  mask_BxTxT = decoder.causal(segment_BxT > 0) & same_segment_BxTxT
  hidden_BxTxD, *_ = decoder.apply(
    model, params, tokens_BxT, column_T[None] - start_BxT, mask_BxTxT, **options
  )
  return jnp.roll(hidden_BxTxD, 1, axis=1)


def _split_noise(noise: Noise | None) -> tuple[Noise | None, Noise | None]:
  """The same standard deviations with two keys."""
  if noise is None:
    return None, None
  sigma_L, key = noise
  return tuple((sigma_L, key) for key in jax.random.split(key))
