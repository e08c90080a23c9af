"""Priors pooled between prompts: BOTS as its paper writes it, and DOTS's references by hand."""

from __future__ import annotations

import numpy as np
import pytest
from curricula import PLAIN, G, columns, make, observe, posterior

from jaxrl_llm.types import UserError

N = 10


def anchored(decay=0.9, size=N, fields=None, **pooling):
  pooling = dict(fn='anchors') | pooling
  return make(
    size,
    fields=fields,
    **PLAIN | dict(prior_pooling=pooling, evidence_decay=dict(fn='step', decay=decay)),
  )


class Bots:
  """α ← (1 − λ)α + λ·1 + (1 − ρ)s + ρm·p̃ and what p̃ is, in loops; from nothing of the package."""

  def __init__(self, decay, rho, adaptive=False):
    fields = columns(N)
    self.weak, self.strong = fields['pass_rate_weak'], fields['pass_rate_strong']
    self.alpha, self.beta = [1.0] * N, [1.0] * N
    self.decay, self.rho, self.adaptive, self.c = decay, rho, adaptive, None

  def step(self, seen):
    """seen: {prompt: right of G}."""
    mean = lambda values: sum(values) / len(seen)  # noqa: E731
    rate = mean([k / G for k in seen.values()])
    weak, strong = mean([self.weak[i] for i in seen]), mean([self.strong[i] for i in seen])
    place = (rate - weak) / (strong - weak + 1e-6)
    self.c = place if self.c is None else 0.9 * self.c + 0.1 * place
    guess = [
      min(max(w + self.c * (s - w), 0), 1) for w, s in zip(self.weak, self.strong, strict=True)
    ]
    miss = mean([abs(guess[i] - k / G) for i, k in seen.items()])
    if self.adaptive and miss >= 0.25:
      self.rho /= 2
    for i in range(N):
      right, wrong = (seen[i], G - seen[i]) if i in seen else (0, 0)
      p = seen[i] / G if i in seen else guess[i]
      keep, rho = self.decay, self.rho
      self.alpha[i] = keep * self.alpha[i] + (1 - keep) + (1 - rho) * right + rho * G * p
      self.beta[i] = keep * self.beta[i] + (1 - keep) + (1 - rho) * wrong + rho * G * (1 - p)


@pytest.mark.parametrize('adaptive', [False, True])
@pytest.mark.parametrize('decay, rho', [(0.9, 0.1), (0.7, 0.5), (1.0, 1.0), (0.9, 0.0)])
def test_bots_is_its_recursion(decay, rho, adaptive):
  ours, theirs = anchored(decay, rho=rho, adaptive=adaptive), Bots(decay, rho, adaptive)
  random = np.random.default_rng(0)
  for _ in range(12):
    index = random.choice(N, 3, replace=False)
    k = random.integers(0, G + 1, 3)
    observe(ours, index, k)
    theirs.step(dict(zip(index.tolist(), k.tolist(), strict=True)))
    np.testing.assert_allclose(posterior(ours), [theirs.alpha, theirs.beta], rtol=1e-4)
  metrics = ours.metrics()
  assert metrics['curriculum/capability'] == pytest.approx(theirs.c, rel=1e-5)
  assert metrics['curriculum/rho'] == theirs.rho and (theirs.rho < rho) == (adaptive and rho > 0)


def test_a_prompt_that_is_never_evaluated_keeps_a_bounded_pseudo_count():
  """2 + ρm/λ in the long run, whatever comes in."""
  curriculum, random = anchored(0.9, rho=0.1), np.random.default_rng(0)
  for _ in range(200):
    observe(curriculum, [0, 1], random.integers(0, G + 1, 2))
  total = posterior(curriculum).sum(0)
  np.testing.assert_allclose(total[2:], 2 + 0.1 * G / 0.1, rtol=1e-4)
  np.testing.assert_allclose(total[:2], 2 + G / 0.1, rtol=1e-4)


def test_without_rho_an_unevaluated_prompt_stays_at_its_prior():
  curriculum = anchored(0.9, rho=0.0)
  for _ in range(20):
    observe(curriculum, [0, 1], [3, 8])
  assert posterior(curriculum)[:, 2:] == pytest.approx(1, rel=1e-12)


def test_empty_names_are_one_ability_for_everyone():
  curriculum = anchored(1.0, fields={}, weak='', strong='', rho=0.5)
  observe(curriculum, [0, 1], [2, 4])  # c = 3/8, four rollouts' worth of it for the others
  np.testing.assert_allclose(posterior(curriculum)[:, 2], [1 + 1.5, 1 + 2.5], rtol=1e-5)


def test_a_step_of_which_nothing_came_back_ages_and_tells_nothing_new():
  curriculum = anchored(0.5, rho=1.0)
  observe(curriculum, np.zeros(0, int), np.zeros(0, int))
  assert (posterior(curriculum) == pytest.approx(1)) and not curriculum.metrics()
  observe(curriculum, [0], [8])
  before, c = posterior(curriculum), curriculum.metrics()['curriculum/capability']
  observe(curriculum, np.zeros(0, int), np.zeros(0, int))
  fields = columns(N)
  guess = fields['pass_rate_weak'] + c * (fields['pass_rate_strong'] - fields['pass_rate_weak'])
  expected = 1 + 0.5 * (before[0] - 1) + G * np.clip(guess, 0, 1)
  np.testing.assert_allclose(posterior(curriculum)[0], expected, rtol=1e-4)


