"""Credit assignment: limits, loops in plain Python, and padding."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from objective_table import METHODS, B, G, P, T, batch, data, gae, settings, signal

from jaxrl_llm import objective
from jaxrl_llm.objective import credit_assignment
from jaxrl_llm.objective.token_inputs import CreditInputs
from jaxrl_llm.types import UserError


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True), jax.disable_jit():
    yield


def graded(d, **more):
  return CreditInputs(d.reward[:, None], d.mask, d.group, **more)


def target(d, **choices):
  method = objective.method(settings(**choices))
  return objective.targets(method, batch(d), G, signal(method, d))


def coefficients(d, **choices):
  method = objective.method(settings(**choices))
  c, _ = objective.coefficients(method, target(d, **choices), d.x)
  return np.asarray(c)


def test_gae_that_forgets_nothing_is_what_came_minus_what_was_expected():
  d = data()
  a, returns = credit_assignment.gae(graded(d, values_BxT=d.values), whiten=False)
  np.testing.assert_allclose(a, (d.reward[:, None] - d.values) * d.mask, atol=1e-12)
  np.testing.assert_allclose(returns, d.reward[:, None] * d.mask, atol=1e-12)


def test_gae_without_a_trace_is_one_step():
  d = data()
  a, returns = credit_assignment.gae(
    graded(d, values_BxT=d.values), discount=0.9, trace=0.0, whiten=False
  )
  for b, n in enumerate(d.length):
    following = [*(0.9 * d.values[b, 1:n]), d.reward[b]]
    np.testing.assert_allclose(a[b, :n], following - d.values[b, :n], atol=1e-12)
    np.testing.assert_allclose(returns[b, :n], following, atol=1e-12)


def test_gae_is_the_loop_of_its_definition_and_whitened_over_all_tokens():
  d = data(1)
  choices = dict(discount=0.9, trace=0.7)
  plain, returns = credit_assignment.gae(graded(d, values_BxT=d.values), whiten=False, **choices)
  np.testing.assert_allclose(plain, gae(d, 0.9, 0.7), atol=1e-12)
  white, same_returns = credit_assignment.gae(graded(d, values_BxT=d.values), **choices)
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
  fn, want = getattr(credit_assignment, name), None
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
  d, rows = data(), slice(G, 2 * G)
  d.reward[rows] = 1
  t = target(
    d, advantage='raw', credit_assignment='gae', auxiliary_model='critic', zero_variance='mask'
  )
  assert (np.asarray(t.advantage_BxT)[rows] == 0).all()
  np.testing.assert_allclose(t.return_BxT[rows], d.reward[rows, None] * d.mask[rows], atol=1e-12)


def test_prime_without_process_is_leave_one_out():
  plain = dict(
    advantage='leave_one_out', ratio='one', trust_region='none', aggregation='sequence_sum'
  )
  of_outcome = dict(fn='process', process=0.0, outcome=1.0, whiten=False)
  got = coefficients(data(), **plain, credit_assignment=of_outcome, auxiliary_model='outcome')
  want = coefficients(data(), **plain)
  assert np.abs(want).max() > 1e-2
  np.testing.assert_allclose(got, want, atol=1e-12)


def test_prime_gives_a_token_what_is_still_to_come():
  d = data()
  how = dict(outcome=3.0, whiten=False, bounded=False)
  got, _ = credit_assignment.process(graded(d, process_BxT=d.process), **how)
  for b, n in enumerate(d.length):
    group = [o for o in range(B) if o // G == b // G]
    mean = np.mean([d.process[o, : d.length[o]].mean() for o in group])
    ahead = [sum(d.process[b, j] - mean for j in range(t, n)) * G / (G - 1) for t in range(n)]
    np.testing.assert_allclose(got[b, :n], np.array(ahead) + 3 * d.reward[b], atol=1e-12)


def test_istar_of_a_model_that_has_not_moved_is_grpo():
  d = data()
  d.process = 0 * d.process
  got = coefficients(d, credit_assignment='steps', auxiliary_model='preference')
  want = coefficients(d)
  assert np.abs(want).max() > 1e-2
  np.testing.assert_array_equal(got, want)


def test_istar_with_one_turn_is_grpo_of_the_reward_plus_grpo_of_the_process():
  d = data()
  total = (d.process * d.mask).sum(1)
  second = target(type(d)(**(vars(d) | dict(reward=total)))).advantage_BxT
  got = target(
    d, credit_assignment=dict(fn='steps', weight=0.5), auxiliary_model='preference'
  ).advantage_BxT
  np.testing.assert_allclose(got, target(d).advantage_BxT + 0.5 * second, atol=1e-12)


def test_istar_compares_the_turns_of_a_group_with_each_other():
  """Two rows; the first says (1 + 2), then 4, the second 7: means and standard deviation over 3, 4, 7."""
  process = np.array([[1.0, 2, 4, 9], [7, 9, 9, 9]])
  mask = np.array([[1.0, 1, 1, 0], [1, 0, 0, 0]])
  turn = np.array([[0, 0, 1, 1], [0, 0, 0, 0]])
  view = CreditInputs(np.zeros((2, 1)), mask, np.zeros(2, int), process_BxT=process, turn_BxT=turn)
  got, _ = credit_assignment.steps(view, eps=0.0)
  z = (np.array([3, 4, 7]) - 14 / 3) / np.std([3, 4, 7], ddof=1)
  np.testing.assert_allclose(got, [[z[0], z[0], z[1], 0], [z[2], 0, 0, 0]], atol=1e-12)


def talk():
  """Two groups of G rows of up to four turns, of one to three tokens, with a token given between them."""
  r = np.random.default_rng(0)
  rows, columns = 2 * G, 16
  mask, turn = np.zeros((rows, columns)), np.zeros((rows, columns), np.int32)
  paid, state = np.zeros((rows, columns)), np.zeros((rows, columns), np.int32)
  for b in range(rows):
    at = 0
    for k in range(r.integers(1, 5)):
      n = r.integers(1, 4)
      mask[b, at : at + n], turn[b, at : at + n] = 1, k
      state[b, at : at + n] = 7 if k == 0 else r.integers(3)
      paid[b, at + n - 1] = r.random()
      at += n + (b % 2)  # or none is given
  group, advantage = np.repeat([0, 1], G), r.normal(size=(rows, 1))
  return CreditInputs(advantage, mask, group, turn_BxT=turn, turn_reward_BxT=paid, state_BxT=state)


def steps_of(g, discount=0.9):
  """(row, turn, its tokens, return, state) of every turn, by the definition."""
  found = []
  for b in range(len(g.group_B)):
    turns = sorted(set(g.turn_BxT[b][g.mask_BxT[b] > 0].tolist()))
    where = [np.flatnonzero((g.mask_BxT[b] > 0) & (g.turn_BxT[b] == k)) for k in turns]
    paid = [g.turn_reward_BxT[b][at].sum() for at in where]
    for k, at in zip(turns, where, strict=True):
      total = sum(discount ** (j - k) * paid[j] for j in turns if j >= k)
      found.append((b, k, at, total, int(g.state_BxT[b, at[0]])))
  return found


@pytest.mark.parametrize('by_std', [True, False])
def test_gigpo_compares_the_turns_of_a_prompt_that_began_from_the_same_state(by_std):
  g = talk()
  got, _ = credit_assignment.gigpo(g, weight=0.7, discount=0.9, by_std=by_std)
  want, alone = np.zeros_like(g.mask_BxT), 0
  for b, _, at, total, state in steps_of(g):
    alike = [t for c, _, _, t, s in steps_of(g) if s == state and g.group_B[c] == g.group_B[b]]
    alone += len(alike) == 1
    std = np.std(alike, ddof=1) + 1e-6 if by_std and len(alike) > 1 else 1.0
    step = (total - np.mean(alike)) / std
    want[b, at] = g.advantage_Bx1[b, 0] + 0.7 * step
  np.testing.assert_allclose(got, want, atol=1e-9)
  assert len({s for *_, s in steps_of(g)}) == 4 and np.ptp(np.asarray(got)[g.mask_BxT > 0]) > 1


def test_gigpo_of_states_that_are_all_distinct_or_of_no_weight_is_grpo():
  g = talk()
  distinct = np.zeros_like(g.state_BxT)
  for n, (b, _, at, *_) in enumerate(steps_of(g)):
    distinct[b, at] = n
  row = g.advantage_Bx1 * g.mask_BxT
  np.testing.assert_allclose(
    credit_assignment.gigpo(g._replace(state_BxT=distinct))[0], row, atol=1e-12
  )
  np.testing.assert_allclose(credit_assignment.gigpo(g, weight=0.0)[0], row, atol=1e-12)


@pytest.mark.parametrize('discount', [0.0, 0.9])
def test_turns_of_at_grpo_are_compared_with_turns_of_the_same_number(discount):
  g = talk()
  got, _ = credit_assignment.turn_grouped(g, discount=discount)
  returns = {(b, k): total for b, k, _, total, _ in steps_of(g, discount)}
  want = np.zeros_like(g.mask_BxT)
  for b, k, at, total, _ in steps_of(g, discount):
    alike = [t for (c, j), t in returns.items() if j == k and g.group_B[c] == g.group_B[b]]
    if len(alike) > 1:
      want[b, at] = (total - np.mean(alike)) / (np.std(alike, ddof=1) + 1e-6)
  np.testing.assert_allclose(got, want, atol=1e-9)
  assert len({k for _, k in returns}) == 4 and np.ptp(want) > 1


def whitened(g, bound=3.0):
  """By the definition, turn after turn: the advantage of every row that has it."""
  found = np.zeros_like(g.mask_BxT)
  for k in range(4):
    rows = [(b, at) for b, turn, at, *_ in steps_of(g) if turn == k]
    of = {b: [c for c, _ in rows if g.group_B[c] == g.group_B[b]] for b, _ in rows}
    reward = g.advantage_Bx1[:, 0]
    off = [reward[b] - (reward[of[b]].mean() if len(of[b]) > 1 else 0) for b, _ in rows]
    off = np.array(off) - np.mean(off)
    std = np.std(off, ddof=1) if len(off) > 1 else 0.0
    for (b, at), a in zip(rows, off, strict=True):
      found[b, at] = np.clip(a / std if std > 1e-6 else a, -bound, bound)
  return found


@pytest.mark.parametrize('bound', [3.0, 0.7])
def test_whitening_a_turn_is_a_matter_of_the_rows_that_have_it(bound):
  g = talk()
  got, _ = credit_assignment.turn_whitened(g, bound=bound)
  np.testing.assert_allclose(got, whitened(g, bound), atol=1e-9)
  has = {k: [b for b, turn, *_ in steps_of(g) if turn == k] for k in range(4)}
  # Some group has a turn in one row alone, and some turn is not in all rows.
  alone = [(k, x) for k in has for x in (0, 1) if sum(g.group_B[b] == x for b in has[k]) == 1]
  assert alone and len(has[3]) < len(has[0])


def test_rewards_of_all_turns_are_whitened_together_over_their_tokens():
  g = talk()
  got, _ = credit_assignment.turn_reward_whitened(g)
  reward, lengths = np.zeros_like(g.mask_BxT), set()
  for b, _, at, total, _ in steps_of(g, 0.0):
    reward[b, at], lengths = total, lengths | {len(at)}
  own = g.mask_BxT > 0
  want = (reward - reward[own].mean()) / reward[own].std() * own
  np.testing.assert_allclose(got, want, atol=1e-9)
  assert len(lengths) > 1 and np.abs(want).max() > 1
  for paid in (0.0, 2.0):  # nothing to compare
    same = g._replace(turn_reward_BxT=np.where(g.turn_reward_BxT > 0, paid, 0.0))
    np.testing.assert_allclose(credit_assignment.turn_reward_whitened(same)[0], 0, atol=1e-9)
  empty = g._replace(mask_BxT=0 * g.mask_BxT)
  assert not np.asarray(credit_assignment.turn_reward_whitened(empty)[0]).any()


def test_whitening_rewards_that_are_all_the_same_gives_nothing_and_one_turn_is_the_batch():
  g = talk()
  same, _ = credit_assignment.turn_whitened(g._replace(advantage_Bx1=0 * g.advantage_Bx1 + 2.0))
  lone = [b for b, k, *_ in steps_of(g) if k == 3]
  assert np.isfinite(np.asarray(same)).all() and (np.asarray(same)[:, 0] == 0).all() and lone
  once = g._replace(turn_BxT=0 * g.turn_BxT)
  got, _ = credit_assignment.turn_whitened(once, bound=99.0)
  reward = g.advantage_Bx1.reshape(2, G)
  off = reward - reward.mean(1, keepdims=True)
  want = (off / off.std(ddof=1)).reshape(-1, 1) * g.mask_BxT
  np.testing.assert_allclose(got, want, atol=1e-9)


def test_the_reward_comes_at_the_end_of_a_row_and_not_of_each_of_its_turns():
  """What an environment gives in between is no end: generalised advantages with and without it are the same."""
  g = talk()
  values = np.random.default_rng(1).normal(size=g.mask_BxT.shape)
  got, returns = credit_assignment.gae(
    g._replace(values_BxT=values), discount=0.9, trace=0.7, whiten=False
  )
  first = np.arange(values.shape[1]) < g.mask_BxT.sum(1)[:, None]
  closed = np.zeros_like(values)
  closed[first] = values[g.mask_BxT > 0]
  plain = CreditInputs(g.advantage_Bx1, first * 1.0, g.group_B, values_BxT=closed)
  want, same = credit_assignment.gae(plain, discount=0.9, trace=0.7, whiten=False)
  np.testing.assert_allclose(np.asarray(got)[g.mask_BxT > 0], np.asarray(want)[first], atol=1e-12)
  np.testing.assert_allclose(np.asarray(returns)[g.mask_BxT > 0], np.asarray(same)[first])


@pytest.mark.parametrize(
  'choices, message',
  [
    (
      dict(credit_assignment='gae'),
      "credit_assignment.fn='gae' needs values of an auxiliary model.*='none' returns nothing",
    ),
    (dict(credit_assignment='steps'), 'auxiliary_model.fn=outcome .or preference'),
    (
      dict(auxiliary_model='critic'),
      "credit_assignment.fn='row' needs nothing of an auxiliary model.*fn=none",
    ),
    (
      dict(credit_assignment='process', auxiliary_model='critic'),
      "='critic' returns values; set --config.objective.auxiliary_model.fn=out",
    ),
    (
      dict(credit_assignment='gae', auxiliary_model=dict(fn='critic', learning_rate=0.0)),
      'must be above 0',
    ),
    (
      dict(credit_assignment='gae', auxiliary_model=dict(fn='critic', beta=1.0)),
      'takes: learning_rate, clip',
    ),
  ],
)
def test_credit_assignment_without_its_auxiliary_model_is_refused(choices, message):
  with pytest.raises(UserError, match=message):
    objective.method(settings(**choices))


def test_only_prime_keeps_a_reference_for_its_auxiliary_model():
  kept = {n for n in ('ppo', 'prime', 'oprl', 'grpo') if _method(n).needs_reference}
  assert kept == {'prime'} and not any(
    _method(n).needs_old or _method(n).needs_rows for n in ('ppo', 'prime', 'oprl')
  )


def _method(name):
  return objective.method(settings(**METHODS[name].settings))


assert P * G == B and T > 4
