"""Rewards by majority: who agrees, ties, what has no vote, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl_llm.rewards import majority_vote, resolve_vote, verifiers
from jaxrl_llm.rewards.parsing import extract
from jaxrl_llm.types import Row, UserError

G = 5
COUNT = majority_vote.Majority(0, extract.number).count


def test_the_most_frequent_answer_is_right_however_it_is_written():
  texts = ['7', 'it is 7.0', '8', '1,000 less 993 is 7', '9'] + ['no idea', '3', '4', '5', '4.00']
  agree_B, winner_P = COUNT(texts, G)
  assert agree_B.tolist() == [True, True, False, True, False] + [False, False, True, False, True]
  assert winner_P.tolist() == [0, 7]


def test_ties_go_to_the_answer_given_first():
  assert COUNT(['2', '1', '1', '2', '3'], G)[0].tolist() == [True, False, False, True, False]
  assert COUNT(['1', '2', '2', '1', '3'], G)[0].tolist() == [True, False, False, True, False]


def test_without_an_answer_there_is_no_vote_and_no_agreement():
  agree_B, winner_P = COUNT(['?', '?', '?', None, '5'] + ['?', '', None, '', '?'], G)
  assert agree_B.tolist() == [False] * 4 + [True] + [False] * 5
  assert winner_P.tolist() == [4, -1]


def test_order_in_a_group_and_of_groups_is_of_no_account():
  r = np.random.default_rng(0)
  groups = [['4', '4', '5', '6', '4.0'], ['1', '2', '1', 'x', '3'], ['9', 'no', '8', '8', '7']]
  agree_PxG = COUNT(sum(groups, []), G)[0].reshape(-1, G)
  assert agree_PxG.sum(1).tolist() == [3, 2, 2]
  for _ in range(20):
    p, order = r.permutation(3), r.permutation(G)
    texts = [groups[g][i] for g in p for i in order]
    got = COUNT(texts, G)[0].reshape(-1, G)
    np.testing.assert_array_equal(got, agree_PxG[p][:, order])


@pytest.mark.parametrize('name', ['exact', 'number', 'first_number', 'short_answer'])
def test_a_grader_calls_right_what_has_the_same_extract_as_the_answer(name):
  found, grader = getattr(extract, name), getattr(verifiers, name)
  texts = ['12', ' 12 ', '12.0', 'no', '3 then 12', '12 then 3', '', '-0', '0']
  for answer in ('12', '3', '0'):
    row = Row('id', 'question', (), answer, 'source', {})
    for text in texts:
      assert grader(text, row) == (found(text) is not None and found(text) == found(answer))


def test_a_config_makes_the_vote_of_its_grader_or_none():
  assert resolve_vote(dict(fn='none'), dict(fn='gym'), 8) is None
  vote = resolve_vote(dict(fn='majority', learn_from=4), dict(fn='first_number', workers=2), 8)
  assert vote == majority_vote.Majority(4, extract.first_number)


@pytest.mark.parametrize(
  'spec, grader, message',
  [
    (dict(fn='majority'), dict(fn='gym'), "which config.rewards.fn='gym' cannot determine"),
    (dict(fn='majority'), dict(fn='my.own:grader'), 'choose one of: exact, first_number'),
    (dict(fn='majority', learn_from=9), dict(fn='number'), 'learn_from=9 must be from 2 to'),
    (dict(fn='majority', learn_from=1), dict(fn='number'), 'learn_from=1 must be'),
    (dict(fn='majority'), dict(fn='number', parts=(dict(fn='tagged'),)), 'rewards.parts=.* empty'),
    (dict(fn='most'), dict(fn='number'), 'choose one of: majority, none'),
  ],
)
def test_what_cannot_be_voted_on_is_told(spec, grader, message):
  with pytest.raises(UserError, match=message):
    resolve_vote(spec, grader, 8)
