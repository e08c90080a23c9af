"""A success head on hidden states: exact fit, recovery of a logistic world, reliability, fallback, resuming."""

from __future__ import annotations

import numpy as np
import pytest
from curricula import PLAIN, G, make, observe, same
from scipy import optimize

from jaxrl_llm.curriculum import answer_wording, candidates, success_head
from jaxrl_llm.curriculum.prompt_features import PromptFeatures
from jaxrl_llm.types import UserError

N, D, K, BLOCK = 6000, 40, 6, 32

GIVEN = dict(prior_pooling=dict(fn='fitted_kind'))


def predictor(size=N, *, kind=None, seed=0, **settings):
  pooling = dict(fn='hidden_state', dimensions=K) | settings
  return make(size, kind=kind, seed=seed, fields={}, **PLAIN | dict(prior_pooling=pooling))


def states(random, size=N):
  """Hidden states [N, D] of six strong directions and weak others, and these six, of unit variance."""
  z = random.normal(size=(size, K))
  mix = np.linalg.qr(random.normal(size=(D, D)))[0][:K]
  return 5 + z @ mix + 0.02 * random.normal(size=(size, D)), z


def world(scale=1.5, spread=0.0, bias=-0.5):
  """Hidden states, and success rates that are logistic in six directions of them, with noise of its own per prompt."""
  random = np.random.default_rng(0)
  hidden, z = states(random)
  weights = np.array([1.0, -0.8, 0.6, 0.0, 0.0, 0.3])
  logit = bias + scale * z @ weights + spread * random.normal(size=N)
  return hidden, 1 / (1 + np.exp(-logit)), random


def encode(curriculum, hidden, index):
  features = curriculum.features
  if not features.ready:
    first = features.others(0, BLOCK)
    features.fit(hidden[first])
    features.put(first, hidden[first])
  features.put(index, hidden[index])


def watch(curriculum, hidden, p, random, steps=40, of=1000):
  """The first `of` prompts are visited, 64 a step at most, and each step encodes its own."""
  for index in np.array_split(random.permutation(of), steps):
    encode(curriculum, hidden, index)
    observe(curriculum, index, random.binomial(G, p[index]))


def calibration(predicted, truth) -> float:
  """Σ over ten bins of equal mass of the prediction: share · |mean prediction − mean truth|."""
  parts = np.array_split(np.argsort(predicted, kind='stable'), 10)
  return sum(abs((predicted - truth)[at].sum()) for at in parts) / len(truth)


def log_loss(predicted, truth) -> float:
  return float(-(truth * np.log(predicted) + (1 - truth) * np.log1p(-predicted)).mean())


def visits(random, count=60, features=4):
  design = np.c_[random.normal(size=(count, features - 1)), np.ones(count)]
  n = random.integers(2, 9, count)
  k = random.binomial(n, 0.3)
  square = k * (k - 1) / (n * (n - 1))
  expected = random.uniform(0.2, 0.6, count)
  return success_head.Visits(design, expected, k, n, square, np.ones(count, bool))


SETTINGS = success_head.Settings(ridge=0.7, visits=20.0, memory=1e12, share=1 / 3)


@pytest.mark.parametrize('mean_F', [0.0, np.array([0.0, 1.0, -2.0, 0.5])], ids=['0', 'given'])
def test_the_fit_is_the_maximum_of_the_penalized_likelihood(mean_F):
  seen, settings = visits(np.random.default_rng(0)), SETTINGS._replace(mean_F=mean_F)
  state = success_head.initial(4)
  np.testing.assert_allclose(success_head.weights(state, settings), mean_F + np.zeros(4))
  state = success_head.learn(state, seen, settings)
  share = float(np.clip(_share(seen), 1e-3, 1))
  weight = 1 / (1 + (seen.count_V - 1) * share)
  offset = np.log(seen.expected_V / (1 - seen.expected_V))

  def loss(theta):
    logit = offset + seen.design_VxF @ theta
    likelihood = seen.right_V * logit - seen.count_V * np.logaddexp(0, logit)
    return -(weight * likelihood).sum() + settings.ridge / 2 * ((theta - mean_F) ** 2).sum()

  found = optimize.minimize(loss, np.zeros(4), method='BFGS', options=dict(gtol=1e-9)).x
  np.testing.assert_allclose(success_head.weights(state, settings), found, atol=1e-6)


