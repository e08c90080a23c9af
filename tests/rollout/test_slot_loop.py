"""Slots, queue orders, stop rules and continued rows change when a row runs and no token."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_checks
from rollout_checks import assert_same

from jaxrl_llm.models import decoder
from jaxrl_llm.rollout import queue_order, ring_decode, stopping
from jaxrl_llm.rollout import slot_loop as slot
from jaxrl_llm.rollout.decode_records import DecodeInputs, Loops
from jaxrl_llm.types import STOPPED, TRUNCATED, UNFINISHED, ModelConfig, Prompts

MODEL = ModelConfig(
  vocab=24, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_tokens=64
)
P, G, L, T = 6, 4, 7, 13
B = P * G
ORDERS = (queue_order.fifo, queue_order.longest_first, queue_order.probe_then_longest)


@pytest.fixture(scope='module')
def params():
  return jax.tree.map(lambda x: x * 1.5, decoder.init(MODEL, 0))


@pytest.fixture(scope='module')
def uninterrupted(params):
  """A slot for every row, without interruption."""
  return run(params)[0]


def make_prompts():
  r = np.random.default_rng(0)
  length_P = r.integers(1, L + 1, P).astype(np.int32)
  tokens_PxL = r.integers(0, 24, (P, L)).astype(np.int32)
  expected_P = np.array([3, 0, 9, 5, 1, 12], np.float32)
  return Prompts(tokens_PxL, length_P, np.arange(P, dtype=np.int32) * 7, np.full(P, 2), expected_P)


def run(
  params,
  continued=None,
  *,
  cap=None,
  version=4,
  stop_after=None,
  pause=None,
  member_B=None,
  **changes,
):
  """`stop_after`: decode iterations before a rule stops. The named arguments and the order cause no compilation."""
  rank = ORDERS.index(changes.pop('queue_order', queue_order.fifo))
  more = dict(continued=continued, cap=cap, pause=pause, member_B=member_B)
  fn = compiled(**dict(slots=0) | changes)
  rollout, iterations = fn(params, make_prompts(), more, version, rank, stop_after)
  return jax.tree.map(np.asarray, rollout), int(iterations)


@functools.cache
def compiled(**changes):
  spec = ring_decode.DecodeSettings(G, T, 1.0, (3, 11), 'float32')._replace(**changes)

  @jax.jit
  def fn(params, prompts, more, version, rank, stop_after):
    ranked = spec._replace(queue_order=lambda progress: jax.lax.switch(rank, ORDERS, progress))
    if stop_after is not None:
      ranked = ranked._replace(stop_rule=functools.partial(stopping.rounds, count=stop_after))
    inputs = DecodeInputs(params, prompts, jax.random.key(1), version, **more)
    return ring_decode.generate(MODEL, ranked, inputs)

  return fn


def test_rows_of_this_test_end_early_late_and_never(uninterrupted):
  assert len(set(uninterrupted.length_B.tolist())) > 5
  assert {STOPPED, TRUNCATED} == set(uninterrupted.reason_B.tolist())


@pytest.mark.parametrize('fn', ORDERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize('slots', [4, 6, 24])
def test_tokens_do_not_depend_on_slots_or_order(params, uninterrupted, slots, fn):
  got, iterations = run(params, slots=slots, queue_order=fn)
  assert_same(got, uninterrupted)
  # A row's first token is sampled from its prompt, the others in the loop.
  needed = (uninterrupted.length_B - 1).sum()
  assert -(-needed // slots) <= iterations <= needed / slots + T


@pytest.mark.parametrize('fn', ORDERS, ids=lambda f: f.__name__)
def test_one_slot_takes_rows_in_the_queue_order(params, fn):
  """After two thirds of the iterations, with rows of equal length: the finished rows are those that went first."""
  got, iterations = run(params, slots=1, queue_order=fn, end_ids=(), cap=5, stop_after=4 * 8)
  assert iterations == 32
  # An unknown length counts as the cap, 5. Longest expected first, ties in their order.
  ranked = sorted(range(P), key=lambda p: -(make_prompts().expected_P[p] or 5))
  first = {
    'fifo': range(8),
    'longest_first': [p * G + g for p in ranked[:2] for g in range(G)],
    'probe_then_longest': [p * G for p in range(P)] + [1, 2],
  }[fn.__name__]
  assert np.flatnonzero(got.length_B == 5).tolist() == sorted(first)


def test_after_the_probe_the_longest_groups_go_first():
  length_B, finished_B = np.zeros(B, np.int32), np.zeros(B, bool)
  length_B[::G], finished_B[::G] = [4, 9, 2, 13, 5, 6], [True, True, True, True, False, True]
  score_B = queue_order.probe_then_longest(
    queue_order.Progress(0, 0, length_B, finished_B, np.full(B, T), np.zeros(P))
  )
  others = np.asarray(score_B).reshape(P, G)[:, 1:]
  assert others.tolist() == [[s] * 3 for s in [4, 9, 2, 13, T, 6]]  # 4: unfinished, so the cap


@pytest.mark.parametrize('slots', [0, 5])
def test_continued_rows_equal_uninterrupted_ones(params, uninterrupted, slots):
  """Stopped every three iterations and continued, with unchanged weights, until every row has finished."""
  continued, calls = empty(), 0
  while (continued.reason_B == UNFINISHED).any():
    continued, iterations = run(params, continued, version=calls, slots=slots, stop_after=3)
    assert iterations <= 3
    calls += 1
    assert calls < 60
  assert calls > 3
  assert_same(continued, uninterrupted)
  real = np.arange(T)[None] < continued.length_B[:, None]
  steps = np.where(real, continued.version_BxT, -1)
  assert steps.max() == calls - 1
  assert (np.diff(continued.version_BxT, axis=1)[real[:, 1:]] >= 0).all()


def test_a_waiting_row_with_many_tokens_is_decoded_again(params, uninterrupted):
  """More continued rows than slots: rows that are not encoded at the start end with the same tokens."""
  continued, _ = run(params, empty(), slots=0, stop_after=6)
  assert ((continued.reason_B == UNFINISHED) & (continued.length_B > 4)).sum() > 5
  got, _ = run(params, continued, slots=5, version=5, stop_after=999)
  assert_same(got, uninterrupted)


def test_new_weights_continue_old_tokens(params, uninterrupted):
  continued, _ = run(params, empty(), slots=0, stop_after=4)
  other = jax.tree.map(lambda x: x * 0.9, params)
  got, _ = run(other, continued, version=5, slots=5, stop_after=999)
  want = rescored(other, got)
  for b in range(B):
    old = continued.length_B[b]
    np.testing.assert_array_equal(got.tokens_BxT[b, :old], uninterrupted.tokens_BxT[b, :old])
    np.testing.assert_array_equal(got.logp_BxT[b, :old], continued.logp_BxT[b, :old])
    new = slice(old, got.length_B[b])
    assert (got.version_BxT[b, new] == 5).all() and (got.version_BxT[b, :old] == 4).all()
    np.testing.assert_allclose(got.logp_BxT[b, new], want[b, new], atol=5e-5)
  assert (got.tokens_BxT != uninterrupted.tokens_BxT).any()


def empty():
  return jax.tree.map(np.asarray, slot.empty_rollout(B, T))


def rescored(params, rollout):
  return rollout_checks.rescored(MODEL, params, make_prompts(), rollout)


@pytest.mark.parametrize('slots', [0, 3])
def test_recorded_log_prob_is_the_teacher_forced_one(params, slots):
  got, _ = run(params, slots=slots)
  real = np.arange(T)[None] < got.length_B[:, None]
  np.testing.assert_allclose(got.logp_BxT[real], rescored(params, got)[real], atol=5e-5)


def test_a_cap_is_traced_and_compiles_once(params, uninterrupted):
  spec = ring_decode.DecodeSettings(G, T, 1.0, (3, 11), 'float32', slots=5)
  key = jax.random.key(1)
  traces = []

  @jax.jit
  def fn(params, prompts, cap):
    traces.append(cap)
    return ring_decode.generate(MODEL, spec, DecodeInputs(params, prompts, key, 4, cap=cap))[0]

  for cap in (1, 4, T, 99):
    got = fn(params, make_prompts(), jnp.int32(cap))
    np.testing.assert_array_equal(got.length_B, np.minimum(uninterrupted.length_B, cap))
    cut = np.arange(T)[None] < cap
    np.testing.assert_array_equal(got.tokens_BxT, np.where(cut, uninterrupted.tokens_BxT, 0))
  assert len(traces) == 1
  cap_B = np.arange(B) % T + 1
  got = run(params, cap=cap_B)[0]
  np.testing.assert_array_equal(got.length_B, np.minimum(uninterrupted.length_B, cap_B))
  long = uninterrupted.length_B > cap_B
  assert (got.reason_B[long] == TRUNCATED).all() and long.any()


@pytest.mark.parametrize('slots', [0, 5])
def test_a_growing_ring_samples_the_same_tokens(params, uninterrupted, slots):
  """Rings of 4, 7 and 13 columns, grown while rows of all ages are in the slots."""
  got, iterations = run(params, slots=slots, loops=Loops(windows=3))
  assert_same(got, uninterrupted)
  assert iterations == run(params, slots=slots)[1]


def test_a_ring_grows_at_any_column(params, uninterrupted):
  """Short rows go first, so the row that outgrows the ring starts at an arbitrary column of it."""
  cap_B = np.where(np.arange(B) < 7, np.arange(B) % 3 + 2, T)
  got, _ = run(params, cap=cap_B, slots=3, loops=Loops(windows=2))
  assert_same(got, run(params, cap=cap_B, slots=3)[0])
  assert (got.length_B[7:] == uninterrupted.length_B[7:]).all() and got.length_B.max() == T


def test_short_rows_never_leave_the_narrow_ring(params):
  """Rows that end within 4 tokens: wider rings are created after all rows have ended, and not decoded with."""
  spec = ring_decode.DecodeSettings(G, 64, 1.0, (3, 11), 'float32', loops=Loops(windows=5), slots=6)
  widths = []
  real = decoder.apply
  ring_decode.decoder.apply, key = _spy(real, widths), jax.random.key(1)
  try:
    out = jax.jit(
      lambda p, q, c: ring_decode.generate(MODEL, spec, DecodeInputs(p, q, key, 4, cap=c))
    )(params, make_prompts(), jnp.int32(4))
  finally:
    ring_decode.decoder.apply = real
  assert sorted(set(widths)) == [4, 8, 16, 32, 64]
  assert out[0].length_B.max() == 4
  # Every row of at most 4 tokens fits the ring of 4: no other loop ran.
  alone = jax.jit(
    lambda p, q, c: ring_decode.generate(
      MODEL, spec._replace(loops=Loops(), max_tokens=4), DecodeInputs(p, q, key, 4, cap=c)
    )
  )(params, make_prompts(), jnp.int32(4))
  assert out[1] == alone[1]


def _spy(real, widths):
  def apply(*args, cache=None, **more):
    if cache is not None:
      widths.append(cache[0][0].shape[2])
    return real(*args, cache=cache, **more)

  return apply


@pytest.mark.parametrize('slots', [0, 5])
def test_testing_for_the_end_less_often_changes_no_token(params, uninterrupted, slots):
  got, iterations = run(params, slots=slots, loops=Loops(windows=2, test_every=4))
  assert_same(got, uninterrupted)
  assert iterations % 4 == 0 and iterations - run(params, slots=slots)[1] < 2 * 4


def test_paused_rows_continue_as_their_members(params, uninterrupted):
  """All rows run to 4 tokens, then half of each group to the end, each with its member number."""
  paused, _ = run(params, pause=4)
  assert paused.length_B.max() == 4
  assert ((paused.reason_B == UNFINISHED) == (uninterrupted.length_B > 4)).all()
  member = np.array([[0, 2], [1, 3], [2, 3], [0, 1], [1, 2], [0, 3]])
  row_B = (np.arange(P)[:, None] * G + member).reshape(-1)
  continued = jax.tree.map(lambda x: x[row_B], paused)
  got, _ = run(params, continued, rollouts=2, member_B=member.reshape(-1))
  assert_same(got, jax.tree.map(lambda x: x[row_B], uninterrupted))


@pytest.mark.parametrize('dtype,error', [('bfloat16', 0.005), ('int8', 0.01)])
def test_a_smaller_cache_differs_by_rounding_only(params, dtype, error):
  """The rounding does not depend on slot or ring, and is small on average."""
  got, _ = run(params, cache_dtype=dtype)
  # Where float32 sums differ in their last bit, a cached value may round to its neighbor: 3.5e-5 seen with bfloat16.
  assert_same(run(params, slots=5, cache_dtype=dtype, loops=Loops(windows=2))[0], got, atol=3e-4)
  real = np.arange(T)[None] < got.length_B[:, None]
  gap_BxT = np.abs(np.exp(got.logp_BxT) - np.exp(rescored(params, got)))
  assert 1e-5 < gap_BxT[real].mean() < error


def test_stop_rules_stop_at_their_condition(params, uninterrupted):
  half, iterations = run(params, slots=6, stop_rule=lambda p: stopping.groups(p, fraction=0.5))
  done_P = (half.reason_B != UNFINISHED).reshape(P, G).all(1)
  assert done_P.sum() >= 3
  before, _ = run(params, slots=6, stop_after=iterations - 1)
  assert (before.reason_B != UNFINISHED).reshape(P, G).all(1).sum() < 3
  some, _ = run(params, slots=6, stop_rule=lambda p: stopping.tokens(p, per_row=3.0))
  assert 3 * B <= some.length_B.sum() < 3 * B + 6
  more, _ = run(params, some, slots=6, stop_rule=lambda p: stopping.tokens(p, per_row=1.0))
  assert B <= more.length_B.sum() - some.length_B.sum() < B + 6, 'the budget is per call'


@pytest.mark.parametrize('slots', [0, 6])
def test_caches_are_written_in_place_and_never_copied(params, slots):
  """Only updates of one column create arrays of a cache's shape in the compiled program."""
  spec = ring_decode.DecodeSettings(G, 128, 1.0, (3,), 'float32', slots=slots)
  fn = jax.jit(
    lambda p, q: ring_decode.generate(MODEL, spec, DecodeInputs(p, q, jax.random.key(0), 0))[0]
  )
  text = fn.lower(params, make_prompts()).compile().as_text()
  shape = f'f32[{slots or B},{MODEL.kv_heads},128,{MODEL.head_dim}]'
  rollout_checks.assert_written_in_place(text, shape, 2 * MODEL.layers)


