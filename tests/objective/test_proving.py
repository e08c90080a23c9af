"""For each method the identity that proves it: a limit or a special case in which it must be another, known one."""

from __future__ import annotations

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_table import (
  METHODS,
  B,
  G,
  P,
  T,
  batch,
  data,
  gz,
  known,
  leverage,
  settings,
  signal,
  tok,
)

from jaxrl_llm import objective
from jaxrl_llm.config import compatibility, stages
from jaxrl_llm.objective import advantage, method_spec, reward_shaping, token_inputs


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def run(d, **choices):
  """Coefficients and sums; a name of the table stands for its settings."""
  method = objective.method(settings(**choices))
  target = objective.targets(method, batch(d), G, signal(method, d), leverage(d))
  target = target.with_arrays(**known(method, d))
  c, sums = objective.coefficients(method, target, d.x, d.entropy, d.confidence, d.collision)
  return np.asarray(c), {k: float(v) for k, v in sums.items()}


def of(name, **changes):
  return METHODS[name].settings | changes


def same(one, other, **tolerance):
  assert np.abs(one).max() > 1e-4
  np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-13, **tolerance)


WIDE = dict(fn='clip', low=1e6, high=1e6)


def change(d, **new):
  return type(d)(**(vars(d) | new))


def test_ppo_with_wide_bounds_is_the_plain_ratio():
  same(run(data(), trust_region=WIDE)[0], run(data(), trust_region='none')[0])


def test_dual_clip_with_a_high_bound_is_ppo():
  same(run(data(), trust_region=dict(fn='dual_clip', most=1e6))[0], run(data())[0])


def test_grpo_of_equal_rewards_is_zero():
  d = data()
  assert (run(change(d, reward=np.ones(B)))[0] == 0).all()


def test_dr_grpo_counts_columns_that_no_row_reaches():
  d = data()
  wide = {k: np.pad(getattr(d, k), ((0, 0), (0, T))) for k in ('x', 'old', 'behavior', 'mask')}
  wide |= {
    k: np.pad(getattr(d, k), ((0, 0), (0, T)))
    for k in ('reference', 'entropy', 'confidence', 'collision', 'tokens')
  }
  same(2 * run(change(d, **wide), **of('dr_grpo'))[0][:, :T], run(d, **of('dr_grpo'))[0])


def test_rloo_is_the_group_mean_times_n_over_n_minus_1():
  d = data()
  mean = run(d, **of('rloo', advantage='group_centered'))[0]
  same(run(d, **of('rloo'))[0], G / (G - 1) * mean)


@pytest.mark.parametrize('name', sorted(stages.choices(advantage)))
def test_empty_rows_have_no_advantage_and_no_say(name):
  """Of the sums over groups and over the batch."""
  r = np.random.default_rng(5)
  reward, length = r.random((2, 3)), r.integers(1, 9, (2, 3)).astype(float)
  chosen = getattr(advantage, name)
  chosen = functools.partial(chosen, k=2) if name == 'pass_at_k' else chosen
  needs = getattr(chosen, 'needs', ())
  more, last = [r.normal(size=(2, 3))] if 'norms' in needs else [], []
  if 'contexts' in needs:
    more = [r.integers(-1, 2, (2, 3)).astype(float)]
  if 'parts' in needs:
    more, last = [r.normal(size=(2, 3, 2))], [jnp.array([1.0, 0.5])]
  fn = lambda *arrays: chosen(*map(jnp.asarray, arrays), *last)  # noqa: E731
  want = np.pad(np.asarray(fn(reward, length, *more)), ((0, 1), (0, 2)))
  for junk in (9.0, -9.0, 100.0):
    filled = np.pad(reward, ((0, 1), (0, 2)), constant_values=junk)
    by_row = lambda x: ((0, 1), (0, 2), (0, 0))[: x.ndim]  # noqa: E731
    wide = [np.pad(x, by_row(x), constant_values=junk) for x in more]
    got = fn(filled, np.pad(length, ((0, 1), (0, 2))), *wide)
    np.testing.assert_allclose(got, want, atol=1e-12)


