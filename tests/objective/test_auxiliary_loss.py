"""Losses of auxiliary models: against the written formula, their slope, and sums over microbatches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_table import B, G, P, data

from jaxrl_llm.objective import auxiliary_loss


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True), jax.disable_jit():
    yield


def lesson(d, **more):
  exists = (d.length > 0).astype(float)
  return auxiliary_loss.AuxiliaryTargets(
    mask_BxT=d.mask,
    weight_BxT=d.mask / d.mask.sum(),
    weight_B=exists / exists.sum(),
    correct_B=d.correct,
    base_BxT=d.reference,
    old_BxT=d.values,
    return_BxT=d.reward[:, None] * d.mask,
  )._replace(**more)


def test_a_reward_for_tokens_sums_to_the_log_ratio():
  d = data()
  for made in (auxiliary_loss.outcome(beta=0.05), auxiliary_loss.preference(beta=0.05)):
    q = made.signal(jnp.asarray(d.x), lesson(d))
    want = [0.05 * (d.x[b, :n] - d.reference[b, :n]).sum() for b, n in enumerate(d.length)]
    np.testing.assert_allclose(q.sum(1), want, atol=1e-12)
    same = made.signal(jnp.asarray(d.reference), lesson(d))
    assert (same == 0).all()


def written(name, x, d):
  """The losses, number by number."""
  if name == 'critic':
    out = 0.0
    for b, n in enumerate(d.length):
      for t in range(n):
        near = jnp.clip(x[b, t], d.values[b, t] - 0.5, d.values[b, t] + 0.5)
        out += jnp.maximum((x[b, t] - d.reward[b]) ** 2, (near - d.reward[b]) ** 2) / 2
    return out / d.mask.sum()
  total = [0.05 * (x[b, :n] - d.reference[b, :n]).sum() for b, n in enumerate(d.length)]
  if name == 'outcome':
    p = [1 / (1 + jnp.exp(-s)) for s in total]
    return -sum(jnp.log(p[b] if d.correct[b] else 1 - p[b]) for b in range(B)) / B
  pairs = [
    total[i] - total[j]
    for i in range(B)
    for j in range(B)
    if i // G == j // G and d.correct[i] == 1 and d.correct[j] == 0
  ]
  return sum(jnp.log(1 + jnp.exp(-gap)) for gap in pairs) / len(pairs)


MADE = dict(
  critic=auxiliary_loss.critic(clip=0.5),
  outcome=auxiliary_loss.outcome(beta=0.05),
  preference=auxiliary_loss.preference(beta=0.05),
)


def output(name, d):
  """Values that are partly beyond the clip, or log-probabilities."""
  return d.values + d.entropy * 4 - 0.7 if name == 'critic' else d.x


@pytest.mark.parametrize('name', MADE)
def test_a_loss_and_its_slope_are_those_of_the_formula(name):
  d = data()
  x = jnp.asarray(output(name, d))
  loss = lambda x: MADE[name].loss(x, lesson(d), G)  # noqa: E731
  (value, sums), slope = jax.value_and_grad(loss, has_aux=True)(x)
  want, want_slope = jax.value_and_grad(lambda x: written(name, x, d))(x)
  np.testing.assert_allclose(value, want, rtol=1e-12)
  np.testing.assert_allclose(slope, want_slope * d.mask, atol=1e-14)
  assert np.abs(slope).max() > 1e-4
  if name == 'critic':
    assert 0 < sums['critic/vf_clipfrac'] < 1
  for b, t in ((0, 0), (5, 0)):
    nudge = np.zeros_like(d.x)
    nudge[b, t] = 1e-5
    measured = (loss(x + nudge)[0] - loss(x - nudge)[0]) / 2e-5
    np.testing.assert_allclose(measured, slope[b, t], rtol=1e-5, atol=1e-9)


def test_values_further_than_the_clip_learn_nothing_from_a_return_beyond_them():
  d = data()
  far = jnp.asarray(np.where(d.reward[:, None] > d.values, d.values + 0.7, d.values - 0.7))
  slope = jax.grad(lambda x: MADE['critic'].loss(x, lesson(d), G)[0])(far)
  on_the_way = (d.mask > 0) & (np.abs(d.reward[:, None] - d.values) > 1.3)
  assert on_the_way.sum() > 3 and (np.asarray(slope)[on_the_way] == 0).all()


@pytest.mark.parametrize('name', ['outcome', 'preference'])
def test_rewards_of_0_teach_log_2_and_push_right_rows_up_and_wrong_ones_down(name):
  d = data()
  (value, sums), slope = jax.value_and_grad(
    lambda x: MADE[name].loss(x, lesson(d), G), has_aux=True
  )(jnp.asarray(d.reference))
  np.testing.assert_allclose(value, np.log(2), rtol=1e-12)
  mixed = np.repeat(d.correct.reshape(P, G).std(1) > 0, G)
  learns = mixed if name == 'preference' else np.ones(B, bool)
  assert (np.sign(-slope[:, 0]) == np.where(d.correct == 1, 1, -1) * learns).all()
  sure = jnp.asarray(d.reference + np.where(d.correct == 1, 5.0, -5.0)[:, None])
  assert float(MADE[name].loss(sure, lesson(d), G)[1]['companion/accuracy']) == 1


@pytest.mark.parametrize('name', MADE)
def test_slices_add_up_where_a_loss_does_not_look_at_whole_minibatches(name):
  d, x = data(), jnp.asarray(output(name, data()))
  whole = MADE[name].loss(x, lesson(d), G)[0]
  parts = []
  for start in range(0, B, 2):  # half a group
    rows = slice(start, start + 2)
    piece = jax.tree.map(lambda a: a[rows], lesson(d))  # noqa: B023
    parts.append(MADE[name].loss(x[rows], piece, 2)[0])
  assert np.isclose(sum(parts), whole, rtol=1e-12) == (not MADE[name].compares_rows)


@pytest.mark.parametrize('name', MADE)
def test_empty_rows_and_padding_teach_nothing(name):
  d = data()
  d.length[1], d.mask[1] = 0, 0
  targets = lesson(d)
  poison = lambda a: np.where(d.mask > 0, a, np.nan)  # noqa: E731
  fill = targets._replace(base_BxT=poison(targets.base_BxT), old_BxT=poison(targets.old_BxT))
  x = jnp.asarray(output(name, d))
  loss = lambda x, targets: MADE[name].loss(x, targets, G)[0]  # noqa: E731
  value, slope = jax.value_and_grad(loss)(x, targets)
  bad_value, bad_slope = jax.value_and_grad(loss)(jnp.where(d.mask > 0, x, 1e3), fill)
  np.testing.assert_array_equal([value, *slope.ravel()], [bad_value, *bad_slope.ravel()])
  assert (slope[d.mask == 0] == 0).all()
  empty = targets._replace(mask_BxT=0 * d.mask, weight_BxT=0 * d.mask, weight_B=0 * d.correct)
  assert loss(x, empty) == 0
