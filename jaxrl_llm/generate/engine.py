"""Prefill each prompt once, then decode its G rollouts together in one `lax.while_loop`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.generate import sampling
from jaxrl_llm.models import decoder
from jaxrl_llm.types import STOPPED, TRUNCATED, ModelConfig, Prompts, Rollout


class Spec(NamedTuple):
  """What is fixed when generation is compiled."""

  rollouts: int  # G, per prompt
  max_tokens: int  # T
  temperature: float  # 0 = greedy
  end_ids: tuple[int, ...]  # any of these ends a row; the end token belongs to the row
  dtype: str  # of compute and cache


class _Carry(NamedTuple):
  t: jax.Array  # column of the token that goes into the model next
  token_B: jax.Array
  done_B: jax.Array
  tokens_BxT: jax.Array
  logp_BxT: jax.Array
  length_B: jax.Array
  cache: decoder.Cache


def generate(
  model: ModelConfig, params: Any, prompts: Prompts, key: jax.Array, version: jax.Array, spec: Spec
) -> Rollout:
  """Samples G completions of each prompt: rows b = p * G + g of a Rollout.

  `params` are laid out and cast for decoding by the caller: nothing is gathered in the loop. The key
  of a token is fold(key, prompt index, g, position), so neither row order nor mesh changes a
  sample. Columns past a row's end hold token 0 and log-probability 0. Source: none.
  """
  prompt_cache, logits_PxV = prefill(model, params, prompts, spec.dtype)
  keys_B = sampling.row_keys(key, prompts.index_P, spec.rollouts)
  mask_PxL = jnp.arange(prompts.tokens_PxL.shape[1])[None] < prompts.length_P[:, None]
  start_B = jnp.repeat(prompts.length_P, spec.rollouts)

  def record(carry: _Carry, logits_BxV: jax.Array, column: jax.Array) -> _Carry:
    """Samples column `column` for the rows that still run."""
    uniform_B = sampling.uniforms(keys_B, column)
    token_B, logp_B = sampling.sample(logits_BxV, uniform_B, spec.temperature)
    running_B = ~carry.done_B
    token_B = jnp.where(running_B, token_B, 0)
    ends_B = jnp.isin(token_B, jnp.asarray(spec.end_ids, jnp.int32))
    return carry._replace(
      t=column,
      token_B=token_B,
      done_B=carry.done_B | ends_B,
      tokens_BxT=_put(carry.tokens_BxT, token_B, column),
      logp_BxT=_put(carry.logp_BxT, jnp.where(running_B, logp_B, 0.0), column),
      length_B=carry.length_B + running_B,
    )

  def body(carry: _Carry) -> _Carry:
    mask_1xT = jnp.arange(spec.max_tokens) <= carry.t
    hidden, cache = decoder.apply(
      model,
      params,
      carry.token_B[:, None],
      (start_B + carry.t)[:, None],
      jnp.broadcast_to(mask_1xT, (start_B.shape[0], 1, spec.max_tokens)),
      shared=(prompt_cache, mask_PxL),
      cache=carry.cache,
      at=carry.t,
      dtype=spec.dtype,
    )
    logits_BxV = decoder.head(model, params, hidden[:, 0], spec.dtype)
    return record(carry._replace(cache=cache), logits_BxV, carry.t + 1)

  def unfinished(carry: _Carry) -> jax.Array:
    return (carry.t < spec.max_tokens - 1) & ~carry.done_B.all()

  first = record(
    _empty(model, start_B.shape[0], spec), jnp.repeat(logits_PxV, spec.rollouts, axis=0), 0
  )
  last = jax.lax.while_loop(unfinished, body, first._replace(t=jnp.int32(0)))
  reason_B = jnp.where(last.done_B, STOPPED, TRUNCATED).astype(jnp.int8)
  version_B = jnp.full_like(last.length_B, version)
  return Rollout(last.tokens_BxT, last.logp_BxT, last.length_B, reason_B, version_B)


def prefill(
  model: ModelConfig, params: Any, prompts: Prompts, dtype: str
) -> tuple[decoder.Cache, jax.Array]:
  """The prompts' cache, (k, v) [P, K, L, d] a layer, and the logits [P, V] after each one's last token.

  Source: none.
  """
  P, L = prompts.tokens_PxL.shape
  positions_PxL = jnp.broadcast_to(jnp.arange(L), (P, L))
  mask_PxL = positions_PxL < prompts.length_P[:, None]
  hidden, cache = decoder.apply(
    model, params, prompts.tokens_PxL, positions_PxL, decoder.causal(mask_PxL), dtype=dtype
  )
  last = jnp.take_along_axis(hidden, (prompts.length_P - 1)[:, None, None], axis=1)[:, 0]
  return cache, decoder.head(model, params, last, dtype)


def _empty(model: ModelConfig, rows: int, spec: Spec) -> _Carry:
  T = spec.max_tokens
  shape = (rows, model.kv_heads, T, model.head_dim)
  return _Carry(
    t=jnp.int32(0),
    token_B=jnp.zeros(rows, jnp.int32),
    done_B=jnp.zeros(rows, bool),
    tokens_BxT=jnp.zeros((rows, T), jnp.int32),
    logp_BxT=jnp.zeros((rows, T), jnp.float32),
    length_B=jnp.zeros(rows, jnp.int32),
    # One array per layer: stacked layers cost the CPU a copy of the cache every token.
    cache=[
      (jnp.zeros(shape, spec.dtype), jnp.zeros(shape, spec.dtype)) for _ in range(model.layers)
    ],
  )


def _put(x_BxT: jax.Array, column_B: jax.Array, t: jax.Array) -> jax.Array:
  return jax.lax.dynamic_update_slice_in_dim(x_BxT, column_B[:, None].astype(x_BxT.dtype), t, 1)