# What the papers, or the code that comes with them, set; where a docstring says 'ours', what we do.
DEFAULTS = {
  'sft_loss': dict(
    likelihood=[0.1],
    chord=[0.1, 0.1, 0, 0, True],
    replace=[0, 1.0],
    one_token_rollouts=[-0.1],
    suffix_weighted=[0.999, -0.08, 0.3, 0.1, 10.0],
  ),
  'distillation': dict(on_policy=[1.0]),
  'reward_shaping': dict(
    overlong=[1.0],
    overlong_where_solved=[1.0, 1.0],
    brief_where_solved=[0.2, 0.6, 1e-4],
    best_of_group=[0.0, 1e-6],
    length_fitted=[2, 1.0, 1e-6],
  ),
  'advantage': dict(
    group_normalized=[1e-6],
    raw=[0.0],
    batch_normalized=[1e-4],
    median_centered=[1e-3],
    token_whitened=[1e-8],
    group_whitened=[1e-8],
    shifted=[-0.1],
    exp_weighted=[1.0],
    amplified=[1.0, 3.0, 1.0],
    log_mean_exp=[1.0],
    least_variance=[True, 1e-8],
    adora=[0.1, 0.5, 4054, 1e-6],
    equal_treatment=[4.0],
    hardness_weighted=[8.0],
    decoupled=[1e-4],
    nudged=[1.1, 1e-6],
    staged=['mean', 1.0],
    pass_at_k=[4, 0.5, 1e-6],
    best_margin=[1e-6],
    rescaled=[1.0],
  ),
  'credit_assignment': dict(
    gae=[1.0, 1.0, True],
    process=[1.0, 1.0, True, True],
    steps=[1.0, 1e-6],
    flow=[0.01, 0.6, 15],
    gigpo=[1.0, 0.95, True, 1e-6],
    turn_grouped=[0.0, 1e-6],
    turn_whitened=[3.0, 1e-6],
    turn_reward_whitened=[1e-8],
    by_depth=[1e-8, 1e-6],
    return_whitened=[1.0],
  ),
  'auxiliary_model': dict(
    critic=[1e-5, 0.5],
    outcome=[1e-6, 0.05],
    preference=[1e-6, 0.05],
    flow=[1e-4, (0.25, 0.5, 0.75), 4, 0.8, 0],
  ),
  'importance_correction': dict(
    token_truncate=[0.0, 2.0],
    sequence_truncate=[0.0, 5.0],
    token_mask=[0.5, 5.0],
    sequence_mask=[0.0, 3.0],
    geometric_mask=[0.99, 1.01],
    divergent_negatives=[1e-4],
    second_moment_mask=[0.04],
    token_divergence=['k3', 0.01],
    sequence_divergence=['k3', 'mean', 0.01],
  ),
  'advantage_modulation': dict(unsure=[0.1, 0.0, 2.0, 1e-8], token_baseline=[1e-8, False]),
  'trust_region': dict(
    clip=[0.2, 0.2],
    dual_clip=[0.2, 0.2, 3.0],
    cap=[5.0],
    cap_above=[4.0],
    cap_band=[0.2, 0.2],
    one_side=[0.2, 0.2, True],
    two_side=[0.2, 0.2, True],
    ring=[0.2, 0.2, 0.6, 2.0, False],
    total_variation=[0.2, 20.0],
    binary_kl=[0.05, 20.0],
    second_moment_clip=[0.04, 0.3, 0.5],
    second_moment_mask=[0.04],
    balanced_clip=[1.0, 3.0],
    sigmoid=[1.0, 1.05],
    gamma=[2.0, 3.0, 3.0, 2.0],
    taper=[1.0],
    confidence_clip=[0.05, 0.15, 4.0, 16],
    shifted_clip=[0.2, 0.2],
    geometric=[0.4, 0.4],
    listwise=[10.0, 0.1],
  ),
  'token_weighting': dict(
    uncertain=[0.99, 0.2],
    covariance_clip_by_term=[0.0002, 1.0, 5.0, 0.02, 1.0, 40.0],
    forking=[0.2],
    covariance_clip=[0.0002, 1.0, 5.0],
    sharpen=[1.0, 1.0],
  ),
  'kl': dict(
    {name: [0.001] for name in ('k1', 'k2', 'k3', 'k3_straight', 'ratio_k1', 'ratio_k3')},
    receding=[0.001, 50, 10, 0.1, 0.5],
    quadratic=[0.1],
    sequence_quadratic=[0.001],
    sequence_quadratic_old=[0.001],
    covariance=[1.0, 0.0002],
    hinge=[1000.0, 1e-4],
  ),
}


@pytest.mark.parametrize('stage', DEFAULTS)
def test_defaults_are_those_of_the_sources(stage):
  fns = stages.choices(method_spec.STAGES[stage])
  defaults = {k: list(fn.__kwdefaults__.values()) for k, fn in fns.items() if fn.__kwdefaults__}
  assert defaults == DEFAULTS[stage], (
    f'defaults of {stage} must equal DEFAULTS of this file, which lists them as their sources set them'
  )


def test_dars_tops_up_hard_groups_to_what_its_rollouts_would_have_made_of_them():
  """Σ|A| of N + ΔN rollouts at the same rate, ΔN the table of the paper's code for N = 8 before rounding up."""
  k = np.arange(9)
  reward = jnp.asarray((np.arange(8)[None] < k[:, None]).astype(float))
  plain = np.abs(advantage.group_centered(reward, jnp.ones((9, 8)))).sum(1)
  for fn, more in (
    (advantage.equal_treatment, [24, 11, 3, 1, 0]),
    (advantage.hardness_weighted, [56, 24, 8, 3, 0]),
  ):
    got = np.abs(fn(reward, jnp.ones((9, 8)))).sum(1)
    assert got[0] == 0
    np.testing.assert_array_equal(got[4:], plain[4:])
    total = 8 * got[1:5] / plain[1:5]
    assert np.ceil(total - 8 - 1e-9).tolist() == more[1:]
  np.testing.assert_allclose(
    np.abs(advantage.equal_treatment(reward, jnp.ones((9, 8)))).sum(1)[1:5], plain[4]
  )
  same(
    run(data(), advantage=dict(fn='equal_treatment', most=1.0))[0],
    run(data(), advantage='group_centered')[0],
  )


def test_replayed_rows_have_a_ratio_of_one_and_the_others_the_ratios_that_they_had():
  d = data()
  method = objective.method(settings(**of('rlep', importance_correction='token_truncate')))
  marked = batch(d)._replace(replayed_B=np.arange(B) % 3 == 0)
  target, plain = (
    objective.targets(method, x, G).with_arrays(old_BxT=d.old) for x in (marked, batch(d))
  )
  c, sums = objective.coefficients(method, target, d.x)
  want = np.asarray(objective.coefficients(method, plain, d.x)[0])
  again = marked.replayed_B
  np.testing.assert_array_equal(np.asarray(c)[~again], want[~again])
  one = target.weight_BxT * target.advantage_BxT
  np.testing.assert_allclose(np.asarray(c)[again], one[again], rtol=1e-12)
  assert np.abs(np.asarray(c) - want)[again].max() > 1e-4
  seen = np.asarray(target.mask_BxT) > 0
  moved = np.where(seen & ~again[:, None], d.behavior - d.x, 0)
  np.testing.assert_allclose(float(sums['kl']), moved.sum())


