"""Attention in blocks of queries: the same outputs and gradients, without scores of all queries in memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.models import attention
from jaxrl_llm.models.attention import KeyValues

P, G, Q, L, K, R, d = 2, 2, 11, 5, 2, 3, 4
B, H = P * G, K * R


def arrays(dtype=np.float64):
  r = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(r.normal(size=shape), dtype)  # noqa: E731
  own, prompt = (normal(B, K, Q, d), normal(B, K, Q, d)), (normal(P, K, L, d), normal(P, K, L, d))
  return dict(q=normal(B, Q, H, d), own=own, prompt=prompt, sink=normal(H))


def masks(per_query: bool):
  """Causal within a window; prompts of different lengths, as all queries see them or each for itself."""
  position = np.arange(Q)
  near = (position[:, None] >= position) & (position[:, None] - position < 7)
  own = np.broadcast_to(near, (B, Q, Q))
  prompt = np.arange(L) < np.array([[3], [5]])
  if per_query:
    prompt = prompt[:, None, None] & (np.arange(G * Q).reshape(1, G, Q, 1) % 4 >= np.arange(L) % 3)
  return own, prompt


def outputs(given, own_mask, prompt_mask, *, cap, sinks):
  prompt = None if prompt_mask is None else KeyValues(*given['prompt'], prompt_mask)
  sink = given['sink'] if sinks else None
  own = KeyValues(*given['own'], own_mask)
  return attention.attend(given['q'], own, prompt, scale=0.7, cap=cap, sink_H=sink)


@pytest.mark.parametrize(
  'per_query, cap, sinks', [(False, 0.0, True), (True, 2.0, False), (None, 0.0, False)]
)
@pytest.mark.parametrize('block', [1, 4, 6])  # 11 queries: padded to 11, 12 and 12
def test_blocks_change_neither_outputs_nor_gradients(per_query, cap, sinks, block, monkeypatch):
  monkeypatch.setattr(jnp, 'float32', jnp.float64)  # of the scores
  with jax.enable_x64(True):
    own_mask, prompt_mask = masks(bool(per_query))
    prompt_mask = None if per_query is None else prompt_mask
    run = functools.partial(
      outputs, own_mask=own_mask, prompt_mask=prompt_mask, cap=cap, sinks=sinks
    )
    weights = np.random.default_rng(1).normal(size=(B, Q, H, d))

    def both():
      value = lambda given: (weights * run(given)).sum()  # noqa: E731
      return jax.jit(lambda given: (run(given), jax.grad(value)(given)))(arrays())

    want = both()
    monkeypatch.setattr(attention, '_MOST_QUERIES', 6)
    monkeypatch.setattr(attention, '_BLOCK_QUERIES', block)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-13), both(), want)
    assert all(np.abs(x).max() > 1e-3 for x in jax.tree.leaves(want[1]['own']))


def temporary_bytes(queries: int) -> int:
  """Of the gradient at `queries` causal tokens with 4 heads."""
  shape = jax.ShapeDtypeStruct((1, queries, 4, 8), np.float32)
  kv = jax.ShapeDtypeStruct((1, 4, queries, 8), np.float32)

  def value(q, k, v):
    position = jnp.arange(queries)
    mask = (position[:, None] >= position[None])[None]
    return attention.attend(q, KeyValues(k, v, mask)).sum()

  compiled = jax.jit(jax.grad(value, argnums=(0, 1, 2))).lower(shape, kv, kv).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def test_scores_of_all_queries_are_never_in_memory(monkeypatch):
  tokens = 4096
  scores = 4 * tokens**2 * 4
  assert temporary_bytes(tokens) < 0.7 * scores
  monkeypatch.setattr(attention, '_MOST_QUERIES', tokens)
  assert temporary_bytes(tokens) > 2 * scores


def test_queries_that_devices_share_out_are_not_gathered():
  """Over the axis `context`: a block holds queries of all devices."""
  mesh = jax.make_mesh((4,), ('context',), devices=jax.devices()[:4])
  tokens = 1536
  place = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))  # noqa: E731
  q = jax.ShapeDtypeStruct((1, tokens, 4, 8), np.float32, sharding=place(None, 'context'))
  kv = jax.ShapeDtypeStruct((1, 4, tokens, 8), np.float32, sharding=place())
  mask = jax.ShapeDtypeStruct((1, tokens, tokens), bool, sharding=place(None, 'context'))
  run = jax.jit(
    lambda q, k, v, mask: attention.attend(q, KeyValues(k, v, mask)),
    out_shardings=place(None, 'context'),
  )
  text = run.lower(q, kv, kv, mask).compile().as_text()
  assert 'while' in text
  assert not any(f'{name}(' in text for name in ('all-gather', 'all-to-all', 'collective-permute'))


def test_rows_of_more_than_a_thousand_tokens_have_the_logits_of_transformers(tmp_path):
  """Gemma 2: capped scores, and a sliding window in every second layer."""
  pytest.importorskip('transformers')
  from jaxrl_llm.models import decoder, huggingface
  from tests.models import test_parity as parity

  kind, changes = parity.CASES['gemma2']
  theirs = parity.reference(kind, changes | dict(max_position_embeddings=2048))
  theirs.save_pretrained(tmp_path)
  config, _ = huggingface.read_config(str(tmp_path))
  params = huggingface.load_params(str(tmp_path), config)
  tokens = np.random.default_rng(0).integers(0, 97, (2, 1100)).astype(np.int32)
  mask = np.arange(1100) < np.array([[1100], [300]])
  assert mask.shape[1] > attention._MOST_QUERIES
  ours = jax.jit(lambda p: decoder.forward(config, p, tokens, mask))(params)
  assert np.abs(np.asarray(ours) - parity.their_logits(theirs, tokens, mask))[mask].max() <= 1e-4
