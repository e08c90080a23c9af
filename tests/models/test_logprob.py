"""The chunked head against all logits at once."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

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
