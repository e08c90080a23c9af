"""Attention to latents: projected queries give what expanded keys and values give, in every kind of tree and cache."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.learner import lora
from jaxrl_llm.models import attention, decoder, linear
from jaxrl_llm.rollout import slot_loop
from jaxrl_llm.types import ModelConfig

MODEL = ModelConfig(
  vocab=24, width=32, layers=2, heads=3, kv_heads=3, head_dim=10, mlp=48, max_tokens=64, latent=12,
  query_latent=9, value_dim=7, rotary_dim=4, rotary_pairs=True,
)  # fmt: skip
ADAPTER = lora.LoraSettings(2, 4.0, ('q_a', 'q_b', 'kv_a', 'kv_b', 'o'))
P, G, L, Q = 2, 2, 5, 3


def weights(kind):
  params = decoder.init(MODEL, 0)
  if kind == 'int8':
    return linear.quantize_params(params, 'int8', 'float32')
  if kind == 'plain':
    return params
  adapter = lora.init(ADAPTER, params, 1)
  draw = np.random.default_rng(0).normal
  filled = jax.tree.map(lambda x: x + 0.3 * draw(size=x.shape).astype(np.float32), adapter)
  return lora.join(params, filled, ADAPTER.alpha)


@functools.partial(jax.jit, static_argnums=(1, 2))
def hidden(params, with_cache, dtype='float32'):
  """Hidden states of Q tokens of P · G rows behind prompts that their groups share."""
  r, B = np.random.default_rng(0), P * G
  prompt_PxL, token_BxQ = r.integers(0, 24, (P, L)), r.integers(0, 24, (B, Q))
  mask_PxL = np.arange(L)[None] < np.array([[L], [3]])
  positions_PxL = np.broadcast_to(np.arange(L), (P, L))
  _, shared, _ = decoder.apply(MODEL, params, prompt_PxL, positions_PxL, decoder.causal(mask_PxL))
  shared = jax.tree.map(lambda x: attention.pack_cache(x, dtype), shared)
  cache = slot_loop.empty_cache(MODEL, B, [Q] * MODEL.layers, dtype) if with_cache else None
  out, *_ = decoder.apply(
    MODEL,
    params,
    token_BxQ,
    np.repeat(mask_PxL.sum(1), G)[:, None] + np.arange(Q),
    jnp.broadcast_to(np.tril(np.ones((Q, Q), bool)), (B, Q, Q)),
    shared=(shared, mask_PxL),
    cache=cache,
    at=0 if with_cache else None,
  )
  return out


@pytest.mark.parametrize('kind', ['plain', 'adapted', 'int8'])
def test_projected_queries_attend_as_to_expanded_keys(kind):
  params = weights(kind)
  expanded, projected = hidden(params, False), hidden(params, True)
  np.testing.assert_allclose(projected, expanded, atol=1e-5)
  assert np.abs(expanded - hidden(weights('plain'), False)).max() > 0.01 or kind == 'plain'


def test_an_int8_cache_rounds_latents_and_rotated_keys_apart():
  exact = hidden(weights('plain'), True)
  for with_cache in (True, False):  # without one, the prompt's is rounded
    gap = np.abs(hidden(weights('plain'), with_cache, 'int8') - exact).max()
    assert 0 < gap < 0.02 * np.abs(exact).max()
  cache = slot_loop.empty_cache(MODEL, 1, [4] * MODEL.layers, 'int8')
  sizes = [x.shape[-1] for x in jax.tree.leaves(cache[0])]
  assert sizes == [12, 4, 4, 4], 'data and scales of latents, then of keys'
