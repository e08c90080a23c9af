"""Loops that go on with half of their slots: the same completions, and fewer rows in each iteration."""

from __future__ import annotations

import dataclasses
import functools
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from rollout_checks import assert_same

from jaxrl_llm.models import decoder
from jaxrl_llm.rollout import carried_kv, early_exit, ring_decode, slot_loop, stopping
from jaxrl_llm.rollout.decode_records import DecodeInputs, DecodeSettings, Loops, TokenRecords
from jaxrl_llm.types import ModelConfig, Prompts

MODEL = ModelConfig(
  vocab=24, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_tokens=64
)
P, G, L, T = 4, 8, 7, 24
B, END = P * G, (3, 11)


@pytest.fixture(scope='module')
def params():
  return jax.tree.map(lambda x: x * 2.2, decoder.init(MODEL, 0))


def make_prompts():
  r = np.random.default_rng(0)
  length_P = np.array([4, 7, 1, 6], np.int32)
  tokens_PxL = r.integers(0, 24, (P, L)).astype(np.int32)
  return Prompts(
    tokens_PxL, length_P, np.arange(P, dtype=np.int32) * 7, np.full(P, 2), np.zeros(P, np.float32)
  )


def settings(**changes):
  return DecodeSettings(G, T, 1.0, END, 'float32')._replace(**changes)


@pytest.fixture(autouse=True)
def halves_short_rows(monkeypatch):
  monkeypatch.setattr(ring_decode, '_LEAST_TOKENS', 0)


def run(params, model=MODEL, more=None, halvings=0, **changes):
  def fn(params, more):
    inputs = DecodeInputs(params, make_prompts(), jax.random.key(1), 4, **more)
    if inputs.carried is not None:
      return ring_decode.resume(model, spec, inputs)
    return ring_decode.generate(model, spec, inputs)

  loops = changes.pop('loops', Loops())._replace(halvings=halvings)
  spec = settings(loops=loops, **changes)
  return jax.tree.map(np.asarray, jax.jit(fn)(params, more or {}))


def test_lengths_of_these_tests_need_every_size(params):
  length_B = run(params)[0].length_B
  busy_T = [(length_B > t).sum() for t in range(1, T)]
  assert busy_T[0] > B // 2 and any(B // 4 < n <= B // 2 for n in busy_T) and 0 < busy_T[-1] <= 8


@pytest.mark.parametrize(
  'changes',
  [
    dict(),
    dict(slots=20),
    dict(slots=12, loops=Loops(windows=2)),
    dict(loops=Loops(windows=3)),
    dict(loops=Loops(test_every=4)),
    dict(cache_dtype='int8'),
    dict(temperature=0.0),
  ],
  ids=str,
)
def test_halvings_change_no_completion(params, changes):
  want, iterations = run(params, **changes)
  got, iterations_halved = run(params, halvings=2, **changes)
  assert_same(got, want)
  assert iterations_halved == iterations


def test_sliding_layers_keep_their_rings(params):
  model = dataclasses.replace(MODEL, window=5, sliding=(True, False))
  assert_same(run(params, model, halvings=2)[0], run(params, model)[0])


def test_each_iteration_takes_half_of_the_slots_once_they_suffice(params, monkeypatch):
  seen, apply = [], decoder.apply

  def counted(config, params, tokens, *args, **keywords):
    if keywords.get('cache') is not None:
      jax.debug.callback(functools.partial(seen.append, len(tokens)))
    return apply(config, params, tokens, *args, **keywords)

  monkeypatch.setattr(decoder, 'apply', counted)
  rollout, iterations = run(params, halvings=2)
  jax.effects_barrier()
  busy = [(rollout.length_B > t).sum() for t in range(1, iterations + 1)]
  assert seen == [next(n for n in (8, 16, 32) if n >= count) for count in busy]


def test_rows_that_wait_keep_all_slots(params, monkeypatch):
  """With 20 slots for 32 rows no loop is halved before the last row has started."""
  seen, halve = [], ring_decode._halve

  def watched(constants, state, slots):
    jax.debug.callback(lambda *x: seen.append(x), state.waiting_B.any(), state.row_S, slots)
    return halve(constants, state, slots)

  monkeypatch.setattr(ring_decode, '_halve', watched)
  run(params, halvings=2, slots=20)
  jax.effects_barrier()
  assert [slots for *_, slots in seen] == [10, 5]
  for waits, row_S, slots in seen:
    assert not waits and (row_S < B).sum() <= slots


