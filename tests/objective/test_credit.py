"""How an advantage is laid over tokens: limits, loops in plain Python, and what stands in padding."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from objective_table import METHODS, B, G, P, T, batch, data, gae, settings, signal

from jaxrl_llm import objective
from jaxrl_llm.objective import credit
from jaxrl_llm.objective.tokens import Graded
from jaxrl_llm.types import UserError


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True), jax.disable_jit():
    yield


def graded(d, **more):
  return Graded(d.reward[:, None], d.mask, d.group, **more)


def target(d, **choices):
  method = objective.method(settings(**choices))
  return objective.targets(method, batch(d), G, signal(method, d))


def coefficients(d, **choices):
  method = objective.method(settings(**choices))
  c, _ = objective.coefficients(method, target(d, **choices), d.x)
  return np.asarray(c)


def test_gae_that_forgets_nothing_is_what_came_minus_what_was_expected():
  d = data()
  a, returns = credit.gae(graded(d, values_BxT=d.values), whiten=False)
  np.testing.assert_allclose(a, (d.reward[:, None] - d.values) * d.mask, atol=1e-12)
  np.testing.assert_allclose(returns, d.reward[:, None] * d.mask, atol=1e-12)


def test_gae_without_a_trace_is_one_step():
  d = data()
  a, returns = credit.gae(graded(d, values_BxT=d.values), discount=0.9, trace=0.0, whiten=False)
  for b, n in enumerate(d.length):
    following = [*(0.9 * d.values[b, 1:n]), d.reward[b]]
    np.testing.assert_allclose(a[b, :n], following - d.values[b, :n], atol=1e-12)
    np.testing.assert_allclose(returns[b, :n], following, atol=1e-12)


def test_gae_is_the_loop_of_its_definition_and_whitened_over_all_tokens():
  d = data(1)
  choices = dict(discount=0.9, trace=0.7)
  plain, returns = credit.gae(graded(d, values_BxT=d.values), whiten=False, **choices)
  np.testing.assert_allclose(plain, gae(d, 0.9, 0.7), atol=1e-12)
  white, same_returns = credit.gae(graded(d, values_BxT=d.values), **choices)
  np.testing.assert_array_equal(returns, same_returns)
  seen = np.asarray(white)[d.mask > 0]
  np.testing.assert_allclose([seen.mean(), seen.var(ddof=1)], [0, 1], atol=1e-6)
  slope = np.ptp(seen) / np.ptp(np.asarray(plain)[d.mask > 0])
  np.testing.assert_allclose(np.diff(seen), slope * np.diff(plain[d.mask > 0]), atol=1e-9)


@pytest.mark.parametrize('name', ['gae', 'process', 'steps'])
def test_padding_and_empty_rows_have_no_credit_and_no_say(name):
  d = data()
  d.length[:3], d.mask[:3] = 0, 0
  field = 'values' if name == 'gae' else 'process'
  fn, want = getattr(credit, name), None
  for junk in (0.0, 200.0, np.nan):
    filled = np.where(d.mask > 0, getattr(d, field), junk)
    wide = graded(d)._replace(mask_BxT=np.pad(d.mask, ((0, 0), (0, 2))))
    padded = np.pad(filled, ((0, 0), (0, 2)), constant_values=junk)
    a, returns = fn(graded(d, **{f'{field}_BxT': filled}))
    assert returns is None or (np.asarray(returns)[d.mask == 0] == 0).all()
    wider, _ = fn(wide._replace(**{f'{field}_BxT': padded}))
    want = a if want is None else want
    np.testing.assert_array_equal(a, want)
    np.testing.assert_allclose(wider, np.pad(want, ((0, 0), (0, 2))), atol=1e-12)
  assert (want[d.mask == 0] == 0).all() and np.abs(want).max() > 0.1


def test_a_group_that_leaves_the_loss_still_teaches_the_critic():
  d = data()
  t = target(d, advantage='raw', credit='gae', companion='critic', zero_variance='mask')
  rows = slice(G, 2 * G)  # all right
  assert (np.asarray(t.advantage_BxT)[rows] == 0).all()
  np.testing.assert_allclose(t.return_BxT[rows], d.reward[rows, None] * d.mask[rows], atol=1e-12)


def test_prime_without_process_is_leave_one_out():
  plain = dict(advantage='leave_one_out', ratio='one', trust='none', aggregate='sequence_sum')
  of_outcome = dict(fn='process', process=0.0, outcome=1.0, whiten=False)
  got = coefficients(data(), **plain, credit=of_outcome, companion='outcome')
  want = coefficients(data(), **plain)
  assert np.abs(want).max() > 1e-2
  np.testing.assert_allclose(got, want, atol=1e-12)


def test_prime_gives_a_token_what_is_still_to_come():
  d = data()
  got, _ = credit.process(graded(d, process_BxT=d.process), outcome=3.0, whiten=False)
  for b, n in enumerate(d.length):
    others = [o for o in range(B) if o // G == b // G and o != b]
    base = np.mean([d.process[o, : d.length[o]].mean() for o in others])
    ahead = [sum(d.process[b, j] - base for j in range(t, n)) for t in range(n)]
    np.testing.assert_allclose(got[b, :n], np.array(ahead) + 3 * d.reward[b], atol=1e-12)


def test_istar_of_a_model_that_has_not_moved_is_grpo():
  d = data()
  d.process = 0 * d.process
  got = coefficients(d, credit='steps', companion='preference')
  want = coefficients(d)
  assert np.abs(want).max() > 1e-2
  np.testing.assert_array_equal(got, want)


def test_istar_with_one_turn_is_grpo_of_the_reward_plus_grpo_of_the_process():
  d = data()
  total = (d.process * d.mask).sum(1)
  second = target(type(d)(**(vars(d) | dict(reward=total)))).advantage_BxT
  got = target(d, credit=dict(fn='steps', weight=0.5), companion='preference').advantage_BxT
  np.testing.assert_allclose(got, target(d).advantage_BxT + 0.5 * second, atol=1e-12)


def test_istar_compares_the_turns_of_a_group_with_each_other():
  """Two rows; the first says (1 + 2), then 4, the second 7: means and standard deviation over 3, 4, 7."""
  process = np.array([[1.0, 2, 4, 9], [7, 9, 9, 9]])
  mask = np.array([[1.0, 1, 1, 0], [1, 0, 0, 0]])
  turn = np.array([[0, 0, 1, 1], [0, 0, 0, 0]])
  view = Graded(np.zeros((2, 1)), mask, np.zeros(2, int), process_BxT=process, turn_BxT=turn)
  got, _ = credit.steps(view, eps=0.0)
  z = (np.array([3, 4, 7]) - 14 / 3) / np.std([3, 4, 7], ddof=1)
  np.testing.assert_allclose(got, [[z[0], z[0], z[1], 0], [z[2], 0, 0, 0]], atol=1e-12)


@pytest.mark.parametrize(
  'choices, told',
  [
    (dict(credit='gae'), "credit.fn='gae' asks a companion for values .*='none' gives nothing"),
    (dict(credit='steps'), 'set companion.fn to outcome or preference'),
    (dict(companion='critic'), "credit.fn='row' asks a companion for nothing .*fn to none"),
    (dict(credit='process', companion='critic'), "='critic' gives values; set companion.fn to out"),
    (dict(credit='gae', companion=dict(fn='critic', learning_rate=0.0)), 'must be above 0'),
    (dict(credit='gae', companion=dict(fn='critic', beta=1.0)), 'takes: learning_rate, clip'),
  ],
)
def test_a_credit_and_a_companion_that_do_not_fit_are_told(choices, told):
  with pytest.raises(UserError, match=told):
    objective.method(settings(**choices))


def test_only_prime_keeps_a_reference_for_its_companion():
  kept = {n for n in ('ppo', 'prime', 'oprl', 'grpo') if _method(n).needs_reference}
  assert kept == {'prime'} and not any(_method(n).needs_prepass for n in ('ppo', 'prime', 'oprl'))


def _method(name):
  return objective.method(settings(**METHODS[name].settings))


assert P * G == B and T > 4
