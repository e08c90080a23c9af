"""Exit rules: which rows they end, when, and that other rows do not change."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_checks import assert_same

from jaxrl_llm import step as steps
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import empty_records
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import decoder
from jaxrl_llm.replay import PartialRollouts
from jaxrl_llm.rollout import early_exit, ring_decode, text_automaton
from jaxrl_llm.rollout.decode_records import DecodeInputs
from jaxrl_llm.types import ABORTED, EXITED, STOPPED, UNFINISHED, ModelConfig, Prompts

V, P, G, T = 6, 12, 8, 24
B = P * G
MODEL = ModelConfig(
  vocab=V, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp=24, max_tokens=64
)
TEXTS = ['', 'a', 'b', 'ab', 'ca', 'ba']


@pytest.fixture(scope='module')
def params():
  return jax.tree.map(lambda x: x * 2.5, decoder.init(MODEL, 0))


def run(params, *args, **kwargs):
  return next(runs(params, *args, **kwargs))


def runs(params, rule=None, slots=0, end_ids=(), pauses=()):
  """A rollout for each of `pauses`: decoding pauses when rows have so many tokens, and continues from there."""
  ones = np.ones(P, np.int32)
  prompts = Prompts(
    np.arange(P, dtype=np.int32)[:, None] % V,
    ones,
    ones * 3 + np.arange(P),
    ones,
    np.zeros(P, np.float32),
  )
  spec = ring_decode.DecodeSettings(G, T, 1.0, end_ids, 'float32', slots=slots, exit_rule=rule)

  @jax.jit
  def decode(p, begun, pause):
    inputs = DecodeInputs(p, prompts, jax.random.key(0), 1, continued=begun, pause=pause)
    return ring_decode.generate(MODEL, spec, inputs)[0]

  for stops in pauses or [()]:
    rollout = None
    for pause in (*stops, T + 1):
      rollout = jax.tree.map(np.asarray, decode(params, rollout, pause))
    yield rollout


@pytest.fixture(scope='module')
def free(params):
  return run(params)


def check(got, free, ends):
  """Rows end at `ends` (T without an exit); their tokens until then are unchanged."""
  np.testing.assert_array_equal(got.length_B, ends)
  assert 0 < (ends < T).sum() < B
  for b in range(B):
    np.testing.assert_array_equal(got.tokens_BxT[b, : ends[b]], free.tokens_BxT[b, : ends[b]])


def first(flags, default=T):
  """The number of tokens when a flag first holds."""
  return next((n for n, flag in flags if flag), default)


@pytest.mark.parametrize('slots', [0, 7])
def test_repetition_ends_a_row_at_the_token_that_completes_it(params, free, slots):
  def repeats(y, n):
    return any(
      n >= 3 * p and all(y[n - 1 - i] == y[n - 1 - i - p] for i in range(2 * p)) for p in (1, 2)
    )

  got = run(params, functools.partial(early_exit.repetition, period=2, times=3), slots)
  ends = [first((n, repeats(y, n)) for n in range(2, T + 1)) for y in free.tokens_BxT]
  check(got, free, np.array(ends))
  assert (got.reason_B[got.length_B < T] == EXITED).all()


def test_entropy_ends_a_row_when_its_running_mean_is_too_high(params, free):
  means_BxT = np.zeros((B, T))
  for b in range(B):
    tokens = np.concatenate([[b // G % V], free.tokens_BxT[b]])[None]
    logp = jax.nn.log_softmax(decoder.forward(MODEL, params, tokens, np.ones_like(tokens, bool)))[0]
    entropy, mean = np.asarray(-(jnp.exp(logp) * logp).sum(-1)), 0.0
    for t in range(
      1, T
    ):  # token t is drawn from what position t says; the rule runs at it in its t-th call
      mean = 0.8 * mean + 0.2 * entropy[t]
      means_BxT[b, t] = mean / (1 - 0.8**t) if t >= 4 else 0
  high = float(np.median(means_BxT.max(1)))
  got = run(
    params, functools.partial(early_exit.entropy, high=high, decay=0.8, least_tokens=4), slots=9
  )
  over = means_BxT > high
  check(got, free, np.where(over.any(1), over.argmax(1) + 1, T))


def test_the_table_finds_a_text_however_it_is_cut(free):
  table = text_automaton.build_table(TEXTS, 'aba')
  for y in free.tokens_BxT:
    state = 0
    for n in range(T):
      state = table[state, y[n]]
      text = ''.join(TEXTS[t] for t in y[: n + 1])
      if 'aba' in text:
        assert state == 3
      else:
        assert state == max(k for k in range(3) if text.endswith('aba'[:k]))


@pytest.mark.parametrize('slots', [0, 7])
def test_marker_aborts_rows_without_it_and_ends_sure_rows_with_it(params, free, slots):
  table = jnp.asarray(text_automaton.build_table(TEXTS, 'aba'))
  rule = functools.partial(
    early_exit.marker,
    text='aba',
    table=table,
    start=0.25,
    deadline=0.5,
    abort=0.6,
    margin=0.2,
    streak=2,
  )
  got = run(params, rule, slots)
  has = np.array(['aba' in ''.join(TEXTS[t] for t in y[: T // 2]) for y in free.tokens_BxT])
  aborted = got.reason_B == ABORTED
  assert (got.length_B[aborted] == T // 2).all() and not has[aborted].any()
  spared = ~has & ~aborted
  assert aborted.sum() / (~has).sum() == pytest.approx(0.6, abs=0.2) and spared.any()
  np.testing.assert_allclose(got.weight_B, np.where(spared, 1 / 0.4, 1.0), rtol=1e-5)
  exited = got.reason_B == EXITED
  assert exited.any()
  for b in np.flatnonzero(exited):
    n = got.length_B[b]
    assert n >= T // 4 and 'aba' in ''.join(TEXTS[t] for t in got.tokens_BxT[b, : n - 1])
  # Weights 1/(1 − abort) for spared rows and 0 for aborted ones leave sums unbiased.
  assert got.weight_B[~aborted].sum() == pytest.approx(B, rel=0.15)


def test_the_coin_of_the_marker_keeps_every_length_possible(params):
  """One coin per token: with ignore=0 rows exit at once, with ignore=1 never, in between later."""
  table = jnp.asarray(text_automaton.build_table(TEXTS, 'aba'))
  rule = functools.partial(
    early_exit.marker, text='aba', table=table, start=0.25, abort=0.0, margin=0.2, streak=2
  )
  never, always, half = (
    run(params, functools.partial(rule, ignore=ignore)) for ignore in (0.0, 1.0, 0.5)
  )
  ends = never.reason_B == EXITED
  assert ends.sum() > 20 and not (always.reason_B == EXITED).any()
  later = half.length_B - never.length_B
  assert (later >= 0).all() and len(np.unique(later[ends])) > 3
  assert (later[ends] > 0).mean() == pytest.approx(0.5, abs=0.2)


def test_a_row_that_ends_by_itself_does_not_exit(params):
  """Every row exits at its 5th token, except rows whose 5th token is an end token."""

  def fifth(row):
    return early_exit._decision(row)._replace(exit_S=row.length_S == 5)

  got = run(params, fifth, end_ids=(1, 2))
  at = got.length_B == 5
  ended = np.isin(got.tokens_BxT[:, 4], (1, 2)) & at
  assert ended.any() and (got.reason_B[ended] == STOPPED).all()
  assert (at & ~ended).any() and (got.reason_B[at & ~ended] == EXITED).all()


@pytest.mark.parametrize('slots', [0, B // 4])
def test_text_ends_a_row_with_the_token_that_completes_it(params, free, slots):
  table = jnp.asarray(text_automaton.build_table(TEXTS, 'aba'))
  got = run(params, functools.partial(early_exit.text, text='aba', table=table), slots)
  text_of = lambda b, n: ''.join(TEXTS[t] for t in free.tokens_BxT[b, :n])  # noqa: E731
  ends = np.array([first((n, 'aba' in text_of(b, n)) for n in range(2, T + 1)) for b in range(B)])
  check(got, free, ends)
  assert (got.reason_B[ends < T] == EXITED).all() and (got.weight_B == 1).all()


def test_a_marker_may_begin_with_the_first_token():
  """'a', then 'ba': found when the rule first runs, at the second token."""
  table = jnp.asarray(text_automaton.build_table(TEXTS, 'aba'))
  tokens_SxT = jnp.array([[1, 5, 0], [2, 5, 0]])
  two, zeros = jnp.full(2, 2), jnp.zeros((2, early_exit.MEMORY_SIZE))
  row = early_exit.RowSignals(tokens_SxT, two, two + 2, *jnp.zeros((2, 2)), jnp.full(2, 0.5), zeros)
  decision = early_exit.marker(row, text='aba', table=table, deadline=0.5, abort=0.9)
  assert decision.memory_SxM[:, 0].tolist() == [3, 1]
  assert decision.abort_S.tolist() == [False, True]


MARKER = dict(text='aba', start=0.25, deadline=0.5, abort=0.6, margin=0.2, streak=2)
RULES = dict(
  text=functools.partial(early_exit.text, text='aba'),
  marker=functools.partial(early_exit.marker, **MARKER),
  late_marker=functools.partial(early_exit.marker, **MARKER | dict(deadline=0.9, streak=3)),
  entropy=functools.partial(early_exit.entropy, high=0.5, decay=0.8, least_tokens=4),
  repetition=functools.partial(early_exit.repetition, period=2, times=3),
)


def rule_of(name):
  rule = RULES[name]
  if 'text' in rule.keywords:
    rule = functools.partial(rule, table=jnp.asarray(text_automaton.build_table(TEXTS, 'aba')))
  return rule


@pytest.mark.parametrize('slots', [0, 7])
@pytest.mark.parametrize('name', RULES)
def test_the_memory_of_a_rule_survives_a_pause(params, name, slots):
  """Pauses change no token, end, reason or weight."""
  uninterrupted = run(params, rule_of(name))
  assert 0 < (uninterrupted.reason_B == EXITED).sum() < B
  for got in runs(params, rule_of(name), slots, pauses=([1], [2], [5], [3, 8, 12, 13])):
    assert_same(got, uninterrupted)
    np.testing.assert_array_equal(got.weight_B, uninterrupted.weight_B)


def test_the_memory_of_a_rule_survives_a_step_and_a_checkpoint():
  """Unfinished groups pass through the host with their memories, which batches do not contain."""
  c = configs.default()
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = 4, 4, 1, T
  with c.ignore_type():
    c.rollout.early_exit = dict(fn='marker', **MARKER)
    c.rollout.stop = dict(fn='rounds', count=5)
  mesh = sharding.make_mesh(c.mesh, jax.devices()[:1])
  make = lambda: make_spec(c, MODEL, (), mesh, lambda: list(TEXTS))  # noqa: E731
  cut = make()
  with c.ignore_type():
    c.rollout.stop = dict(fn='none')
  uninterrupted, unfinished = make(), PartialRollouts(4, 99)
  params = jax.tree.map(lambda x: x * 2.5, decoder.init(MODEL, 0))
  index_P = np.arange(4, dtype=np.int32)
  first = Prompts(
    index_P[:, None] % V, index_P * 0 + 1, index_P, index_P * 0, np.zeros(4, np.float32)
  )
  sample = lambda step_spec: jax.jit(  # noqa: E731
    lambda p, begun: steps.generate(step_spec, train_state.sampling_state(p), first, begun)[0]
  )
  want, call = sample(uninterrupted)(params, None), sample(cut)
  begun, calls = empty_records.empty_rollout(cut), 0
  while (begun.reason_B == UNFINISHED).any():
    begun, calls = jax.tree.map(np.asarray, call(params, begun)), calls + 1
    unfinished.keep(first, begun, calls)
    again = PartialRollouts(4, 99)
    again.load_state_dict(unfinished.state_dict())
    if len(unfinished):
      rows_B = np.repeat(np.isin(index_P, unfinished.prompts.index_P), 4)
      np.testing.assert_array_equal(again.rollout.memory_BxM, begun.memory_BxM[rows_B])
  assert calls > 2 and (np.asarray(want.reason_B) == EXITED).any()
  assert_same(begun, jax.tree.map(np.asarray, want))
  assert empty_records.empty_batch(cut).rollout.memory_BxM is None
