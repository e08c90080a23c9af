"""Carried keys and values: with the same weights rows are the uninterrupted ones; with new weights old keys stay."""

from __future__ import annotations

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_job
from rollout_checks import assert_same

from jaxrl_llm import replay, train
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import empty_records
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import attention, decoder, shared_prompt_forward
from jaxrl_llm.profiling import hlo
from jaxrl_llm.rollout import carried_kv, queue_order, ring_decode, slot_loop
from jaxrl_llm.rollout.decode_records import DecodeInputs
from jaxrl_llm.types import UNFINISHED, ModelConfig, Prompts, UserError

MODEL = ModelConfig(
  vocab=24, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_tokens=64
)
P, G, L, T = 4, 3, 5, 10
B = P * G
SPEC = ring_decode.DecodeSettings(G, T, 1.0, (3, 11), 'float32')


@pytest.fixture(scope='module')
def params():
  return jax.tree.map(lambda x: x * 1.5, decoder.init(MODEL, 0))


def make_prompts(count=P, born=2):
  r = np.random.default_rng(0)
  length_P = r.integers(1, L + 1, count).astype(np.int32)
  tokens_PxL = r.integers(0, 24, (count, L)).astype(np.int32)
  expected_P = np.resize([3, 0, 9, 5], count).astype(np.float32)
  index_P = np.arange(count, dtype=np.int32)
  return Prompts(tokens_PxL, length_P, index_P * 7, np.full(count, born, np.int32), expected_P)


@functools.cache
def uninterrupted(cache_dtype='float32'):
  """(params) → rollout of the ring loop, with a slot for every row."""
  spec, key = SPEC._replace(cache_dtype=cache_dtype), jax.random.key(1)
  return jax.jit(
    lambda p: ring_decode.generate(MODEL, spec, DecodeInputs(p, make_prompts(), key, 0))[0]
  )


@functools.cache
def resumed(rows=0, cache_dtype='float32'):
  """(params, prompts, continued, carried, version, most iterations) → rollout, iterations, carried cache.

  One compilation for any number of iterations and for both orders.
  """
  spec = SPEC._replace(slots=rows, cache_dtype=cache_dtype)

  @jax.jit
  def fn(params, prompts, continued, carried, version, count, longest):
    limited = spec._replace(
      stop_rule=lambda p: p.iterations >= count,
      queue_order=lambda p: jnp.where(longest, queue_order.longest_first(p), queue_order.fifo(p)),
    )
    carried = carried_kv.reorder(carried, prompts, G)
    inputs = DecodeInputs(
      params, prompts, jax.random.key(1), version, continued=continued, carried=carried
    )
    return ring_decode.resume(MODEL, limited, inputs)

  def call(*args, longest=False):
    return jax.tree.map(np.asarray, fn(*args, longest))

  return call


def start(cache_dtype='float32'):
  return slot_loop.empty_rollout(B, T), carried_kv.empty(
    MODEL, SPEC._replace(cache_dtype=cache_dtype), P
  )


def groups(tree, order_P, rollouts=G):
  """Rows [B, …] with their groups reordered."""
  row_B = (np.asarray(order_P)[:, None] * rollouts + np.arange(rollouts)).reshape(-1)
  return jax.tree.map(lambda x: np.asarray(x)[row_B], tree)


def assert_all_is_cached(rollout, carried):
  """All tokens of every unfinished row are cached except the youngest, which no pass has read; zeros elsewhere."""
  cached_B = np.where(rollout.reason_B == UNFINISHED, rollout.length_B - 1, 0)
  np.testing.assert_array_equal(carried.cached_B, cached_B)
  for x in jax.tree.leaves(carried.cache):
    used_BxT = np.moveaxis(x != 0, 1, 2).reshape(B, T, -1).any(-1)
    np.testing.assert_array_equal(used_BxT, np.arange(T)[None] < cached_B[:, None])


