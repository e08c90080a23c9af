"""Recorded likeliest tokens: those of a plain forward pass over prompt and completion, however rows are decoded."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import decoder
from jaxrl_llm.rollout import ring_decode, sampling
from jaxrl_llm.rollout.decode_records import DecodeInputs, DecodeSettings, Loops, TokenRecords
from jaxrl_llm.types import UNFINISHED, ModelConfig, Prompts

MODEL = ModelConfig(
  vocab=24, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_tokens=64
)
P, G, L, T, K = 4, 8, 7, 24, 5
B, END, TEMPERATURE = P * G, (3, 11), 0.8


@pytest.fixture(scope='module')
def params():
  return jax.tree.map(lambda x: x * 1.4, decoder.init(MODEL, 0))


def make_prompts():
  r = np.random.default_rng(0)
  length_P = np.array([4, 7, 1, 6], np.int32)
  tokens_PxL = r.integers(0, 24, (P, L)).astype(np.int32)
  return Prompts(
    tokens_PxL, length_P, np.arange(P, dtype=np.int32), np.full(P, 2), np.zeros(P, np.float32)
  )


def sampled(params, begun=None, pause=None, **changes):
  settings = DecodeSettings(G, T, TEMPERATURE, END, 'float32', records=TokenRecords(top_tokens=K))
  settings = settings._replace(**changes)

  def fn(params, begun):
    inputs = DecodeInputs(
      params, make_prompts(), jax.random.key(1), 4, continued=begun, pause=pause
    )
    return ring_decode.generate(MODEL, settings, inputs)[0]

  return jax.tree.map(np.asarray, jax.jit(fn)(params, begun))


@functools.partial(jax.jit)
def _logits(params, tokens_BxS):
  at_BxS = jnp.broadcast_to(jnp.arange(tokens_BxS.shape[1]), tokens_BxS.shape)
  mask = decoder.causal(jnp.ones(tokens_BxS.shape, bool))
  hidden, *_ = decoder.apply(MODEL, params, tokens_BxS, at_BxS, mask)
  return decoder.head(MODEL, params, hidden, 'float32')


def distributions(params, rollout):
  """Log-probabilities [B, T, V] that each token was drawn from, by one pass over prompt and completion in a row."""
  prompts = make_prompts()
  out = []
  tokens_BxS = np.zeros((B, L + T), np.int32)
  for b in range(B):
    n = prompts.length_P[b // G]
    tokens_BxS[b, :n] = prompts.tokens_PxL[b // G, :n]
    tokens_BxS[b, n : n + T] = rollout.tokens_BxT[b]
  logits = np.asarray(_logits(params, tokens_BxS))
  for b in range(B):
    n = prompts.length_P[b // G]
    out.append(logits[b, n - 1 : n - 1 + T])
  return np.asarray(jax.nn.log_softmax(np.stack(out) / TEMPERATURE))


def check(rollout, logp_BxTxV, rows_BxT):
  """The records of the chosen tokens are those of these distributions."""
  want, ids = jax.lax.top_k(logp_BxTxV, K)
  np.testing.assert_allclose(rollout.top_logp_BxTxK[rows_BxT], want[rows_BxT], atol=5e-5)
  own = np.take_along_axis(logp_BxTxV, rollout.top_id_BxTxK, axis=-1)
  np.testing.assert_allclose(rollout.top_logp_BxTxK[rows_BxT], own[rows_BxT], atol=5e-5)
  assert (np.sort(rollout.top_id_BxTxK)[rows_BxT] == np.sort(ids)[rows_BxT]).all(-1).mean() > 0.98


@pytest.mark.parametrize(
  'changes',
  [
    dict(),
    dict(slots=12),
    dict(slots=20, loops=Loops(windows=2)),
    dict(loops=Loops(test_every=4)),
  ],
  ids=str,
)
def test_the_likeliest_tokens_are_those_of_a_plain_pass(params, changes):
  rollout = sampled(params, **changes)
  real_BxT = np.arange(T)[None] < rollout.length_B[:, None]
  assert len({*rollout.length_B}) > 3 and T in rollout.length_B
  check(rollout, distributions(params, rollout), real_BxT)
  assert not rollout.top_logp_BxTxK[~real_BxT].any() and not rollout.top_id_BxTxK[~real_BxT].any()
  drawn = (rollout.top_id_BxTxK == rollout.tokens_BxT[..., None]) & real_BxT[..., None]
  assert drawn.any(-1).sum() > 100
  logp_BxT = np.where(drawn, rollout.top_logp_BxTxK, 0).sum(-1)
  np.testing.assert_allclose(
    logp_BxT[drawn.any(-1)], rollout.logp_BxT[drawn.any(-1)], atol=1e-5, rtol=0
  )


def test_recording_changes_no_token(params):
  plain, recorded = sampled(params, records=TokenRecords()), sampled(params)
  assert plain.top_id_BxTxK is None and plain.top_logp_BxTxK is None
  for name in ('tokens_BxT', 'logp_BxT', 'length_B', 'reason_B'):
    np.testing.assert_array_equal(getattr(plain, name), getattr(recorded, name))


def test_a_continued_row_keeps_the_records_of_the_weights_that_drew_them(params):
  others = jax.tree.map(lambda x: x * 1.4, decoder.init(MODEL, 5))
  part = sampled(params, pause=4)
  assert (part.reason_B == UNFINISHED).sum() > 8
  whole = sampled(others, begun=part, slots=12)
  begun = np.arange(T)[None] < part.length_B[:, None]
  went = (np.arange(T)[None] < whole.length_B[:, None]) & ~begun
  assert begun.sum() > 30 and went.sum() > 30
  check(whole, distributions(params, whole), begun)
  check(whole, distributions(others, whole), went)


@pytest.mark.parametrize('is_exact', [False, True])
def test_the_log_probability_of_a_drawn_token_is_that_of_sampling(is_exact):
  logits = jnp.asarray(np.random.default_rng(2).normal(size=(64, 300)).astype(np.float32) * 3)
  u = jax.random.uniform(jax.random.key(0), (64,))
  token, logp = sampling.sample(logits, u, TEMPERATURE, is_exact=is_exact)
  ids, top = sampling.top_tokens(logits, TEMPERATURE, 40, is_exact)
  at = np.asarray(ids == token[:, None])
  assert at.any(-1).sum() > 40
  own = np.where(at, top, 0).sum(-1)[at.any(-1)]
  tolerance = 0 if is_exact else 2e-6
  np.testing.assert_allclose(own, np.asarray(logp)[at.any(-1)], atol=tolerance, rtol=0)