def _share(seen):
  """Var(p) / (m(1 − m)) of a head whose θ is 0, shrunk toward a third by 20 visits."""
  m, rate = seen.expected_V, seen.right_V / seen.count_V
  residual, binary = (seen.square_V - 2 * m * rate + m * m).sum(), (m * (1 - m)).sum()
  pseudo = SETTINGS.visits * binary / len(m)
  return (residual + pseudo * SETTINGS.share) / (binary + pseudo)


def test_visits_one_by_one_give_nearly_the_fit_of_all():
  """Exact but for the expansion of older likelihoods, which a linear model would not need."""
  seen = visits(np.random.default_rng(1), 300)
  together = success_head.learn(success_head.initial(4), seen, SETTINGS)
  state = success_head.initial(4)
  for i in range(0, 300, 10):
    part = success_head.Visits(*(x[i : i + 10] for x in seen))
    state = success_head.learn(state, part, SETTINGS)
  ours, theirs = (success_head.weights(s, SETTINGS) for s in (state, together))
  np.testing.assert_allclose(ours, theirs, atol=0.06)


def test_a_logistic_world_is_recovered_and_calibrated():
  hidden, p, random = world()
  curriculum = predictor()
  watch(curriculum, hidden, p, random)
  unseen = np.arange(1000, N)
  encode(curriculum, hidden, unseen)
  observe(
    curriculum, np.zeros(0, int), np.zeros(0, int)
  )  # predictions are computed with the evidence
  mean = curriculum.predict(unseen)[0]
  error, truth = calibration(mean, p[unseen]), p[unseen]
  constant = np.full(len(unseen), p[:1000].mean())
  print(f'calibration error {error:.4f}; log loss {log_loss(mean, truth):.4f}, of the mean '
        f'{log_loss(constant, truth):.4f}, of the truth {log_loss(truth, truth):.4f}')  # fmt: skip
  assert error <= 0.02
  assert np.abs(mean - truth).mean() < 0.04
  assert log_loss(mean, truth) < log_loss(truth, truth) + 0.01 < log_loss(constant, truth) - 0.1
  metrics = curriculum.metrics()
  assert metrics['curriculum/head_gain'] > 0.9 and metrics['curriculum/head_unexplained'] < 0.3


def test_the_strength_is_the_measured_spread_around_the_prediction():
  hidden, p, random = world(spread=0.8)
  curriculum = predictor(N)
  watch(curriculum, hidden, p, random, steps=60, of=3000)
  unseen = np.arange(3000, N)
  encode(curriculum, hidden, unseen)
  observe(curriculum, np.zeros(0, int), np.zeros(0, int))
  alpha, beta = curriculum.posterior(unseen)
  mean = alpha / (alpha + beta)
  true = (mean * (1 - mean)).sum() / ((p[unseen] - mean) ** 2).sum() - 1
  assert (alpha + beta)[0] == pytest.approx(true, rel=0.25)


def test_states_of_noise_change_nothing():
  _, p, random = world()
  hidden = random.normal(size=(N, D))
  # The other averages success rates over as many visits.
  curriculum, kinds = predictor(), make(N, fields={}, **PLAIN | GIVEN | dict(kind_decay=0.9995))
  watch(curriculum, hidden, p, np.random.default_rng(3))
  watch_kinds = np.random.default_rng(3)
  for index in np.array_split(watch_kinds.permutation(1000), 40):
    observe(kinds, index, watch_kinds.binomial(G, p[index]))
  unseen = np.arange(1000, N)
  encode(curriculum, hidden, unseen)
  observe(curriculum, np.zeros(0, int), np.zeros(0, int))
  metrics = curriculum.metrics()
  assert metrics['curriculum/head_gain'] < 0.1
  assert metrics['curriculum/head_unexplained'] == pytest.approx(1, abs=0.05)
  (ours, _, _), (theirs, _, _) = (c.predict(unseen) for c in (curriculum, kinds))
  assert np.abs(ours - theirs).mean() < 0.02
  strengths = [sum(c.posterior(unseen[:1]))[0] for c in (curriculum, kinds)]
  assert strengths[0] == pytest.approx(strengths[1], rel=0.1)