def test_gdpo_of_one_part_is_grpo_up_to_a_constant_and_of_two_tells_equal_sums_apart():
  d = data()
  d.parts = d.reward[:, None]
  one, grpo = (
    run(d, advantage='decoupled')[0],
    run(d, advantage=dict(fn='group_normalized', eps=1e-4))[0],
  )
  ratio = one[grpo != 0] / grpo[grpo != 0]
  np.testing.assert_allclose(ratio, ratio[0], rtol=1e-10)
  standard = lambda x: (x - x.mean()) / x.std(ddof=1)  # noqa: E731
  parts = np.array([[[1.0, 0], [0, 1], [0, 0], [0, 0], [0, 1]]])  # the second is given twice
  fn = lambda parts, *w: np.asarray(  # noqa: E731
    advantage.decoupled(None, jnp.ones((1, 5)), jnp.asarray(parts), jnp.asarray(w), eps=0.0)
  )[0]
  got = fn(parts, 1.0, 1.0)
  np.testing.assert_allclose(got, standard(standard(parts[0, :, 0]) + standard(parts[0, :, 1])))
  assert got[0] - got[1] > 0.3  # whose sum is 1, both
  np.testing.assert_allclose(fn(parts * np.array([1.0, 50.0]), 1.0, 1.0), got, atol=1e-12)
  want = standard(standard(parts[0, :, 0]) + 0.5 * standard(parts[0, :, 1]))
  np.testing.assert_allclose(fn(parts, 1.0, 0.5), want, atol=1e-12)


def test_grpo_lambda_without_groups_is_grpo_and_apriel_without_its_share_is_overlong():
  d = data()
  same(
    run(d, **of('grpo_lambda', reward_shaping=dict(fn='brief_where_solved', share=0.0)))[0],
    run(d)[0],
  )
  plain = dict(fn='overlong_where_solved', buffer_tokens=4, power=0.0, failure=1.0)
  long = dict(fn='overlong', buffer_tokens=4)
  same(run(d, reward_shaping=plain)[0], run(d, reward_shaping=long)[0])


