"""Completions of the ring loop, compared with full forward passes and with reordered runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import decoder, shared_prompt_forward
from jaxrl_llm.rollout import ring_decode
from jaxrl_llm.rollout.decode_records import DecodeInputs
from jaxrl_llm.types import STOPPED, TRUNCATED, ModelConfig, Prompts

MODEL = ModelConfig(
  vocab=40,
  width=32,
  layers=2,
  heads=4,
  kv_heads=2,
  head_dim=8,
  mlp=48,
  max_tokens=64,
  qk_norm='head',
)
L, T, G = 9, 7, 3
END = (3, 11)


@pytest.fixture(scope='module')
def params():
  return jax.tree.map(lambda x: x * 1.5, decoder.init(MODEL, 0))


def make_prompts(seed=0):
  r = np.random.default_rng(seed)
  length_P = np.array([4, 9, 1, 6], np.int32)
  tokens_PxL = np.where(np.arange(L)[None] < length_P[:, None], r.integers(0, 40, (4, L)), 0)
  index_P = np.array([5, 2, 8, 30], np.int32)
  return Prompts(
    tokens_PxL.astype(np.int32), length_P, index_P, np.zeros(4, np.int32), np.zeros(4, np.float32)
  )


def spec(**changes):
  return ring_decode.DecodeSettings(G, T, 1.0, END, 'float32')._replace(**changes)


def run(params, prompts, seed=0, **changes):
  key = jax.random.key(seed)
  fn = jax.jit(
    lambda p, q: ring_decode.generate(MODEL, spec(**changes), DecodeInputs(p, q, key, 4))[0]
  )
  return jax.tree.map(np.asarray, fn(params, prompts))


def sequences(prompts, rollout, rollouts=G):
  """Prompt and completion in one row, without any padding between them."""
  for b in range(len(rollout.length_B)):
    p = b // rollouts
    start, n = prompts.length_P[p], rollout.length_B[b]
    yield b, start, np.concatenate([prompts.tokens_PxL[p, :start], rollout.tokens_BxT[b, :n]])


@pytest.mark.parametrize('temperature', [1.0, 0.7])
def test_recorded_log_prob_is_the_teacher_forced_one(params, temperature):
  prompts = make_prompts()
  rollout = run(params, prompts, temperature=temperature)
  for b, start, tokens in sequences(prompts, rollout):
    mask = np.ones((1, len(tokens)), bool)
    logits = decoder.forward(MODEL, params, tokens[None], mask)[0] / temperature
    logp = jax.nn.log_softmax(logits)[np.arange(start - 1, len(tokens) - 1), tokens[start:]]
    np.testing.assert_allclose(rollout.logp_BxT[b, : len(logp)], logp, atol=1e-5)


def test_greedy_takes_the_largest_logit_of_a_whole_forward_pass(params):
  prompts = make_prompts()
  rollout = run(params, prompts, temperature=0.0, rollouts=1)
  for _, start, tokens in sequences(prompts, rollout, 1):
    logits = decoder.forward(MODEL, params, tokens[None], np.ones((1, len(tokens)), bool))[0]
    np.testing.assert_array_equal(logits.argmax(-1)[start - 1 : -1], tokens[start:])


def test_rows_end_at_any_end_token_and_hold_nothing_after_it(params):
  rollout = run(params, make_prompts(), seed=1, rollouts=30)
  for tokens, logp, n, reason in zip(
    rollout.tokens_BxT, rollout.logp_BxT, rollout.length_B, rollout.reason_B, strict=True
  ):
    ends = np.isin(tokens[:n], END)
    assert not ends[:-1].any() and ends[-1] == (reason == STOPPED)
    assert (n == T) if reason == TRUNCATED else True
    assert (logp[:n] < 0).all() and (logp[n:] == 0).all() and (tokens[n:] == 0).all()
  ended_by = {
    int(t[n - 1]) for t, n, r in zip(*rollout[:1], *rollout[2:4], strict=True) if r == STOPPED
  }
  assert ended_by == set(END), 'both ids must have ended a row for this test to mean anything'
  real = np.arange(T)[None] < rollout.length_B[:, None]
  assert (rollout.version_BxT[real] == 4).all()


def test_padding_tokens_of_a_prompt_do_not_matter_even_when_they_are_end_tokens(params):
  prompts = make_prompts()
  padded = np.arange(L)[None] >= prompts.length_P[:, None]
  other = prompts._replace(tokens_PxL=np.where(padded, END[0], prompts.tokens_PxL))
  for a, b in zip(run(params, prompts), run(params, other), strict=True):
    np.testing.assert_array_equal(a, b)
  wider = prompts._replace(tokens_PxL=np.pad(prompts.tokens_PxL, ((0, 0), (0, 5))))
  np.testing.assert_array_equal(run(params, wider).tokens_BxT, run(params, prompts).tokens_BxT)


def test_order_of_prompts_and_number_of_rollouts_change_no_sample(params):
  prompts = make_prompts()
  rollout = run(params, prompts)
  order = np.array([2, 0, 3, 1])
  moved = run(params, jax.tree.map(lambda x: x[order], prompts))
  np.testing.assert_array_equal(
    moved.tokens_BxT.reshape(4, G, T), rollout.tokens_BxT.reshape(4, G, T)[order]
  )
  more = run(params, prompts, rollouts=G + 2)
  np.testing.assert_array_equal(
    more.tokens_BxT.reshape(4, G + 2, T)[:, :G], rollout.tokens_BxT.reshape(4, G, T)
  )
  fresh = run(params, prompts, seed=1)
  assert (fresh.tokens_BxT != rollout.tokens_BxT).any()


def test_a_shared_prompt_is_a_repeated_prompt(params):
  """Each row alone with its own copy of the prompt gives the logits that the shared cache gave."""
  prompts = make_prompts()
  r = np.random.default_rng(3)
  tokens_BxT = r.integers(0, 40, (4 * G, T)).astype(np.int32)
  cache, _ = shared_prompt_forward.prefill(MODEL, params, prompts, 'float32')
  mask_PxL = np.arange(L)[None] < prompts.length_P[:, None]
  start_Bx1 = np.repeat(prompts.length_P, G)[:, None]
  own = np.broadcast_to(np.tril(np.ones((T, T), bool)), (4 * G, T, T))
  hidden, *_ = decoder.apply(
    MODEL, params, tokens_BxT, start_Bx1 + np.arange(T)[None], own, shared=(cache, mask_PxL)
  )
  logits = decoder.head(MODEL, params, hidden)
  for b in range(4 * G):
    start = prompts.length_P[b // G]
    row = np.concatenate([prompts.tokens_PxL[b // G, :start], tokens_BxT[b]])
    want = decoder.forward(MODEL, params, row[None], np.ones((1, len(row)), bool))[0, start:]
    np.testing.assert_allclose(logits[b], want, atol=2e-5)


def test_the_loop_stops_when_every_row_is_done(params):
  """An infinite cap costs nothing once all rows ended: the cache's columns beyond stay untouched."""
  certain = jax.tree.map(jnp.copy, params)
  # Every logit but that of an end token becomes hopeless: the head is the embedding.
  bias = jnp.zeros(40).at[END[0]].set(1.0)
  certain['norm']['scale'] = certain['norm']['scale'] * 0 + 1.0
  certain['embed']['embedding'] = certain['embed']['embedding'] * 0 + bias[:, None]
  for i in range(MODEL.layers):
    for name in ('o', 'down'):
      certain['layers'][i][name]['kernel'] = certain['layers'][i][name]['kernel'] * 0
  prompts = make_prompts()
  prompts = prompts._replace(tokens_PxL=np.full_like(prompts.tokens_PxL, END[0]))
  jaxpr = run(certain, prompts, max_tokens=60)
  assert (jaxpr.length_B == 1).all() and (jaxpr.reason_B == STOPPED).all()
  loops = _trips(certain, prompts)
  assert loops == 0


def _trips(params, prompts):
  """How many times the decode loop's body ran."""
  count = []
  body = decoder.apply

  def counted(*args, **kwargs):
    if kwargs.get('cache') is not None:
      jax.debug.callback(lambda: count.append(1))
    return body(*args, **kwargs)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(decoder, 'apply', counted)
    jax.block_until_ready(
      ring_decode.generate(
        MODEL, spec(max_tokens=60), DecodeInputs(params, prompts, jax.random.key(0), 0)
      )
    )
    jax.effects_barrier()
  return len(count)