def test_prompts_without_features_have_the_prior_of_their_kind():
  hidden, p, random = world()
  kind = np.arange(N) % 3
  curriculum = predictor(kind=kind)
  kinds = make(N, kind=kind, fields={}, **PLAIN | dict(prior_pooling=dict(fn='fitted_kind')))
  other = np.random.default_rng(5)
  for index in np.array_split(random.permutation(1000), 20):
    encode(curriculum, hidden, index)
    k = other.binomial(G, p[index])
    observe(curriculum, index, k), observe(kinds, index, k)
  known = curriculum.features.state['known']
  bare = np.flatnonzero(~known)
  assert 3000 < len(bare) < N - 1000 + 1
  ours, theirs = (np.stack(c.posterior(np.arange(N))) for c in (curriculum, kinds))
  np.testing.assert_array_equal(ours[:, bare], theirs[:, bare])
  seen = np.flatnonzero(known & (curriculum.visits(np.arange(N)) == 0))
  assert len(seen) and not np.allclose(curriculum.posterior(seen), kinds.posterior(seen), rtol=0.05)


def test_the_head_adds_to_what_kinds_explain():
  hidden, p, random = world()
  kind = np.arange(N) % 2
  p = np.where(kind, p, p / 4)
  both, blind = predictor(kind=kind), predictor()
  watch(both, hidden, p, np.random.default_rng(1))
  watch(blind, hidden, p, np.random.default_rng(1))
  unseen = np.arange(1000, N)
  losses = []
  for curriculum in (both, blind):
    encode(curriculum, hidden, unseen)
    observe(curriculum, np.zeros(0, int), np.zeros(0, int))
    losses.append(log_loss(curriculum.predict(unseen)[0], p[unseen]))
  assert losses[0] < losses[1] - 0.02


def test_hidden_kinds_are_predicted_nearly_as_well_as_given_ones():
  """States hold the kind, which only the other curriculum is given: log loss of right or wrong on unseen prompts."""
  random = np.random.default_rng(0)
  kind = random.integers(0, K, N)
  hidden = random.normal(size=(K, D))[kind] + 0.1 * random.normal(size=(N, D))
  p = np.array([0.05, 0.2, 0.4, 0.6, 0.8, 0.95])[kind]
  blind, given = predictor(), make(N, kind=kind, fields={}, **PLAIN | GIVEN)
  for index in np.array_split(random.permutation(1000), 40):
    k = random.binomial(G, p[index])
    encode(blind, hidden, index)
    observe(blind, index, k), observe(given, index, k)
  unseen = np.arange(1000, N)
  encode(blind, hidden, unseen)
  observe(blind, np.zeros(0, int), np.zeros(0, int))
  ours, theirs = (log_loss(c.predict(unseen)[0], p[unseen]) for c in (blind, given))
  constant = log_loss(np.full(len(unseen), p[:1000].mean()), p[unseen])
  print(f'log loss: hidden kinds {ours:.4f}, given kinds {theirs:.4f}, the mean {constant:.4f}')
  assert ours < 1.03 * theirs and theirs < constant - 0.1


def test_features_are_principal_components_of_unit_variance():
  hidden, z = states(np.random.default_rng(2), 2000)
  features = PromptFeatures(2000, K, 1, 0)
  features.fit(hidden[:1000])
  features.put(np.arange(2000), hidden)
  values = features.state['values'].astype(float)
  assert np.allclose(np.cov(values[:1000].T, bias=True), np.eye(K), atol=0.01)
  explained = np.linalg.lstsq(values, z - z.mean(0), rcond=None)
  residual = z - z.mean(0) - values @ explained[0]
  assert (residual**2).mean() < 0.01  # they span the six strong directions
  assert features.design(np.arange(3)).shape == (3, K + 1)


def test_equal_states_have_features_of_zero():
  features = PromptFeatures(4, K, 1, 0)
  features.fit(np.ones((4, D)))
  features.put(np.arange(4), np.ones((4, D)))
  assert not features.state['values'].any()


def with_odds(hidden, odds):
  return np.concatenate([hidden, odds[:, None]], axis=1)


