"""Per-token values of rollout files equal those of the update; `cuts` locate tokens in the text."""

from __future__ import annotations

import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objective
from jaxrl_llm.config import loading as configs
from jaxrl_llm.models import tokenizer
from jaxrl_llm.runner import token_stats
from jaxrl_llm.types import STOPPED, Batch, Prompts, Rollout, Turns

P, G, T = 4, 3, 5
B = P * G
CONFIGS = pathlib.Path(__file__).parents[2] / 'configs'
CHARS = tokenizer.characters('0123456789+=')


def make(minibatches=1, **spec):
  config = configs.default()
  for name, part in spec.items():
    config.objective[name] = part
  method = objective.method(config.objective)
  return spec_of(method, minibatches, 1), config


def spec_of(method, minibatches, slots_per_prompt):
  return types.SimpleNamespace(
    objective=types.SimpleNamespace(method=method),
    update=types.SimpleNamespace(minibatches=minibatches),
    rollout=types.SimpleNamespace(decode=types.SimpleNamespace(rollouts=G)),
    layout=types.SimpleNamespace(slots_per_prompt=slots_per_prompt, group=G),
  )


def batch(seed=0):
  random = np.random.default_rng(seed)
  length_B = random.integers(1, T + 1, B).astype(np.int32)
  length_B[4] = 0
  prompts = Prompts(np.ones((P, 2), np.int32), *[np.full(P, 2, np.int32)] * 3, np.zeros(P))
  rollout = Rollout(
    random.integers(2, 14, (B, T)).astype(np.int32),
    -random.random((B, T)).astype(np.float32),
    length_B,
    np.full(B, STOPPED, np.int8),
    np.zeros((B, T), np.int32),
    np.ones(B, np.float32),
    np.zeros((B, 0), np.float32),
  )
  right_B = random.integers(0, 2, B).astype(np.float32)
  return Batch(prompts, rollout, right_B, right_B)


def turns():
  """One turn, after whose first token stands one that was given."""
  number_BxT = np.zeros((B, T), np.int32)
  number_BxT[:, 1] = -1
  zeros = np.zeros((B, T), np.float32)
  return Turns(number_BxT, zeros, zeros.astype(np.int32), np.zeros(B, np.int8))


def said(given):
  return [CHARS.decode(t[:n].tolist()) for t, n in zip(*given.rollout[:3:2], strict=True)]


def test_coefficients_are_the_gradient_of_the_loss_at_the_sampled_policy():
  step_spec, config = make(trust_region=dict(fn='clip', low=0.2, high=0.2))
  given = batch()
  records = token_stats.TokenStats(step_spec, config, CHARS.backend)(given, said(given))
  target = objective.targets(step_spec.objective.method, given, G)

  def surrogate(logp_BxT):  # PPO's, as the paper writes it
    ratio = jnp.exp(logp_BxT - given.rollout.logp_BxT)
    A = target.advantage_BxT
    return (target.weight_BxT * jnp.minimum(ratio * A, jnp.clip(ratio, 0.8, 1.2) * A)).sum()

  wanted_BxT = jax.grad(surrogate)(jnp.asarray(given.rollout.logp_BxT))
  assert sorted(records) == [b for b in range(B) if b != 4]
  for b, row in records.items():
    n = int(given.rollout.length_B[b])
    spread = lambda x: np.broadcast_to(np.array(x, float), n)  # noqa: B023, E731
    np.testing.assert_allclose(spread(row['coefficient']), wanted_BxT[b, :n], rtol=1e-3, atol=1e-9)
    np.testing.assert_allclose(spread(row['advantage']), target.advantage_BxT[b, :n], rtol=1e-3)
    np.testing.assert_allclose(row['logp'], given.rollout.logp_BxT[b, :n], rtol=5e-3)


def test_minibatches_have_denominators_of_their_own():
  step_spec, config = make(minibatches=2, aggregation=dict(fn='token_mean'))
  given = batch()
  made = token_stats.token_values(step_spec, given, True)
  for u in range(2):
    at_P = np.arange(P) % 2 == u
    at_B = np.repeat(at_P, G)
    part = Batch(
      Prompts(*[x if x is None else x[at_P] for x in given.prompts]),
      Rollout(*[x if x is None else x[at_B] for x in given.rollout]),
      given.reward_B[at_B], given.correct_B[at_B],
    )  # fmt: skip
    target = objective.targets(step_spec.objective.method, part, G)
    wanted, _ = objective.coefficients(step_spec.objective.method, target, target.behavior_BxT)
    np.testing.assert_allclose(made['coefficient'][at_B], wanted, rtol=1e-5)


def test_shaped_rewards_are_those_of_the_update():
  given = batch()
  step_spec, config = make(reward_shaping=dict(fn='overlong', buffer_tokens=2, factor=0.5))
  shaped_B = token_stats.shaped_rewards(step_spec, given)
  over_B = np.clip((given.rollout.length_B - (T - 2)) / 2, 0, None)
  np.testing.assert_allclose(shaped_B, given.reward_B - 0.5 * over_B, rtol=1e-6)
  assert (shaped_B != given.reward_B).any()
  assert token_stats.shaped_rewards(make(reward_shaping=dict(fn='none'))[0], given) is None