def carry_on(params, rows=0, cache_dtype='float32', longest=False):
  """Stopped every three iterations and continued, each time with the groups in another order."""
  continued, carried = start(cache_dtype)
  where_P = np.arange(P)
  for call in range(40):
    order_P = np.random.default_rng(call).permutation(P)
    where_P = where_P[order_P]
    prompts = jax.tree.map(lambda x, at=where_P: x[at], make_prompts())
    continued = groups(continued, order_P)
    # The first call has a slot for every row, so later more rows have keys than there are slots.
    fn = resumed(rows if call else 0, cache_dtype)
    continued, iterations, carried = fn(
      params, prompts, continued, carried, call, 3, longest=longest
    )
    assert iterations <= 3
    assert_all_is_cached(continued, carried)
    if (continued.reason_B != UNFINISHED).all():
      assert call > 1
      return groups(continued, np.argsort(where_P))
  raise AssertionError('rows do not end')


@pytest.mark.parametrize('rows, longest', [(0, False), (5, False), (5, True)])
def test_carried_rows_equal_uninterrupted_ones(params, rows, longest):
  want = uninterrupted()(params)
  assert len(set(want.length_B.tolist())) > 4
  assert_same(carry_on(params, rows, longest=longest), want)


@pytest.mark.parametrize('rows', [0, 5])
def test_carried_int8_keys_equal_those_of_an_uninterrupted_run(params, rows):
  """Encoding again would compute keys from unrounded ones, and other log-probabilities with the same weights."""
  want = uninterrupted('int8')(params)
  assert np.abs(want.logp_BxT - uninterrupted()(params).logp_BxT).max() > 1e-3
  assert_same(carry_on(params, rows, 'int8'), want)


@pytest.mark.parametrize(
  'rows, dtype', [(0, 'float32'), (5, 'float32'), (5, 'bfloat16'), (5, 'int8')]
)
def test_rows_that_wait_for_an_entire_call_keep_their_cache(params, rows, dtype):
  """Without any iteration, the caches of rows with and without slots return bit for bit."""
  r = np.random.default_rng(0)
  cached_B = np.where(np.arange(B) % 4 < 3, r.integers(0, T - 1, B), 0)
  continued = slot_loop.empty_rollout(B, T)._replace(
    length_B=cached_B + 1, reason_B=np.where(np.arange(B) % 4 < 3, UNFINISHED, 1).astype(np.int8)
  )
  prompts = make_prompts()
  real = np.arange(T)[None, None, :, None] < cached_B[:, None, None, None]
  fill = lambda: attention.pack_cache(r.normal(size=(B, 2, T, 8)).astype(np.float32) * real, dtype)  # noqa: E731
  cache = [(fill(), fill()) for _ in range(MODEL.layers)]
  carried = carried_kv.CarriedKV(prompts.index_P, prompts.born_P, cached_B, cache)
  got, iterations, after = resumed(rows, dtype)(params, prompts, continued, carried, 1, 0)
  assert iterations == 0 and (cached_B > 0).sum() > 5
  np.testing.assert_array_equal(got.length_B, continued.length_B)
  jax.tree.map(np.testing.assert_array_equal, after, jax.tree.map(np.asarray, carried))


@functools.cache
def reader():
  """A model pass over token j of every row, in column j: the next token's log-probs and the cache."""

  @jax.jit
  def fn(params, prompts, prompt_cache, cache, token_B, j):
    hidden, cache, _ = decoder.apply(
      MODEL,
      params,
      token_B[:, None],
      (jnp.repeat(prompts.length_P, G) + j)[:, None],
      jnp.broadcast_to(jnp.arange(T) <= j, (B, 1, T)),
      shared=(prompt_cache, jnp.arange(L)[None] < prompts.length_P[:, None]),
      cache=cache,
      at=j,
    )
    return jax.nn.log_softmax(decoder.head(MODEL, params, hidden[:, 0])), cache

  return fn