def test_a_stop_rule_ends_all_loops(params):
  rule = functools.partial(stopping.rounds, count=4)
  want, iterations = run(params, stop_rule=rule)
  got, iterations_halved = run(params, stop_rule=rule, halvings=2)
  assert (want.reason_B == 0).sum() > B // 2  # more rows than the next loop has slots
  assert_same(got, want)
  assert iterations_halved == iterations


def test_exit_rules_and_continued_rows(params):
  rule = functools.partial(early_exit.entropy, high=1.2, least_tokens=6)
  whole, _ = run(params, exit_rule=rule)
  assert set(whole.reason_B.tolist()) != set(run(params)[0].reason_B.tolist())
  begun, _ = run(params, exit_rule=rule, more=dict(pause=np.int32(5)))
  assert (begun.reason_B == 0).any()
  got, want = (
    run(params, exit_rule=rule, halvings=n, more=dict(continued=begun))[0] for n in (2, 0)
  )
  assert_same(got, want)
  # Encoding a row again rounds otherwise than decoding it did, by 7.6e-5 in one log-prob on jax 0.12.
  assert_same(got, whole, atol=3e-4)


def test_a_mixture_records_the_experts_of_each_row():
  model = dataclasses.replace(MODEL, experts=4, experts_per_token=2)
  params = jax.tree.map(lambda x: x * 2.2, decoder.init(model, 0))
  records = TokenRecords(experts=True)
  want, _ = run(params, model, records=records)
  got, _ = run(params, model, records=records, halvings=2)
  assert_same(got, want)
  real_BxT = np.arange(T)[None] < want.length_B[:, None] - 1
  np.testing.assert_array_equal(got.expert_BxTxNxk[real_BxT], want.expert_BxTxNxk[real_BxT])


def test_carried_caches_keep_the_slots_of_all_rows(params, monkeypatch):
  monkeypatch.setattr(ring_decode, '_halve', None)  # not called
  prompts = make_prompts()
  empty = carried_kv.empty(MODEL, settings(), P)
  empty = empty._replace(index_P=prompts.index_P, born_P=prompts.born_P)
  more = dict(continued=slot_loop.empty_rollout(B, T), carried=empty)
  assert_same(run(params, more=more, halvings=2)[0], run(params)[0])


def test_shards_in_lockstep_halve_together(params, monkeypatch):
  """Four shards with a prompt each; the loop ends when the slots of the busiest one suffice."""
  mesh = jax.make_mesh((4,), ('data',), devices=jax.devices()[:4])
  rows = PartitionSpec('data')
  seen, halve = [], ring_decode._halve

  def watched(constants, state, slots):
    jax.debug.callback(lambda n: seen.append(int(n)), state.iterations)
    return halve(constants, state, slots)

  def decode(prompts):
    inputs = DecodeInputs(params, prompts, jax.random.key(1), 4)
    return ring_decode.generate(
      MODEL, settings(lockstep=('data',), loops=Loops(halvings=1)), inputs
    )[0]

  monkeypatch.setattr(ring_decode, '_halve', watched)
  place = lambda x: jax.device_put(x, NamedSharding(mesh, rows))  # noqa: E731
  fn = jax.shard_map(decode, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
  got = jax.tree.map(np.asarray, jax.jit(fn)(jax.tree.map(place, make_prompts())))
  jax.effects_barrier()
  assert_same(got, run(params)[0])
  busiest_T = [(got.length_B.reshape(P, G) > t).sum(1).max() for t in range(1, T)]
  assert seen == [next(t for t, n in enumerate(busiest_T) if n <= G // 2)] * P


def test_loops_are_halved_only_where_it_pays(monkeypatch):
  def counts(T, L, slots, carried=None):
    prompts = make_prompts()._replace(tokens_PxL=np.zeros((P, L), np.int32))
    constants = mock.Mock(
      prompts=prompts, settings=settings(max_tokens=T, loops=Loops(halvings=2)), carried=carried
    )
    return ring_decode.slot_counts(constants, slots)

  monkeypatch.undo()
  assert counts(64, 64, 32) == [16, 8] and counts(64, 64, 9) == [5]
  assert counts(63, 64, 32) == counts(63, 8, 32) == counts(64, 65, 32) == []
  assert counts(64, 64, 7) == [4] and counts(64, 64, 6) == []
  assert counts(64, 64, 32, carried=1) == []
