"""The chunked head against all logits at once."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import decoder, logprob
from jaxrl_llm.types import ModelConfig

MODEL = ModelConfig(
  vocab=23, width=8, layers=1, heads=2, kv_heads=1, head_dim=4, mlp=8, max_tokens=16
)
OPTIONS = dict(temperature=0.7, chunk_tokens=4)


def case():
  params = decoder.init(MODEL, 0)
  hidden_BxTxD = jax.random.normal(jax.random.key(1), (2, 5, 8))
  return params, hidden_BxTxD, jax.random.randint(jax.random.key(2), (2, 5), 0, 23)


def test_confidence_is_the_mean_of_the_largest_probabilities():
  params, hidden, targets = case()
  logits = np.asarray(decoder.head(MODEL, params, hidden), np.float64) / 0.7
  p = np.exp(logits - logits.max(-1, keepdims=True))
  p /= p.sum(-1, keepdims=True)
  for top in (1, 5, 30):
    got = logprob.token_logp(MODEL, params, hidden, targets, **OPTIONS, top=top)[2]
    np.testing.assert_allclose(got, np.sort(p)[..., -top:].mean(-1), rtol=1e-5)


def test_confidence_has_no_gradient_and_changes_none():
  params, hidden, targets = case()

  def loss(hidden, top, weight):
    logp, _, *more = logprob.token_logp(MODEL, params, hidden, targets, **OPTIONS, top=top)
    return (logp * jnp.arange(10).reshape(2, 5)).sum() + weight * sum(x.sum() for x in more)

  plain = jax.grad(functools.partial(loss, top=0, weight=0.0))(hidden)
  np.testing.assert_array_equal(jax.grad(functools.partial(loss, top=5, weight=3.0))(hidden), plain)
  assert np.abs(plain).max() > 1e-3


def test_without_top_no_top_k_is_computed():
  params, hidden, targets = case()
  traced = lambda top: str(  # noqa: E731
    jax.make_jaxpr(lambda h: logprob.token_logp(MODEL, params, h, targets, **OPTIONS, top=top)[0])(
      hidden
    )
  )
  assert 'top_k' in traced(5) and 'top_k' not in traced(0)


def _large_head(tied: bool):
  """A model whose head is larger than the logits of a chunk: 16 chunks of 128 tokens where columns may be skipped."""
  model = dataclasses.replace(MODEL, vocab=2000, width=256, tied=tied)
  params = decoder.init(model, 0)
  hidden_BxTxD = jax.random.normal(jax.random.key(1), (1, 2048, 256))
  return model, params, hidden_BxTxD, jax.random.randint(jax.random.key(2), (1, 2048), 0, 2000)


@pytest.mark.parametrize('tied', [False, True])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_chunks_have_one_gradient_of_the_head_and_keep_no_copies_of_it(tied, dtype):
  model, params, hidden, targets = _large_head(tied)

  def loss(params, hidden, used, chunk_tokens):
    logp, entropy = logprob.token_logp(
      model, params, hidden, targets, temperature=0.7, chunk_tokens=chunk_tokens, dtype=dtype,
      used=used, entropy_gradient=True,
    )  # fmt: skip
    return (jnp.where(jnp.arange(2048) < 300, jnp.sin(logp) + 0.1 * entropy, 0)).sum()

  slope = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=3)
  whole = slope(params, hidden, None, 2048)
  tolerance = 1e-5 if dtype == 'float32' else 0.02
  for used, chunk_tokens in ((jnp.int32(300), 512), (jnp.int32(2048), 200), (None, 512)):
    parts = slope(params, hidden, used, chunk_tokens)
    for one, all_at_once in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
      scale = np.abs(all_at_once).max() + 1e-30
      np.testing.assert_allclose(one / scale, all_at_once / scale, atol=tolerance)
  compiled = slope.lower(params, hidden, jnp.int32(300), 512).compile()
  head_bytes, logits_bytes = 4 * 2000 * 256, 4 * 2000 * 128
  assert compiled.memory_analysis().temp_size_in_bytes < 4 * (head_bytes + logits_bytes)


@pytest.mark.parametrize('tied', [False, True])
@pytest.mark.parametrize('chunk_tokens', [5, 1000])
def test_the_gradient_in_bfloat16_is_near_that_in_float32_and_has_no_product_in_float32(
  tied, chunk_tokens
):
  """Both products of the backward pass are of bfloat16, and the head is rounded once and not in each chunk."""
  config = dataclasses.replace(MODEL, tied=tied)
  params = decoder.init(config, 0)
  r = np.random.default_rng(0)
  hidden_BxTxD = jnp.asarray(r.normal(size=(2, 12, config.width)), jnp.float32)
  targets_BxT = jnp.asarray(r.integers(0, config.vocab, (2, 12)))
  weight_BxT = jnp.asarray(r.normal(size=(2, 12)), jnp.float32)

  def slopes(dtype):
    def loss(params, hidden):
      options = dict(temperature=1.0, chunk_tokens=chunk_tokens, dtype=dtype)
      logp_BxT = logprob.token_logp(config, params, hidden, targets_BxT, **options)[0]
      return (logp_BxT * weight_BxT).sum()

    return jax.grad(loss, argnums=(0, 1))

  name = ('embed', 'embedding') if tied else ('head', 'kernel')
  (wide, wide_h), (low, low_h) = (slopes(d)(params, hidden_BxTxD) for d in ('float32', 'bfloat16'))
  for a, b in ((wide[name[0]][name[1]], low[name[0]][name[1]]), (wide_h, low_h)):
    assert a.dtype == b.dtype == jnp.float32
    assert 0 < np.linalg.norm(a - b) < 1e-2 * np.linalg.norm(a)
  text = jax.jit(slopes('bfloat16')).lower(params, hidden_BxTxD).as_text()
  products = re.findall(r'dot_general.*: \((tensor<\S+>), (tensor<\S+>)\)', text)
  assert len(products) >= 3
  assert all('bf16' in a and 'bf16' in b for a, b in products)
  sizes = f'{config.vocab}x{config.width}' if tied else f'{config.width}x{config.vocab}'
  assert len(re.findall(rf'convert .*tensor<{sizes}xf32>\) -> tensor<{sizes}xbf16>', text)) == 1
