"""Drafts: which tokens are accepted, that log-probs are the policy's, and that the coupled rule is exact."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from rollout_checks import assert_same
from scipy import stats

from jaxrl_llm import step as steps
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import microbatch, verify_drafts
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import decoder
from jaxrl_llm.rollout import sampling
from jaxrl_llm.types import ABORTED, EXITED, TRUNCATED, UNFINISHED, ModelConfig, Prompts

P, G, L, T, V = 6, 4, 5, 9, 12
MODEL = ModelConfig(
  vocab=V, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp=24, max_tokens=64
)


TEXTS = ['', 'a', 'b', '', 'xa', 'b', 'a', 'bx', 'y', 'ab', 'a', 'bb']
RULES = dict(
  entropy=dict(fn='entropy', high=1.9, decay=0.8, least_tokens=3),
  text=dict(fn='text', text='ab'),
  marker=dict(fn='marker', text='ab', start=0.1, deadline=0.6, abort=0.3, margin=0.02, streak=2),
  repetition=dict(fn='repetition', period=2, times=2),
)


def step_spec(prompts=P, rollouts=G, exit_rule=None, **draft):
  c = configs.default()
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = prompts, rollouts, L, T
  with c.ignore_type():
    c.rollout.draft = draft or dict(fn='none')
    c.rollout.early_exit = exit_rule or dict(fn='none')
  mesh = sharding.make_mesh(c.mesh, jax.devices()[:1])
  return make_spec(c, MODEL, (3,), mesh, lambda: list(TEXTS))


@pytest.fixture(scope='module')
def params():
  # Larger weights amplify rounding beyond a bound of 1e-5 on some processors.
  return jax.tree.map(lambda x: x * 1.5, decoder.init(MODEL, 0))


@pytest.fixture(scope='module')
def changed(params):
  noise = decoder.init(MODEL, 1)
  return jax.tree.map(lambda x, y: x + 0.15 * y, params, noise)


def make_prompts(count=P, born=0):
  r = np.random.default_rng(0)
  length_P = r.integers(1, L + 1, count).astype(np.int32)
  tokens_PxL = r.integers(0, V, (count, L)).astype(np.int32)
  index_P = np.arange(count, dtype=np.int32)
  born_P, expected_P = np.full(count, born, np.int32), np.zeros(count, np.float32)
  return Prompts(tokens_PxL, length_P, index_P, born_P, expected_P)


def sample(step_spec, params, born=0, draft=None, version=1, cap=None):
  prompts, state = (
    make_prompts(step_spec.layout.prompts, born),
    functools.partial(train_state.sampling_state, version=version),
  )
  fn = jax.jit(lambda p, d: steps.generate(step_spec, state(p), prompts, None, d, cap))
  rollout, metrics, _ = jax.tree.map(np.asarray, fn(params, draft))
  assert (rollout.reason_B != UNFINISHED).all()
  return rollout, metrics


def test_unchanged_weights_at_lenience_one_accept_every_token(params):
  draft, _ = sample(step_spec(), params)
  # Verified and sampled log-probabilities differ by rounding, which the excess of 1e-4 covers.
  got, metrics = sample(step_spec(fn='lenient', lenience=1.0001), params, born=7, draft=draft)
  assert_same(got, draft)
  assert metrics['generate/draft_tokens_kept'] == draft.length_B.sum()
  assert metrics['generate/rounds'] == 0


def test_unbounded_lenience_returns_the_draft_and_zero_rejects_it(params, changed):
  draft, _ = sample(step_spec(), params)
  got, metrics = sample(step_spec(fn='lenient', lenience=1e30), changed, born=7, draft=draft)
  np.testing.assert_array_equal(got.tokens_BxT, draft.tokens_BxT)
  assert (got.logp_BxT != draft.logp_BxT).any(), 'log-probs must be those of the new weights'
  got, metrics = sample(step_spec(fn='lenient', lenience=0.0), changed, born=7, draft=draft)
  fresh, _ = sample(step_spec(), changed, born=7)
  assert_same(got, fresh)
  assert metrics['generate/draft_tokens_kept'] == 0


def test_a_token_is_accepted_with_the_probability_of_its_ratio(params, changed):
  """First tokens of many rows are accepted with probability min(1, ℓ·π_new/π_old)."""
  many, lenience = step_spec(rollouts=600), 0.8
  draft, _ = sample(many, params)
  prompts, rows = make_prompts(), 600
  spec = step_spec(rollouts=rows, fn='lenient', lenience=lenience)

  def verified(p):
    state = train_state.sampling_state(p, 1)
    return verify_drafts.verify_drafts(spec, p, state, prompts, draft, None, T)[0]

  cut = jax.tree.map(np.asarray, jax.jit(verified)(changed))
  new = jax.jit(lambda p: microbatch.log_probs(many, p, prompts, draft.tokens_BxT)[0])(changed)
  ratio_B = np.exp(np.asarray(new)[:, 0] - draft.logp_BxT[:, 0])
  wanted, kept = np.minimum(1, lenience * ratio_B), cut.length_B > 0
  spread = np.sqrt((wanted * (1 - wanted)).sum())
  assert abs(kept.sum() - wanted.sum()) < 4 * spread and spread > 5


@pytest.mark.parametrize('draft_of', [dict(fn='lenient', lenience=1.5), dict(fn='coupled')])
def test_recorded_log_prob_is_that_of_the_weights_now(params, changed, draft_of):
  spec = step_spec(**draft_of)
  draft, _ = sample(spec, params)
  got, metrics = sample(spec, changed, born=7, draft=draft)
  assert 0 < metrics['generate/draft_tokens_kept'] < draft.length_B.sum()
  prompts = make_prompts()
  logp = jax.jit(lambda p: microbatch.log_probs(spec, p, prompts, got.tokens_BxT)[0])(changed)
  real = np.arange(T)[None] < got.length_B[:, None]
  np.testing.assert_allclose(got.logp_BxT[real], np.asarray(logp)[real], atol=5e-5)


def test_the_coupled_rule_equals_sampling_without_a_draft(params, changed):
  """With the noise of the same step, so the tokens behind the accepted ones agree, too."""
  spec = step_spec(fn='coupled')
  draft, _ = sample(spec, params, born=1)
  got, metrics = sample(spec, changed, born=1, draft=draft)
  fresh, alone = sample(spec, changed, born=1)
  assert_same(got, fresh)
  assert (fresh.tokens_BxT != draft.tokens_BxT).any()
  assert metrics['generate/draft_tokens_kept'] > 0.3 * draft.length_B.sum()
  assert metrics['generate/rounds'] <= alone['generate/rounds']


def test_behind_the_first_rejection_a_visit_has_its_own_noise(params, changed):
  """Two visits with the same weights agree up to the replaced token, and differ behind it."""
  spec = step_spec(prompts=12, fn='coupled')
  draft, _ = sample(spec, params, born=1)
  one, _ = sample(spec, changed, born=2, draft=draft)
  other, _ = sample(spec, changed, born=3, draft=draft)
  apart = 0
  for b in range(12 * G):
    n = min(draft.length_B[b], one.length_B[b])
    same = one.tokens_BxT[b, :n] == draft.tokens_BxT[b, :n]
    cut = n if same.all() else int(same.argmin()) + 1  # the replacement has the old noise
    np.testing.assert_array_equal(one.tokens_BxT[b, :cut], other.tokens_BxT[b, :cut])
    assert (one.noise_BxT[b, :cut] == 1).all()
    assert (one.noise_BxT[b, cut : one.length_B[b]] == 2).all()
    apart += (one.tokens_BxT[b] != other.tokens_BxT[b]).any()
  assert apart > 5


def test_every_token_of_a_third_visit_is_drawn_by_its_recorded_noise(params, changed):
  """Drafts with parts of two visits: π_new draws with the uniform of that step, prompt, rollout and position."""
  spec, third = step_spec(fn='coupled'), jax.tree.map(lambda x: x * 0.9, changed)
  first, _ = sample(spec, params, born=1)
  second, _ = sample(spec, changed, born=2, draft=first)
  got, _ = sample(spec, third, born=5, draft=second)
  assert set(np.unique(got.noise_BxT)) == {0, 1, 2, 5}
  prompts = make_prompts()
  uniform_BxT = sampling.redraw(jax.random.key(0), prompts, G, got.noise_BxT)
  for b in range(P * G):
    start = prompts.length_P[b // G]
    row = np.concatenate([prompts.tokens_PxL[b // G, :start], got.tokens_BxT[b]])[None]
    logits = decoder.forward(MODEL, third, row, np.ones(row.shape, bool))[0, start - 1 : -1]
    token_T, _ = sampling.sample(logits, uniform_BxT[b], 1.0)
    n = got.length_B[b]
    np.testing.assert_array_equal(token_T[:n], got.tokens_BxT[b, :n])


def test_the_coupled_rule_samples_the_new_policy(params, changed):
  """Chi-square of the first two tokens over 6000 rows against the policy's own probabilities."""
  spec = step_spec(prompts=1, rollouts=6000, fn='coupled')
  draft, _ = sample(spec, params)
  got, _ = sample(spec, changed, draft=draft)
  prompts = make_prompts(1)
  start = prompts.length_P[0]
  rows = np.concatenate(
    [np.repeat(prompts.tokens_PxL[:, :start], V, 0), np.arange(V)[:, None]], axis=1
  )
  logits = decoder.forward(MODEL, changed, rows, np.ones(rows.shape, bool))
  policy = np.exp(np.asarray(jax.nn.log_softmax(logits[:, -2:]), np.float64))
  first, second = policy.swapaxes(0, 1)
  joint = first[0][:, None] * second  # first[v] is the same for every row
  ended = got.length_B == 1
  counts = np.zeros((V, V))
  np.add.at(counts, (got.tokens_BxT[~ended, 0], got.tokens_BxT[~ended, 1]), 1)
  joint[3] = 0  # the end token has no second
  observed, wanted = np.append(counts.ravel(), ended.sum()), np.append(joint.ravel(), first[0][3])
  big = wanted * 6000 >= 5
  observed, wanted = (
    np.append(observed[big], observed[~big].sum()),
    np.append(wanted[big], wanted[~big].sum()),
  )
  assert stats.chisquare(observed, wanted / wanted.sum() * 6000).pvalue > 1e-3


