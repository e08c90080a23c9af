"""Layers with a sliding window have a ring of that width: it changes the stored columns and no token."""

from __future__ import annotations

import dataclasses
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
from jaxrl_llm.types import UNFINISHED, GlobalSizes, ModelConfig, Prompts

P, G, L, T, WINDOW = 4, 3, 7, 13, 5
B = P * G
SOME = ModelConfig(
  vocab=24, width=32, layers=3, heads=4, kv_heads=2, head_dim=8, mlp=48, max_tokens=64,
  window=WINDOW, sliding=(True, False, True), sliding_rope_theta=100.0,
)  # fmt: skip
ALL = dataclasses.replace(SOME, sliding=(True,) * 3)
CHUNKED = dataclasses.replace(SOME, chunked=True)
# Layers that do not slide have heads of another size, and values that are their keys.
UNEQUAL = dataclasses.replace(
  SOME, global_sizes=GlobalSizes(head_dim=12, kv_heads=1, key_values=True), qk_norm='qkv'
)
# The last layers attend to keys and values of earlier ones, and each layer has an input of its own.
READERS = dataclasses.replace(
  UNEQUAL, layers=5, sliding=(True, False, True, True, False), kv_readers=2, kv_reader_mlp=2,
  layer_input=6, layer_input_vocab=24, norms='both', layer_scales=True,
)  # fmt: skip
SPEC = ring_decode.DecodeSettings(G, T, 1.0, (3, 11), 'float32')
KEY = jax.random.key(1)


@functools.cache
def params(model=SOME):
  return jax.tree.map(lambda x: x * 1.5, decoder.init(model, 0))


def run(fn, model=SOME):
  """fn(params, prompts) as one program."""
  return jax.tree.map(np.asarray, jax.jit(fn)(params(model), prompts()))


@functools.cache
def prompts():
  r = np.random.default_rng(0)
  length_P = r.integers(1, L + 1, P).astype(np.int32)
  tokens_PxL = r.integers(0, 24, (P, L)).astype(np.int32)
  index_P = np.arange(P, dtype=np.int32)
  return Prompts(tokens_PxL, length_P, index_P, np.full(P, 2), np.ones(P, np.float32))


@functools.cache
def uninterrupted(model):
  """A slot for every row, without interruption."""
  return sampled(model)


def sampled(model, **changes):
  return run(
    lambda p, q: ring_decode.generate(model, SPEC._replace(**changes), DecodeInputs(p, q, KEY, 0))[
      0
    ],
    model,
  )


def rescored(model, rollout):
  return rollout_checks.rescored(model, params(model), prompts(), rollout)


@pytest.mark.parametrize(
  'model',
  [SOME, ALL, CHUNKED, UNEQUAL, READERS],
  ids=['some', 'all', 'chunked', 'unequal', 'readers'],
)
def test_recorded_log_prob_is_that_of_a_forward_pass_with_windows(model):
  got = uninterrupted(model)
  real = np.arange(T)[None] < got.length_B[:, None]
  assert (got.length_B > 2 * WINDOW).sum() >= 3, 'some rows must pass the ring twice'
  np.testing.assert_allclose(got.logp_BxT[real], rescored(model, got)[real], atol=5e-5)
  wide = rescored(dataclasses.replace(model, window=L + T), got)
  assert np.abs(got.logp_BxT - wide)[real].max() > 0.1, 'masked tokens must matter'


@pytest.mark.parametrize(
  'model, changes',
  [
    (SOME, dict(slots=5)),
    (SOME, dict(loops=Loops(windows=2))),
    (SOME, dict(slots=5, loops=Loops(windows=3))),
    (ALL, dict(slots=5, loops=Loops(windows=3))),
    (CHUNKED, dict(slots=5, loops=Loops(windows=3))),
    (UNEQUAL, dict(slots=5, loops=Loops(windows=3))),
    (READERS, dict(slots=5, loops=Loops(windows=3))),
  ],
)
def test_slots_and_rings_that_grow_change_nothing(model, changes):
  """Rings of 4, 7 and 13 columns, in sliding layers of 4 and 5: the first grows, the second is only rolled."""
  assert_same(sampled(model, **changes), uninterrupted(model))