def test_grpo_lambda_shortens_right_answers_of_the_groups_with_most_of_them():
  correct = jnp.array([[1.0, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
  length = jnp.array([[2, 4, 9, 9], [2, 9, 9, 9], [2, 9, 9, 9], [2, 9, 9, 9], [0, 0, 0, 0]])
  for share, groups in ((0.0, []), (0.25, [0]), (0.5, [0, 2, 3]), (0.75, [0, 2, 3])):
    got = reward_shaping.brief_where_solved(correct, correct, length, 9, share=share)
    assert np.flatnonzero((got < correct).any(1)).tolist() == groups  # equals all or none
    assert (got[correct == 0] == 0).all() and (got[4] == 1).all()  # an empty group is none
  assert got[0, 0] > got[0, 1] > got[0, 2] > 0


def test_apriel_lets_right_answers_to_hard_prompts_be_long_but_not_cut_off():
  correct = jnp.array([[1.0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]])
  length = jnp.array([[8, 8, 10, 1], [8, 8, 10, 1], [8, 8, 0, 0]])
  fall = correct - reward_shaping.overlong_where_solved(
    correct, correct, length, 10, buffer_tokens=4
  )
  np.testing.assert_allclose(fall[0], [0.25 / 2, 1 / 2, 1, 0])
  np.testing.assert_allclose(fall[1], [0.75 / 2, 0.75 / 2, 1, 0])
  np.testing.assert_allclose(fall[2], [1 / 2, 1 / 2, 0, 0])  # two rows exist, both right


@pytest.mark.parametrize('name', ['token_whitened', 'group_whitened'])
def test_reinforce_pp_has_mean_0_and_variance_1_over_tokens(name):
  d = data()
  method = objective.method(settings(advantage=name))
  a = np.asarray(objective.targets(method, batch(d), G, leverage(d)).advantage_BxT)[d.mask > 0]
  np.testing.assert_allclose([a.mean(), a.var(ddof=1)], [0, 1], atol=1e-6)


def test_lite_ppo_is_grpo_up_to_a_constant_where_groups_are_alike():
  d = data()
  d.reward = np.tile([0.0, 0.1, 0.7, 1.0], P)
  one, other = run(d, advantage='batch_normalized')[0], run(d)[0]
  ratio = one[other != 0] / other[other != 0]
  np.testing.assert_allclose(ratio, ratio[0], rtol=1e-10)


def test_rlfr_of_latents_on_the_flow_is_grpo_and_its_rewards_are_of_the_tokens_ahead():
  d = data()
  plain = run(d, trust_region='dual_clip')[0]
  for deviation in (0 * d.deviation, 0 * d.deviation + 0.7):
    same(run(change(d, deviation=deviation), **of('rlfr'))[0], plain)
  same(run(d, **of('rlfr', credit_assignment=dict(fn='flow', coef=0.0)))[0], plain)
  # One latent off the flow lowers the advantages up to its token, and none after it.
  b = int(np.argmax(d.length))
  far = 0 * d.deviation
  far[b, 2] = 1.0
  method = objective.method(settings(**of('rlfr')))
  advantage = lambda d: np.asarray(  # noqa: E731
    objective.targets(method, batch(d), G, d.deviation).advantage_BxT
  )
  fall = advantage(change(d, deviation=0 * far)) - advantage(change(d, deviation=far))
  want = np.zeros(d.mask.shape)
  want[b, :3] = 0.3
  np.testing.assert_allclose(fall, want, atol=1e-12)
  assert d.length[b] > 3
  far[b, d.length[b] - 1] = 9.0  # the last token of a row is not read
  np.testing.assert_allclose(
    advantage(change(d, deviation=far)), advantage(change(d, deviation=far * (far < 9)))
  )


def test_the_baseline_of_least_variance_is_the_mean_where_all_rows_pull_alike():
  reward, length = jnp.array([[0.1, 0.5, 0.2, 0.9]]), jnp.ones((1, 4))
  for pull in (0.0, 300.0, -jnp.inf):
    pull_PxG, centered = jnp.full((1, 4), pull), advantage.group_centered(reward, length)
    a = advantage.least_variance(reward, length, pull_PxG, by_std=False, floor=0.0)
    np.testing.assert_allclose(a, centered, atol=1e-15)
    a = advantage.least_variance(reward, length, pull_PxG, floor=0.0)
    np.testing.assert_allclose(a, centered / np.std(reward), rtol=1e-12)
  # Equal rewards are not divided by what rounding leaves of their deviation; without any pull the baseline is 0.
  for pull, want in ((0.0, 0.0), (-300.0, 0.7)):
    a = advantage.least_variance(jnp.full((1, 4), 0.7), length, jnp.full((1, 4), pull))
    np.testing.assert_allclose(a, want, atol=1e-8)


def test_the_baseline_of_least_variance_has_it_on_an_enumerated_policy():
  """Four answers with known probabilities, sampled by another policy: E and Var of w·(R − b)·∇log π, no estimate.

  A group that holds each answer as often as it is sampled has the b of the expectation.
  """
  theta, sampler = np.array([0.3, -0.5, 0.9, 0.1]), np.array([3, 1, 2, 2]) / 8
  pi = np.exp(theta) / np.exp(theta).sum()
  reward, score = np.array([1.0, 0.2, 0.0, 0.7]), np.eye(4) - pi  # ∇ log π of a softmax
  w = pi / sampler

  def spread(b):
    sample = (w * (reward - b))[:, None] * score
    mean = sampler @ sample
    return float(sampler @ ((sample - mean) ** 2).sum(1)), mean

  group = np.repeat(np.arange(4), [3, 1, 2, 2])
  pull = np.log(w * np.linalg.norm(score, axis=1))[group]
  a = advantage.least_variance(
    jnp.asarray(reward[group][None]), jnp.ones((1, 8)), jnp.asarray(pull[None]), by_std=False
  )
  b = float(reward[group][0] - a[0, 0])
  assert all(spread(b)[0] < spread(b + step)[0] for step in (-1e-4, 1e-4))
  assert spread(b)[0] < spread(reward[group].mean())[0] - 1e-4
  np.testing.assert_allclose(spread(b)[1], spread(0.0)[1], atol=1e-12)  # a baseline moves no mean


def test_the_median_of_an_odd_group_has_no_advantage_and_an_outlier_moves_no_other():
  reward, length = jnp.array([[0.1, 0.5, 0.2, 0.9, 0.4]]), jnp.ones((1, 5))
  a = advantage.median_centered(reward, length)
  assert np.flatnonzero(a[0] == 0).tolist() == [4]
  far = advantage.median_centered(reward.at[0, 3].set(1e9), length)
  np.testing.assert_allclose(far[0, :3], a[0, :3])
  # Empty rows are neither at the median nor counted: |A| is scaled by 5/4, not 7/4.
  empty = advantage.median_centered(
    jnp.concatenate([reward, jnp.full((1, 2), 9.0)], 1), jnp.array([[1.0] * 5 + [0.0] * 2])
  )
  np.testing.assert_allclose(empty, np.pad(a, ((0, 0), (0, 2))))


def test_all_means_agree_where_all_rows_are_equally_long():
  d = data()
  d.length, d.mask = np.full(B, T), np.ones((B, T))
  means = [run(d, aggregation=f'{k}_mean')[0] for k in ('token', 'sequence', 'prompt')]
  same(means[0], means[1])
  same(means[0], means[2])


def test_a_prompt_counts_the_same_however_long_its_answers_are():
  d = data()
  method = objective.method(settings(aggregation='prompt_mean'))
  weight = np.asarray(objective.targets(method, batch(d), G, leverage(d)).weight_BxT)
  np.testing.assert_allclose(weight.reshape(P, -1).sum(1), 1 / P)


def test_gspo_of_single_tokens_is_grpo():
  d = data()
  d.length, d.mask = np.ones(B, int), (np.arange(T)[None] < 1) * np.ones((B, 1))
  same(run(d, ratio='sequence')[0], run(d)[0])
  same(run(d, ratio='product')[0], run(d)[0])


def test_luspo_is_gspo_times_the_length():
  d = data()
  same(run(d, **of('luspo'))[0], run(d, ratio='sequence')[0] * d.length[:, None])


def test_gmpo_with_wide_bounds_is_gspo_with_wide_bounds():
  wide = dict(fn='geometric', low=1e6, high=1e6)
  same(run(data(), trust_region=wide)[0], run(data(), ratio='sequence', trust_region=WIDE)[0])


def test_a_cap_of_infinity_is_unclipped_ppo_and_a_cap_of_0_no_update():
  d = data()
  same(run(d, trust_region=dict(fn='cap', most=1e9))[0], run(d, trust_region='none')[0])
  assert (run(d, trust_region=dict(fn='cap', most=0.0))[0] == 0).all()


def test_three_conventions_of_cispo_with_one_meaning():
  d = data()
  above = run(d, trust_region=dict(fn='cap_above', high=0.3))[0]
  same(run(d, trust_region=dict(fn='cap', most=1.3))[0], above)
  same(run(d, trust_region=dict(fn='cap_band', low=1.0, high=0.3))[0], above)
  assert np.abs(run(d, trust_region=dict(fn='cap_band', low=0.1, high=0.3))[0] - above).max() > 1e-4


def test_minpro_is_ppo_where_only_the_last_token_is_off_policy():
  d = data()
  last = np.arange(T)[None] == d.length[:, None] - 1
  d.behavior = np.where(last, d.behavior, d.x)
  # The prefix's minimum is then 1: nothing before the last token moved.
  same(run(d, ratio='prefix_min')[0], run(d)[0])
  d.behavior = data().behavior
  d.length, d.mask = np.ones(B, int), (np.arange(T)[None] < 1) * np.ones((B, 1))
  same(run(d, ratio='prefix_min')[0], run(d)[0])


def test_bapo_without_a_target_has_its_first_bounds_and_with_a_high_one_its_last():
  d = data()
  none = dict(fn='balanced_clip', target=0.0)
  first = dict(fn='dual_clip', low=0.4, high=0.2)
  same(run(d, trust_region=none)[0], run(d, trust_region=first)[0])
  last = dict(fn='dual_clip', low=0.2, high=1.0)
  same(run(d, trust_region=dict(fn='balanced_clip', target=1e9))[0], run(d, trust_region=last)[0])


def harmful(d):
  a = np.asarray(objective.targets(objective.method(settings()), batch(d), G).advantage_BxT)
  r = np.exp(d.x - d.behavior)
  return (((a > 0) & (r > 1)) | ((a < 0) & (r < 1))) & (d.mask > 0)


@pytest.mark.parametrize('budget', [0.001, 0.01, 0.04])
def test_m2po_holds_as_few_tokens_as_its_budget_allows(budget):
  d = data()
  chosen, square = harmful(d), (d.x - d.behavior) ** 2
  level = float(token_inputs.level_within(jnp.asarray(square), jnp.asarray(chosen), budget))
  following = np.min(square[chosen], where=square[chosen] > level, initial=np.inf)
  assert np.minimum(square, level)[chosen].mean() < budget
  assert np.minimum(square, following)[chosen].mean() >= budget


def test_m2po_with_a_large_budget_masks_nothing_and_with_none_clips_no_tighter_than_told():
  d = data()
  plain = run(d, trust_region='none')[0]
  for fn in ('second_moment_clip', 'second_moment_mask'):
    same(run(d, trust_region=dict(fn=fn, budget=1e9))[0], plain)
  tight = dict(fn='second_moment_clip', budget=1e-9, low=0.1, high=0.15)
  same(run(d, trust_region=tight)[0], run(d, trust_region=dict(fn='clip', low=0.1, high=0.15))[0])
  dropped = (run(d, trust_region=dict(fn='second_moment_mask', budget=0.0))[0] == 0) & (plain != 0)
  np.testing.assert_array_equal(dropped, harmful(d))


def test_topr_of_successes_alone_is_supervised_learning():
  d = data()
  d.reward = np.ones(B)
  supervised = dict(advantage='raw', ratio='one', trust_region='none', aggregation='sequence_sum')
  same(run(d, **of('topr', advantage='raw'))[0], run(d, **supervised)[0])


def test_opmd_at_a_high_temperature_is_the_mean():
  reward, length = jnp.asarray(data().reward.reshape(P, G)), jnp.ones((P, G))
  got = 1e6 * advantage.log_mean_exp(reward, length, temperature=1e6)
  np.testing.assert_allclose(got, advantage.group_centered(reward, length), atol=1e-5)


def test_r3l_without_amplification_is_the_mean():
  d = data()
  plain = dict(fn='amplified', right=9.0, factor=1.0, temperature=0.0)
  mean = run(d, **of('r3l', advantage='group_centered'))[0]
  same(run(d, **of('r3l', advantage=plain))[0], mean)


def test_r3l_counts_the_only_row_of_a_group_by_its_reward():
  """From 1 up as 1, and below that threefold; an empty row is none of the group."""
  reward, length = jnp.array([[0.5, 7.0], [1.5, 7.0]]), jnp.array([[3, 0], [3, 0]])
  np.testing.assert_allclose(advantage.amplified(reward, length), [[0.75, 0], [0.5, 0]])


def test_asym_re_differs_from_the_mean_by_supervised_learning_on_its_own_samples():
  d = data()
  mean = run(d, **of('asym_re', advantage='group_centered'))[0]
  same(run(d, **of('asym_re', advantage=dict(fn='shifted', shift=0.0)))[0], mean)
  np.testing.assert_allclose(run(d, **of('asym_re'))[0] - mean, 0.1 * tok(d), atol=1e-12)


def test_red_weight_at_a_high_temperature_is_reinforce():
  d = data()
  plain = run(d, **of('red_weight', advantage='group_centered'))[0]
  hot = dict(fn='exp_weighted', temperature=1e9)
  np.testing.assert_allclose(run(d, **of('red_weight', advantage=hot))[0], plain, atol=1e-8)


@pytest.mark.parametrize('rows', [3, 5, 6, 7])
def test_red_drop_is_the_mean_over_all_choices_of_the_rows_that_are_kept(rows):
  """Groups in which several rows below the mean are kept, with graded rewards, and empty rows between them."""
  r = np.random.default_rng(rows)
  reward_PxG, length_PxG = r.exponential(size=(20, rows)) ** 2, r.integers(0, 4, (20, rows))
  got = np.asarray(advantage.balanced(jnp.asarray(reward_PxG), jnp.asarray(length_PxG)))
  several = 0
  for reward_G, length_G, got_G in zip(reward_PxG, length_PxG, got, strict=True):
    exists = np.flatnonzero(length_G)
    if not len(exists):
      assert not got_G.any()
      continue
    mean = reward_G[exists].mean()
    good = [i for i in exists if reward_G[i] >= mean]
    bad = [i for i in exists if reward_G[i] < mean]
    several += 1 < len(good) < len(bad)
    draws = [*itertools.combinations(bad, min(len(good), len(bad)))]
    want_G = np.zeros(rows)
    for chosen in draws:
      kept = [*good, *chosen]
      want_G[kept] += (reward_G[kept] - reward_G[kept].mean()) / len(draws)
    np.testing.assert_allclose(got_G, want_G, atol=1e-12)
  assert several or rows < 5


def test_red_drop_keeps_equal_rewards_whose_mean_is_rounded_up():
  reward_PxG = np.full((1, 6), 0.1, np.float32)
  got = advantage.balanced(jnp.asarray(reward_PxG), jnp.ones((1, 6)))
  np.testing.assert_allclose(got, 0, atol=1e-6)


def test_rec_one_side_is_ppo_and_a_ring_with_a_far_rim_is_two_side():
  d = data()
  same(run(d, trust_region='one_side')[0], run(d)[0])
  far = dict(fn='ring', outer_low=1.0, outer_high=1e9)
  same(run(d, trust_region=far)[0], run(d, trust_region=dict(fn='two_side', corrected=False))[0])


def test_kimi_without_its_regulariser_is_reinforce():
  d = data()
  plain = run(d, **of('kimi', kl='none'))[0]
  same(run(d, **of('kimi', kl=dict(fn='quadratic', coef=0.0)))[0], plain)


@pytest.mark.parametrize('name', ['a_star_po', 'oapl'])
def test_least_squares_of_rows_rest_at_the_optimum_of_their_regularized_objective(name):
  """A group of equally likely answers of the anchor, π* = π_anchor·e^{(R − V*)/β}: no row has a gradient."""
  d, beta = data(), 0.4
  share = np.exp(d.reward / beta)
  share /= np.repeat(share.reshape(-1, G).mean(1), G)  # π* / π_anchor of a row
  anchor = d.reference if name == 'a_star_po' else d.behavior
  d.x = anchor + np.log(share)[:, None] / d.length[:, None]
  advantage = dict(fn='log_mean_exp', temperature=beta)
  rest = dict(fn=METHODS[name].settings['kl']['fn'], coef=beta / (1 + beta))
  got = run(d, **of(name, advantage=advantage, kl=rest))[0]
  np.testing.assert_allclose(got, 0, atol=1e-12)
  assert np.abs(run(d, **of(name, advantage=advantage, kl='none'))[0]).max() > 0.01


@pytest.mark.parametrize('fn', ['total_variation', 'binary_kl'])
def test_dppo_masks_nothing_at_a_wide_bound_and_never_an_unlikely_token(fn):
  d = data()
  same(
    run(d, ratio='direct', trust_region=dict(fn=fn, delta=100.0))[0],
    run(d, ratio='direct', trust_region='none')[0],
  )
  d.x, d.behavior = d.x - 8, d.behavior - 8  # p of about 1e-4: a large ratio is a small step
  assert run(d, ratio='direct', trust_region=fn)[1]['clipped'] == 0
  assert run(d)[1]['clipped'] > 0


def test_remix_on_fresh_rollouts_is_ppo():
  d = data(mismatch=0)
  same(run(d, **of('remix', aggregation='sequence_mean', kl='none'))[0], run(d)[0])


@pytest.mark.parametrize(
  'step, share',
  [(0, 1), (50, 1), (51, 0.9), (60, 0.9), (61, 0.8), (100, 0.5), (101, 0.5), (9999, 0.5)],
)
def test_the_kl_of_remix_goes_from_the_first_weights_to_those_before_the_batch(step, share):
  """share = 1 is one KL; else each has its part, the reference's that of k3."""
  d = change(data(), step=np.full(B, step))

  def at(**kl):
    stages = dict(old_policy='before', advantage='raw', trust_region='none', ratio='one', kl=kl)
    return run(d, **stages)[0]

  none = at(fn='none')
  first = at(fn='k3', coef=0.3) - none
  swapped = change(d, reference=d.old)
  before = (
    run(swapped, advantage='raw', trust_region='none', ratio='one', kl=dict(fn='k3', coef=0.3))[0]
    - none
  )
  same(at(fn='receding', coef=0.3) - none, share * first + (1 - share) * before)


def test_corrections_with_open_bounds_are_the_whole_ratio():
  d = data()
  open_ = dict(low=0.0, high=1e9)
  token = run(d, importance_correction='token')[0]
  for fn in ('token_truncate', 'token_mask', 'geometric_mask'):
    same(run(d, importance_correction=dict(fn=fn, **open_))[0], token)
  rows = np.exp(((d.old - d.behavior) * d.mask).sum(1, keepdims=True))
  plain = run(change(d, behavior=d.old))[0]
  for fn in ('sequence_truncate', 'sequence_mask'):
    same(run(d, importance_correction=dict(fn=fn, **open_))[0], rows * plain)


def test_what_a_mask_rejects_is_exactly_0_counted_and_left_in_the_denominator():
  d = data()
  choices = dict(fn='token_mask', low=0.8, high=1.25)
  c, sums = run(d, importance_correction=choices)
  rho = np.exp(d.old - d.behavior)
  out = ((rho < 0.8) | (rho > 1.25)) & (d.mask > 0)
  assert 0 < out.sum() == sums['rejected'] and (c[out] == 0).all()
  same(c[~out], run(d, importance_correction='token')[0][~out])


def test_opsm_never_masks_what_was_good():
  d = data()
  kept = run(d, importance_correction=dict(fn='divergent_negatives', delta=-1e9))[0]
  plain = run(d, trust_region='none', ratio='one')[0]
  assert (kept[plain < 0] == 0).all()
  same(kept[plain > 0], run(d)[0][plain > 0])


def test_decoupled_ppo_is_ppo_or_importance_sampling_at_its_two_ends():
  d = data()
  mean = dict(aggregation='token_mean')
  same(run(change(d, old=d.behavior), **of('decoupled_ppo'))[0], run(d, **mean)[0])
  free = run(d, ratio='direct', trust_region='none', **mean)[0]
  same(run(change(d, old=d.x), **of('decoupled_ppo'))[0], free)


def test_mini_rl_on_policy_is_reinforce_and_a_long_answer_pulls_as_hard_per_token():
  d = data(drift=0, mismatch=0)
  c, _ = run(d, **of('mini_rl'))
  a = np.asarray(
    objective.targets(objective.method(settings(**of('mini_rl'))), batch(d), G).advantage_BxT
  )
  same(c, a / B)


def test_echo_with_a_constant_epsilon_and_no_tilt_is_grpo():
  d = data()
  flat = dict(advantage_modulation=dict(fn='unsure', multiply=0.0), aggregation='token_mean')
  constant = dict(fn='confidence_clip', base=0.2, gain=0.0)
  same(run(d, **of('echo', **flat, trust_region=constant))[0], run(d, aggregation='token_mean')[0])
  sure = change(d, confidence=np.ones((B, T)), behavior=d.x - 0.1)
  slack = dict(fn='clip', low=0.05 + 0.15 / 2, high=0.05 + 0.15 / 2)
  same(
    run(sure, trust_region='confidence_clip')[0],
    run(sure, trust_region=slack)[0],
    err_msg='σ(0) = 1/2',
  )


def test_the_tilt_of_echo_lifts_unsure_tokens_within_its_bound_and_gives_nothing_to_a_group():
  d = data()
  d.entropy[0, 0], d.confidence[0, 0] = 50.0, 0.0  # far above all others
  c, a = (
    run(d, advantage_modulation=dict(fn='unsure', multiply=m), trust_region='none', ratio='one')[0]
    for m in (0.2, 0.0)
  )
  seen = (d.mask > 0) & (a != 0)
  lift = np.where(seen, c / np.where(seen, a, 1), 1)
  assert np.isclose(lift[0, 0], 1 + 0.2 * 2) and (lift[seen] >= 1 - 0.4 - 1e-12).all()
  order = np.argsort((d.entropy - d.confidence)[seen & (d.entropy < 1)])
  assert lift[seen & (d.entropy < 1)][order[-1]] > lift[seen & (d.entropy < 1)][order[0]]
  equal = change(d, reward=np.ones(B))  # no advantage: what is added is all there is
  added = run(
    equal,
    advantage_modulation=dict(fn='unsure', add=0.3),
    trust_region='none',
    aggregation='token_mean',
  )[0]
  r = np.where(d.mask > 0, np.exp(d.x - d.behavior), 1)
  np.testing.assert_allclose((added / r).reshape(P, -1).sum(1), 0, atol=1e-15)
  assert np.abs(added).max() > 1e-3


def test_sapo_is_flat_far_away_and_steepest_at_one():
  from jaxrl_llm.objective import trust_region

  view = token_inputs.Tokens(
    *[jnp.zeros((1, 3))] * 3, jnp.ones((1, 3)), jnp.ones((1, 3)), None, None
  )
  weight, value = trust_region.sigmoid(jnp.log(jnp.array([[1e-3, 1.0, 30.0]])), view)
  np.testing.assert_allclose(weight[0, 1], 1.0)
  np.testing.assert_allclose(value[0, 1], 2.0)
  assert float(weight[0, 0]) < 1e-2 and float(weight[0, 2]) < 1e-8


def test_vespo_weighs_most_at_k_over_lambda():
  from jaxrl_llm.objective import trust_region

  w = jnp.linspace(0.1, 4, 400)[None]
  view = token_inputs.Tokens(*[w * 0] * 3, w * 0 + 1, w * 0 + 1, None, None)
  for k, rate in ((2.0, 3.0), (3.0, 2.0)):
    weight, _ = trust_region.gamma(jnp.log(w), view, power=k, decay=rate)
    np.testing.assert_allclose(w[0, np.argmax(weight)], k / rate, atol=0.01)


def test_adora_with_a_weight_of_1_is_grpo():
  same(run(data(), advantage=dict(fn='adora', weak=1.0))[0], run(data())[0])


def test_adora_trusts_only_groups_whose_right_answers_are_longer_than_the_mean_wrong_one():
  reward = jnp.array([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
  length = jnp.array([[5.0, 2.0, 6.0], [4.0, 2.0, 6.0]])
  for long_tokens, second in ((4054, 0.1), (7, 0.1), (6, 1.0)):
    got = advantage.adora(reward, length, long_tokens=long_tokens)
    weight = got / advantage.group_normalized(reward, length)
    np.testing.assert_allclose(weight, [[1.0] * 3, [second] * 3])


def test_max_rl_pulls_with_one_over_the_share_that_is_right():
  reward, length = jnp.array([[1.0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]), jnp.ones((3, 4))
  a = advantage.mean_relative(reward, length)
  np.testing.assert_allclose(a, [[3, -1, -1, -1], [1 / 3, 1 / 3, 1 / 3, -1], [0] * 4])


def test_xrpo_adds_nothing_to_equal_likelihoods_and_never_more_than_told():
  d = data()
  level = change(d, x=np.full((B, T), -1.0), behavior=d.behavior - d.x - 1.0)
  same(run(level, token_weighting='sharpen')[0], run(level)[0])
  plain = run(d)[0]
  ratio = run(d, token_weighting=dict(fn='sharpen', strength=1e6, most=0.5))[0] / np.where(
    plain, plain, 1
  )
  assert ratio.max() == pytest.approx(1.5) and ratio[plain < 0].min() == 1


def test_ulo_rl_masks_nothing_above_probability_1_or_while_entropy_is_high():
  d = data()
  plain = run(d)[0]
  assert np.abs(run(d, token_weighting=dict(fn='uncertain', mastered=0.5))[0] - plain).max() > 1e-3
  same(run(d, token_weighting=dict(fn='uncertain', mastered=1.1))[0], plain)
  same(run(d, token_weighting=dict(fn='uncertain', mastered=0.5, entropy=0.0))[0], plain)


def test_all_tokens_fork_where_all_are_asked_for():
  same(run(data(), token_weighting=dict(fn='forking', share=1.0))[0], run(data())[0])


def test_covariance_terms_without_strength_are_plain():
  d = data()
  same(run(d, token_weighting=dict(fn='covariance_clip', low=1e8, high=1e9))[0], run(d)[0])
  free = run(d, trust_region='none')[0]
  same(run(d, trust_region='none', kl=dict(fn='covariance', coef=0.0))[0], free)


def test_clip_cov_drops_on_average_the_share_it_was_told_to():
  d = data()
  everything = dict(fn='covariance_clip', share=0.1, low=-9.0, high=9.0)
  n = d.mask.sum()
  same(
    run(d, trust_region='none', token_weighting=everything)[0],
    (1 - (0.1 * n // 1) / n) * run(d, trust_region='none')[0],
  )


def test_clip_cov_drops_nothing_that_the_clip_drops():
  d = data()
  plain = run(d)[0]
  kept = (plain != 0).sum() + (d.mask * (gz(d) == 0)).sum()
  everything = dict(fn='covariance_clip', share=0.1, low=-9.0, high=9.0)
  same(run(d, token_weighting=everything)[0], (1 - (0.1 * d.mask.sum() // 1) / kept) * plain)


def test_drpo_at_a_high_temperature_is_the_mean_over_right_minus_the_mean_over_wrong():
  """That is R − mean, divided by p(1 − p)."""
  d = data()
  d.reward = d.correct
  flat = dict(fn='listwise', max_tokens=T, temperature=1e6, length_rate=1e9)
  got = run(d, **of('drpo', kl='none', trust_region=flat))[0]
  p = np.repeat(d.correct.reshape(P, G).mean(1), G)[:, None]
  scale = np.where((p > 0) & (p < 1), 1 / np.maximum(p * (1 - p), 1e-9), 0)
  want = run(d, advantage='group_centered', ratio='one', trust_region='none')[0] * scale
  np.testing.assert_allclose(got, want, atol=1e-6)


def test_the_hinge_of_drpo_is_still_until_the_drift_is_too_large():
  d = data()
  plain = run(d, **of('drpo', kl='none'))[0]
  same(run(d, **of('drpo', kl=dict(fn='hinge', delta=1e6)))[0], plain)


def test_kl_forms_agree_in_value_where_they_should():
  d = data()
  assert run(d, kl='k3')[1]['kl_loss'] == run(d, kl='k3_straight')[1]['kl_loss'] > 0
  level = change(d, reference=d.x)
  for name in ('k1', 'k2', 'k3', 'k3_straight', 'ratio_k1', 'ratio_k3'):
    assert run(level, kl=name)[1]['kl_loss'] == 0
  for name in ('k2', 'k3', 'k3_straight', 'ratio_k3'):
    same(run(level, kl=name)[0], run(d)[0])


def ess(d, **changes):
  method = objective.method(
    settings(lr_scale=dict(fn='effective_sample_size') | changes, ratio='direct_product')
  )
  return float(
    objective.learning_rate_scale(method, objective.targets(method, batch(d), G, leverage(d)), d.x)
  )


def test_vcpo_leaves_the_learning_rate_for_equal_weights_and_takes_a_root_of_1_over_b_for_one():
  d = data()
  assert ess(change(d, behavior=d.x)) == pytest.approx(1)
  assert ess(change(d, behavior=d.x - 0.1 / d.length[:, None])) == pytest.approx(1)
  far = np.where(np.arange(B)[:, None] == 3, 15.0, 0.0) / d.length[:, None]
  assert ess(change(d, behavior=d.x - far)) == pytest.approx(np.sqrt(1 / B), rel=1e-3)
  w = np.exp(((d.x - d.behavior) * d.mask).sum(1))
  assert ess(d) == pytest.approx(np.sqrt(w.sum() ** 2 / (w**2).sum() / B))
  for scale in (60.0, -60.0):  # no overflow; a batch that all but vanishes takes no step
    far = change(d, behavior=d.behavior + scale / d.length[:, None])
    assert ess(far) == pytest.approx(ess(d) if scale < 0 else 0, rel=1e-6, abs=1e-9)
  assert ess(d, base=0.1) == 1
  half = change(d, length=np.where(np.arange(B) < G, d.length, 0))
  w = np.exp(((d.x - d.behavior) * d.mask).sum(1))[:G]
  assert ess(half) == pytest.approx(np.sqrt(w.sum() ** 2 / (w**2).sum() / G))
  assert ess(change(d, length=0 * d.length)) == 1


def test_penalties_on_the_drift_have_the_values_they_are_said_to_have():
  d = change(data(4), old=data(4).behavior)
  moved, weight = (d.x - d.behavior) * d.mask, tok(d)
  got = run(d, kl='quadratic', aggregation='token_mean')[1]['kl_loss']
  assert got == pytest.approx((weight * moved**2).sum() / 2)
  got = run(d, kl='sequence_quadratic', aggregation='sequence_sum')[1]['kl_loss']
  rows = ((d.x - d.reference) * d.mask).sum(1)
  assert got == pytest.approx((rows**2 / 2).mean())
  got = run(d, kl='sequence_quadratic_old', aggregation='sequence_sum')[1]['kl_loss']
  assert got == pytest.approx((moved.sum(1) ** 2 / 2).mean())
  drift = -(weight * moved).sum()
  got = run(d, kl=dict(fn='hinge', coef=7.0, delta=0.01), aggregation='token_mean')[1]['kl_loss']
  assert drift > 0.01 and got == pytest.approx((drift - 0.01) * drift)


@pytest.mark.parametrize('name', sorted(stages.choices(advantage)))
def test_an_advantage_that_compares_a_group_is_refused_for_groups_of_one(name):
  """What says the same of a lone row whatever its reward was would teach nothing: `validation.py` lists it."""
  fn, r = getattr(advantage, name), np.random.default_rng(0)
  fn = functools.partial(fn, k=1) if name == 'pass_at_k' else fn

  def advantages(reward_Px1):
    given = dict(reward_PxG=reward_Px1, parts_PxGxK=reward_Px1[..., None], weight_K=np.ones(1))
    given |= dict.fromkeys(('length_PxG', 'leverage_PxG', 'context_PxG'), np.ones((P, 1)))
    return fn(**{k: v for k, v in given.items() if k in inspect.signature(fn).parameters})

  one, other = (advantages(r.uniform(0.1, 1, (P, 1))) for _ in range(2))
  assert np.allclose(one, other) == (name in compatibility.OF_A_GROUP)