@pytest.mark.parametrize('name', RULES)
def test_a_draft_ends_where_the_exit_rule_ends_it_now(params, changed, name):
  """The rule runs on accepted tokens as on sampled ones: with new weights a row may exit earlier or later."""
  spec = step_spec(exit_rule=RULES[name], fn='coupled')
  draft, _ = sample(spec, params)
  for weights in (params, changed):
    got, metrics = sample(spec, weights, draft=draft)
    fresh, _ = sample(spec, weights)
    assert_same(got, fresh)
    np.testing.assert_allclose(got.weight_B, fresh.weight_B)
    assert metrics['generate/draft_tokens_kept'] > 0
  ends = (EXITED, ABORTED)
  assert np.isin(fresh.reason_B, ends).any() and not np.isin(fresh.reason_B, ends).all()
  assert (fresh.reason_B != draft.reason_B).any()


def test_a_draft_continues_under_a_longer_cap_and_ends_at_a_shorter_one(params):
  spec = step_spec(fn='coupled')
  short, _ = sample(spec, params, cap=5)
  assert (short.reason_B == TRUNCATED).any()
  long, _ = sample(spec, params)
  assert_same(sample(spec, params, draft=short)[0], long)
  assert_same(sample(spec, params, draft=long, cap=5)[0], short)
