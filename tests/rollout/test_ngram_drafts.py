"""Drafts from the group's text: the same tokens in fewer decode iterations."""

from __future__ import annotations

import collections
import functools
import re

import jax
import numpy as np
import pytest
import quick
import rollout_checks
from scipy import stats

from jaxrl_llm import step as steps
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import decoder
from jaxrl_llm.rollout import ngram_drafts, queue_order, ring_decode, stopping
from jaxrl_llm.rollout.decode_records import DecodeInputs
from jaxrl_llm.runner import validate
from jaxrl_llm.types import STOPPED, TRUNCATED, UNFINISHED, ModelConfig, Prompts, UserError

MODEL = ModelConfig(
  vocab=24, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_tokens=64
)
P, G, L, T = 6, 4, 7, 17
B = P * G


@pytest.fixture(scope='module')
def params():
  """Sharp logits from small weights: siblings repeat each other often, but not always."""
  params = jax.tree.map(lambda x: x * 1.5, decoder.init(MODEL, 0))
  params['norm']['scale'] = params['norm']['scale'] * 4.0
  return params


@pytest.fixture(scope='module')
def plain(params):
  """A slot for every row, without drafts."""
  return run(params)[0]


def make_prompts():
  r = np.random.default_rng(0)
  length_P = r.integers(1, L + 1, P).astype(np.int32)
  tokens_PxL = r.integers(0, 24, (P, L)).astype(np.int32)
  expected_P = np.array([3, 0, 9, 5, 1, 12], np.float32)
  return Prompts(tokens_PxL, length_P, np.arange(P, dtype=np.int32) * 7, np.full(P, 2), expected_P)


@functools.lru_cache
def compiled(spec, draft, match):
  """The ring loop without a draft, else the loop with drafts."""

  @jax.jit
  def fn(params, prompts, version, continued, cap):
    inputs = DecodeInputs(params, prompts, jax.random.key(1), version, continued=continued, cap=cap)
    if not draft:
      return *ring_decode.generate(MODEL, spec, inputs), None
    return ngram_drafts.generate(MODEL, spec, inputs, ngram_drafts.NgramSettings(match, draft))

  return fn


def run(params, draft=0, continued=None, cap=None, match=3, **changes):
  """Rollout, iterations and, with a draft, counts."""
  fn = compiled(
    ring_decode.DecodeSettings(G, T, 1.0, (3, 11), 'float32')._replace(**changes), draft, match
  )
  return jax.tree.map(np.asarray, fn(params, make_prompts(), 4, continued, cap))


def assert_same(got, want):
  rollout_checks.assert_same(got, want, atol=1e-4)
  np.testing.assert_array_equal(got.version_BxT, want.version_BxT)


def test_rows_of_this_test_end_early_late_and_never(plain):
  assert len(set(plain.length_B.tolist())) > 5
  assert {STOPPED, TRUNCATED} == set(plain.reason_B.tolist())


@pytest.mark.parametrize('temperature', [1.0, 0.0])
@pytest.mark.parametrize(
  'draft, match, slots, fn',
  [
    (1, 3, 0, queue_order.fifo),
    (4, 3, 0, queue_order.fifo),
    (8, 2, 6, queue_order.probe_then_longest),
    (3, 1, 5, queue_order.longest_first),
  ],
)
def test_drafts_change_no_token(params, plain, temperature, draft, match, slots, fn):
  want = plain if temperature else run(params, temperature=0.0)[0]
  changes = dict(temperature=temperature, slots=slots, queue_order=fn)
  got, iterations, counts = run(params, draft, match=match, **changes)
  assert_same(got, want)
  # A row's first token comes from its prompt; a turn samples one token and accepts some of its draft.
  assert counts.turns + counts.kept == (want.length_B - 1).sum()
  assert counts.kept < counts.offered <= counts.turns * draft, 'some drafts must be rejected'
  assert counts.kept > 4 and counts.turns <= iterations * (slots or B)