def test_the_odds_of_an_answer_are_a_feature_of_their_own():
  random = np.random.default_rng(3)
  hidden, odds = random.normal(size=(400, D)), random.normal(-4, 3, 400)
  odds[5:9] = np.nan  # no answer
  plain, features = PromptFeatures(400, K, 1, 0), PromptFeatures(400, K, 1, 0, answer_tokens=4)
  plain.fit(hidden[:300]), features.fit(with_odds(hidden, odds)[:300])
  plain.put(np.arange(400), hidden), features.put(np.arange(400), with_odds(hidden, odds))
  np.testing.assert_array_equal(features.state['values'][:, :K], plain.state['values'])
  assert np.nanmin(odds) < -10 < 0 < np.nanmax(odds)
  np.testing.assert_allclose(features.state['values'][:, K], np.clip(odds, -10, 10), atol=5e-3)
  assert np.isnan(features.state['values'][5:9, K]).all() and features.state['known'].all()


def test_prompts_without_odds_are_predicted_by_their_states_alone():
  """Both curricula see the same forty visits of kinds that differ; only one reads odds, and has none."""
  hidden, p, _ = world(scale=0.3)
  kind, means = np.arange(N) % 2, []
  p = np.where(kind, p, p / 8)
  for tokens, states in ((0, hidden), (4, with_odds(hidden, np.full(N, np.nan)))):
    curriculum = predictor(kind=kind, answer_tokens=tokens)
    watch(curriculum, states, p, np.random.default_rng(5), steps=10, of=40)
    unseen = np.arange(1000, N)
    encode(curriculum, states, unseen)
    observe(curriculum, np.zeros(0, int), np.zeros(0, int))
    means.append(curriculum.predict(unseen)[0])
  assert np.isfinite(means).all() and np.abs(means[0] - means[1]).max() < 0.05


def after_eight_visits(seed, shuffled):
  """Mean gap to the rates of unseen prompts, whose odds are right or another prompt's, and that of their mean."""
  random = np.random.default_rng(seed)
  o = random.normal(-2, 2, N)
  p, odds = 1 / (1 + np.exp(-o)), random.permutation(o) if shuffled else o
  curriculum = predictor(dimensions=16, answer_tokens=4)
  states = with_odds(random.normal(size=(N, D)), odds)
  watch(curriculum, states, p, random, steps=4, of=8)
  unseen = np.arange(1000, N)
  encode(curriculum, states, unseen)
  observe(curriculum, np.zeros(0, int), np.zeros(0, int))
  gap = np.abs(curriculum.predict(unseen)[0] - p[unseen]).mean()
  return gap, np.abs(p[unseen] - p[unseen].mean()).mean()


def test_odds_are_believed_after_eight_visits_unless_they_are_wrong():
  """Of 19 weights: where their prior is 0 in the mean, the gap is more than half of that of the mean."""
  right, shuffled = (
    np.mean([after_eight_visits(s, x) for s in range(6)], 0) for x in (False, True)
  )
  print(
    f'gaps: {right[0]:.3f} with right odds, {shuffled[0]:.3f} with others, {right[1]:.3f} of the mean'
  )
  assert right[0] < 0.5 * right[1] and shuffled[0] < 1.3 * shuffled[1]


def test_odds_that_know_the_rate_take_the_place_of_kinds():
  """Kinds tell a part of what the odds do, so that logit m₀ beside them would count twice."""
  random = np.random.default_rng(0)
  kind = random.integers(0, 4, N)
  p = 1 / (1 + np.exp(-(np.array([-3.0, -1.0, 0.5, 2.5])[kind] + 1.5 * random.normal(size=N))))
  states = with_odds(random.normal(size=(N, D)), np.log(p / (1 - p)))
  curriculum = predictor(kind=kind, answer_tokens=4)
  watch(curriculum, states, p, random)
  unseen = np.arange(1000, N)
  encode(curriculum, states, unseen)
  observe(curriculum, np.zeros(0, int), np.zeros(0, int))
  mean = curriculum.predict(unseen)[0]
  print(f'gap {np.abs(mean - p[unseen]).mean():.4f}, log loss {log_loss(mean, p[unseen]):.4f}')
  assert np.abs(mean - p[unseen]).mean() < 0.015
  assert log_loss(mean, p[unseen]) < log_loss(p[unseen], p[unseen]) + 0.002