@pytest.mark.parametrize(
  'values, text',
  [
    (None, 'is not a field of the data'),
    ([0.5] * 9 + [1.5], 'row 9 holds .*from 0 to 1'),
    ([0.5] * 9 + [None], 'row 9 holds .*nan'),
    (['a'] * 10, 'does not hold numbers'),
  ],
)
def test_anchors_that_are_none_are_user_errors(values, text):
  fields = columns(N) | dict(mine=values)
  if values is None:
    del fields['mine']
  with pytest.raises(
    UserError, match=rf"^config\.curriculum\.prior_pooling\.strong='mine'.* {text}"
  ):
    anchored(fields=fields, strong='mine')


@pytest.mark.parametrize(
  'pooling, text',
  [
    (dict(fn='anchors', rho=1.5), r'prior_pooling\.rho=1.5 must be'),
    (dict(fn='anchors', momentum=-1), r'prior_pooling\.momentum=-1 must be'),
    (
      dict(fn='anchors', adaptive='no'),
      r"prior_pooling\.adaptive='no' of 'anchors' must be True or False",
    ),
    (dict(fn='kernel', every=0), r'prior_pooling\.every=0 must be a whole'),
    (dict(fn='kernel', temperature=0.0), r'prior_pooling\.temperature=0.0 must be'),
    (dict(fn='kernel', strength=0.0), r'prior_pooling\.strength=0.0 must be'),
    (dict(fn='kernel', feature='color'), r"prior_pooling\.feature='color' is not a field"),
  ],
)
def test_bad_settings_are_user_errors(pooling, text):
  with pytest.raises(UserError, match=text):
    make(N, prior_pooling=pooling)


# DOTS.

CORNERS = np.repeat([[3.0, 0.0], [0.0, 0.5]], 5, axis=0)  # of unit length: two directions


def kernel(feature=CORNERS, **pooling):
  pooling = dict(fn='kernel', feature='mine', every=2) | pooling
  return make(N, fields=dict(mine=feature), **PLAIN | dict(prior_pooling=pooling))


def test_difficulty_is_the_attended_mean_of_the_references():
  curriculum = kernel(temperature=0.5, strength=6.0)
  observe(curriculum, [0, 7], [8, 2])
  near, far = 1 / (1 + np.exp(-2)), 1 / (1 + np.exp(2))  # cosines 1 and 0
  rates = np.array([8.5, 2.5]) / 9
  expected = np.repeat([near * rates[0] + far * rates[1], far * rates[0] + near * rates[1]], 5)
  prior = posterior(curriculum)
  unseen = [1, 2, 3, 4, 5, 6, 8, 9]
  np.testing.assert_allclose(prior[0, unseen], 6 * expected[unseen], rtol=1e-5)
  np.testing.assert_allclose(prior.sum(0)[unseen], 6, rtol=1e-5)
  np.testing.assert_allclose(prior[:, 0], [6 * expected[0] + 8, 6 - 6 * expected[0]], rtol=1e-5)


def test_only_reference_steps_change_the_difficulty_of_others():
  curriculum = kernel()
  observe(curriculum, [0, 7], [8, 2])
  before = posterior(curriculum)[:, 1]
  observe(curriculum, [2, 8], [0, 0])
  assert np.array_equal(posterior(curriculum)[:, 1], before)
  observe(curriculum, [2, 8], [0, 0])
  assert posterior(curriculum)[0, 1] < 0.2 * before[0]


def test_far_references_and_zeros_do_no_harm():
  features = np.concatenate([CORNERS[:9], np.zeros((1, 2))])
  curriculum = kernel(features, temperature=1e-3)
  observe(curriculum, [0, 1], [8, 0])
  np.testing.assert_allclose(posterior(curriculum)[0, 5:], 8 * 0.5, rtol=1e-5)


def test_reference_steps_draw_evenly_and_others_choose():
  curriculum = kernel(temperature=0.1)
  observe(curriculum, [0, 7], [8, 4])
  drawn = np.array([curriculum.propose(2 * s, 3).index for s in range(2000)])
  counts = np.bincount(drawn.ravel(), minlength=N)
  assert ((counts - 600) ** 2 / 600).sum() < 27.9  # 9 degrees of freedom, one in a thousand
  assert set(curriculum.propose(3, 3).index.tolist()) <= {5, 6, 7, 8, 9}
  assert [curriculum.propose(s, 3).why[0] for s in (2, 3)] == ['reference', 'picked']


@pytest.mark.parametrize('value', [np.inf, np.nan])
def test_features_that_are_no_numbers_are_user_errors(value):
  features = CORNERS.copy()
  features[3, 1] = value
  with pytest.raises(
    UserError, match=r"prior_pooling\.feature='mine': row 3 holds .* finite numbers"
  ):
    kernel(features)


def test_kinds_may_be_the_features():
  pooling = dict(fn='kernel', feature='kind', temperature=0.1)
  curriculum = make(N, kind=np.arange(N) % 2, **PLAIN | dict(prior_pooling=pooling))
  observe(curriculum, [0, 1], [8, 0])
  mean = curriculum.predict(np.arange(2, N))[0]
  assert (mean[::2] > 0.9).all() and (mean[1::2] < 0.1).all()
