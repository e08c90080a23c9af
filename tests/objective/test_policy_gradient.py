"""Every method's coefficients against the loss as its paper writes it, differentiated by jax in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objective
from jaxrl_llm.config import loading as configs
from jaxrl_llm.types import Batch, Prompts, Rollout, UserError

P, G, T = 4, 4, 6
B = P * G


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def settings(**changes):
  c = configs.default().objective
  for name, value in changes.items():
    c[name] = value
  return c


PRESETS = {
  'grpo': settings(),
  'dr_grpo': settings(advantage=dict(fn='group_centered'), aggregation=dict(fn='fixed')),
  'dapo': settings(
    trust_region=dict(fn='clip', low=0.2, high=0.28),
    aggregation=dict(fn='token_mean'),
    zero_variance=dict(fn='mask'),
  ),
  'rloo': settings(
    advantage=dict(fn='leave_one_out'),
    ratio=dict(fn='one'),
    trust_region=dict(fn='none'),
    aggregation=dict(fn='sequence_sum'),
  ),
}


def make_batch(seed=0, off_policy=0.3):
  """Random lengths, rewards that leave group 1 all right, and log-probs that moved since sampling."""
  r = np.random.default_rng(seed)
  length_B = r.integers(1, T + 1, B).astype(np.int32)
  correct_B = r.integers(0, 2, B).astype(np.float64)
  correct_B[G : 2 * G] = 1
  logp_BxT = np.log(r.uniform(0.05, 0.95, (B, T)))
  rollout = Rollout(
    r.integers(0, 9, (B, T)).astype(np.int32),
    logp_BxT + off_policy * r.normal(size=(B, T)),
    length_B,
    np.ones(B, np.int8),
    np.zeros((B, T), np.int32),
    np.ones(B),
    np.zeros((B, 0)),
  )
  prompts = Prompts(
    np.zeros((P, 3), np.int32), np.full(P, 3, np.int32), *[np.arange(P)] * 2, np.zeros(P)
  )
  return Batch(prompts, rollout, correct_B, correct_B), logp_BxT


def loss_as_written(name, batch, logp_BxT):
  """The papers' formulas, row by row and token by token, from nothing of the package."""
  reward = batch.correct_B.reshape(P, G)
  rows, total_tokens = [], 0
  for b in range(B):
    group, n = reward[b // G], int(batch.rollout.length_B[b])
    mean, std = group.mean(), group.std(ddof=1)
    advantage = {
      'grpo': (batch.correct_B[b] - mean) / (std + 1e-6),
      'dapo': (batch.correct_B[b] - mean) / (std + 1e-6),
      'dr_grpo': batch.correct_B[b] - mean,
      'rloo': batch.correct_B[b] - (group.sum() - batch.correct_B[b]) / (G - 1),
    }[name]
    if name == 'dapo' and std == 0:
      continue
    total_tokens += n
    high = 0.28 if name == 'dapo' else 0.2
    terms = []
    for t in range(n):
      if name == 'rloo':
        terms.append(advantage * logp_BxT[b, t])
        continue
      r = jnp.exp(logp_BxT[b, t] - batch.rollout.logp_BxT[b, t])
      clipped = jnp.clip(r, 0.8, 1 + high)
      terms.append(jnp.minimum(r * advantage, clipped * advantage))
    rows.append((sum(terms), n))
  if name == 'grpo':
    return -sum(s / n for s, n in rows) / B
  if name == 'dr_grpo':
    return -sum(s for s, _ in rows) / (B * T)
  if name == 'dapo':
    return -sum(s for s, _ in rows) / total_tokens
  return -sum(s for s, _ in rows) / B


def coefficients(name, batch, logp_BxT):
  method = objective.method(PRESETS[name])
  return objective.coefficients(method, objective.targets(method, batch, G), logp_BxT)


@pytest.mark.parametrize('name', PRESETS)
@pytest.mark.parametrize('off_policy', [0.0, 0.3])
def test_coefficients_are_the_gradient_of_the_written_loss(name, off_policy):
  batch, logp = make_batch(off_policy=off_policy)
  value, gradient = jax.value_and_grad(lambda x: loss_as_written(name, batch, x))(jnp.asarray(logp))
  c, sums = coefficients(name, batch, jnp.asarray(logp))
  if off_policy:  # at r = 1 exactly, min() splits its gradient between two equal branches
    assert float(sums['clipped']) > 0 or name == 'rloo'
  np.testing.assert_allclose(-c, gradient, atol=1e-7 if name in ('grpo', 'dapo') else 1e-12)
  if name != 'rloo':  # its surrogate r·A has the same gradient and another value
    np.testing.assert_allclose(float(sums['pg_loss']), float(value), atol=1e-7)


@pytest.mark.parametrize('name', PRESETS)
def test_on_policy_is_reinforce(name):
  batch, logp = make_batch(off_policy=0.0)
  method = objective.method(PRESETS[name])
  target = objective.targets(method, batch, G)
  c, sums = objective.coefficients(method, target, jnp.asarray(logp))
  np.testing.assert_allclose(c, target.weight_BxT * target.advantage_BxT, rtol=1e-12)
  assert float(sums['clipped']) == 0
  assert np.abs(c).max() > 1e-3


@pytest.mark.parametrize('name', PRESETS)
def test_padding_columns_and_their_log_probs_change_nothing(name):
  batch, logp = make_batch()
  c, _ = coefficients(name, batch, logp)
  poisoned = np.where(np.arange(T)[None] < batch.rollout.length_B[:, None], logp, -np.inf)
  behavior = np.where(np.isinf(poisoned), 200.0, batch.rollout.logp_BxT)
  wrong = batch._replace(rollout=batch.rollout._replace(logp_BxT=behavior))
  c_wrong, sums = coefficients(name, wrong, poisoned)
  np.testing.assert_array_equal(c, c_wrong)
  assert all(np.isfinite(float(v)) for v in sums.values())
  if name != 'dr_grpo':  # whose denominator is the number of columns
    pad = lambda x: np.pad(x, ((0, 0), (0, 3)))  # noqa: E731
    wider = batch.rollout._replace(
      tokens_BxT=pad(batch.rollout.tokens_BxT),
      logp_BxT=pad(batch.rollout.logp_BxT),
      version_BxT=pad(batch.rollout.version_BxT),
    )
    c_wider, _ = coefficients(name, batch._replace(rollout=wider), pad(logp))
    np.testing.assert_allclose(c_wider[:, :T], c, rtol=1e-12)


@pytest.mark.parametrize('name', PRESETS)
def test_order_of_groups_and_of_rows_in_a_group_does_not_matter(name):
  batch, logp = make_batch()
  r = np.random.default_rng(1)
  order = np.concatenate([p * G + r.permutation(G) for p in r.permutation(P)])
  mixed_up = Batch(
    batch.prompts,
    jax.tree.map(lambda x: x[order], batch.rollout),
    batch.reward_B[order],
    batch.correct_B[order],
  )
  c, _ = coefficients(name, batch, logp)
  c_mixed_up, _ = coefficients(name, mixed_up, logp[order])
  np.testing.assert_allclose(c_mixed_up, np.asarray(c)[order], rtol=1e-12)


@pytest.mark.parametrize('name', PRESETS)
def test_huge_log_ratios_and_empty_rows_are_finite(name):
  batch, logp = make_batch()
  length_B = batch.rollout.length_B.copy()
  length_B[:3] = 0
  behavior = logp + np.where(np.arange(B)[:, None] % 2, 200.0, -200.0)
  batch = batch._replace(rollout=batch.rollout._replace(length_B=length_B, logp_BxT=behavior))
  c, sums = coefficients(name, batch, logp)
  assert np.isfinite(c).all() and all(np.isfinite(float(v)) for v in sums.values())
  assert (np.asarray(c)[:3] == 0).all()


def test_zero_variance_groups_leave_the_denominator_only_when_masked():
  batch, logp = make_batch()
  tokens_P = np.asarray(batch.rollout.length_B).reshape(P, G).sum(1)
  mixed_P = batch.correct_B.reshape(P, G).std(1) > 0
  assert mixed_P.sum() < P
  for policy, count in (('mask', tokens_P[mixed_P].sum()), ('keep', tokens_P.sum())):
    c = settings(aggregation=dict(fn='token_mean'), zero_variance=dict(fn=policy))
    weight = objective.targets(objective.method(c), batch, G).weight_BxT
    np.testing.assert_allclose(np.max(weight), 1 / count, rtol=1e-12)


def test_masking_looks_at_correctness_not_at_the_shaped_reward():
  batch, logp = make_batch()
  shape = dict(fn='overlong', buffer_tokens=T - 1, factor=0.5)
  method = objective.method(settings(shape=shape, zero_variance=dict(fn='mask')))
  target = objective.targets(method, batch, G)
  assert np.asarray(target.mask_BxT)[G : 2 * G].sum() == 0


def test_overlong_is_piecewise_linear_in_tokens():
  from jaxrl_llm.objective import reward_shaping

  ones, length_PxG = jnp.ones((1, 5)), jnp.asarray([[0, 12, 14, 16, 20]])
  got = reward_shaping.overlong(ones, ones, length_PxG, 20, buffer_tokens=8, factor=0.5)
  np.testing.assert_allclose(got, [[1, 1, 1 - 0.125, 1 - 0.25, 1 - 0.5]])


def test_group_standard_deviation_is_unbiased_and_empty_rows_count_nowhere():
  from jaxrl_llm.objective import advantage

  reward = jnp.asarray([[1.0, 0.0, 0.0, 9.0]])
  count = jnp.asarray([[1.0, 1.0, 1.0, 0.0]])
  want = (np.array([1, 0, 0]) - 1 / 3) / (np.std([1, 0, 0], ddof=1) + 1e-6)
  np.testing.assert_allclose(advantage.group_normalized(reward, count)[0, :3], want, rtol=1e-9)
  assert advantage.group_normalized(reward, count)[0, 3] == 0
  np.testing.assert_allclose(advantage.leave_one_out(reward, count)[0], [1, -0.5, -0.5, 0])


@pytest.mark.parametrize(
  'change, message',
  [
    (dict(trust_region=dict(fn='clup')), 'choose one of: balanced_clip, binary_kl, .*two_side'),
    (dict(trust_region=dict(fn='clip', hihg=0.3)), 'takes: low, high'),
    (dict(reward_shaping=dict(fn='overlong')), 'buffer_tokens is missing'),
    (dict(zero_variance=dict(fn='drop')), 'keep, mask'),
    (dict(advantage=dict(fn='jnp')), 'choose one of'),
    (
      dict(kl_aggregation=dict(fn='tokens')),
      "kl_aggregation.fn='tokens' .*: auto, fixed, .*token_mean",
    ),
    (
      dict(advantage=dict(fn='decoupled'), reward_shaping=dict(fn='overlong', buffer_tokens=2)),
      "reward_shaping.fn='overlong': .* changes the sum .* set --config.objective.reward_shaping.fn=none",
    ),
  ],
)
def test_unknown_names_and_keywords_list_the_valid_ones(change, message):
  with pytest.raises(UserError, match=message):
    objective.method(settings(**change))


def test_rows_kept_by_chance_weigh_in_the_loss_and_in_no_denominator():
  batch, logp_BxT = make_batch()
  r = np.random.default_rng(2)
  weight_B = r.uniform(1, 4, B)
  weighed = batch._replace(rollout=batch.rollout._replace(weight_B=weight_B))
  for name in ('token_mean', 'sequence_mean', 'fixed', 'sequence_sum'):
    c = configs.default().objective
    c.aggregation.fn = name
    plain, got = (
      objective.coefficients(m, objective.targets(m, x, G), logp_BxT)[0]
      for m, x in ((objective.method(c), batch), (objective.method(c), weighed))
    )
    np.testing.assert_allclose(got, plain * weight_B[:, None], rtol=1e-6)
    assert np.abs(plain).max() > 0
    c.weigh_rows = False
    unmoved = objective.method(c)
    off = objective.coefficients(unmoved, objective.targets(unmoved, weighed, G), logp_BxT)[0]
    np.testing.assert_array_equal(off, plain)


def test_an_advantage_with_several_needs_gets_all_of_them():
  from objective_table import G, batch, data, leverage

  from jaxrl_llm.objective.token_inputs import needs

  got = {}

  @needs('norms', 'contexts', 'parts')
  def greedy(reward_PxG, length_PxG, leverage_PxG, context_PxG, parts_PxGxK, weight_K):
    got.update(leverage=leverage_PxG, context=context_PxG, parts=parts_PxGxK, weight=weight_K)
    return reward_PxG

  d = data()
  method = objective.method(settings())
  stages = method.batch_stages._replace(advantage=functools.partial(greedy))
  method = method._replace(batch_stages=stages, weight_K=(1.0, 2.0))
  objective.targets(method, batch(d), G, None, leverage(d))
  np.testing.assert_array_equal(got['leverage'], leverage(d).reshape(-1, G))
  np.testing.assert_array_equal(got['context'], d.context.reshape(-1, G))
  np.testing.assert_array_equal(got['parts'], d.parts.reshape(-1, G, 2))
  np.testing.assert_array_equal(got['weight'], [1.0, 2.0])


def test_the_kl_term_has_the_denominators_of_its_paper_or_those_that_a_config_gives_it():
  """`auto`: a mean over tokens for DRPO's hinge, the policy term's for the others; rows kept by chance weigh in
  both."""
  batch, logp_BxT = make_batch()
  batch = batch._replace(
    rollout=batch.rollout._replace(weight_B=np.random.default_rng(3).uniform(1, 4, B))
  )
  mask_BxT = (np.arange(T)[None] < batch.rollout.length_B[:, None]).astype(float)
  weight_B = batch.rollout.weight_B[:, None]
  per_token = mask_BxT / mask_BxT.sum() * weight_B
  per_row = mask_BxT / mask_BxT.sum(1, keepdims=True) / B * weight_B
  chosen = dict(fn='hinge', coef=7.0, delta=-9.0), dict(fn='quadratic', coef=0.3)

  def term(kl, how, weigh=True):
    """What the KL term adds to the coefficients, over its coefficients without a denominator."""
    changes = dict(
      aggregation=dict(fn='sequence_mean'), kl_aggregation=dict(fn=how), weigh_rows=weigh
    )
    c = []
    for spec in (kl, dict(fn='none')):
      method = objective.method(settings(kl=spec, **changes))
      c.append(objective.coefficients(method, objective.targets(method, batch, G), logp_BxT)[0])
    moved = np.where(mask_BxT > 0, logp_BxT - batch.rollout.logp_BxT, 1.0)
    drift = -(mask_BxT * moved).sum() / mask_BxT.sum()
    return (c[0] - c[1]) / (-0.3 * moved if kl['fn'] == 'quadratic' else 7.0 * (drift + 9.0))

  for kl, auto in zip(chosen, (per_token, per_row), strict=True):
    for how, want in (('auto', auto), ('token_mean', per_token), ('sequence_mean', per_row)):
      np.testing.assert_allclose(term(kl, how), want, atol=1e-12)
    np.testing.assert_allclose(term(kl, 'token_mean', False), per_token / weight_B, atol=1e-12)