def test_caps_cut_within_a_draft_and_compile_once(params, plain):
  for cap_B in (np.full(B, 1), np.full(B, 4), np.arange(B) % T + 1):
    got = run(params, 5, cap=cap_B.astype(np.int32), slots=4)[0]
    np.testing.assert_array_equal(got.length_B, np.minimum(plain.length_B, cap_B))
    cut = np.arange(T)[None] < cap_B[:, None]
    np.testing.assert_array_equal(got.tokens_BxT, np.where(cut, plain.tokens_BxT, 0))
    np.testing.assert_allclose(got.logp_BxT, np.where(cut, plain.logp_BxT, 0), atol=1e-4)
    long = plain.length_B > cap_B
    assert (got.reason_B[long] == TRUNCATED).all() and long.any()
  spec = ring_decode.DecodeSettings(G, T, 1.0, (3, 11), 'float32', slots=4)
  assert compiled(spec, 5, 3)._cache_size() == 1


@pytest.mark.parametrize('slots', [0, 5])
def test_continued_rows_equal_uninterrupted_ones(params, plain, slots):
  """Stopped every two iterations and continued until every row has finished; waiting rows decode their tokens again."""
  continued, calls, stop = None, 0, lambda p: stopping.rounds(p, count=2)
  while continued is None or (continued.reason_B == UNFINISHED).any():
    continued, iterations, _ = run(params, 3, continued, slots=slots, stop_rule=stop)
    assert iterations <= 2
    calls += 1
    assert calls < 60
  assert calls > 3
  assert_same(continued, plain)


