"""Decode loops over a model whose cache holds latents and rotated keys, which have one head and different sizes."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
import rollout_checks
from rollout_checks import assert_same

from jaxrl_llm.models import decoder
from jaxrl_llm.rollout import (
  carried_kv,
  ngram_drafts,
  ring_decode,
  slot_loop,
  stopping,
  tree_decode,
  tree_rules,
)
from jaxrl_llm.rollout.decode_records import DecodeInputs, Loops
from jaxrl_llm.types import UNFINISHED, ModelConfig, Prompts

P, G, L, T = 4, 3, 7, 13
B = P * G
MODEL = ModelConfig(
  vocab=24, width=32, layers=2, heads=4, kv_heads=4, head_dim=12, mlp=48, max_tokens=64, latent=10, value_dim=6,
  rotary_dim=4, rotary_pairs=True,
)  # fmt: skip
SPEC = ring_decode.DecodeSettings(G, T, 1.0, (3, 11), 'float32')
KEY = jax.random.key(1)


@functools.cache
def params():
  return jax.tree.map(lambda x: x * 1.5, decoder.init(MODEL, 0))


@functools.cache
def prompts():
  r = np.random.default_rng(0)
  length_P = r.integers(1, L + 1, P).astype(np.int32)
  tokens_PxL = r.integers(0, 24, (P, L)).astype(np.int32)
  return Prompts(
    tokens_PxL, length_P, np.arange(P, dtype=np.int32), np.full(P, 2), np.ones(P, np.float32)
  )


def run(fn):
  """fn(inputs) as one program."""
  call = jax.jit(lambda p, q: fn(DecodeInputs(p, q, KEY, 0)))
  return jax.tree.map(np.asarray, call(params(), prompts()))


@functools.cache
def uninterrupted():
  return run(lambda inputs: ring_decode.generate(MODEL, SPEC, inputs)[0])


def tree(share):
  rules = tree_rules.latr(
    absolute=0.05, relative=0.3, ages=(2, 3, 5), suffix=1.0, rouge=0.3, edit=0.0, limit=99
  )
  return run(lambda inputs: tree_decode.generate(MODEL, SPEC, inputs, rules, share=share))


def drafted():
  settings = ngram_drafts.NgramSettings(2, 3)
  return run(lambda inputs: ngram_drafts.generate(MODEL, SPEC, inputs, settings)[0])


def assert_rescored(got):
  real = np.arange(T)[None] < got.length_B[:, None]
  want = rollout_checks.rescored(MODEL, params(), prompts(), got)
  np.testing.assert_allclose(got.logp_BxT[real], want[real], atol=5e-5)


def test_recorded_log_prob_is_that_of_a_forward_pass():
  assert uninterrupted().length_B.max() == T
  assert_rescored(uninterrupted())


def test_slots_and_rings_that_grow_change_nothing():
  spec = SPEC._replace(slots=5, loops=Loops(windows=3))
  assert_same(run(lambda inputs: ring_decode.generate(MODEL, spec, inputs)[0]), uninterrupted())


def test_trees_copy_rows_and_drafts_overwrite_columns():
  assert_same(tree(0.0)[0], uninterrupted())
  assert_same(drafted(), uninterrupted())
  grown, _, shape = tree(1.0)
  assert (shape.parent_B != np.arange(B)).any()
  assert_rescored(grown)


@pytest.mark.parametrize('carries', [False, True], ids=['encoded', 'carried'])
def test_unfinished_rows_are_continued(carries):
  @functools.partial(jax.jit, static_argnums=0)
  def fn(slots, params, prompts, continued, carried):
    spec = SPEC._replace(slots=slots, stop_rule=functools.partial(stopping.rounds, count=3))
    inputs = DecodeInputs(params, prompts, KEY, 0, continued=continued)
    if carries:
      return ring_decode.resume(MODEL, spec, inputs._replace(carried=carried))
    return *ring_decode.generate(MODEL, spec, inputs), carried

  continued = slot_loop.empty_rollout(B, T)
  carried = carried_kv.reorder(carried_kv.empty(MODEL, SPEC, P), prompts(), G)
  for call in range(20):
    continued, _, carried = fn(5 if call else 0, params(), prompts(), continued, carried)
  assert (np.asarray(continued.reason_B) != UNFINISHED).all()
  assert_same(continued, uninterrupted())


def test_no_keys_of_heads_are_expanded_while_decoding():
  spec = SPEC._replace(max_tokens=128)
  fn = jax.jit(lambda p, q: ring_decode.generate(MODEL, spec, DecodeInputs(p, q, KEY, 0))[0])
  text = fn.lower(params(), prompts()).compile().as_text()
  assert f'f32[{B},1,128,{MODEL.latent}]' in text
  sizes = MODEL.head_dim, MODEL.head_dim - MODEL.rotary_dim, MODEL.value_dim
  for heads in (f'{B},{MODEL.heads},128', f'{B},128,{MODEL.heads}', f'{B},128'):
    for size in (*sizes, MODEL.heads * (MODEL.head_dim - MODEL.rotary_dim + MODEL.value_dim)):
      assert f'f32[{heads},{size}]' not in text, (heads, size)