def test_shaped_rewards_of_groups_are_chosen_within_a_minibatch():
  given = batch()
  changes = dict(reward_shaping=dict(fn='brief_where_solved', share=0.25))
  shaped_B = token_stats.shaped_rewards(make(minibatches=2, **changes)[0], given)
  one = token_stats.shaped_rewards(make(**changes)[0], given)
  for u in range(2):
    at_B = np.repeat(np.arange(P) % 2 == u, G)
    part = Batch(
      Prompts(*[x if x is None else x[u::2] for x in given.prompts]),
      Rollout(*[x if x is None else x[at_B] for x in given.rollout]),
      given.reward_B[at_B], given.correct_B[at_B],
    )  # fmt: skip
    wanted = token_stats.shaped_rewards(make(**changes)[0], part)
    np.testing.assert_allclose(shaped_B[at_B], wanted, rtol=1e-6)
  assert (shaped_B != one).any()


def test_environment_tokens_do_not_count_for_shaping():
  given = batch()
  given = given._replace(rollout=given.rollout._replace(turns=turns()))
  made = make(reward_shaping=dict(fn='overlong', buffer_tokens=4, factor=1.0))
  length_B = given.rollout.length_B
  sampled_B = length_B - (length_B > 1)  # the second token is the environment's
  wanted_B = given.reward_B - np.clip((sampled_B - (T - 4)) / 4, 0, None)
  np.testing.assert_allclose(token_stats.shaped_rewards(made[0], given), wanted_B, rtol=1e-6)


def test_groups_beyond_the_token_limit_are_left_out():
  step_spec, config = make()
  given = batch()
  length_P = given.rollout.length_B.reshape(P, G).sum(1)
  for bound, groups in ((length_P[:2].sum(), 2), (length_P[:2].sum() - 1, 1), (1, 0)):
    config.monitoring.rollouts_tokens = int(bound)
    records = token_stats.TokenStats(step_spec, config, CHARS.backend)(given, said(given))
    assert {b // G for b in records} == set(range(groups))


@pytest.mark.parametrize(
  'spec, both',
  [
    (dict(), (True, True)),
    (dict(kl=dict(fn='k3', coef=0.1)), (True, False)),
    (dict(distillation=dict(fn='on_policy')), (False, False)),
  ],
)
def test_what_the_update_works_out_first_is_left_out(spec, both):
  step_spec, config = make(**spec)
  assert token_stats.available(step_spec, config) == both
  config.curriculum.hint = dict(fn='corrected')  # a group is learned a step later, with another row
  assert token_stats.available(step_spec, config) == (False, False)
  config.curriculum.hint = dict(fn='none')
  config.replay.collect = dict(fn='mixed')
  assert token_stats.available(step_spec, config) == (False, False)


def test_a_text_that_is_not_the_tokens_own_has_no_cuts():
  step_spec, config = make()
  given = batch()
  texts = said(given)
  stats = token_stats.TokenStats(step_spec, config, CHARS.backend)
  records = stats(given, [*texts[:1], 'told before ' + texts[1], *texts[2:]])
  assert (
    records[0]['cuts'] == [1] * len(texts[0]) and 'cuts' not in records[1] and 'logp' in records[1]
  )


def test_tokens_that_an_environment_gave_have_no_numbers():
  step_spec, config = make()
  given = batch()
  given = given._replace(rollout=given.rollout._replace(turns=turns()))
  records = token_stats.TokenStats(step_spec, config, CHARS.backend)(given, said(given))
  for b, row in records.items():
    length = int(given.rollout.length_B[b])
    assert [x is None for x in row['logp']] == [t == 1 for t in range(length)]
    assert length < 2 or row['advantage'][1] is None and row['coefficient'][1] is None


def test_numbers_are_short_and_near():
  x = np.random.default_rng(0).normal(size=2000) * 10.0 ** np.random.default_rng(1).integers(
    -12, 6, 2000
  )
  rounded = token_stats.significant(x)
  np.testing.assert_allclose(rounded, x, rtol=5.1e-4)
  assert (
    max(len(f'{abs(v)!r}'.split('e')[0].replace('.', '').strip('0')) for v in rounded.tolist()) <= 4
  )
  assert token_stats.significant(np.array([0.0, np.inf])).tolist() == [0.0, np.inf]


def test_what_is_no_number_of_the_policys_is_null():
  assert token_stats._numbers(np.array([1.0, np.nan, 2.0]), np.array([True, True, False])) == [
    1.0,
    None,
    None,
  ]


@pytest.mark.parametrize('path', sorted(CONFIGS.rglob('*.py')), ids=lambda path: path.stem)
def test_every_method_has_values_or_is_left_out(path):
  config = configs.load(str(path))
  method = objective.method(config.objective)
  step_spec = spec_of(method, 2, 2)
  given = batch()
  slots = dict(part_P=np.zeros(P, np.int32), weight_P=np.ones(P, np.float32))
  slots['context_P'] = np.zeros(P, np.int32)
  given = given._replace(prompts=given.prompts._replace(**slots))
  if method.needs_parts:
    given = given._replace(parts_BxK=np.ones((B, len(method.weight_K or (1, 1))), np.float32))
  if config.environment.fn != 'none':
    given = given._replace(rollout=given.rollout._replace(turns=turns()))
  advantage, coefficient = token_stats.available(step_spec, config)
  if advantage:
    made = jax.eval_shape(lambda x: token_stats.token_values(step_spec, x, coefficient), given)
    assert all(x.shape == (B, T) for x in made.values()) and ('coefficient' in made) == coefficient
  shaped_B = token_stats.shaped_rewards(step_spec, given)
  assert (shaped_B is None) == (config.objective.reward_shaping.fn == 'none')
  assert shaped_B is None or np.isfinite(shaped_B).all()
