"""Hidden states of prompts, and of completions whose group shares a prompt, which is encoded once for all its rows."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.models import attention, decoder
from jaxrl_llm.models.decoder import Attend
from jaxrl_llm.types import JsonObject, ModelConfig, Params, Prompts


def hidden(
  model: ModelConfig,
  params: Params,
  prompts: Prompts,
  tokens_BxT: jax.Array,
  *,
  dtype: str = 'float32',
  remat: bool = False,
  gather: Callable[[Params], Params] | None = None,
  expert_BxTxNxk: jax.Array | None = None,
  attend: Attend | None = None,
) -> jax.Array:
  """The hidden state [B, T, D] that predicts each token; row b belongs to prompt b // (B / P).

  The prompt's last hidden state predicts token 0 of all its rows; the completion's own hidden
  states predict the rest. `gather` and `attend` are those of `decoder.apply`. `expert` fixes the experts of completion
  tokens; prompt tokens are routed.
  """
  options: JsonObject = dict(dtype=dtype, remat=remat, gather=gather, attend=attend)
  P = len(prompts.length_P)
  B, T = tokens_BxT.shape
  hidden_PxLxD, cache, mask_PxL = _encode(model, params, prompts, options, 0)
  last_Px1xD = _last(hidden_PxLxD, prompts, 0)
  if T == 1:
    return jnp.repeat(last_Px1xD, B // P, axis=0)
  start_Bx1 = jnp.repeat(prompts.length_P, B // P)[:, None]
  hidden_BxT1xD, *_ = decoder.apply(
    model,
    params,
    tokens_BxT[:, :-1],
    start_Bx1 + jnp.arange(T - 1)[None],
    jnp.broadcast_to(jnp.tril(jnp.ones((T - 1, T - 1), bool)), (B, T - 1, T - 1)),
    shared=(cache, mask_PxL),
    expert_BxQxNxk=None if expert_BxTxNxk is None else expert_BxTxNxk[:, :-1],
    **options,
  )
  return jnp.concatenate([jnp.repeat(last_Px1xD, B // P, axis=0), hidden_BxT1xD], axis=1)


def prefill(
  model: ModelConfig, params: Params, prompts: Prompts, dtype: str, prefix_tokens: int = 0
) -> tuple[decoder.Cache, jax.Array]:
  """The prompts' cache, arrays [P, K, L, d] of each layer, and the hidden state [P, D] of each prompt's last token.

  The first `prefix_tokens` tokens, which must be the same in all prompts and less than any prompt, are encoded once.
  """
  hidden_PxNxD, cache, _ = _encode(model, params, prompts, dict(dtype=dtype), prefix_tokens)
  return cache, _last(hidden_PxNxD, prompts, prefix_tokens)[:, 0]


def states(
  model: ModelConfig,
  params: Params,
  rows: Prompts,
  at_PxT: jax.Array,
  dtype: str,
  prefix_tokens: int = 0,
) -> jax.Array:
  """The hidden states [P, T, D] of these tokens of each row, none of which is among the first `prefix_tokens`.

  `prefix_tokens`: as of `prefill`. A token past the last column counts as the last one.
  """
  hidden_PxNxD, *_ = _encode(model, params, rows, dict(dtype=dtype), prefix_tokens)
  at_PxT = jnp.minimum(at_PxT - prefix_tokens, hidden_PxNxD.shape[1] - 1)
  return jnp.take_along_axis(hidden_PxNxD, at_PxT[..., None], axis=1)


def _encode(
  model: ModelConfig, params: Params, prompts: Prompts, options: JsonObject, prefix_tokens: int
) -> tuple[jax.Array, decoder.Cache, jax.Array]:
  """Hidden states [P, N, D] of the tokens after the prefix, the prompts' cache, and the mask [P, L] of their tokens."""
  P, L = prompts.tokens_PxL.shape
  positions_PxL = jnp.broadcast_to(jnp.arange(L), (P, L))
  mask_PxL = positions_PxL < prompts.length_P[:, None]
  first_1xF = prompts.tokens_PxL[:1, :prefix_tokens]
  prefix = decoder.encode_prefix(model, params, first_1xF, options['dtype'])
  hidden_PxNxD, cache, _ = decoder.apply(
    model,
    params,
    prompts.tokens_PxL[:, prefix_tokens:],
    positions_PxL[:, prefix_tokens:],
    decoder.causal(mask_PxL[:, prefix_tokens:]),
    shared=prefix,
    **options,
  )
  if prefix is not None:
    repeated = jax.tree.map(lambda x: jnp.broadcast_to(x, (P, *x.shape[1:])), prefix[0])
    # States behind the prefix went on behind it.
    extend = lambda kv, before: jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), before, kv)  # noqa: E731
    cache = attention.map_columns(extend, cache, repeated)
  return hidden_PxNxD, cache, mask_PxL


def _last(hidden_PxNxD: jax.Array, prompts: Prompts, prefix_tokens: int) -> jax.Array:
  """The hidden state [P, 1, D] of the last token of each prompt."""
  last_P = jnp.maximum(prompts.length_P - (1 + prefix_tokens), 0)
  return jnp.take_along_axis(hidden_PxNxD, last_P[:, None, None], axis=1)
