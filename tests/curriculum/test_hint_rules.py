"""Hint rules on written visits, and the item response fit on simulated ones."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxrl_llm.curriculum import HintScheduler, hint_rules
from jaxrl_llm.curriculum.hint_rules import Visit
from jaxrl_llm.types import UserError


def test_a_prefix_begins_after_failure_and_moves_with_what_came():
  share = lambda *visits: rule.share([Visit(*v) for v in visits])  # noqa: E731
  rule = hint_rules.prefix(start=0.5, step=0.2, plain=0.25, after=1)
  assert share() == 0  # first without
  assert share((0, 1, 8)) == 0 == share((0, 8, 8))  # solved before: it needs none
  assert share((0, 0, 8)) == 0.5
  np.testing.assert_allclose(share((0, 0, 8), (0.5, 0, 8)), 0.7)
  np.testing.assert_allclose(share((0, 0, 8), (0.9, 0, 8)), 1.0)
  assert share((0, 0, 8), (0.5, 4, 8)) == 0.5  # half right is what is wanted
  np.testing.assert_allclose(share((0, 0, 8), (0.5, 5, 8)), 0.3)
  assert share((0, 0, 8), (0.1, 5, 8)) == 0
  assert rule.skip == 0.25  # a share of visits is plain anyhow
  assert (
    share((0, 0, 8), (0.5, 8, 8), (0, 1, 8)) == 0
  )  # solved without: the prefix has done its work


def test_guidance_comes_after_failure_and_every_second_time():
  share = lambda *visits: hint_rules.guide(after=2).share([Visit(*v) for v in visits])  # noqa: E731
  assert share() == share((0, 0, 8)) == 0
  assert share((0, 0, 8), (0, 0, 8)) == 1
  assert share((0, 0, 8), (0, 0, 8), (1, 3, 8)) == 0  # asked plainly before it is told again
  assert share((0, 0, 8), (0, 0, 8), (1, 3, 8), (0, 0, 8)) == 1
  assert share((0, 0, 8), (0, 1, 8)) == 0


def test_a_demonstration_is_shown_until_a_completion_is_right():
  rule = hint_rules.self_rolled(after=1)
  share = lambda *visits: rule.share([Visit(*v) for v in visits])  # noqa: E731
  assert rule.plain and not rule.learned
  assert share() == 0 and share((0, 0, 8)) == 1
  assert share((0, 0, 8), (1, 0, 8)) == 0  # a plain visit before it is shown again
  assert share((0, 0, 8), (1, 0, 8), (0, 0, 8)) == 1
  # The cache holds a completion: wrong groups get it, and no demonstration.
  assert share((0, 0, 8), (1, 1, 8), (0, 0, 8)) == 0 == share((0, 1, 8), (0, 0, 8))


def test_a_hint_by_difficulty_is_the_line_between_its_ends():
  rule = hint_rules.by_difficulty(least=0.1, most=0.7, noise=0.0)
  share = lambda *visits: rule.share([Visit(*v) for v in visits])  # noqa: E731
  assert share() == 0
  np.testing.assert_allclose([share((0, k, 8)) for k in (0, 4, 6)], [0.7, 0.4, 0.25])
  assert share((0, 8, 8)) == 0
  assert share((0, 0, 8), (0.7, 4, 8)) == 0


def curve(h, a, b, c=0.0):
  return c + (1 - c) / (1 + np.exp(-a * (h - b)))


@pytest.mark.parametrize('a, b', [(8.0, 0.3), (12.0, 0.8), (5.0, 0.5)])
def test_the_item_response_fit_finds_the_curve_that_made_its_visits(a, b):
  random, shares = np.random.default_rng(0), np.linspace(0, 1, 11)
  visits = [Visit(h, int(random.binomial(400, curve(h, a, b))), 400) for h in shares]
  found_a, found_b = hint_rules._fit_item(visits)
  np.testing.assert_allclose(found_b, b, atol=0.05)
  np.testing.assert_allclose(found_a, a, rtol=0.3)


@pytest.mark.parametrize('guess', [0.0, 0.2])
def test_the_chosen_share_comes_to_the_target(guess):
  """A prompt visited again and again: success near one half, whatever its curve."""
  random, rule = np.random.default_rng(1), hint_rules.item_response(target=0.5, guess=guess)
  for b in (0.25, 0.5, 0.75):
    visits = []
    for _ in range(12):
      h = rule.share(visits)
      visits.append(Visit(h, int(random.binomial(8, curve(h, 10, b, guess))), 8))
    late = visits[4:]
    assert abs(sum(v.right for v in late) / 64 - 0.5) < 0.2


def test_an_easy_prompt_is_told_nothing_and_without_evidence_half():
  rule = hint_rules.item_response()
  assert rule.share([Visit(0.0, 8, 8)] * 3) == 0
  np.testing.assert_allclose(rule.share([]), 0.5)


def test_choices_are_of_seed_step_and_prompt_alone_and_go_on_after_a_restore():
  rule = hint_rules.by_difficulty(noise=0.3)
  one, other = HintScheduler(rule, seed=3), HintScheduler(rule, seed=3)
  index_P, none_P = np.array([4, 9, 2]), np.zeros(3)
  one.observe(index_P, none_P, np.array([0, 3, 8]), np.full(3, 8))
  other.load_state_dict(json.loads(json.dumps(one.state_dict())))
  want = one.choose(index_P, 7)
  assert want.dtype == np.float32 and (want > 0).any() and want[2] == 0
  np.testing.assert_array_equal(other.choose(index_P, 7), want)
  np.testing.assert_array_equal(one.choose(index_P[::-1], 7), want[::-1])
  assert (one.choose(index_P, 8) != want).any()
  assert (HintScheduler(rule, seed=4).choose(index_P, 7) == 0).all()


def visited(rule, seed=0, size=60):
  """Hints after some visits to most prompts."""
  hints, random = HintScheduler(rule, seed), np.random.default_rng(1)
  for step in range(6):
    index_P = random.choice(size - 5, 20, replace=False)
    right_P = random.integers(0, 3, 20) * random.integers(0, 2, 20)
    hints.observe(index_P, hints.choose(index_P, step), right_P, np.full(20, 8))
  return hints


@pytest.mark.parametrize(
  'rule',
  [
    hint_rules.item_response(),
    hint_rules.prefix(plain=0.3),
    hint_rules.by_difficulty(),
    hint_rules.guide(),
  ],
)
def test_evidence_is_of_all_that_would_be_shown_something_and_of_their_last_hint(rule):
  """Against the visits themselves, prompt by prompt, also after a restore."""
  hints = visited(rule)
  again = HintScheduler(rule, 0)
  again.load_state_dict(json.loads(json.dumps(hints.state_dict())))
  for step in (6, 7):
    want = [i for i in sorted(hints.visits) if hints.choose(np.array([i]), step)[0] > 0]
    index, counts = hints.evidence(step)
    assert index.tolist() == want and 5 < len(want)
    for i, (right, wrong) in zip(want, counts, strict=True):
      last = [(v.right, v.n - v.right) for v in hints.visits[i] if v.share > 0][-1:] or [(0, 0)]
      assert (right, wrong) == last[0]
    np.testing.assert_array_equal(again.evidence(step)[0], index)
    np.testing.assert_array_equal(again.evidence(step)[1], counts)


def test_a_rule_is_asked_once_a_visit_however_many_prompts_are_known():
  calls = []
  rule = hint_rules.item_response()
  counted = rule._replace(share=lambda visits: calls.append(len(visits)) or rule.share(visits))
  hints = visited(counted, size=400)
  known = len(hints.visits)
  del calls[:]
  for step in range(6, 9):
    hints.evidence(step)
    shares = hints.choose(np.array([3, 7]), step)
    hints.observe(np.array([3, 7]), shares, np.array([1, 2]), np.full(2, 8))
  assert known > 50 and len(calls) == 3 * (2 + 1)  # two visits, and what one never visited gets


def test_chance_shows_nothing_as_often_as_it_says_and_spreads_shares():
  hints, every = HintScheduler(hint_rules.prefix(start=0.5, plain=0.25), 0), np.arange(4000)
  hints.observe(every, every * 0.0, every * 0, np.full(4000, 8))
  shares = hints.choose(every, 3)
  assert set(shares.tolist()) == {0.0, 0.5}
  assert (shares == 0).mean() == pytest.approx(0.25, abs=0.03)
  np.testing.assert_array_equal(hints.choose(every[:7], 3), shares[:7])
  rule = hint_rules.by_difficulty(least=0.0, most=0.5, noise=0.1)
  hints = HintScheduler(rule, 0)
  hints.observe(every, every * 0.0, every * 0, np.full(4000, 8))
  shares = hints.choose(every, 3)
  assert shares.mean() == pytest.approx(0.5, abs=0.01) and shares.std() == pytest.approx(
    0.1, abs=0.01
  )


@pytest.mark.parametrize(
  'make, field',
  [
    (lambda: hint_rules.prefix(start=1.5), 'curriculum.hint.start=1.5'),
    (lambda: hint_rules.prefix(after=-1), 'curriculum.hint.after=-1'),
    (lambda: hint_rules.guide(after=0), 'curriculum.hint.after=0'),
    (lambda: hint_rules.item_response(target=0.1, guess=0.2), 'curriculum.hint.guess=0.2'),
    (lambda: hint_rules.by_difficulty(least=0.5, most=0.4), 'curriculum.hint.most=0.4'),
    (lambda: hint_rules.contexts(texts=()), 'curriculum.hint.texts='),
    (lambda: hint_rules.contexts(texts=('a',), drop=2), 'curriculum.hint.drop=2'),
    (lambda: hint_rules.stages(shares=0.5), 'curriculum.hint.shares=0.5 must be a list'),
    (lambda: hint_rules.stages(shares=(0.0,)), 'curriculum.hint.shares='),
    (lambda: hint_rules.stages(shares=(0.1, 0.5)), 'curriculum.hint.shares='),
    (lambda: hint_rules.stages(shares=(0.0, 0.5, 0.5)), 'curriculum.hint.shares='),
    (lambda: hint_rules.stages(shares=(0.0, 1.0)), 'curriculum.hint.shares='),
    (lambda: hint_rules.rewritten(medium=1.1), 'curriculum.hint.medium=1.1'),
    (lambda: hint_rules.rewritten(hard=0.8), 'curriculum.hint.hard=0.8'),
    (lambda: hint_rules.rewritten(least_chars=0), 'curriculum.hint.least_chars=0'),
    (lambda: hint_rules.rewritten(most_chars=5), 'curriculum.hint.most_chars=5'),
    (lambda: hint_rules.rewritten(simplify='again'), "curriculum.hint.simplify='again' must be"),
    (lambda: hint_rules.rewritten(vary='{question} {text}'), 'curriculum.hint.vary='),
    (lambda: hint_rules.rewritten(vary='{question'), 'curriculum.hint.vary='),
    (lambda: hint_rules.rewritten(vary=3), 'curriculum.hint.vary=3'),
    (
      lambda: hint_rules.reflected(request='{question}'),
      r'hint.request=.*\{question\} and \{attempt\}',
    ),
    (lambda: hint_rules.reflected(request='{question} {attempt} {x}'), 'hint.request='),
    (lambda: hint_rules.reflected(guidance='{question'), 'curriculum.hint.guidance='),
    (lambda: hint_rules.reflected(guidance=3), 'curriculum.hint.guidance=3 must be'),
    (lambda: hint_rules.written(hints=1), 'curriculum.hint.hints=1 must be'),
    (lambda: hint_rules.written(instruction='{attempt}'), 'curriculum.hint.instruction='),
    (
      lambda: hint_rules.written(instruction='{question}{answer}'),
      '{attempt} and {solution} alone',
    ),
    (lambda: hint_rules.written(tag='<hint>'), 'curriculum.hint.tag=.<hint>. must be'),
    (lambda: hint_rules.written(tag=None), 'curriculum.hint.tag=None'),
    (lambda: hint_rules.written(temperature=0.0), 'curriculum.hint.temperature=0.0'),
    (lambda: hint_rules.written(penalty=0.2), 'curriculum.hint.penalty=0.2'),
  ],
)
def test_bad_settings_are_named(make, field):
  with pytest.raises(UserError, match=field):
    make()