FRESH = dict(candidates=dict(fn='encoded'))


def of_encoded(size=200):
  pooling = dict(fn='hidden_state', dimensions=K)
  return make(size, fields={}, **PLAIN | FRESH | dict(prior_pooling=pooling))


def test_candidates_are_what_the_last_step_encoded_besides_its_own():
  curriculum, hidden = of_encoded(), np.random.default_rng(0).normal(size=(200, D))
  assert len(np.unique(curriculum.propose(0, 150).index)) == 150  # nothing is encoded yet
  features = curriculum.features
  features.fit(hidden)
  features.put(np.arange(200), hidden)
  features.put(np.array([3, 4, 50, 60, 70, 80, 3]), hidden[:7], [3, 4])
  curriculum.accept(curriculum.propose(1, 2))
  assert set(curriculum.propose(1, 4).index) == {50, 60, 70, 80}
  assert set(curriculum.propose(1, 3, busy=[60]).index) == {50, 70, 80}
  many = set(curriculum.propose(1, 20, busy=[60]).index)  # these are too few
  assert len(many) == 20 and 60 not in many


def test_a_million_candidates_are_not_compared_where_nothing_is_encoded():
  free = np.ones(70_000, bool)
  chosen = candidates.encoded(free, 4, 0, free * 0, np.random.default_rng(0))
  assert len(np.unique(chosen)) == 65_536


def test_a_restored_curriculum_has_the_same_candidates():
  whole, hidden = of_encoded(), np.random.default_rng(0).normal(size=(200, D))
  encode(whole, hidden, np.arange(40))
  whole.features.put(np.arange(40), hidden[:40], range(4))
  resumed = of_encoded()
  resumed.load_state_dict(whole.state_dict())
  chosen = resumed.propose(2, 12).index
  assert np.array_equal(chosen, whole.propose(2, 12).index) and set(chosen) <= set(range(4, 40))


def test_candidates_that_nothing_encodes_are_refused():
  with pytest.raises(UserError, match=r"candidates\.fn='encoded' .* prior_pooling\.fn='kind' enc"):
    make(20, **FRESH | dict(prior_pooling=dict(fn='kind')))
  with pytest.raises(UserError, match=r"prior_pooling\.fn='none' encodes none; set it to hidden"):
    make(20, **PLAIN | FRESH)