@pytest.mark.parametrize('carries', [False, True], ids=['encoded', 'carried'])
@pytest.mark.parametrize('rows, model', [(0, SOME), (5, SOME), (5, UNEQUAL), (5, READERS)])
def test_unfinished_rows_are_continued(rows, model, carries):
  @functools.partial(jax.jit, static_argnums=0)
  def fn(rows, params, prompts, continued, carried):
    spec = SPEC._replace(slots=rows, stop_rule=functools.partial(stopping.rounds, count=3))
    inputs = DecodeInputs(params, prompts, KEY, 0, continued=continued)
    if carries:
      return ring_decode.resume(model, spec, inputs._replace(carried=carried))
    return *ring_decode.generate(model, spec, inputs), carried

  continued, carried = (
    slot_loop.empty_rollout(B, T),
    carried_kv.reorder(carried_kv.empty(model, SPEC, P), prompts(), G),
  )
  for call in range(40):
    # The first call has a slot for every row, so later rows with carried keys wait and are loaded while others run.
    continued, _, carried = fn(rows if call else 0, params(model), prompts(), continued, carried)
  assert (np.asarray(continued.reason_B) != UNFINISHED).all()
  assert_same(continued, uninterrupted(model))


def test_trees_and_drafts_sample_the_same_tokens():
  """A tree without forks is plain sampling; drafts store every column, since rejected drafts are overwritten."""
  never = tree_rules.latr(
    absolute=1.0, relative=1.0, ages=(2,), suffix=1.0, rouge=1.0, edit=0.0, limit=99
  )
  grown = run(
    lambda p, q: tree_decode.generate(SOME, SPEC, DecodeInputs(p, q, KEY, 0), never, share=0.0)[0]
  )
  assert_same(grown, uninterrupted(SOME))
  drafted = ngram_drafts.NgramSettings(2, 3)
  out, _, counts = run(
    lambda p, q: ngram_drafts.generate(SOME, SPEC, DecodeInputs(p, q, KEY, 0), drafted)
  )
  assert_same(out, uninterrupted(SOME))
  assert counts[0] > 0


def test_forked_rows_copy_their_windows():
  """Recorded log-probabilities of a tree equal those of a forward pass over each row."""
  rules = tree_rules.latr(
    absolute=0.05, relative=0.3, ages=(2, 3, 5), suffix=1.0, rouge=0.3, edit=0.0, limit=99
  )
  got, _, grown = run(
    lambda p, q: tree_decode.generate(SOME, SPEC, DecodeInputs(p, q, KEY, 0), rules, share=1.0)
  )
  assert (grown.parent_B != np.arange(B)).any() and got.length_B.max() > 2 * WINDOW
  real = np.arange(T)[None] < got.length_B[:, None]
  np.testing.assert_allclose(got.logp_BxT[real], rescored(SOME, got)[real], atol=5e-5)


def test_only_the_window_is_stored_and_no_cache_is_copied():
  spec = SPEC._replace(max_tokens=128)
  fn = jax.jit(lambda p, q: ring_decode.generate(SOME, spec, DecodeInputs(p, q, KEY, 0))[0])
  text = fn.lower(params(), prompts()).compile().as_text()
  for width, layers in ((WINDOW, 2), (128, 1)):
    shape = f'f32[{B},{SOME.kv_heads},{width},{SOME.head_dim}]'
    rollout_checks.assert_written_in_place(text, shape, 2 * layers)
  sizes = [x.shape[2] for x in jax.tree.leaves(carried_kv.empty(SOME, spec, P).cache)]
  assert sizes == [WINDOW] * 2 + [128] * 2 + [WINDOW] * 2
