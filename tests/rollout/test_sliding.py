"""Layers whose window slides keep a ring of that window: it changes what is stored, and never what a row says."""

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
from jaxrl_llm.rollout.decode_records import DecodeInputs
from jaxrl_llm.types import UNFINISHED, ModelConfig, Prompts

P, G, L, T, WINDOW = 4, 3, 7, 13, 5
B = P * G
SOME = ModelConfig(
  vocab=24, width=32, layers=3, heads=4, kv_heads=2, head_dim=8, mlp=48, max_tokens=64,
  window=WINDOW, sliding=(True, False, True), sliding_rope_theta=100.0,
)  # fmt: skip
ALL = dataclasses.replace(SOME, sliding=(True,) * 3)
SPEC = ring_decode.DecodeSettings(G, T, 1.0, (3, 11), 'float32')
KEY = jax.random.key(1)


@functools.cache
def params():
  return jax.tree.map(lambda x: x * 1.5, decoder.init(SOME, 0))


def run(fn):
  """fn(params, prompts) as one program."""
  return jax.tree.map(np.asarray, jax.jit(fn)(params(), prompts()))


@functools.cache
def prompts():
  r = np.random.default_rng(0)
  length_P = r.integers(1, L + 1, P).astype(np.int32)
  tokens_PxL = r.integers(0, 24, (P, L)).astype(np.int32)
  index_P = np.arange(P, dtype=np.int32)
  return Prompts(tokens_PxL, length_P, index_P, np.full(P, 2), np.ones(P, np.float32))


@functools.cache
def whole(model):
  """Every row in a slot of its own, none interrupted."""
  return sampled(model)


def sampled(model, **changes):
  return run(
    lambda p, q: ring_decode.generate(model, SPEC._replace(**changes), DecodeInputs(p, q, KEY, 0))[
      0
    ]
  )


def rescored(model, rollout):
  return rollout_checks.rescored(model, params(), prompts(), rollout)


@pytest.mark.parametrize('model', [SOME, ALL], ids=['some', 'all'])
def test_recorded_log_prob_is_that_of_a_forward_pass_with_windows(model):
  got = whole(model)
  real = np.arange(T)[None] < got.length_B[:, None]
  assert (got.length_B > 2 * WINDOW).sum() >= 3, 'rows that go round the ring twice'
  np.testing.assert_allclose(got.logp_BxT[real], rescored(model, got)[real], atol=5e-5)
  wide = rescored(dataclasses.replace(model, window=L + T), got)
  assert np.abs(got.logp_BxT - wide)[real].max() > 0.1, 'what a window hides must matter'


@pytest.mark.parametrize(
  'model, changes',
  [
    (SOME, dict(slots=5)),
    (SOME, dict(windows=2)),
    (SOME, dict(slots=5, windows=3)),
    (ALL, dict(slots=5, windows=3)),
  ],
)
def test_slots_and_rings_that_grow_change_nothing(model, changes):
  """Rings of 4, 7 and 13 columns, in sliding layers of 4 and 5: one grows, one is only turned."""
  assert_same(sampled(model, **changes), whole(model))


@pytest.mark.parametrize('carries', [False, True], ids=['encoded', 'carried'])
@pytest.mark.parametrize('rows', [0, 5])
def test_rows_that_are_cut_short_go_on(rows, carries):
  @functools.partial(jax.jit, static_argnums=0)
  def fn(rows, params, prompts, begun, kept):
    spec = SPEC._replace(slots=rows, stop_rule=functools.partial(stopping.rounds, count=3))
    inputs = DecodeInputs(params, prompts, KEY, 0, continued=begun)
    if carries:
      return ring_decode.resume(SOME, spec, inputs._replace(carried=kept))
    return *ring_decode.generate(SOME, spec, inputs), kept

  begun, kept = (
    slot_loop.empty_rollout(B, T),
    carried_kv.reorder(carried_kv.empty(SOME, SPEC, P), prompts(), G),
  )
  for call in range(40):
    # At first a slot for every row, so that later rows with keys wait, and are seated while others are under way.
    begun, _, kept = fn(rows if call else 0, params(), prompts(), begun, kept)
  assert (np.asarray(begun.reason_B) != UNFINISHED).all()
  assert_same(begun, whole(SOME))


def test_trees_and_drafts_say_the_same():
  """Where nothing forks a tree is plain sampling; drafts keep every column, for one that fails is written over."""
  never = tree_rules.latr(
    absolute=1.0, relative=1.0, ages=(2,), suffix=1.0, rouge=1.0, edit=0.0, limit=99
  )
  grown = run(
    lambda p, q: tree_decode.generate(SOME, SPEC, DecodeInputs(p, q, KEY, 0), never, share=0.0)[0]
  )
  assert_same(grown, whole(SOME))
  drafted = ngram_drafts.NgramSettings(2, 3)
  out, _, counts = run(
    lambda p, q: ngram_drafts.generate(SOME, SPEC, DecodeInputs(p, q, KEY, 0), drafted)
  )
  assert_same(out, whole(SOME))
  assert counts[0] > 0


def test_forked_rows_take_their_windows_along():
  """Every record of a tree is that of a forward pass over its row."""
  rules = tree_rules.latr(
    absolute=0.05, relative=0.3, ages=(2, 3, 5), suffix=1.0, rouge=0.3, edit=0.0, limit=99
  )
  got, _, grown = run(
    lambda p, q: tree_decode.generate(SOME, SPEC, DecodeInputs(p, q, KEY, 0), rules, share=1.0)
  )
  assert (grown.parent_B != np.arange(B)).any() and got.length_B.max() > 2 * WINDOW
  real = np.arange(T)[None] < got.length_B[:, None]
  np.testing.assert_allclose(got.logp_BxT[real], rescored(SOME, got)[real], atol=5e-5)


def test_only_the_window_is_stored_and_nothing_copied():
  spec = SPEC._replace(max_tokens=128)
  fn = jax.jit(lambda p, q: ring_decode.generate(SOME, spec, DecodeInputs(p, q, KEY, 0))[0])
  text = fn.lower(params(), prompts()).compile().as_text()
  for width, layers in ((WINDOW, 2), (128, 1)):
    shape = f'f32[{B},{SOME.kv_heads},{width},{SOME.head_dim}]'
    rollout_checks.assert_written_in_place(text, shape, 2 * layers)
  sizes = [x.shape[2] for x in jax.tree.leaves(carried_kv.empty(SOME, spec, P).cache)]
  assert sizes == [WINDOW] * 2 + [128] * 2 + [WINDOW] * 2
