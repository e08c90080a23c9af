"""Carried keys and values: the uninterrupted rows with the same weights, and the old keys with new ones."""

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
from jaxrl_llm.learner.step_spec import make_spec
from jaxrl_llm.models import decoder, kvcache
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
  """(params) → every row in a slot of its own, by the plain engine."""
  spec, key = SPEC._replace(cache_dtype=cache_dtype), jax.random.key(1)
  return jax.jit(
    lambda p: ring_decode.generate(MODEL, spec, DecodeInputs(p, make_prompts(), key, 0))[0]
  )


@functools.cache
def resumed(rows=0, cache_dtype='float32'):
  """(params, prompts, begun, kept, version, rounds at most) → rollout, rounds, what is carried on.

  One compilation for any number of rounds, and for both orders.
  """
  spec = SPEC._replace(slots=rows, cache_dtype=cache_dtype)

  @jax.jit
  def fn(params, prompts, begun, carried, version, count, longest):
    limited = spec._replace(
      stop_rule=lambda p: p.iterations >= count,
      queue_order=lambda p: jnp.where(longest, queue_order.longest_first(p), queue_order.fifo(p)),
    )
    carried = carried_kv.reorder(carried, prompts, G)
    inputs = DecodeInputs(
      params, prompts, jax.random.key(1), version, continued=begun, carried=carried
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
  """Rows [B, …] in another order of their groups."""
  row_B = (np.asarray(order_P)[:, None] * rollouts + np.arange(rollouts)).reshape(-1)
  return jax.tree.map(lambda x: np.asarray(x)[row_B], tree)


def assert_all_is_held(rollout, kept):
  """Of every unfinished row all but the youngest token, which no pass has read; zeros elsewhere."""
  cached_B = np.where(rollout.reason_B == UNFINISHED, rollout.length_B - 1, 0)
  np.testing.assert_array_equal(kept.cached_B, cached_B)
  for x in jax.tree.leaves(kept.cache):
    used_BxT = np.moveaxis(x != 0, 1, 2).reshape(B, T, -1).any(-1)
    np.testing.assert_array_equal(used_BxT, np.arange(T)[None] < cached_B[:, None])


def carry_on(params, rows=0, cache_dtype='float32', longest=False):
  """Stopped every three rounds and continued, with the groups in another order every time."""
  begun, kept = start(cache_dtype)
  where_P = np.arange(P)
  for call in range(40):
    order_P = np.random.default_rng(call).permutation(P)
    where_P = where_P[order_P]
    prompts = jax.tree.map(lambda x, at=where_P: x[at], make_prompts())
    begun = groups(begun, order_P)
    # At first a slot for every row: later more rows have keys than there are slots.
    fn = resumed(rows if call else 0, cache_dtype)
    begun, rounds, kept = fn(params, prompts, begun, kept, call, 3, longest=longest)
    assert rounds <= 3
    assert_all_is_held(begun, kept)
    if (begun.reason_B != UNFINISHED).all():
      assert call > 1
      return groups(begun, np.argsort(where_P))
  raise AssertionError('rows do not end')


@pytest.mark.parametrize('rows, longest', [(0, False), (5, False), (5, True)])
def test_carried_rows_are_the_uninterrupted_ones(params, rows, longest):
  want = uninterrupted()(params)
  assert len(set(want.length_B.tolist())) > 4
  assert_same(carry_on(params, rows, longest=longest), want)


@pytest.mark.parametrize('rows', [0, 5])
def test_carried_int8_keys_are_those_of_the_uninterrupted_run(params, rows):
  """Encoded again, a row's keys would come from unrounded ones, and the same weights say something else."""
  want = uninterrupted('int8')(params)
  assert np.abs(want.logp_BxT - uninterrupted()(params).logp_BxT).max() > 1e-3
  assert_same(carry_on(params, rows, 'int8'), want)


@pytest.mark.parametrize(
  'rows, dtype', [(0, 'float32'), (5, 'float32'), (5, 'bfloat16'), (5, 'int8')]
)
def test_rows_that_wait_a_whole_call_keep_their_cache(params, rows, dtype):
  """No round is run: what was seated and what was not come back bit for bit."""
  r = np.random.default_rng(0)
  cached_B = np.where(np.arange(B) % 4 < 3, r.integers(0, T - 1, B), 0)
  begun = slot_loop.empty_rollout(B, T)._replace(
    length_B=cached_B + 1, reason_B=np.where(np.arange(B) % 4 < 3, UNFINISHED, 1).astype(np.int8)
  )
  prompts = make_prompts()
  real = np.arange(T)[None, None, :, None] < cached_B[:, None, None, None]
  fill = lambda: kvcache.pack(r.normal(size=(B, 2, T, 8)).astype(np.float32) * real, dtype)  # noqa: E731
  cache = [(fill(), fill()) for _ in range(MODEL.layers)]
  kept = carried_kv.CarriedKV(prompts.index_P, prompts.born_P, cached_B, cache)
  got, rounds, after = resumed(rows, dtype)(params, prompts, begun, kept, 1, 0)
  assert rounds == 0 and (cached_B > 0).sum() > 5
  np.testing.assert_array_equal(got.length_B, begun.length_B)
  jax.tree.map(np.testing.assert_array_equal, after, jax.tree.map(np.asarray, kept))


@functools.cache
def reader():
  """One token of every row through the model, token j in column j: its keys, and the next one's log-probs."""

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
  """Log-probs [B, T] of a rollout, token by token, with keys that stay.

  The weights that sampled a token have read the one before it, and all later ones see their keys.
  """
  prompts = jax.tree.map(jnp.asarray, make_prompts())
  read = [slot_loop.prefill(MODEL, w, prompts, 'float32') for w in weights]
  said = [np.repeat(jax.nn.log_softmax(logits), G, axis=0) for _, logits in read]
  cache = [(np.zeros((B, 2, T, 8), np.float32),) * 2 for _ in range(MODEL.layers)]
  logp_BxT = np.zeros((B, T), np.float32)
  for j in range(T):
    chosen_BxV = np.choose(rollout.version_BxT[:, j, None], said)
    logp_BxT[:, j] = chosen_BxV[np.arange(B), rollout.tokens_BxT[:, j]]
    if j + 1 == T:
      return logp_BxT
    token_B, next_B = rollout.tokens_BxT[:, j], rollout.version_BxT[:, j + 1, None, None, None]
    passes = [reader()(w, prompts, read[v][0], cache, token_B, j) for v, w in enumerate(weights)]
    said = [np.asarray(logp) for logp, _ in passes]
    cache = jax.tree.map(lambda *x, v=next_B: np.choose(v, x), *(c for _, c in passes))


def test_new_weights_see_old_keys_and_record_what_they_say(params):
  """Three sets of weights; rows that wait out the second one keep the keys of the first."""
  weights = [jax.tree.map(lambda x, f=f: x * f, params) for f in (1.0, 0.8, 1.2)]
  begun, _, kept = resumed()(weights[0], make_prompts(), *start(), 0, 4)
  first_B = begun.length_B
  assert (begun.reason_B == UNFINISHED).sum() > 5
  begun, _, kept = resumed(5)(weights[1], make_prompts(), begun, kept, 1, 2)
  waited_B = (begun.reason_B == UNFINISHED) & (begun.length_B == first_B)
  assert waited_B.any()
  got, *_ = resumed(5)(weights[2], make_prompts(), begun, kept, 2, 99)
  assert (got.length_B > first_B)[waited_B].all() and (got.version_BxT == 1).any()
  real_BxT = np.arange(T)[None] < got.length_B[:, None]
  want_BxT = teacher_forced(weights, got)
  np.testing.assert_allclose(got.logp_BxT[real_BxT], want_BxT[real_BxT], atol=2e-5)
  # To one who reads all of it with the last weights, what these said is off-policy.
  last = got._replace(version_BxT=np.full_like(got.version_BxT, 2))
  gap_BxT = np.abs(np.exp(teacher_forced(weights, last)) - np.exp(got.logp_BxT))
  assert gap_BxT[real_BxT & (got.version_BxT == 2)].max() > 0.01


def test_tokens_whose_keys_are_missing_are_read_again(params):
  begun, _, kept = resumed()(params, make_prompts(), *start(), 0, 5)
  other_P = make_prompts().born_P + [0, 0, 1, 0]
  lost = kept._replace(cached_B=np.where(np.arange(B) % 2, kept.cached_B, 0), born_P=other_P)
  got, _, left = resumed(5)(params, make_prompts(), begun, lost, 1, 2)
  assert (left.cached_B + 1 < got.length_B)[left.cached_B > 0].any(), 'one is still on its way'
  got, *_ = resumed(5)(params, make_prompts(), got, left, 1, 99)
  assert_same(got, uninterrupted()(params))


def text_of(params, rows, carry):
  spec = SPEC._replace(max_tokens=128, slots=rows, stop_rule=lambda p: p.iterations >= 3)
  begun, kept = slot_loop.empty_rollout(B, 128), carried_kv.empty(MODEL, spec, P)

  def fn(begun, carried):
    inputs = DecodeInputs(params, make_prompts(), jax.random.key(0), 0, continued=begun)
    if not carry:
      return ring_decode.generate(MODEL, spec, inputs)
    carried = carried_kv.reorder(carried, make_prompts(), G)
    return ring_decode.resume(MODEL, spec, inputs._replace(carried=carried))

  return jax.jit(fn, donate_argnums=1).lower(begun, kept).compile().as_text()


# Whoever encodes 128 tokens at once scores 128 against 128.
ENCODES = re.compile(r'f32\[(?:\d+,)*128,(?:\d+,)*128\b')
HANDS_ON = {'parameter', 'get-tuple-element', 'tuple', 'bitcast', 'while', 'conditional', 'call'}


def test_rows_that_are_not_carried_are_encoded(params):
  """Else the test below this one would prove nothing."""
  assert ENCODES.search(text_of(params, 6, carry=False))


@pytest.mark.parametrize('rows', [0, 6])
def test_nothing_is_encoded_and_caches_are_copied_only_where_a_row_is_seated(params, rows):
  text = text_of(params, rows, carry=True)
  assert not ENCODES.search(text)
  program, dims = hlo.parse(text), [(n, 2, 128, 8) for n in {rows or B, B}]
  loops = [i for c in program.values() for i in c if i.opcode == 'while']
  (loop,) = [i for i in loops if hlo.op_name(i).endswith(f'{ring_decode.LOOP_SCOPE}/while')]
  body = hlo.reachable(program, hlo.attribute(loop, 'body'))

  def made(names):
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
    assert sorted(bool(made(b)) for b in branches) == [False, True]
    body = body.difference(*branches)
  found = made(body)
  assert found.pop('dynamic-update-slice') == 2 * MODEL.layers
  assert found.pop('fusion', 0) <= 2 * MODEL.layers and not found, found  # frames around these


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
  made = make_spec(c, MODEL, (3, 11), sharding.make_mesh(c.mesh, jax.devices()[:devices]))
  return made, programs.compile_sample(made)


def drive(params, lag=0, decay=1.0, **kind):
  """Six calls as the host makes them, groups held `lag` calls late: finished rows, tokens carried, what is left.

  In call i the weights are those at first times decayⁱ. A held group runs beside a later visit to its prompt.
  """
  program, sample = sampler(**kind)
  state, held = (
    train_state.init_state(program, params),
    replay.PartialRollouts(G, max_age=99, shards=P),
  )
  handed, flights, done, tokens = state.carried, [], {}, 0
  for index in range(6):
    fresh = jax.tree.map(lambda x: x[: 2 * P - len(held)], make_prompts(2 * P, born=index))
    prompts, begun = held.begin(fresh, empty_records.empty_rollout(program))
    weights = jax.tree.map(lambda x, f=decay**index: x * f, state.params)
    state = state._replace(carried=())
    asked = prompts, begun, None, np.int32(T)
    rollout, told, handed = sample(state._replace(params=weights), handed, *asked)
    tokens += float(told.get('generate/carried_tokens', 0))
    flights.append((prompts, jax.tree.map(np.asarray, rollout)))
    if len(flights) > lag:
      asked, said = flights.pop(0)
      held.keep(asked, said, index)
      for b in np.flatnonzero(said.reason_B != UNFINISHED):
        name = int(asked.index_P[b // G]), int(asked.born_P[b // G]), int(b % G)
        done[name] = said.tokens_BxT[b], said.logp_BxT[b], said.length_B[b]
  return done, tokens, handed


def assert_same_rows(got, want, atol):
  assert got.keys() == want.keys() and max(n for *_, n in got.values()) > 5
  for name, (tokens_T, logp_T, length) in want.items():
    np.testing.assert_array_equal(got[name][0], tokens_T)
    np.testing.assert_allclose(got[name][1], logp_T, atol=atol)
    assert got[name][2] == length


@pytest.mark.parametrize('mode', ['fused', 'lag'])
def test_a_group_goes_on_with_its_own_cache(params, mode):
  """Same weights: rows are those that are encoded again, in another row than before, a call later with lag."""
  lag = int(mode == 'lag')
  got, tokens, handed = drive(params, lag, mode=mode)
  want, none, _ = drive(params, lag, carry=False)
  assert_same_rows(got, want, 1e-5)
  assert tokens > none == 0 and len(handed) == 1 + lag


def test_eight_devices_carry_what_one_does(params):
  """New weights in every call; two groups on each of four shards, where they go on."""
  one, eight = drive(params, decay=0.95), drive(params, decay=0.95, devices=8)
  assert_same_rows(eight[0], one[0], 1e-4)
  assert eight[1] == one[1] > 0
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), eight[2], one[2])
  assert eight[2][0].cache[0][0].addressable_shards[0].data.shape == (2 * G, 1, T, 8)


@pytest.mark.parametrize('mode', ['lag', 'split'])
def test_a_run_cut_in_two_is_the_whole_one(mode, tmp_path):
  """Bit for bit, under weights that shrink in every step: the checkpoint holds the old keys."""
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
    told = configs.load(path, [f'--config.steps={total}'])
    train.run(told, str(tmp_path / folder))
  rows = tiny_job.rows(tmp_path / 'whole')
  assert tiny_job.rows(tmp_path / 'cut') == rows
  assert min(row['generate/carried_tokens'] for row in rows[4:]) > 0
  for name in (f'rollouts/step_{n:06d}.jsonl' for n in (4, 5)):
    assert (tmp_path / 'cut' / name).read_text() == (tmp_path / 'whole' / name).read_text()


NO_STOP = dict(stop=dict(fn='none'))


@pytest.mark.parametrize(
  'changes, why',
  [
    (NO_STOP, "stop.fn='none': .*; set --config.rollout.stop.fn to a rule such as groups"),
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


def test_without_it_nothing_is_held():
  made = make_spec(config(carry_cache=False), MODEL, (3,), sharding.make_mesh(config().mesh))
  assert made.rollout.carried_calls == 0 and train_state.abstract_state(made).carried == ()