def teacher_forced(weights, rollout):
  """Log-probs [B, T] of a rollout, token by token, with keys that are not recomputed.

  The weights that sampled a token computed the keys of the token before it, and later weights attend to these.
  """
  prompts = jax.tree.map(jnp.asarray, make_prompts())
  read = [shared_prompt_forward.prefill(MODEL, w, prompts, 'float32') for w in weights]
  logits = [decoder.head(MODEL, w, last) for w, (_, last) in zip(weights, read, strict=True)]
  finished = [np.repeat(jax.nn.log_softmax(x), G, axis=0) for x in logits]
  cache = [(np.zeros((B, 2, T, 8), np.float32),) * 2 for _ in range(MODEL.layers)]
  logp_BxT = np.zeros((B, T), np.float32)
  for j in range(T):
    chosen_BxV = np.choose(rollout.version_BxT[:, j, None], finished)
    logp_BxT[:, j] = chosen_BxV[np.arange(B), rollout.tokens_BxT[:, j]]
    if j + 1 == T:
      return logp_BxT
    token_B, next_B = rollout.tokens_BxT[:, j], rollout.version_BxT[:, j + 1, None, None, None]
    passes = [reader()(w, prompts, read[v][0], cache, token_B, j) for v, w in enumerate(weights)]
    finished = [np.asarray(logp) for logp, _ in passes]
    cache = jax.tree.map(lambda *x, v=next_B: np.choose(v, x), *(c for _, c in passes))


def test_new_weights_attend_to_old_keys_and_record_their_log_probs(params):
  """Three sets of weights; rows that wait during the second keep the keys of the first."""
  weights = [jax.tree.map(lambda x, f=f: x * f, params) for f in (1.0, 0.8, 1.2)]
  continued, _, carried = resumed()(weights[0], make_prompts(), *start(), 0, 4)
  first_B = continued.length_B
  assert (continued.reason_B == UNFINISHED).sum() > 5
  continued, _, carried = resumed(5)(weights[1], make_prompts(), continued, carried, 1, 2)
  waited_B = (continued.reason_B == UNFINISHED) & (continued.length_B == first_B)
  assert waited_B.any()
  got, *_ = resumed(5)(weights[2], make_prompts(), continued, carried, 2, 99)
  assert (got.length_B > first_B)[waited_B].all() and (got.version_BxT == 1).any()
  real_BxT = np.arange(T)[None] < got.length_B[:, None]
  want_BxT = teacher_forced(weights, got)
  np.testing.assert_allclose(got.logp_BxT[real_BxT], want_BxT[real_BxT], atol=2e-5)
  # Scored entirely with the last weights, their tokens are off-policy.
  last = got._replace(version_BxT=np.full_like(got.version_BxT, 2))
  gap_BxT = np.abs(np.exp(teacher_forced(weights, last)) - np.exp(got.logp_BxT))
  assert gap_BxT[real_BxT & (got.version_BxT == 2)].max() > 0.01


def test_tokens_without_carried_keys_are_decoded_again(params):
  continued, _, carried = resumed()(params, make_prompts(), *start(), 0, 5)
  other_P = make_prompts().born_P + [0, 0, 1, 0]
  lost = carried._replace(cached_B=np.where(np.arange(B) % 2, carried.cached_B, 0), born_P=other_P)
  got, _, left = resumed(5)(params, make_prompts(), continued, lost, 1, 2)
  assert (left.cached_B + 1 < got.length_B)[left.cached_B > 0].any(), (
    'a row must still be decoding old tokens'
  )
  got, *_ = resumed(5)(params, make_prompts(), got, left, 1, 99)
  assert_same(got, uninterrupted()(params))


def text_of(params, rows, carry):
  spec = SPEC._replace(max_tokens=128, slots=rows, stop_rule=lambda p: p.iterations >= 3)
  continued, carried = slot_loop.empty_rollout(B, 128), carried_kv.empty(MODEL, spec, P)

  def fn(continued, carried):
    inputs = DecodeInputs(params, make_prompts(), jax.random.key(0), 0, continued=continued)
    if not carry:
      return ring_decode.generate(MODEL, spec, inputs)
    carried = carried_kv.reorder(carried, make_prompts(), G)
    return ring_decode.resume(MODEL, spec, inputs._replace(carried=carried))

  return jax.jit(fn, donate_argnums=1).lower(continued, carried).compile().as_text()


