"""P(mixed) of graded scores: constants, noise and shares of tests; binary scores keep theirs to the bit."""

from __future__ import annotations

import types

import numpy as np
import pytest
from curricula import PLAIN, G, make, observe, same
from scipy import optimize

from jaxrl_llm.curriculum import gather_evidence, graded_scores, utility

KINDED = PLAIN | dict(prior_pooling=dict(fn='kind'))


def totals(x_VxG):
  """Success mass, Σ x(1 − x), and whether scores differ."""
  return x_VxG.sum(1), (x_VxG * (1 - x_VxG)).sum(1), np.ptp(x_VxG, axis=1) > 1e-6


def watch(curriculum, index, x_VxG):
  k, graded, mixed = totals(x_VxG)
  observe(curriculum, index, k, graded=graded, mixed=mixed)


def test_binary_scores_keep_the_closed_form_to_the_bit():
  random = np.random.default_rng(0)
  ours, plain = (make(40, kind=np.arange(40) % 2) for _ in range(2))
  for step in range(8):
    index = ours.propose(step, 8).index
    x = random.integers(0, 2, (8, G)).astype(float)
    watch(ours, index, x)
    observe(plain, index, x.sum(1).astype(int))
  assert same(ours.state_dict(), plain.state_dict())
  alpha, beta = ours.posterior(np.arange(40))
  closed = utility.mixed_group(alpha, alpha, beta, G)
  assert np.array_equal(ours.predict(np.arange(40))[2], closed)
  assert not ours.state_dict()['graded_log_exponent'].any()


def test_constant_scores_are_never_mixed_and_other_kinds_stay_as_they_are():
  kind = np.arange(40) % 2
  both, alone = make(40, kind=kind, **KINDED), make(40, kind=kind, **KINDED)
  for step in range(10):
    watch(both, [2 * step, 2 * step + 1], np.array([[0.5] * G, [1.0] * 4 + [0.0] * 4]))
    watch(alone, [2 * step + 1], np.array([[1.0] * 4 + [0.0] * 4]))
  predicted = both.predict(np.arange(40))[2]
  assert (predicted[20::2] < 0.2).all()
  assert np.array_equal(predicted[1::2], alone.predict(np.arange(40))[2][1::2])
  assert (both.propose(0, 4).index % 2 == 1).all()  # the utility is corrected, too
  assert predicted[0] < alone.predict(np.arange(1))[2][0]


def test_the_exponent_maximizes_the_likelihood():
  random = np.random.default_rng(0)
  p = random.uniform(0.1, 0.95, 3000)
  mixed = random.random(3000) < 1 - (1 - p) ** 0.4
  zeros, ones = np.zeros(3000, int), np.ones(3000)
  state = graded_scores.initial(1)
  for _ in range(20):
    state = graded_scores.learn(state, zeros, ones, p, mixed, 0.999)

  def loss(t):
    q = 1 - (1 - p) ** t
    return -np.log(np.where(mixed, q, 1 - q)).sum()

  best = optimize.minimize_scalar(loss, bounds=(0.05, 5), method='bounded').x
  assert graded_scores.exponents(state)[0] == pytest.approx(best, rel=1e-3)
  assert best == pytest.approx(0.4, rel=0.1)


def scores(name, p, random):
  """[V, G] scores of mean p."""
  if name == 'tests':  # the share of five independent tests
    return random.binomial(5, p[:, None], (len(p), G)) / 5
  if name == 'noise':
    return np.clip(p[:, None] + random.normal(0, 0.02, (len(p), G)), 0, 1)
  half = np.where(p < 0.5, 0.0, 0.5)[
    :, None
  ]  # of ten prompts, three have coins and the others constants
  coin = random.random((len(p), G)) < p[:, None]
  return np.where((np.arange(len(p)) % 10 < 3)[:, None], coin, half)


