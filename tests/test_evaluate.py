"""What an evaluation is of, which answers are equal, and which level a row is of: nothing compiled."""

from __future__ import annotations

import json
import types
from decimal import Decimal

import pytest

from jaxrl_llm import config as configs
from jaxrl_llm import evaluate
from jaxrl_llm.types import Row


def rows(*extras: dict, source: str = 's') -> list[Row]:
  return [Row(str(i), 'q', (), 'a', source, extra) for i, extra in enumerate(extras)]


@pytest.mark.parametrize(
  'extra, level',
  [
    (dict(level='Level 3', length=2), 'Level 3'),
    (dict(difficulty=4), '4'),
    (dict(metadata=dict(difficulty='hard')), 'hard'),
    (dict(extra_info=dict(level=2.5)), '2.5'),
    (dict(metadata=dict(difficulty=dict(terms=(2, 6)))), ''),  # settings of all rows, not a level
    (dict(level=None), ''),
    ({}, ''),
  ],
)
def test_a_row_s_own_level(extra, level):
  assert evaluate.levels(rows(extra)) == [level]


def test_shared_traits_are_levels_and_what_tells_rows_apart_is_none():
  extras = [dict(length=i % 3, metadata=dict(source_index=i, seed=1)) for i in range(12)]
  assert evaluate.levels(rows(*extras)) == [f'length={i % 3}' for i in range(12)]
  both = [dict(a=i % 2, b=i % 4) for i in range(16)]
  assert evaluate.levels(rows(*both))[3] == 'a=1 b=3'
  assert set(evaluate.levels(rows(*extras[:9]))) == {''}  # three rows a value
  mixed = rows(*extras) + rows(*extras[:5], source='t')
  assert evaluate.levels(mixed) == [f'length={i % 3}' for i in range(12)] + [''] * 5


def test_too_many_levels_are_none():
  assert set(evaluate.levels(rows(*(dict(level=i) for i in range(32))))) != {''}
  assert set(evaluate.levels(rows(*(dict(level=i) for i in range(33))))) == {''}


def test_equal_answers_get_equal_words():
  told = evaluate._answers(
    ['= 1.0', 'so 1', '', '2'], lambda t: Decimal(t.split()[-1]) if t else None
  )
  assert told == ['1.0', '1.0', None, '2']


def test_votes_are_counted_where_the_grader_tells_what_it_compares():
  config, play = configs.default(), types.SimpleNamespace
  assert evaluate.judging_of(config, None, None).read(' x ') == 'x'
  assert evaluate.judging_of(config, None, play(judge='grade')).read is not None
  assert evaluate.judging_of(config, None, play(judge='environment')).read is None
  for fn in ('math_verify', 'package.module:function'):
    config.grade.fn = fn
    assert evaluate.judging_of(config, None, None).read is None
  config.grade.right = 0.5
  assert evaluate.judging_of(config, None, None).right == 0.5


def test_what_an_evaluation_is_of_knows_graders_and_settings_and_no_workers():
  def told(**changes):
    config = configs.default()
    for name, value in changes.items():
      config.update_from_flattened_dict({name.replace('__', '.'): value})
    return evaluate.asked(config, types.SimpleNamespace(fingerprint='f'))

  first = told()
  assert json.loads(json.dumps(first)) == json.loads(json.dumps(told(grade__workers=9)))
  assert told(grade__fn='number')['grader'] != first['grader'] == told(eval__samples=9)['grader']
  assert told(eval__samples=9)['settings'] != first['settings']
  assert told(eval__sampling__temperature=0.5)['settings'] != first['settings']
  played = told(environment__fn='walk')['grader']
  assert played['environment']['fn'] == 'walk' and 'environment' not in first['grader']