# Encoding 128 tokens at once has attention scores of 128 × 128.
ENCODES = re.compile(r'f32\[(?:\d+,)*128,(?:\d+,)*128\b')
HANDS_ON = {'parameter', 'get-tuple-element', 'tuple', 'bitcast', 'while', 'conditional', 'call'}


def test_rows_that_are_not_carried_are_encoded(params):
  """The pattern of the next test matches where rows are encoded."""
  assert ENCODES.search(text_of(params, 6, carry=False))


@pytest.mark.parametrize('rows', [0, 6])
def test_nothing_is_encoded_and_caches_are_copied_only_where_a_row_is_loaded(params, rows):
  text = text_of(params, rows, carry=True)
  assert not ENCODES.search(text)
  program, dims = hlo.parse(text), [(n, 2, 128, 8) for n in {rows or B, B}]
  loops = [i for c in program.values() for i in c if i.opcode == 'while']
  (loop,) = [i for i in loops if hlo.op_name(i).endswith(f'{ring_decode.LOOP_SCOPE}/while')]
  body = hlo.reachable(program, hlo.attribute(loop, 'body'))

  def cache_arrays(names):
    arrays = [(i.opcode, a) for n in names for i in program.get(n, ()) for a in i.arrays]
    return collections.Counter(op for op, a in arrays if a.dims in dims and op not in HANDS_ON)

  seating = [
    [hlo.reachable(program, c) for c in hlo.called(i)]
    for name in body
    for i in program.get(name, ())
    if i.opcode == 'conditional' and f'{carried_kv.LOAD_SCOPE}/' in hlo.op_name(i)
  ]
  assert len(seating) == (rows > 0)
  for branches in seating:
    assert sorted(bool(cache_arrays(b)) for b in branches) == [False, True]
    body = body.difference(*branches)
  found = cache_arrays(body)
  assert found.pop('dynamic-update-slice') == 2 * MODEL.layers
  assert found.pop('fusion', 0) <= 2 * MODEL.layers and not found, found  # fusions wrap these


def config(**changes):
  c = configs.default()
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = 2 * P, G, L, T
  c.rollout.stop, c.rollout.carry_cache = dict(fn='rounds', count=2), True
  with c.ignore_type():
    for name, value in changes.items():
      part = c if name in c else c.rollout
      part[name] = value
  return c


@functools.cache
def sampler(carry=True, mode='fused', devices=1):
  """A program, and its sampling half compiled."""
  c = config(carry_cache=carry, mode=mode, mesh=dict(data=-1, fsdp=1, tensor=min(devices, 2)))
  spec = make_spec(c, MODEL, (3, 11), sharding.make_mesh(c.mesh, jax.devices()[:devices]))
  return spec, programs.compile_sample(spec)


