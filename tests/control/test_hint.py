"""How much of an answer is told: each rule on visits written by hand, and the item response fit on simulated ones."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxrl_llm.control import Hints, hint
from jaxrl_llm.control.hint import Visit
from jaxrl_llm.types import UserError


def always(value):
  """Random numbers that are all the same."""
  return type('Fixed', (), dict(random=lambda self: value, normal=lambda self: value))()


def test_a_prefix_begins_after_failure_and_moves_with_what_came():
  share = lambda *visits, luck=0.9: rule.share([Visit(*v) for v in visits], always(luck))  # noqa: E731
  rule = hint.prefix(start=0.5, step=0.2, plain=0.25, after=1)
  assert share() == 0  # first without
  assert share((0, 1, 8)) == 0 == share((0, 8, 8))  # solved before: it needs none
  assert share((0, 0, 8)) == 0.5
  np.testing.assert_allclose(share((0, 0, 8), (0.5, 0, 8)), 0.7)
  np.testing.assert_allclose(share((0, 0, 8), (0.9, 0, 8)), 1.0)
  assert share((0, 0, 8), (0.5, 4, 8)) == 0.5  # half right is what is wanted
  np.testing.assert_allclose(share((0, 0, 8), (0.5, 5, 8)), 0.3)
  assert share((0, 0, 8), (0.1, 5, 8)) == 0
  assert share((0, 0, 8), luck=0.2) == 0  # a share of visits is plain anyhow
  assert (
    share((0, 0, 8), (0.5, 8, 8), (0, 1, 8)) == 0
  )  # solved without: the prefix has done its work


def test_guidance_comes_after_failure_and_every_second_time():
  share = lambda *visits: hint.guide(after=2).share([Visit(*v) for v in visits], None)  # noqa: E731
  assert share() == share((0, 0, 8)) == 0
  assert share((0, 0, 8), (0, 0, 8)) == 1
  assert share((0, 0, 8), (0, 0, 8), (1, 3, 8)) == 0  # asked plainly before it is told again
  assert share((0, 0, 8), (0, 0, 8), (1, 3, 8), (0, 0, 8)) == 1
  assert share((0, 0, 8), (0, 1, 8)) == 0


def test_a_hint_by_difficulty_is_the_line_between_its_ends():
  rule = hint.by_difficulty(least=0.1, most=0.7, noise=0.0)
  share = lambda *visits: rule.share([Visit(*v) for v in visits], always(0.0))  # noqa: E731
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
  found_a, found_b = hint._fit_item(visits)
  np.testing.assert_allclose(found_b, b, atol=0.05)
  np.testing.assert_allclose(found_a, a, rtol=0.3)


@pytest.mark.parametrize('guess', [0.0, 0.2])
def test_the_chosen_share_comes_to_the_target(guess):
  """A prompt visited again and again: success near one half, whatever its curve."""
  random, rule = np.random.default_rng(1), hint.item_response(target=0.5, guess=guess)
  for b in (0.25, 0.5, 0.75):
    visits = []
    for _ in range(12):
      h = rule.share(visits, random)
      visits.append(Visit(h, int(random.binomial(8, curve(h, 10, b, guess))), 8))
    late = visits[4:]
    assert abs(sum(v.right for v in late) / 64 - 0.5) < 0.2


def test_an_easy_prompt_is_told_nothing_and_without_evidence_half():
  rule = hint.item_response()
  assert rule.share([Visit(0.0, 8, 8)] * 3, always(1.0)) == 0
  np.testing.assert_allclose(rule.share([], always(1.0)), 0.5)


def test_choices_are_of_seed_step_and_prompt_alone_and_go_on_after_a_restore():
  rule = hint.by_difficulty(noise=0.3)
  one, other = Hints(rule, seed=3), Hints(rule, seed=3)
  index_P, none_P = np.array([4, 9, 2]), np.zeros(3)
  one.observe(index_P, none_P, np.array([0, 3, 8]), np.full(3, 8))
  other.load_state_dict(json.loads(json.dumps(one.state_dict())))
  want = one.choose(index_P, 7)
  assert want.dtype == np.float32 and (want > 0).any() and want[2] == 0
  np.testing.assert_array_equal(other.choose(index_P, 7), want)
  np.testing.assert_array_equal(one.choose(index_P[::-1], 7), want[::-1])
  assert (one.choose(index_P, 8) != want).any()
  assert (Hints(rule, seed=4).choose(index_P, 7) == 0).all()


@pytest.mark.parametrize(
  'make, field',
  [
    (lambda: hint.prefix(start=1.5), 'hint.start=1.5'),
    (lambda: hint.prefix(after=-1), 'hint.after=-1'),
    (lambda: hint.guide(after=0), 'hint.after=0'),
    (lambda: hint.item_response(target=0.1, guess=0.2), 'hint.guess=0.2'),
    (lambda: hint.by_difficulty(least=0.5, most=0.4), 'hint.most=0.4'),
    (lambda: hint.contexts(texts=()), 'hint.texts='),
    (lambda: hint.contexts(texts=('a',), drop=2), 'hint.drop=2'),
  ],
)
def test_bad_settings_are_named(make, field):
  with pytest.raises(UserError, match=field):
    make()
