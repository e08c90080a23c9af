"""The class Curriculum: posterior, choice of prompts, and exact continuation."""

from __future__ import annotations

import importlib
import io
import subprocess
import sys

import numpy as np
import pytest
from curricula import PLAIN, G, observe, same

from jaxrl_llm.config import loading, stages
from jaxrl_llm.curriculum import Curriculum, HintedPosteriors
from jaxrl_llm.types import UserError

MOPPS = PLAIN | dict(
  candidates=dict(fn='stream', multiple=4),
  evidence_decay=dict(fn='visit', decay=0.5),
  rate_estimate=dict(fn='thompson'),
  utility=dict(fn='mopps'),
)


def make(size=40, *overrides, kind=None, seed=0, **parts) -> Curriculum:
  settings = loading.load(overrides=overrides).curriculum.to_dict() | parts
  return Curriculum(settings, size, group=G, seed=seed, kind=kind)


def loop(curriculum, rate_N, steps, slots, start=0):
  """Proposes and answers, the answers keyed by step."""
  chosen = []
  for step in range(start, start + steps):
    asked = curriculum.propose(step, slots)
    curriculum.accept(asked)
    index = asked.index
    k = np.random.default_rng((99, step)).binomial(G, rate_N[index])
    observe(curriculum, index, k, truncated=k // 2)
    chosen.append(index)
  return np.array(chosen)


# What it believes.


def test_static_rates_are_recovered_when_nothing_is_forgotten():
  rate_N = np.array([0.0, 0.1, 0.5, 0.9, 1.0])
  curriculum, random = make(5, **PLAIN), np.random.default_rng(0)
  for _ in range(500):
    observe(curriculum, np.arange(5), random.binomial(G, rate_N))
  mean, variance, _ = curriculum.predict(np.arange(5))
  np.testing.assert_allclose(mean, rate_N, atol=0.02)
  np.testing.assert_allclose(variance, mean * (1 - mean) / (4002 + 1), rtol=1e-6)


def test_a_visit_updates_as_mopps_does_and_leaves_the_others_alone():
  curriculum = make(4, **MOPPS)
  observe(curriculum, [1], [6])
  observe(curriculum, [1], [8])
  alpha, beta = 0.5 * (1 + 6) + 0.5 * 1 + 8, 0.5 * (1 + 2) + 0.5 * 1 + 0
  mean, variance, _ = curriculum.predict(np.arange(4))
  assert mean[1] == pytest.approx(alpha / (alpha + beta), rel=1e-6)
  others = [0, 2, 3]
  assert (mean[others] == 0.5).all() and (variance[others] == 1 / 12).all()


def test_step_forgetting_ages_every_prompt():
  curriculum = make(3, **PLAIN | dict(evidence_decay=dict(fn='step', decay=0.9)))
  observe(curriculum, [0, 1], [8, 0])
  observe(curriculum, [2], [4])
  mean = curriculum.predict(np.arange(3))[0]
  np.testing.assert_allclose(mean, [(1 + 7.2) / 9.2, 1 / 9.2, 0.5], rtol=1e-6)


def test_prompts_never_seen_are_likely_to_be_mixed():
  # Beta(1, 1) and G = 8: every k from 0 to 8 is as likely.
  assert make(3, **PLAIN).predict(np.arange(3))[2] == pytest.approx([7 / 9] * 3, rel=1e-6)


def test_an_unvisited_prompt_of_a_solved_kind_is_predicted_easy():
  curriculum = make(30, kind=np.arange(30) % 3)
  for step in range(4):
    observe(curriculum, [3 * step, 3 * step + 1], [8, 0])
  mean, _, mixed = curriculum.predict(np.array([27, 28, 29]))
  assert mean[0] > 0.95 and mean[1] < 0.05 and mean[2] == 0.5
  assert mixed[0] < 0.25 and mixed[1] < 0.25 and mixed[2] > 0.75


def test_the_prior_of_a_kind_is_its_aged_rate_with_room_for_difference():
  pooling = dict(fn='kind', strength=3.0, floor=1.0)
  curriculum = make(9, kind=np.zeros(9, int), prior_pooling=pooling, kind_decay=0.5)
  observe(curriculum, [2], [4])
  observe(curriculum, [0, 1], [8, 2])  # two visits in one step: each ages what was before by half
  rate = (0.25 * 4 + 10 + 1) / (0.25 * 8 + 16 + 2)
  mean, variance, mixed = curriculum.predict(np.array([8]))
  assert mean[0] == pytest.approx(rate, rel=1e-6)
  assert variance[0] == pytest.approx(rate * (1 - rate) / 4, rel=1e-6)  # Beta of strength 3
  assert mixed[0] < 1 - rate**G - (1 - rate) ** G - 0.1  # far below that of one shared rate


def test_a_kind_ages_by_the_visits_it_gets_and_not_by_those_of_others():
  curriculum = make(4, kind=np.array([0, 0, 1, 1]), kind_decay=0.5)
  observe(curriculum, [0], [8])
  before = curriculum.predict(np.array([1]))[0]
  observe(curriculum, [2, 3], [0, 0])
  assert curriculum.predict(np.array([1]))[0] == before


def test_the_order_of_rows_does_not_matter_to_the_bit():
  kind, random = np.arange(200) % 3, np.random.default_rng(0)
  one, other = make(200, kind=kind), make(200, kind=kind)
  for _ in range(20):
    index, k = random.permutation(200)[:50], random.integers(0, G + 1, 50)
    shuffled = random.permutation(50)
    observe(one, index, k, truncated=k // 2)
    observe(other, index[shuffled], k[shuffled], truncated=(k // 2)[shuffled])
  assert same(one.state_dict(), other.state_dict())
  assert one.metrics() == other.metrics()


@pytest.mark.parametrize('setting, wrong', [('count', 4), ('ignore', 1)])
def test_truncation_is_counted_and_is_evidence_only_where_that_is_wanted(setting, wrong):
  one, other = (make(4, **PLAIN | dict(truncated=setting)) for _ in range(2))
  observe(one, [2, 1], [4, 8], truncated=[3, 0])
  other.observe(np.array([2, 1]), np.array([4, 8]), np.array([4 + wrong, 8]))
  assert one.state_dict()['truncated'].tolist() == [0, 0, 3, 0]
  assert one.metrics()['curriculum/truncated_share'] == 3 / 16
  assert one.predict(np.arange(4))[0][2] == pytest.approx(5 / (6 + wrong), rel=1e-6)
  assert np.array_equal(one.predict(np.arange(4)), other.predict(np.arange(4)))


def test_a_group_of_which_nothing_counts_is_a_visit_without_evidence():
  curriculum = make(4, truncated='ignore')
  observe(curriculum, [2], [0], truncated=[8])
  assert np.array_equal(curriculum.predict(np.arange(4)), make(4).predict(np.arange(4)))
  assert curriculum.state_dict()['visits'].tolist() == [0, 0, 1, 0] and not curriculum.metrics()
  observe(curriculum, [2], [4])
  before = curriculum.predict(np.arange(4))
  observe(curriculum, [2], [0], truncated=[8])  # nor does it age what was known
  assert np.array_equal(curriculum.predict(np.arange(4)), before)


@pytest.mark.parametrize(
  'index, k, n, more',
  [
    ([0, 0], [1, 1], 8, {}),
    ([0], [8.01], 8, {}),
    ([0], [-0.01], 8, {}),
    ([0], [float('nan')], 8, {}),
    ([0], [4], 8.5, {}),
    ([0.0], [4], 8, {}),
    ([0], [4], 8, dict(truncated=[1.0])),
    ([0], [4], 8, dict(truncated=[5], truncated_k=[4.5])),
    ([0], [4], 8, dict(truncated=[5], truncated_k=[-1])),
  ],
)
def test_evidence_that_cannot_be_is_refused(index, k, n, more):
  with pytest.raises(ValueError, match='observe needs'):
    make().observe(np.array(index), np.array(k), np.full(len(index), n), **more)


def test_graded_scores_are_evidence_of_their_mass():
  """α = α₀ + k and β = β₀ + n − k for any real k: what a Beta posterior learns of a sum of scores in [0, 1]."""
  curriculum = make(6, **PLAIN)
  observe(curriculum, [4, 1], [0.3, 7.85], mixed=[True, False])
  mean, variance, _ = curriculum.predict(np.array([1, 4]))
  want = np.array([1 + 7.85, 1 + 0.3]) / (2 + G)
  np.testing.assert_allclose(mean, want, rtol=1e-6)
  np.testing.assert_allclose(variance, want * (1 - want) / (3 + G), rtol=1e-6)
  metrics = curriculum.metrics()
  # Mass alone would call both mixed.
  assert metrics['curriculum/mixed_share'] == 0.5
  assert metrics['curriculum/observed_success'] == pytest.approx(8.15 / 16)


def test_what_was_cut_off_takes_its_mass_with_it_where_it_is_no_evidence():
  one, other = (make(4, **PLAIN | dict(truncated='ignore')) for _ in range(2))
  observe(one, [2], [3.5], truncated=[3], truncated_k=[0.75], mixed=[True])
  other.observe(np.array([2]), np.array([2.75]), np.array([5]), mixed=np.array([True]))
  assert np.array_equal(one.predict(np.arange(4)), other.predict(np.arange(4)))
  metrics = one.metrics()
  assert metrics['curriculum/observed_success'] == 0.55 and metrics['curriculum/mixed_share'] == 1


# What it chooses.


@pytest.mark.parametrize('parts', [{}, MOPPS, dict(eligibility=dict(fn='audit', share=0.5))])
@pytest.mark.parametrize('size, slots', [(40, 4), (40, 40), (41, 7), (1, 1)])
def test_a_proposal_is_distinct_and_depends_on_seed_step_and_evidence_alone(parts, size, slots):
  busy, fresh = make(size, **parts), make(size, **parts)
  for step in (3, 1, 7, 7):
    busy.propose(step, slots)
  assert same(busy.state_dict(), fresh.state_dict())
  for step in (7, 12):
    ours, theirs = busy.propose(step, slots), fresh.propose(step, slots)
    np.testing.assert_equal(ours._asdict(), theirs._asdict())
    assert ours.index.dtype == np.int32 and ours.index.shape == (slots,)
    assert len(set(ours.index.tolist())) == slots
    assert 0 <= ours.index.min() and ours.index.max() < size
    assert np.array_equal(ours.p_mean, busy.predict(ours.index)[0])
    assert np.array_equal(ours.p_mixed, busy.predict(ours.index)[2])


@pytest.mark.parametrize('parts', [{}, MOPPS, dict(utility=dict(fn='uniform'))])
def test_steps_and_seeds_choose_differently(parts):
  chosen = {
    tuple(make(500, seed=seed, **parts).propose(step, 8).index)
    for seed in (0, 1)
    for step in (0, 1)
  }
  assert len(chosen) == 4


def test_one_override_makes_the_choice_uniform():
  size, slots, steps = 30, 4, 3000
  kind = np.arange(size) % 3
  curriculum = make(size, '--config.curriculum.utility.fn=uniform', kind=kind)
  for _ in range(5):  # evidence must not matter
    observe(curriculum, np.arange(size), np.where(kind == 0, 8, 4))
  drawn = np.array([curriculum.propose(step, slots).index for step in range(steps)])
  assert all(len(set(row)) == slots for row in drawn.tolist())
  expected = slots * steps / size
  statistic = ((np.bincount(drawn.ravel(), minlength=size) - expected) ** 2 / expected).sum()
  assert statistic < 58.3  # 29 degrees of freedom, one in a thousand; the draw is seeded


def test_the_kind_within_reach_is_found():
  kind = np.arange(400) % 4
  rate_N = np.array([0.0, 0.02, 0.5, 1.0])[kind]
  curriculum = make(400, kind=kind)
  chosen = loop(curriculum, rate_N, 60, 4)[20:]
  assert (kind[chosen] == 2).mean() > 0.8


def test_mopps_looks_for_the_target():
  rate_N = np.linspace(0, 1, 64)
  settings = MOPPS | dict(utility=dict(fn='mopps', target=0.8))
  chosen = loop(make(64, **settings), rate_N, 200, 4)[100:]
  assert abs(rate_N[chosen].mean() - 0.8) < 0.1


def test_lengths_divide_by_the_mean_of_those_that_are_known():
  """All alike but for their lengths: the short come first, the unknown count as the mean."""
  curriculum = make(6, **PLAIN | dict(utility=dict(fn='per_token')))
  tokens = np.array([30, 0, 10, 90, 20, 0], np.float32)  # mean 37.5
  chosen = curriculum.propose(0, 6, lambda index: tokens[index]).index.tolist()
  assert chosen[:3] == [2, 4, 0] and set(chosen[3:5]) == {1, 5} and chosen[5] == 3
  unknown = {
    tuple(curriculum.propose(s, 2, lambda index: 0 * tokens[index]).index) for s in range(9)
  }
  assert len(unknown) > 3 and len({tuple(curriculum.propose(s, 2).index) for s in range(9)}) > 3


def test_the_default_takes_no_notice_of_lengths():
  ours, theirs = make(40), make(40)
  with_lengths = ours.propose(3, 5, lambda index: index.astype(np.float32))
  assert np.array_equal(with_lengths.index, theirs.propose(3, 5).index)


def test_a_proposal_says_what_each_prompt_was_worth_and_which_were_drawn_as_audits():
  curriculum = make(20, **PLAIN | dict(eligibility=dict(fn='audit', share=0.5)))
  loop(curriculum, np.linspace(0, 1, 20), 12, 4)
  asked = curriculum.propose(12, 4)
  mixed_N = curriculum.predict(np.arange(20))[2]  # the default's utility
  assert asked.why == ('picked', 'picked', 'audit', 'audit')
  np.testing.assert_allclose(asked.worth[:2], mixed_N[asked.index[:2]], rtol=1e-5)
  assert np.isnan(asked.worth[2:]).all() and asked.worth[0] == pytest.approx(
    mixed_N.max(), rel=1e-5
  )
  assert asked.mean_worth == pytest.approx(mixed_N.mean(), rel=1e-5)


def test_more_slots_than_prompts_is_a_user_error():
  with pytest.raises(UserError, match=r'config\.prompts=9 .* 8 prompts'):
    make(8).propose(0, 9)


# What it tells.


def test_metrics_compare_what_came_with_what_was_predicted_before():
  curriculum = make(8, **PLAIN)
  assert curriculum.metrics() == {}
  observe(curriculum, [0, 1], [8, 8])
  observe(curriculum, [0, 2], [4, 8])
  metrics = curriculum.metrics()
  assert metrics['curriculum/predicted_success'] == pytest.approx((0.9 + 0.5) / 2)
  assert metrics['curriculum/observed_success'] == 0.75
  assert metrics['curriculum/mixed_share'] == 0.5
  # Beta(9, 1): all right with 9/17, all wrong with next to nothing (8!·9!/17!).
  all_right, all_wrong = 9 / 17, 1 / 24310
  mixed = 1 - all_right - all_wrong
  assert metrics['curriculum/predicted_mixed'] == pytest.approx((mixed + 7 / 9) / 2)
  assert metrics['curriculum/coverage'] == 3 / 8
  # Predicted 0.5, 0.5, 0.5 against 1, 1, 1; predicted 0.9 against 0.5.
  assert metrics['curriculum/calibration_error'] == pytest.approx(3 / 4 * 0.5 + 1 / 4 * 0.4)
  brier = (3 * (7 / 9) ** 2 + (1 - mixed) ** 2) / 4
  assert metrics['curriculum/brier'] == pytest.approx(brier)


def test_calibration_looks_at_recent_prompts_alone():
  curriculum = make(4, **PLAIN | dict(evidence_decay=dict(fn='visit', decay=0.0)))
  for step in range(200):  # the opposite of what was seen last
    observe(curriculum, np.arange(4), [0, 8, 0, 8] if step % 2 else [8, 0, 8, 0])
  assert curriculum.metrics()['curriculum/calibration_error'] > 0.7
  for _ in range(129):
    observe(curriculum, np.arange(4), [4, 4, 4, 4])
  assert curriculum.metrics()['curriculum/calibration_error'] == 0


# That it continues exactly.


@pytest.mark.parametrize('parts', [{}, MOPPS])
def test_a_saved_curriculum_continues_to_the_bit(parts):
  kind, rate_N = np.arange(50) % 5, np.linspace(0, 1, 50)
  whole = make(50, kind=kind, **parts)
  loop(whole, rate_N, 6, 4)
  file = io.BytesIO()
  np.savez(file, **whole.state_dict())
  file.seek(0)
  resumed = make(50, kind=kind, **parts)
  with np.load(file, allow_pickle=False) as saved:
    resumed.load_state_dict(dict(saved))
  assert same(whole.state_dict(), resumed.state_dict())
  assert whole.metrics() == resumed.metrics()
  ours, theirs = (loop(c, rate_N, 6, 4, start=6) for c in (whole, resumed))
  assert np.array_equal(ours, theirs)
  assert same(whole.state_dict(), resumed.state_dict())


def test_a_saved_state_is_a_copy():
  curriculum = make(8)
  saved = curriculum.state_dict()
  kept = {k: v.copy() for k, v in saved.items()}
  observe(curriculum, [0, 1], [3, 4])
  assert same(saved, kept)
  curriculum.load_state_dict(saved)
  observe(curriculum, [0, 1], [3, 4])
  assert same(saved, kept)


def test_the_state_of_other_data_is_a_user_error():
  with pytest.raises(UserError, match='has 9 prompts, not 8'):
    make(8).load_state_dict(make(9).state_dict())
  with pytest.raises(UserError, match='has 2 kinds of prompts, not 4'):
    make(8, kind=np.arange(8) % 4).load_state_dict(make(8, kind=np.arange(8) % 2).state_dict())


STREAM = dict(candidates=dict(fn='stream', multiple=1), utility=dict(fn='uniform'))


@pytest.mark.parametrize('pick', ['top', 'skip'])
@pytest.mark.parametrize('multiple', [1, 3])
def test_every_epoch_of_a_stream_reaches_every_prompt_with_slots_that_vary(pick, multiple):
  """Some prompts run on for a while; audits come besides, and what gives way to them keeps its place."""
  settings = STREAM | dict(candidates=dict(fn='stream', multiple=multiple), selection=dict(fn=pick))
  curriculum = make(37, **PLAIN | settings | dict(eligibility=dict(fn='audit', share=0.1)))
  random, seen = np.random.default_rng(0), np.zeros(37, int)
  for step in range(200):
    busy = random.choice(37, 5, replace=False)
    asked = curriculum.propose(step, int(random.integers(0, 8)), busy=busy)
    curriculum.accept(asked)
    assert not np.isin(asked.index, busy).any() and not np.isin(asked.used, busy).any()
    picked = np.array([why == 'picked' for why in asked.why], bool)
    if multiple == 1 or pick == 'skip':  # what the stream moved past is what was taken
      assert set(asked.index[picked].tolist()) == set(asked.used.tolist())
    seen[asked.used] += 1
    observe(curriculum, asked.index, np.full(len(asked.index), 4))
    # One that runs may lag behind while it does, and no other.
    lag = seen.max() - seen
    assert (np.delete(lag, busy) <= 1).all() or (lag > 1).sum() <= 5
  assert seen.min() >= seen.max() - 2 and seen.min() > 10
  np.testing.assert_array_equal(curriculum.state_dict()['candidates_passes'], seen)


def test_a_stream_goes_on_where_it_was_saved():
  def walk(curriculum, steps):
    consumed = []
    for step in steps:
      asked = curriculum.propose(step, 1 + step % 4)
      curriculum.accept(asked)
      observe(curriculum, asked.index, np.full(len(asked.index), 4))
      consumed += asked.index.tolist()
    return consumed

  whole, first, resumed = (make(23, **PLAIN | STREAM) for _ in range(3))
  want, got = walk(whole, range(40)), walk(first, range(17))
  resumed.load_state_dict(first.state_dict())
  assert got + walk(resumed, range(17, 40)) == want
  assert sorted(want[:23]) == sorted(want[23:46]) == [*range(23)]


def test_a_stream_that_would_stand_still_is_an_error():
  curriculum = make(8, **PLAIN | STREAM)
  observe(curriculum, np.arange(8), np.full(8, 4))  # what is known before the first proposal
  observe(curriculum, curriculum.propose(0, 2).index, [4, 4])
  with pytest.raises(ValueError, match=r'call accept\(proposal\)'):
    curriculum.propose(1, 2)


def test_a_checkpoint_from_before_slots_were_counted_has_audits_at_the_steps_it_had():
  old, settings = make(40), dict(eligibility=dict(fn='audit', share=0.05))
  state = old.state_dict()
  del state['accepted']
  resumed = make(40, **settings)
  resumed.load_state_dict(state)
  whole = make(40, **settings)
  for step in range(30):
    asked = whole.propose(step, 4)
    whole.accept(asked)
    if step >= 13:
      again = resumed.propose(step, 4)
      resumed.accept(again)
      assert again.why == asked.why


def test_more_prompts_than_are_free_is_a_user_error():
  with pytest.raises(
    UserError, match=r'config\.prompts=6 .* 8 prompts .* 3 have unfinished rollouts'
  ):
    make(8).propose(0, 6, busy=np.array([1, 4, 7]))
  assert make(8).propose(0, 0).index.shape == (0,)


# Settings.


@pytest.mark.parametrize(
  'override, message',
  [
    ('evidence_decay.rate=0.5', 'decay'),
    ('eligibility.portion=0.5', 'share'),
    ('eligibility.share=1.5', 'at most 1'),
    ('evidence_decay.decay=-0.1', 'at least 0'),
    ('prior_pooling.strength=0.0', 'above 0'),
    ('prior_pooling.floor=0', 'above 0'),
    ('selection.temperature=0.0', 'above 0'),
    ('kind_decay=2.0', 'at most 1'),
    ('truncated=never', 'one of: count, ignore'),
  ],
)
def test_a_bad_setting_is_told_when_the_curriculum_is_made(override, message):
  name = override.partition('=')[0]
  with pytest.raises(UserError) as error:
    make(8, f'--config.curriculum.{override}')
  assert f'config.curriculum.{name}=' in str(error.value) and message in str(error.value)


@pytest.mark.parametrize(
  'part, some',
  [
    ('candidates', 'everything, stream, subset'),
    ('evidence_decay', 'none, reset'),
    ('prior_pooling', 'anchors, fitted_kind, hidden_state, kernel'),
    ('rate_estimate', 'mean, thompson'),
    ('utility', 'bots, information'),
    ('selection', 'skip, softmax'),
    ('eligibility', 'audit, none'),
    ('domain_mix', 'mix, none'),
  ],
)
def test_an_unknown_function_is_told_with_the_valid_ones(part, some):
  module = importlib.import_module(f'jaxrl_llm.curriculum.{dict(pick="choose").get(part, part)}')
  valid = ', '.join(sorted(stages.choices(module)))
  assert some in valid
  message = rf"^config\.curriculum\.{part}\.fn='best' is unknown; choose one of: {valid}\.$"
  with pytest.raises(UserError, match=message):
    make(8, **{part: dict(fn='best')})


@pytest.mark.parametrize(
  'part, setting, value',
  [
    ('candidates', dict(fn='stream', multiple=0), 0),
    ('candidates', dict(fn='stream', multiple=1.5), 1.5),
    ('candidates', dict(fn='subset', limit=0.5), 0.5),
    ('evidence_decay', dict(fn='step', decay=1.01), 1.01),
    ('utility', dict(fn='mopps', target=float('nan')), float('nan')),
    ('prior_pooling', dict(fn='kind', strength=float('inf')), float('inf')),
    ('eligibility', dict(fn='audit', share='half'), 'half'),
    ('eligibility', dict(fn='audit', share=True), True),
  ],
)
def test_a_value_out_of_range_is_told(part, setting, value):
  with pytest.raises(UserError, match=rf'^config\.curriculum\.{part}\.\w+={value!r} .*must be'):
    make(8, **{part: setting})


@pytest.mark.parametrize('kind', [np.zeros(7, int), np.full(8, -1)])
def test_kinds_that_do_not_fit_the_prompts_are_refused(kind):
  with pytest.raises(ValueError, match='kind must hold 8 codes'):
    make(8, kind=kind)


def test_no_prompts_at_all_is_a_user_error():
  with pytest.raises(UserError, match='config.data.size'):
    make(0)


def test_nothing_here_imports_jax():
  code = 'import sys, jaxrl_llm.curriculum; sys.exit("jax" in sys.modules)'
  assert subprocess.run([sys.executable, '-c', code], check=False).returncode == 0


def test_a_prompt_that_gets_a_hint_is_chosen_for_what_it_is_with_it():
  """All have failed or passed throughout; one would be asked with a hint that makes it right half the time."""
  plain = dict(prior_pooling=dict(fn='none'), selection=dict(fn='top'), eligibility=dict(fn='none'))
  curriculum = make(12, **plain)
  for _ in range(6):
    observe(curriculum, np.arange(12), [0] * 10 + [8, 0])
  hinted = HintedPosteriors(np.array([11, 3]), np.array([5.0, 1.0]), np.array([5.0, 40.0]))
  assert curriculum.propose(0, 1, hinted=hinted).index.tolist() == [11]
  assert {int(curriculum.propose(step, 1).index[0]) for step in range(20)} != {11}
  # What is not in the window of the stream has no say.
  windowed = make(12, **plain, candidates=dict(fn='stream', multiple=1))
  assert len(windowed.propose(0, 3, hinted=hinted).index) == 3