def drive(params, lag=0, decay=1.0, **kind):
  """Six calls as in the host loop, with results `lag` calls late: finished rows, carried tokens, carried caches.

  In call i the weights are the initial ones times decayⁱ. A continued group runs beside a later visit to its prompt.
  """
  program, sample = sampler(**kind)
  state, held = (
    train_state.init_state(program, params),
    replay.PartialRollouts(G, max_age=99, shards=P),
  )
  handed, flights, done, tokens = state.carried, [], {}, 0
  for index in range(6):
    fresh = jax.tree.map(lambda x: x[: 2 * P - len(held)], make_prompts(2 * P, born=index))
    prompts, continued = held.begin(fresh, empty_records.empty_rollout(program))
    weights = jax.tree.map(lambda x, f=decay**index: x * f, state.params)
    state = state._replace(carried=())
    asked = prompts, continued, None, np.int32(T)
    rollout, metrics, handed = sample(state._replace(params=weights), handed, *asked)
    tokens += float(metrics.get('generate/carried_tokens', 0))
    flights.append((prompts, jax.tree.map(np.asarray, rollout)))
    if len(flights) > lag:
      asked, finished = flights.pop(0)
      held.keep(asked, finished, index)
      for b in np.flatnonzero(finished.reason_B != UNFINISHED):
        name = int(asked.index_P[b // G]), int(asked.born_P[b // G]), int(b % G)
        done[name] = finished.tokens_BxT[b], finished.logp_BxT[b], finished.length_B[b]
  return done, tokens, handed


def assert_same_rows(got, want, atol):
  assert got.keys() == want.keys() and max(n for *_, n in got.values()) > 5
  for name, (tokens_T, logp_T, length) in want.items():
    np.testing.assert_array_equal(got[name][0], tokens_T)
    np.testing.assert_allclose(got[name][1], logp_T, atol=atol)
    assert got[name][2] == length


@pytest.mark.parametrize('mode', ['fused', 'lag'])
def test_a_group_continues_with_its_own_cache(params, mode):
  """With the same weights, rows equal those that are encoded again, also in another position and, in lag mode, a
  call later."""
  lag = int(mode == 'lag')
  got, tokens, handed = drive(params, lag, mode=mode)
  want, none, _ = drive(params, lag, carry=False)
  assert_same_rows(got, want, 1e-5)
  assert tokens > none == 0 and len(handed) == 1 + lag


def test_eight_devices_carry_the_same_as_one(params):
  """New weights in every call; two groups on each of four shards, where they are continued."""
  one, eight = drive(params, decay=0.95), drive(params, decay=0.95, devices=8)
  assert_same_rows(eight[0], one[0], 1e-4)
  assert eight[1] == one[1] > 0
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), eight[2], one[2])
  assert eight[2][0].cache[0][0].addressable_shards[0].data.shape == (2 * G, 1, T, 8)


@pytest.mark.parametrize('mode', ['lag', 'split'])
def test_an_interrupted_run_equals_an_uninterrupted_one(mode, tmp_path):
  """Bit for bit, with weights that shrink in every step: the checkpoint contains the old keys."""
  path = tiny_job.config_file(
    tmp_path,
    mode=mode,
    steps=6,
    rollout=dict(slots=8, stop=dict(fn='rounds', count=2), carry_cache=True),
    optimizer=dict(learning_rate=0.1, weight_decay=1.0),
    sft=dict(steps=0),
    evaluation=dict(every=0, prompts=0, samples=0),
  )
  for folder, total in (('whole', 6), ('cut', 4), ('cut', 6)):
    settings = configs.load(path, [f'--config.steps={total}'])
    train.run(settings, str(tmp_path / folder))
  rows = tiny_job.rows(tmp_path / 'whole')
  assert tiny_job.rows(tmp_path / 'cut') == rows
  assert min(row['generate/carried_tokens'] for row in rows[4:]) > 0
  for name in (f'rollouts/step_{n:06d}.jsonl' for n in (4, 5)):
    assert (tmp_path / 'cut' / name).read_text() == (tmp_path / 'whole' / name).read_text()


NO_STOP = dict(stop=dict(fn='none'))


@pytest.mark.parametrize(
  'changes, why',
  [
    (NO_STOP, "stop.fn='none': it carries the cache of unfinished rollouts"),
    (dict(draft=dict(fn='coupled')), "does not go with config.rollout.draft.fn='coupled'"),
    (dict(ngram=dict(match=3, draft=2)), 'does not go with config.rollout.ngram.draft=2'),
    (NO_STOP | dict(tree=dict(fn='latr')), "does not go with config.rollout.tree.fn='latr'"),
    (
      NO_STOP | dict(pruning=dict(fn='uniform')),
      "does not go with config.rollout.pruning.fn='uniform'",
    ),
  ],
)
def test_what_does_not_go_with_it_is_told(changes, why):
  c = config(**changes)
  with pytest.raises(UserError, match='config.rollout.carry_cache=True .*' + re.escape(why)):
    make_spec(c, MODEL, (3, 11), sharding.make_mesh(c.mesh, jax.devices()[:1]))


def test_without_carry_cache_the_state_has_no_cache():
  spec = make_spec(config(carry_cache=False), MODEL, (3,), sharding.make_mesh(config().mesh))
  assert spec.rollout.carried_calls == 0 and train_state.abstract_state(spec).carried == ()
