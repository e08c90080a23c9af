"""Pruning: which candidates survive, with which probability, and that survivors' tokens are unchanged."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import step as steps
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import empty_records
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import decoder
from jaxrl_llm.rollout import correctness_head, survival
from jaxrl_llm.types import EXITED, UNFINISHED, ModelConfig, Prompts, UserError

P, C, G, L, T, V = 4, 8, 3, 4, 9, 12
MODEL = ModelConfig(
  vocab=V, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp=24, max_tokens=64
)


def some_p(groups=500):
  return jnp.asarray(np.random.default_rng(0).beta(0.6, 0.6, (groups, C)), jnp.float32)


@pytest.mark.parametrize('keep', [2, 4, 6])
def test_survival_probabilities_sum_to_the_survivors_within_their_bounds(keep):
  s = np.asarray(survival.probabilities(some_p(), keep, share=0.5, floor=0.05))
  np.testing.assert_allclose(s.sum(1), keep, rtol=1e-4)
  assert s.min() >= 0.05 * 0.999 and s.max() <= 1.001


def test_survivors_are_balanced_where_nothing_is_clipped():
  """Expected correct survivors = share × survivors, where p̂ is the true probability."""
  p = jnp.asarray([[0.3, 0.4, 0.5, 0.2, 0.35, 0.3, 0.25, 0.4]])
  for share in (0.3, 0.5, 0.6):
    s = survival.probabilities(p, 2, share=share, floor=0.0)
    # Each half of the formula gives its part: Σ p·s = keep·[share·Σp²/p̄ + (1−share)·Σp(1−p)/(1−p̄)]/C.
    mean = p.mean()
    want = 2 * (share * (p**2).sum() / mean + (1 - share) * (p * (1 - p)).sum() / (1 - mean)) / C
    assert float((p * s).sum()) == pytest.approx(float(want), rel=1e-4)


def test_certain_groups_survive_evenly():
  for p in (0.0, 1.0):
    s = survival.probabilities(jnp.full((1, C), p), 4, share=0.5, floor=0.05)
    np.testing.assert_allclose(s, 0.5, rtol=1e-4)


def test_a_fixed_number_survives_each_with_its_own_probability():
  """20000 draws for one group: frequencies are s, and the mean of r/s is the mean of r."""
  N, keep = 20000, 3
  s_C = survival.probabilities(some_p(1), keep, share=0.5, floor=0.05)[0]
  keys = jax.random.split(jax.random.key(0), N)
  index, s = survival.sample_survivors(keys, jnp.tile(s_C, (N, 1)), keep)
  index = np.asarray(index)
  assert index.shape == (N, keep) and (np.diff(index, axis=1) > 0).all()
  frequency = np.bincount(index.reshape(-1), minlength=C) / N
  np.testing.assert_allclose(frequency, s_C, atol=4 * 0.5 / np.sqrt(N))
  reward_C = np.arange(C) % 3 == 0
  estimate = (reward_C[index] / np.asarray(s)).sum(1) / C
  assert estimate.mean() == pytest.approx(reward_C.mean(), abs=4 * estimate.std() / np.sqrt(N))
  plain = reward_C[index].mean()
  assert abs(plain - reward_C.mean()) > 0.02, (
    'without weights the mean must differ, or the check could not fail'
  )


@pytest.mark.parametrize('keep, floor', [(1, 0.05), (2, 0.25), (3, 0.2), (7, 0.05)])
@pytest.mark.parametrize('share', [0.0, 0.5, 1.0])
def test_every_candidate_survives_with_its_probability_and_weighted_sums_are_unbiased(
  keep, floor, share
):
  """Exact over all starting points of systematic sampling, for any order; up to floor · candidates = keep."""
  p = jnp.asarray(np.random.default_rng(keep).beta(0.4, 0.4, (1, C)), jnp.float32)
  s_C = np.asarray(survival.probabilities(p, keep, share=share, floor=floor), np.float64)[0]
  reward_C = np.arange(C) ** 2.0
  for seed in range(5):
    order_C = np.random.default_rng(seed).permutation(C)
    edges = np.concatenate([[0], np.cumsum(s_C[order_C])])
    # u + k hits [edge, next edge) for u within these bounds: measure the set of u exactly.
    cuts = np.unique(
      np.concatenate([[0, 1], np.clip(edges[:, None] - np.arange(keep), 0, 1).ravel()])
    )
    width, middle = np.diff(cuts), (cuts[1:] + cuts[:-1]) / 2
    at = np.searchsorted(edges, middle[:, None] + np.arange(keep), side='right') - 1
    chosen = order_C[np.minimum(at, C - 1)]
    share_C = np.zeros(C)
    np.add.at(share_C, chosen.ravel(), np.repeat(width, keep))
    np.testing.assert_allclose(share_C, s_C, atol=2e-5)
    estimate = (width[:, None] * (reward_C / s_C)[chosen]).sum()
    assert estimate == pytest.approx(reward_C.sum(), rel=1e-3)


def test_more_candidates_than_the_floor_allows_are_refused():
  """With Σ s above the survivors, no draw could include each candidate with probability s, and 1/s would be biased."""
  crowded = dict(fn='quality', candidates=C, at_tokens=4)
  with pytest.raises(
    UserError, match=r'pruning\.floor=0.4 .* 8 candidates .* config\.rollouts=3'
  ) as error:
    spec(**crowded, floor=0.4)
  assert 'at most 0.375' in str(error.value)
  assert spec(**crowded, floor=0.375).rollout.pruning.candidates == C


def test_the_correctness_head_learns_and_is_calibrated():
  """Correct with probability σ(3·x₀): predictions must rank like it and be calibrated."""
  r = np.random.default_rng(0)

  def data():
    x = r.normal(size=(256, 8)).astype(np.float32)
    p = 1 / (1 + np.exp(-3 * x[:, 0]))
    return x, p, (r.random(256) < p).astype(np.float32)

  state, ones = correctness_head.init(8, 0), jnp.ones(256)
  x, _, _ = data()
  np.testing.assert_allclose(
    correctness_head.probability(state, x, 0), 0.525, rtol=1e-6
  )  # its bin's middle
  learn = jax.jit(lambda s, x, y, w: correctness_head.train(s, x, y, w, 3e-3))
  for _ in range(300):
    x, _, y = data()
    state = learn(state, x, y, ones)
  x, p, _ = data()
  predicted = np.asarray(correctness_head.probability(state, x, 0))
  assert np.corrcoef(predicted, p)[0, 1] > 0.9
  assert np.abs(predicted - p).mean() < 0.08
  np.testing.assert_array_equal(correctness_head.probability(state, x, 1000), 0.5)
  same = learn(state, x, np.ones(256, np.float32), jnp.zeros(256))
  jax.tree.map(np.testing.assert_array_equal, same, state)


def config(**prune):
  c = configs.default()
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = P, G, L, T
  with c.ignore_type():
    c.rollout.pruning = prune or dict(fn='none')
  return c


def spec(rollouts=G, devices=1, exit_rule=None, slots=0, **prune):
  c = config(**prune)
  c.rollouts, c.rollout.slots = rollouts, slots
  with c.ignore_type():
    c.rollout.early_exit = exit_rule or dict(fn='none')
  c.mesh.data = devices
  mesh = sharding.make_mesh(c.mesh, jax.devices()[:devices])
  return make_spec(c, MODEL, (3,), mesh, lambda: list(TEXTS))


# An exit rule with these settings searches for 'ab' in tokens of letters.
TEXTS = ['', 'a', 'b', '', 'xa', 'b', 'a', 'bx', 'y', 'ab', 'a', 'bb']
EXIT_RULE = dict(fn='marker', text='ab', start=0.1, deadline=0.6, abort=0.5, margin=0.05, streak=2)


@pytest.mark.parametrize('slots', [0, 5])
@pytest.mark.parametrize(
  'exit_rule', [EXIT_RULE, dict(fn='entropy', high=0.7, decay=0.8, least_tokens=5)]
)
def test_survivors_exit_as_without_pruning(slots, exit_rule):
  """The exit rule runs before and after pruning, and its memory is kept in between."""
  params = jax.tree.map(lambda x: x * 2.0, decoder.init(MODEL, 0))
  unpruned, _ = sample(spec(rollouts=C, exit_rule=exit_rule), params)
  prune = dict(fn='quality', candidates=C, at_tokens=4, warmup_steps=0)
  got, _ = sample(spec(exit_rule=exit_rule, slots=slots, **prune), params)
  later = (unpruned.reason_B == EXITED) & (unpruned.length_B > 4)
  assert later.any() and (unpruned.reason_B != EXITED).any()
  for b in range(P * G):
    c = b // G * C + np.arange(C)
    at = c[(unpruned.tokens_BxT[c] == got.tokens_BxT[b]).all(1)]
    assert len(at), f'row {b} is none of its candidates'
    assert (
      got.length_B[b] == unpruned.length_B[at[0]] and got.reason_B[b] == unpruned.reason_B[at[0]]
    )


def make_prompts():
  r = np.random.default_rng(0)
  index_P = np.arange(P, dtype=np.int32)
  tokens_PxL = r.integers(0, V, (P, L)).astype(np.int32)
  return Prompts(tokens_PxL, index_P % L + 1, index_P, index_P * 0, np.zeros(P, np.float32))


def sample(p, params):
  state = train_state.init_state(p, params)
  rollout, metrics = jax.jit(lambda s: steps.generate(p, s, make_prompts())[:2])(state)
  return jax.tree.map(np.asarray, (rollout, metrics))


@pytest.mark.parametrize('devices', [1, 2])
def test_survivors_have_the_tokens_that_they_have_without_pruning(devices):
  params = jax.tree.map(lambda x: x * 2.0, decoder.init(MODEL, 0))
  unpruned, _ = sample(spec(rollouts=C), params)
  got, metrics = sample(
    spec(fn='quality', candidates=C, at_tokens=4, warmup_steps=0, devices=devices), params
  )
  assert (got.reason_B != UNFINISHED).all()
  for p in range(P):
    all_C = [unpruned.tokens_BxT[b].tolist() for b in range(p * C, (p + 1) * C)]
    found = [all_C.index(got.tokens_BxT[b].tolist()) for b in range(p * G, (p + 1) * G)]
    assert found == sorted(found)
    for b, c in zip(range(p * G, (p + 1) * G), found, strict=True):
      np.testing.assert_allclose(got.logp_BxT[b], unpruned.logp_BxT[p * C + c], atol=1e-5)
      assert got.length_B[b] == unpruned.length_B[p * C + c]
  first = np.minimum(unpruned.length_B, 4).sum()
  assert metrics['generate/tokens'] == first + np.maximum(got.length_B - 4, 0).sum()
  assert got.feature_BxF.shape == (P * G, MODEL.width) and (got.weight_B >= 1 - 1e-5).all()


def test_a_step_trains_the_correctness_head_on_graded_rollouts():
  p = spec(fn='quality', candidates=C, at_tokens=4, learning_rate=1e-2)
  state = train_state.init_state(p, decoder.init(MODEL, 0))
  call = steps.compile_step(p)
  batch = empty_records.empty_batch(p)
  state, rollout, _ = call(state, batch, make_prompts(), None, None, np.int32(T))
  assert int(state.rollout_head.updates) == 0
  rollout = jax.tree.map(np.asarray, rollout)
  right = (np.arange(P * G) % 2).astype(np.float32)
  batch = batch._replace(prompts=make_prompts(), rollout=rollout, reward_B=right, correct_B=right)
  want = correctness_head.train(
    jax.device_get(state.rollout_head), rollout.feature_BxF, right, rollout.weight_B, 1e-2
  )
  state, _, _ = call(state, batch, make_prompts(), None, None, np.int32(T))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.rollout_head, want)
  assert int(state.rollout_head.updates) == 1


@pytest.mark.parametrize(
  'prune, message',
  [
    (
      dict(fn='quality', candidates=G, at_tokens=4),
      'candidates=3 must be more than config.rollouts=3',
    ),
    (dict(fn='uniform', candidates=C, at_tokens=T), 'at_tokens=9 must lie between 1 and'),
  ],
)
def test_invalid_settings_raise_user_errors(prune, message):
  with pytest.raises(UserError, match=message):
    spec(**prune)