N, SLOTS, LONG = 512, 64, 512


def lengths():
  """Log-normal, half of the log's variance shared by the group of 8, cut at 512 tokens."""
  r = np.random.default_rng(0)
  log = np.repeat(r.normal(size=N // 8), 8) * 0.7 + r.normal(size=N) * 0.7
  return np.clip(np.exp(4.2 + log), 2, LONG).astype(np.int32)


def simulated(length_B, fn):
  """Decode iterations of the same queue in plain Python: a row takes its length minus one of them."""
  P8, needed_B = N // 8, length_B - 1
  waiting, running, iterations = set(range(N)), {}, 0
  finished_B = np.zeros(N, bool)
  while waiting or running:
    if waiting and len(running) < SLOTS:
      known_B = np.where(finished_B, length_B, 0)
      score = np.asarray(
        fn(queue_order.Progress(0, 0, known_B, finished_B, np.full(N, LONG), np.zeros(P8)))
      )
      for b in sorted(waiting, key=lambda b: (-score[b], b))[: SLOTS - len(running)]:
        waiting.remove(b)
        running[b] = iterations + needed_B[b]
    iterations = min(running.values())
    for b in [b for b, end in running.items() if end == iterations]:
      del running[b]
      finished_B[b] = True
  return iterations


@pytest.mark.parametrize(
  'fn', [queue_order.fifo, queue_order.probe_then_longest], ids=lambda f: f.__name__
)
def test_iterations_over_the_ideal_are_those_of_a_simulation(fn):
  """512 rows of long-tailed, group-correlated lengths in 64 slots; in the real loop caps set the lengths."""
  model = ModelConfig(
    vocab=8, width=4, layers=1, heads=1, kv_heads=1, head_dim=4, mlp=4, max_tokens=1024
  )
  spec = ring_decode.DecodeSettings(8, LONG, 1.0, (), 'float32', slots=SLOTS, queue_order=fn)
  P8 = N // 8
  zeros = np.zeros(P8, np.int32)
  prompts = Prompts(np.ones((P8, 1), np.int32), zeros + 1, zeros, zeros, np.zeros(P8, np.float32))
  length_B = lengths()
  # Caps set the ends here, so probes and bounds get the largest length instead of them.
  blind = spec._replace(queue_order=lambda p: fn(p._replace(cap_B=jnp.full(N, LONG))))
  run = jax.jit(
    lambda params, cap: ring_decode.generate(
      model, blind, DecodeInputs(params, prompts, jax.random.key(0), 0, cap=cap)
    )
  )
  rollout, iterations = run(decoder.init(model, 0), length_B)
  np.testing.assert_array_equal(rollout.length_B, length_B)
  want, ideal = simulated(length_B, fn), (length_B - 1).sum() / SLOTS
  static = sum((length_B[i : i + SLOTS] - 1).max() for i in range(0, N, SLOTS))
  print(
    f'{fn.__name__}: {iterations / ideal:.3f} of the ideal, simulated {want / ideal:.3f}, static {static / ideal:.2f}'
  )
  assert iterations == pytest.approx(want, rel=0.05)
  assert want < static