@pytest.mark.parametrize('name', ['tests', 'noise', 'rarely'])
def test_predicted_shares_of_mixed_groups_are_observed(name):
  random = np.random.default_rng(3)
  size = 1200
  p = random.beta(1, 1, size)
  curriculum = make(size, **KINDED | dict(kind_decay=0.99))
  predicted, binary, seen = [], [], []
  for index in np.split(random.permutation(size), size // 10):
    x = (
      scores(name, p[np.sort(index)], random)
      if name != 'rarely'
      else scores(name, p[index], random)
    )
    index = np.sort(index) if name != 'rarely' else index
    alpha, beta = curriculum.posterior(index)
    predicted.append(curriculum.predict(index)[2])
    binary.append(utility.mixed_group(alpha, alpha, beta, G))
    seen.append(totals(x)[2])
    watch(curriculum, index, x)
  predicted, binary, seen = (np.concatenate(a[40:]) for a in (predicted, binary, seen))
  error, without = abs(predicted.mean() - seen.mean()), abs(binary.mean() - seen.mean())
  print(
    f'{name}: observed {seen.mean():.3f}, predicted {predicted.mean():.3f}, binary {binary.mean():.3f}'
  )
  assert error < 0.04 < without
  assert ((predicted - seen) ** 2).mean() < ((binary - seen) ** 2).mean()


def test_a_checkpoint_from_before_graded_scores_loads():
  old = make(40)
  observe(old, [0, 1], [3, 8])
  state = {k: v for k, v in old.state_dict().items() if not k.startswith('graded')}
  new = make(40)
  new.load_state_dict(state)
  assert same(new.state_dict(), old.state_dict())


def test_a_graded_state_continues_to_the_bit():
  random = np.random.default_rng(0)
  one, other = make(40), make(40)
  watch(one, np.arange(20), random.random((20, G)))
  other.load_state_dict(one.state_dict())
  for curriculum in (one, other):
    watch(curriculum, np.arange(10, 30), np.random.default_rng(1).random((20, G)))
  assert same(one.state_dict(), other.state_dict())
  assert np.array_equal(one.propose(1, 8).index, other.propose(1, 8).index)


def batch_of(success, length, reason, correct):
  rollout = types.SimpleNamespace(
    length_B=np.array(length), reason_B=np.array(reason), weight_B=np.ones(len(length))
  )
  prompts = types.SimpleNamespace(index_P=np.array([5, 3]))
  success = np.array(success, np.float32)
  return types.SimpleNamespace(
    rollout=rollout, prompts=prompts, success=success, correct_B=np.array(correct)
  )


def test_evidence_has_the_sum_of_x_times_one_minus_x():
  from jaxrl_llm.types import STOPPED, TRUNCATED

  success = [0.5, 0.25, 1, 0, 1, 0]
  reason = [STOPPED, TRUNCATED, STOPPED, STOPPED, TRUNCATED, STOPPED]
  batch = batch_of(success, [4, 4, 4, 4, 4, 4], reason, [0, 0, 1, 0, 1, 0])
  evidence = gather_evidence(batch, np.array(success)[:, None], np.array([0, 1]))
  assert evidence.index_V.tolist() == [3, 5]
  assert evidence.graded_V.tolist() == [0, 0.25 + 0.1875]
  assert evidence.truncated_graded_V.tolist() == [0, 0.1875]


def test_truncated_parts_do_not_count_where_they_are_ignored():
  ours, plain = (make(4, truncated='ignore') for _ in range(2))
  observe(
    ours, [0], [2.25], truncated=np.array([1]), truncated_k=np.array([0.25]),
    graded=np.array([0.1875]), truncated_graded=np.array([0.1875]), mixed=np.array([True]),
  )  # fmt: skip
  observe(plain, [0], [2], truncated=np.array([1]), mixed=np.array([True]))
  assert same(ours.state_dict(), plain.state_dict())


@pytest.mark.parametrize('graded, cut', [([-0.1], [0.0]), ([0.1], [0.2])])
def test_impossible_parts_are_refused(graded, cut):
  with pytest.raises(ValueError, match='truncated_graded <= graded'):
    observe(make(4), [0], [2.0], graded=np.array(graded), truncated_graded=np.array(cut))


def test_an_exponent_of_one_changes_no_bit():
  p = np.random.default_rng(0).random(1000)
  p[:2] = 0, 1
  assert np.array_equal(graded_scores.corrected(p, np.ones(1000)), p)
