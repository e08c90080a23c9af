"""Scores of a discussion and the rewards that follow from them (CoMAS)."""

from __future__ import annotations

import pytest

from jaxrl_llm.config import loading as configs
from jaxrl_llm.environments import Result, discussion, resolve, turn_rewards
from jaxrl_llm.environments.protocol import checked
from jaxrl_llm.types import Row, UserError

ROW = Row('a', '1+1=', (), '2', 'test', {})


def played(*texts, **settings):
  environment = discussion.discussion(**settings)
  assert environment.reset(ROW, 0) is None
  return [environment.step(text) for text in texts]


@pytest.mark.parametrize('score, solution, evaluation', [(1, 0, 1), (2, 0.5, 0.5), (3, 1, 0)])
def test_a_score_pays_the_solution_against_its_evaluation(score, solution, evaluation):
  shown = played('2', 'right', f'Well. <score> {score}\n</score> or <score>x</score>', score='S')
  assert [r.observation for r in shown] == [discussion._EVALUATE, 'S', None]
  assert [r.done for r in shown] == [False, False, True]
  assert [turn_rewards(r, n) for n, r in enumerate(shown, 1)] == [
    *((0.0,), (0.0, 0.0)),
    (solution, evaluation, 0.0),
  ]


@pytest.mark.parametrize(
  'text',
  [
    *('', '3', '<score>3', '3</score>', '<score></score>', '<score>0</score>', '<score>4</score>'),
    *('<score>-1</score>', '<score>2.5</score>', '<score>two</score>', '<score>３</score>'),
    *('<score>1 3</score>', '<score>12</score>', '</score>3<score>', '<score>' + '9' * 9999),
    '<score>4</score><score>3</score>',
  ],
)
def test_a_malformed_score_costs_the_scorer_alone(text):
  """Whatever the other turns hold: only the scorer's is read."""
  *_, last = played('<score>3</score>', '<score>1</score>', text)
  assert last == Result(None, (0.0, 0.0, -1.0), True)


@pytest.mark.parametrize('name', ['evaluate', 'score'])
def test_an_empty_instruction_is_one_sentence(name):
  for value in ('', ' ', 3):
    settings = configs.default().environment.to_dict() | {'fn': 'discussion', name: value}
    with pytest.raises(UserError, match=f'config.environment.{name}={value!r}.* must be'):
      resolve(settings)


def test_a_step_may_pay_every_turn_so_far():
  assert checked((None, [1, 0.5], True)) == Result(None, (1.0, 0.5), True)
  assert turn_rewards(Result('x', 2.0), 3) == (0.0, 0.0, 2.0)
  assert turn_rewards(Result('x', (1.0, 2.0)), 2) == (1.0, 2.0)
  assert turn_rewards(Result('x', (1.0, 2.0)), 3) is None
  for wrong in ((1.0, float('nan')), ('much',), ((1.0,),)):
    with pytest.raises(ValueError):
      checked((None, wrong, True))


def test_reward_functions_read_the_turn_that_an_environment_names():
  settings = configs.default().environment.to_dict()
  assert resolve(settings | dict(fn='discussion')).graded_turn == 0
  assert resolve(settings | dict(fn='guess')).graded_turn == -1