def test_waiting_rows_decode_many_known_tokens_per_iteration(params, plain):
  half, _, _ = run(params, stop_rule=lambda p: stopping.rounds(p, count=8))
  unfinished = half.reason_B == UNFINISHED
  assert (unfinished & (half.length_B > 8)).sum() > 6
  got, iterations, counts = run(params, 4, half, slots=1)
  assert_same(got, plain)
  assert counts.turns + counts.kept == (plain.length_B - half.length_B).sum()
  # The longest is encoded before the loop; the others read five tokens per iteration until they sample.
  waiting = np.sort(half.length_B[unfinished])[:-1]
  assert iterations == counts.turns + ((waiting - 1) // 5).sum()


def test_a_budget_of_tokens_is_exceeded_by_at_most_the_drafts(params, plain):
  stop = lambda p: stopping.tokens(p, per_row=4.0)  # noqa: E731
  some, _, counts = run(params, 3, slots=6, stop_rule=stop)
  assert counts.kept > 0
  assert 4 * B <= some.length_B.sum() < 4 * B + 6 * 4
  real = np.arange(T)[None] < some.length_B[:, None]
  np.testing.assert_array_equal(some.tokens_BxT, np.where(real, plain.tokens_BxT, 0))


def test_recorded_log_prob_is_the_teacher_forced_one(params):
  prompts = make_prompts()
  got, _, counts = run(params, 4, slots=6, temperature=0.8)
  assert counts.kept > 20
  rows = np.zeros((B, L + T), np.int32)
  start_B = np.repeat(prompts.length_P, G)
  for row, b in zip(rows, range(B), strict=True):
    row[: start_B[b]] = prompts.tokens_PxL[b // G, : start_B[b]]
    row[start_B[b] :][:T] = got.tokens_BxT[b]
  logits = jax.jit(lambda p: decoder.forward(MODEL, p, rows, np.ones(rows.shape, bool)))(params)
  place_BxT = np.minimum(start_B[:, None] + np.arange(T)[None], L + T - 1)
  logp = np.asarray(jax.nn.log_softmax(logits / 0.8))
  logp = logp[np.arange(B)[:, None], place_BxT - 1, got.tokens_BxT]
  real = np.arange(T)[None] < got.length_B[:, None]
  np.testing.assert_allclose(got.logp_BxT, np.where(real, logp, 0), atol=1e-4)


def searched(tokens_BxT, length_B, row, rollouts, match, draft):
  """The search in plain Python."""
  group = range(row // rollouts * rollouts, (row // rollouts + 1) * rollouts)
  texts = {g: [-1] * match + tokens_BxT[g, : length_B[g]].tolist() for g in group}
  best = (0, 0, 0, 0), []
  for g, text in texts.items():
    for end in range(match, len(text)):
      shared = 0
      while shared < match and text[end - 1 - shared] == texts[row][-1 - shared]:
        shared += 1
      follow = text[end : end + draft]
      best = max(best, ((shared, len(follow), end, -g), follow), key=lambda x: x[0])
  follow = best[1] if best[0][0] else []
  return follow + [-1] * (draft - len(follow))


@pytest.mark.parametrize('match, draft, vocab', [(1, 3, 4), (2, 4, 3), (3, 1, 2), (5, 9, 2)])
def test_drafts_equal_those_of_a_search_in_plain_python(match, draft, vocab):
  r = np.random.default_rng(match)
  found = jax.jit(
    lambda *x: ngram_drafts.find_drafts(
      *x, G, ngram_drafts.NgramSettings(match, draft)
    )  # fixed shapes: one compile
  )
  for _ in range(20):
    length_B = r.integers(1, T + 1, B).astype(np.int32)
    # Tokens behind the end of a row are arbitrary.
    tokens_BxT = r.integers(0, vocab, (B, T)).astype(np.int32)
    row_S = r.permutation(B)[: B // 2].astype(np.int32)
    want = [searched(tokens_BxT, length_B, b, G, match, draft) for b in row_S]
    np.testing.assert_array_equal(found(tokens_BxT, length_B, row_S), want)


def test_repeated_siblings_take_one_iteration_per_draft(params):
  """Greedy with one slot: rollout 0 of a prompt is decoded first, the others take one iteration per γ + 1 tokens."""
  settings = dict(temperature=0.0, slots=1, end_ids=(), max_tokens=33)
  want, iterations, _ = run(params, **settings)
  got, fewer, counts = run(params, 7, match=8, **settings)
  assert_same(got, want)
  assert iterations == P * G * 32
  assert fewer <= P * (32 + (G - 1) * 32 // 8)
  assert counts.turns == fewer and counts.turns + counts.kept == iterations


def test_drafted_tokens_have_the_distribution_of_the_policy():
  """Chi-square of all sequences of four tokens over 6000 rows; three rollouts in four have drafts."""
  V, prompts, length = 4, 1500, 4
  model = ModelConfig(
    vocab=V, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp=24, max_tokens=64
  )
  params = jax.tree.map(lambda x: x * 1.2, decoder.init(model, 0))
  zeros = np.zeros(prompts, np.int32)
  prompts_P = Prompts(
    np.full((prompts, 2), 1, np.int32), zeros + 2, np.arange(prompts), zeros, zeros * 1.0
  )
  spec = ring_decode.DecodeSettings(
    G, length, 1.0, (), 'float32', slots=prompts, queue_order=queue_order.probe_then_longest
  )
  key, settings = jax.random.key(3), ngram_drafts.NgramSettings(2, 3)
  fn = jax.jit(
    lambda p: ngram_drafts.generate(model, spec, DecodeInputs(p, prompts_P, key, 0), settings)
  )
  got, _, counts = jax.tree.map(np.asarray, fn(params))
  assert 3000 < counts.kept < 0.5 * counts.offered, (
    'drafts must be accepted often, and rejected often'
  )
  every = np.stack(np.unravel_index(np.arange(V**length), [V] * length), axis=1)
  rows = np.concatenate([np.full((len(every), 2), 1), every], axis=1)
  logits = decoder.forward(model, params, rows, np.ones(rows.shape, bool))[:, 1:-1]
  logp = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits), np.float64), every[..., None], 2)
  wanted = np.exp(logp.sum((1, 2))) * prompts * G
  number_B = np.ravel_multi_index(tuple(got.tokens_BxT.T), [V] * length)
  observed, big = np.bincount(number_B, minlength=V**length), wanted >= 5
  observed, wanted = (
    np.append(observed[big], observed[~big].sum()),
    np.append(wanted[big], wanted[~big].sum()),
  )
  assert big.sum() > 50
  assert stats.chisquare(observed, wanted / wanted.sum() * prompts * G).pvalue > 1e-3


@pytest.mark.parametrize('slots', [0, 6])
def test_caches_are_written_in_place_and_never_copied(params, slots):
  """Only one update per cache creates an array of its shape in the compiled program."""
  spec, draft = ring_decode.DecodeSettings(G, 128, 1.0, (3,), 'float32', slots=slots), 4
  inputs = lambda p, q: DecodeInputs(p, q, jax.random.key(0), 0)  # noqa: E731
  settings = ngram_drafts.NgramSettings(3, draft)
  fn = jax.jit(lambda p, q: ngram_drafts.generate(MODEL, spec, inputs(p, q), settings)[0])
  text = fn.lower(params, make_prompts()).compile(quick.AS_TRAINED).as_text()
  shape = re.escape(f'f32[{slots or B},{MODEL.kv_heads},{128 + draft},{MODEL.head_dim}]')
  counts = collections.Counter(re.findall(rf'= {shape}\S* ([a-z-]+)\(', text))
  assert counts.pop('scatter') == 2 * MODEL.layers  # rows at different columns
  # Before the loop zeros are one broadcast, copied for each further cache. A fusion wraps either of them.
  assert counts.pop('fusion') <= 2 * MODEL.layers + 1
  assert counts.pop('broadcast') + counts.pop('copy') == 2 * MODEL.layers
  assert set(counts) <= {'parameter', 'get-tuple-element'}, counts


def make_spec_of(draft, devices=1, slots=0, lockstep=True, mesh=None):
  c = configs.default()
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = 8, G, L, T
  c.rollout.ngram.draft, c.rollout.slots, c.rollout.lockstep = draft, slots, lockstep
  c.mesh.update(mesh or {})
  return make_spec(c, MODEL, (3, 11), sharding.make_mesh(c.mesh, jax.devices()[:devices]))


def sampled(step_spec, params):
  r = np.random.default_rng(0)
  length_P, index_P = r.integers(1, L + 1, 8).astype(np.int32), np.arange(8, dtype=np.int32)
  tokens_PxL = r.integers(0, 24, (8, L)).astype(np.int32)
  prompts = Prompts(tokens_PxL, length_P, index_P, index_P * 0, np.zeros(8, np.float32))
  params = train_state.init_state(step_spec, params).params
  fn = jax.jit(lambda p, q: steps.generate(step_spec, train_state.sampling_state(p), q))
  rollout, metrics, _ = fn(params, prompts)
  return jax.tree.map(np.asarray, rollout), {k: float(v) for k, v in metrics.items()}


@pytest.fixture(scope='module')
def one(params):
  """On one device, with a slot for every row."""
  rollout, metrics = sampled(make_spec_of(3), params)
  assert_same(rollout, sampled(make_spec_of(0), params)[0])
  assert metrics['generate/ngram_offered'] > metrics['generate/ngram_kept'] > 0
  return rollout, metrics


def test_one_device_and_eight_draft_the_same(params, one):
  step_spec = make_spec_of(3, 8, mesh=dict(data=2, fsdp=2, tensor=2))
  rollout, metrics = sampled(step_spec, params)
  assert_same(rollout, one[0])
  assert metrics == pytest.approx(one[1])


def test_fewer_slots_on_eight_devices_accept_more_of_their_drafts(params, one):
  """Later rows have more text to search. The loops of the shards end separately here."""
  step_spec = make_spec_of(3, 8, slots=8, lockstep=False, mesh=dict(data=4, fsdp=2, tensor=1))
  rollout, metrics = sampled(step_spec, params)
  assert_same(rollout, one[0])
  share = lambda metrics: metrics['generate/ngram_kept'] / metrics['generate/ngram_turns']  # noqa: E731
  assert share(metrics) > share(one[1])


def test_no_drafts_by_default():
  assert make_spec_of(0).rollout.drafts.ngram is None
  assert make_spec_of(4).rollout.drafts.ngram == ngram_drafts.NgramSettings(match=3, draft=4)


@pytest.mark.parametrize(
  'change, why',
  [
    (dict(draft=-1), 'config.rollout.ngram.draft=-1 must be a whole number of at least 0'),
    (dict(match=0), 'config.rollout.ngram.match=0 must be a whole number of at least 1'),
    (dict(draft=16), 'config.rollout.ngram.draft=16 must be below config.completion_tokens=16'),
  ],
)
def test_settings_out_of_range_raise_user_errors(change, why):
  c = configs.default()
  c.rollout.ngram.update(change)
  with pytest.raises(UserError, match=why):
    validate.validate(c)