def test_each_prompt_is_encoded_in_turn():
  for size in (7, 12, 300):
    features = PromptFeatures(size, 2, 3, seed=size)
    first = features.others(0, 4)
    assert len(first) == -(-min(size, 64) // 4) * 4
    features.fit(np.random.default_rng(0).normal(size=(9, 5)))
    order = np.concatenate([first, *(features.others(s, 4) for s in range(size))])
    rounds = order[: len(order) // size * size].reshape(-1, size)
    assert all(np.array_equal(np.sort(r), np.arange(size)) for r in rounds)
    assert len(features.others(0, 4)) == 12


def of_kinds(size=400, **settings):
  """Of two kinds, of which one is mixed and the other always wrong; a few visits have told which."""
  curriculum = predictor(size, kind=np.arange(size) % 2, multiple=2, considered=4, **settings)
  seen = np.arange(40)
  observe(curriculum, seen, np.where(seen % 2, G // 2, 0))
  return curriculum


def test_prompts_of_promising_kinds_are_encoded_each_in_its_turn():
  curriculum, size = of_kinds(dimensions=0, answer_tokens=4), 400
  plain = PromptFeatures(size, 0, 8, 0, answer_tokens=4)  # all that are considered
  turns = np.concatenate([plain.others(step, 5) for step in range(10)])
  assert np.array_equal(np.sort(turns), np.arange(size))
  before = curriculum.state_dict()
  for step in range(10):
    chosen = curriculum.to_encode(step, 5)
    considered = turns[40 * step :][:40]
    assert len(set(chosen)) == 10 and set(chosen) <= set(considered)
    # The mixed kind has enough of them; it is half of all.
    assert (chosen % 2).all() and 15 <= (considered % 2).sum() <= 25
    assert np.array_equal(curriculum.to_encode(step, 5), chosen)
  assert same(curriculum.state_dict(), before)


def test_no_more_prompts_are_considered_than_there_are():
  curriculum = of_kinds(size=50, dimensions=0, answer_tokens=4)
  chosen = curriculum.to_encode(3, 10)
  assert len(set(chosen)) == 20 and (chosen % 2).all()  # all 50 were
  twice = curriculum.to_encode(3, 30)
  assert len(twice) == 60 and set(twice) == set(range(50))


def test_the_projection_is_fitted_to_prompts_of_all_kinds():
  curriculum = of_kinds()
  first = curriculum.to_encode(0, 4)
  assert len(first) == 64 and 20 < (first % 2).sum() < 44
  curriculum.features.fit(np.random.default_rng(0).normal(size=(64, D)))
  assert len(curriculum.to_encode(0, 4)) == 8 and (curriculum.to_encode(0, 4) % 2).all()


def test_odds_alone_are_kept_and_predict():
  random = np.random.default_rng(0)
  odds = random.normal(-1, 2, N)
  p, states = 1 / (1 + np.exp(-odds)), with_odds(random.normal(size=(N, D)), odds)
  curriculum = predictor(dimensions=0, answer_tokens=4)
  features = curriculum.features
  assert features.ready and features.idle
  features.observe([answer_wording.Group(x, '7', ['7']) for x in 'ab'])
  assert not features.idle
  watch(curriculum, states, p, random)
  unseen = np.arange(1000, N)
  encode(curriculum, states, unseen)
  observe(curriculum, np.zeros(0, int), np.zeros(0, int))
  np.testing.assert_allclose(
    features.state['values'][unseen, 0], np.clip(odds[unseen], -10, 10), atol=5e-3
  )
  assert features.state['values'].shape == (N, 1)
  assert np.abs(curriculum.predict(unseen)[0] - p[unseen]).mean() < 0.015


def test_states_are_kept_before_any_words_are_known():
  assert not PromptFeatures(8, 2, 1, 0, answer_tokens=4).idle
  assert not PromptFeatures(8, 2, 1, 0).idle


def test_a_saved_head_continues_to_the_bit():
  hidden, p, _ = world()
  whole, random = predictor(200), np.random.default_rng(4)
  steps = [(random.choice(200, 8, replace=False), random) for _ in range(8)]

  def run(curriculum, some):
    for index, _ in some:
      encode(curriculum, hidden, index)
      observe(curriculum, index, (index * 7 + len(index)) % (G + 1))

  run(whole, steps[:4])
  resumed = predictor(200)
  resumed.load_state_dict(whole.state_dict())
  assert resumed.features.ready and same(resumed.state_dict(), whole.state_dict())
  run(whole, steps[4:]), run(resumed, steps[4:])
  assert same(resumed.state_dict(), whole.state_dict())
  assert np.array_equal(resumed.propose(9, 6).index, whole.propose(9, 6).index)


def test_a_saved_state_is_a_copy():
  hidden, _, _ = world()
  curriculum = predictor(200)
  encode(curriculum, hidden, np.arange(10))
  saved = curriculum.state_dict()
  before = saved['features_values'].copy()
  curriculum.features.put(np.arange(10), hidden[10:20])
  assert np.array_equal(saved['features_values'], before)


def test_a_prompt_takes_64_bytes():
  """All states of the curriculum, in a checkpoint, with 16 features."""
  sizes = []
  for size in (1000, 2000):
    curriculum = predictor(size, dimensions=16, answer_tokens=16)
    sizes.append(sum(array.nbytes for array in curriculum.state_dict().values()))
  assert sizes[1] - sizes[0] <= 1000 * 64


@pytest.mark.parametrize(
  'name, value',
  [
    *(('dimensions', 0), ('multiple', -1), ('answer_tokens', -1), ('ridge', 0.0), ('strength', 0.0)),
    *(('visits', 0.0), ('memory', 0.5), ('considered', 0)),
  ],
)  # fmt: skip
def test_settings_out_of_range_are_user_errors(name, value):
  with pytest.raises(
    UserError, match=rf'config\.curriculum\.prior_pooling\.{name}={value} must be'
  ):
    predictor(8, **{name: value})
