"""Supervised terms: coefficients of both kinds against the written loss, and the limits that prove each choice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_table import METHODS, B, G, P, T, batch, data, settings

from jaxrl_llm import objective
from jaxrl_llm.config import stages
from jaxrl_llm.data import as_rollout
from jaxrl_llm.objective import sft_loss

NAMES = sorted(set(stages.choices(sft_loss)) - {'none'})


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def shown(seed=3, length=(3, 0, 6, 2)):
  """Demonstrations of four prompts, the second without one: log-probs now, recorded, of a reference."""
  r = np.random.default_rng(seed)
  y = np.log(r.uniform(0.05, 0.95, (P, T)))
  length = np.array(length, np.int32)
  mask = (np.arange(T)[None] < length[:, None]).astype(float)
  recorded = (y + 0.2 * r.normal(size=y.shape)) * mask
  return dict(y=y, length=length, mask=mask, recorded=recorded)


def both(name, d, s, step=0, rl='grpo', **keywords):
  """Coefficients of rollouts and of demonstrations, and the part of the latter."""
  own = METHODS[rl].settings | dict(sft_loss=dict(fn=name, **keywords))
  method = objective.method(settings(**own))
  demo = as_rollout(np.zeros((P, T), np.int32), s['length'])._replace(logp_BxT=s['recorded'])
  full = batch(d)._replace(demo=demo)
  target = objective.targets(method, full, G)
  target, lesson, weigh, share = objective.plan_demonstrations(
    method, target, full, G, jnp.int32(step)
  )
  c_BxT, _ = objective.coefficients(method, target, d.x)
  c_PxT = objective.demonstration_coefficients(weigh, lesson, jnp.asarray(s['y']))
  return np.asarray(c_BxT), np.asarray(c_PxT), float(share)


def alone(d, rl='grpo'):
  method = objective.method(settings(**METHODS[rl].settings))
  return np.asarray(objective.coefficients(method, objective.targets(method, batch(d), G), d.x)[0])


def token_mean(s):
  return s['mask'] / s['mask'].sum()


def phi_sft(y, s):
  p = np.exp(s['y'])  # detached, as the paper has it
  return -(token_mean(s) * p * (1 - p) * y).sum()


@pytest.mark.parametrize('share', [0.0, 0.3, 1.0])
def test_chord_is_the_mixture_of_grpo_and_uncertain_tokens(share):
  """Autodiff of (1 − μ)·GRPO(x) + μ·φ-SFT(y), written out; μ = 0 is GRPO bit for bit."""
  d, s = data(), shown()
  rl, demo, demo_share = both('chord', d, s, high=share, low=share)

  def loss(x, y):
    return (1 - share) * METHODS['grpo'].loss(x, d.x, d) + share * phi_sft(y, s)

  want = jax.grad(loss, argnums=(0, 1))(jnp.asarray(d.x), jnp.asarray(s['y']))
  np.testing.assert_allclose(rl, -want[0] * d.mask, atol=1e-10)
  np.testing.assert_allclose(demo, -want[1], atol=1e-10)
  if share == 0:
    np.testing.assert_array_equal(rl, alone(d))
    assert (demo == 0).all()
  else:
    assert np.abs(demo).max() > 1e-3 and (share < 1 or (rl == 0).all())
  if share < 1:
    assert np.abs(rl).max() > 1e-3
  assert demo_share == pytest.approx(
    3 * share / (3 * share + 4 * (1 - share))
  )  # of four, one shows nothing


def test_chord_weighs_most_at_one_half_and_follows_its_schedule():
  p = jnp.linspace(0.01, 0.99, 99)[None]
  ones = jnp.ones_like(p)
  weigh = lambda **k: sft_loss.chord(ones, ones, 0, **k).token_weight(  # noqa: E731
    sft_loss.DemonstrationTokens(jnp.log(p), jnp.log(p), ones)
  )
  assert float(p[0, jnp.argmax(weigh())]) == pytest.approx(0.5)
  assert (weigh(uncertain=False) == 1).all()
  plan = lambda step: sft_loss.chord(  # noqa: E731
    jnp.zeros(1), jnp.ones(1), jnp.int32(step), warmup=10, decay=20, high=0.8, low=0.2
  )
  shares = [float(plan(s).demo_weight_P[0]) for s in (0, 5, 10, 20, 30, 99)]
  assert shares == pytest.approx([0, 0.4, 0.8, 0.5, 0.2, 0.2])
  sums = [float((plan(s).demo_weight_P + plan(s).rollout_weight_P)[0]) for s in (0, 7, 17, 99)]
  assert sums == pytest.approx([1] * 4)
  paper = [float(sft_loss.chord(p, ones, s).demo_weight_P[0, 0]) for s in (0, 1, 500)]
  assert paper == pytest.approx([0.1] * 3)


def test_a_lost_prompt_learns_from_its_demonstration_and_the_others_as_if_alone():
  """Gates from never to always; the second prompt has no demonstration and never changes sides."""
  d, s = data(), shown()
  d.correct = np.repeat([0.0, 0, 1, 1], G) * np.tile([1, 0, 0, 0], P)  # 0, 0, 1 and 1 right
  d.correct[-G:] = 1
  plain = alone(d)
  for gate, lost in ((-1, []), (0, [0]), (1, [0, 2]), (3, [0, 2]), (G, [0, 2, 3])):
    rl, demo, share = both('replace', d, s, gate=gate, weight=0.5)
    rows = np.isin(np.arange(B) // G, lost)
    np.testing.assert_array_equal(rl, np.where(rows[:, None], 0, plain))
    mask = s['mask'] * np.isin(np.arange(P), lost)[:, None]
    np.testing.assert_allclose(demo, 0.5 * mask / max(mask.sum(), 1), atol=1e-15)
    assert share == pytest.approx(0.5 * len(lost) / (0.5 * len(lost) + P - len(lost)))


def test_likelihood_is_added_to_rl_and_takes_nothing_from_it():
  d, s = data(), shown()
  rl, demo, share = both('likelihood', d, s, weight=0.25)
  np.testing.assert_array_equal(rl, alone(d))
  np.testing.assert_allclose(demo, 0.25 * token_mean(s), atol=1e-15)
  assert share == pytest.approx(0.25 * 3 / (0.25 * 3 + 4))


@pytest.mark.parametrize('beta', [0.0, -0.1, 0.5])
def test_one_token_rollouts_are_the_mean_over_all_tokens_that_could_be_drawn(beta):
  """Σ_v p_v·R_v·∇log p_v over a vocabulary of five, against c·∇log p_y; at beta 0 that is p·∇SFT."""
  z = jnp.asarray(np.random.default_rng(0).normal(size=5))
  reward = np.where(np.arange(5) == 2, 1.0, beta)
  p = jax.nn.softmax(z)
  exact = jax.grad(lambda z: (p * reward * jax.nn.log_softmax(z)).sum())(z)
  logp, slope = jax.value_and_grad(lambda z: jax.nn.log_softmax(z)[2])(z)
  s = shown()
  s['y'][:] = float(logp)
  rl, demo, share = both('one_token_rollouts', data(), s, beta=beta)
  assert (rl == 0).all() and share == 1
  np.testing.assert_allclose(demo * s['mask'].sum() * float(slope[2]), s['mask'] * exact[2])
  if beta == 0:
    np.testing.assert_allclose(demo, np.exp(s['y']) * token_mean(s), atol=1e-12)


def test_suffix_weights_are_plain_without_ratios_and_else_the_product_of_what_follows():
  d, s = data(), shown()
  rl, plain, share = both('suffix_weighted', d, s, low=0.0, high=0.0, discount=1.0)
  assert (rl == 0).all() and share == 1
  np.testing.assert_allclose(plain, token_mean(s), atol=1e-12)
  _, c, _ = both('suffix_weighted', d, s, least=0.9, most=1.3)
  for p, n in enumerate(s['length']):
    for t in range(n):
      gap = s['y'][p, t + 1 : n] - s['recorded'][p, t + 1 : n]
      delta = np.exp(np.clip(gap, -0.08, 0.3)).prod()
      want = np.clip(0.999 ** (n - 1 - t) * delta, 0.9, 1.3) / s['mask'].sum()
      np.testing.assert_allclose(c[p, t], want, rtol=1e-10)
  assert (c[s['mask'] == 0] == 0).all() and len(np.unique(c.round(9))) > 5


def test_rows_without_recorded_log_probs_take_those_of_the_reference():
  s, reference = shown(), np.full((P, T), -7.0)
  s['recorded'][2] = 0
  lesson = objective.DemonstrationTerms(s['mask'], s['mask'], s['recorded'])
  got = np.asarray(objective.fill_behavior(lesson, reference).behavior_PxT)
  np.testing.assert_array_equal(got[[0, 3]], s['recorded'][[0, 3]])
  np.testing.assert_array_equal(got[2], reference[2])


KEYWORDS = dict(chord=dict(high=0.4, low=0.4), replace=dict(gate=3))


@pytest.mark.parametrize('name', NAMES)
def test_no_denominator_knows_of_the_tokens_of_the_other_kind(name):
  d, s, keywords = data(), shown(), KEYWORDS.get(name, {})
  rl, demo, _ = both(name, d, s, **keywords)
  longer, _, _ = both(name, d, shown(length=(5, 0, 1, 6)), **keywords)
  np.testing.assert_array_equal(longer, rl)
  short = data()
  short.length = np.maximum(short.length - 2, 1)
  short.mask = (np.arange(T)[None] < short.length[:, None]).astype(float)
  cut, same, _ = both(name, short, s, **keywords)
  np.testing.assert_array_equal(same, demo)
  assert np.abs(demo).max() > 1e-3 and ((rl == 0).all() or np.abs(cut - rl).max() > 1e-3)


@pytest.mark.parametrize('name', NAMES)
def test_padding_and_prompts_without_rollouts_or_demonstrations_take_part_nowhere(name):
  d, s, keywords = data(), shown(), KEYWORDS.get(name, {})
  _, demo, _ = both(name, d, s, **keywords)
  assert (demo[s['mask'] == 0] == 0).all()
  for poison in (-np.inf, 200.0, np.nan):
    bad = s | {k: np.where(s['mask'] > 0, s[k], poison) for k in ('y', 'recorded')}
    np.testing.assert_array_equal(both(name, d, bad, **keywords)[1], demo)
  d.length[2 * G : 3 * G] = 0  # a group that is still unfinished
  d.correct[2 * G : 3 * G] = 0
  d.mask[2 * G : 3 * G] = 0
  _, held, _ = both(name, d, s, **keywords)
  assert (held[2] == 0).all()
  _, short, _ = both(name, d, shown(length=(3, 0, 0, 2)) | dict(y=s['y']), **keywords)
  if name != 'suffix_weighted':  # whose recorded log-probs are drawn anew
    np.testing.assert_array_equal(held, short)
  nothing = shown(length=(0, 0, 0, 0))
  assert (both(name, d, nothing, **keywords)[1] == 0).all()


def test_what_a_choice_needs_stands_on_it():
  needs = lambda fn: objective.method(settings(sft_loss=fn))  # noqa: E731
  assert not needs('none').needs_demo
  for name in NAMES:
    method = needs(name)
    assert method.needs_demo and method.needs_reference == (name == 'suffix_weighted')
    assert not method.needs_old and not method.needs_rows and not method.needs_teacher
