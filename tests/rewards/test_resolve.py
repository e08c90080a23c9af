"""config.rewards → grader, and a sentence for everything that can be wrong with it."""

from __future__ import annotations

import pytest

from jaxrl_llm.rewards import check_rows, resolve, resolve_parts, weights
from jaxrl_llm.types import Row, UserError

OWN = """
arguments = {}
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
  arguments.update(locals())
  return float(solution_str == ground_truth) + bonus
def as_dict(data_source, solution_str, ground_truth, extra_info=None):
  return {'score': 0.25, 'acc': True}
def wrong(text, row):
  return 1.0
number = 7
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
  (tmp_path / 'own_resolve.py').write_text(OWN)
  (tmp_path / 'own_broken.py').write_text('1 / 0')
  (tmp_path / 'own_broken.json').write_text('{"type": 7}')
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))


def row(answer='7', **extra) -> Row:
  return Row('id', 'question', (), answer, 'gsm8k', extra)


def test_a_name_with_settings_of_the_pool():
  grader = resolve(dict(fn='number', workers=3, deadline_s=1.0))
  assert (grader('7', row()), grader('8', row())) == (1.0, 0.0)


def test_own_function_gets_what_verl_passes():
  import own_resolve

  grader = resolve(dict(fn='own_resolve:compute_score', bonus=0.5))
  assert grader('7', row(a=1)) == 1.5
  assert own_resolve.arguments == dict(
    data_source='gsm8k', solution_str='7', ground_truth='7', extra_info=dict(a=1), bonus=0.5
  )


def test_own_function_gets_the_raw_ground_truth_and_extra_info():
  import own_resolve

  known = row('[1, 2]', reward_model=dict(ground_truth=[1, 2]), extra_info=dict(index=4))
  resolve(dict(fn='own_resolve:compute_score'))('7', known)
  assert own_resolve.arguments['ground_truth'] == [1, 2]
  assert own_resolve.arguments['extra_info'] == dict(index=4)


def test_own_function_may_return_a_dict():
  assert resolve(dict(fn='own_resolve:as_dict'))('7', row()) == 0.25


@pytest.mark.parametrize(
  'spec, message',
  [
    (dict(fn='nubmer'), "config.rewards.fn='nubmer' is unknown; choose one of: bare_number, countdown, exact, "),
    (dict(fn='nubmer'), "unit_tests, or your own function as 'package.module:function'."),
    (dict(fn='numeric', abs_tol=-1.0), 'config.rewards.abs_tol=-1.0 must be a finite number from 0 up.'),
    (dict(fn='numeric', rel_tol=float('nan')), 'config.rewards.rel_tol=nan must be a finite number'),
    (dict(fn='tags', tags=[]), 'config.rewards.tags=[] must be different names'),
    (dict(fn='tags', tags=['a', 'a']), "tags=['a', 'a'] must be different names"),
    (dict(fn='tags', tags=['<a>']), "tags=['<a>'] must be different names of letters"),
    (dict(fn='pattern'), "config.rewards.regex is missing; 'pattern' needs it."),
    (dict(fn='pattern', regex='('), "config.rewards.regex='(' is no regular expression"),
    (dict(fn='repetition', n=0), 'config.rewards.n=0 must be a whole number from 1 up.'),
    (dict(fn='json_schema', schema='nowhere.json'), "schema='nowhere.json' is no file with a JSON schema"),
    (dict(fn='json_schema', schema='own_broken.json'), 'is no file with a JSON schema (no JSON schema'),
    (dict(fn='multiple_choice', first_index=2), 'config.rewards.first_index=2 must be one of: -1, 0, 1.'),
    (dict(fn=None), 'config.rewards.fn=None is unknown'),
    (dict(fn='number', tag='x'), "config.rewards.tag='x' is not a setting of 'number'"),
    (dict(fn='own_missing:f'), "importing 'own_missing' failed (ModuleNotFoundError"),
    (dict(fn='own_broken:f'), 'failed (ZeroDivisionError'),
    (dict(fn='own_resolve:nothing'), "'own_resolve' has no function 'nothing'"),
    (dict(fn='own_resolve:number'), "has no function 'number'"),
    (dict(fn='own_resolve:wrong'), 'which match no known convention'),
    (dict(fn='own_resolve:compute_score', bouns=1), "has no parameter 'bouns' for the setting bouns="),
  ],
)  # fmt: skip
def test_bad_specs_are_told(spec, message):
  with pytest.raises(UserError) as error:
    resolve(spec)
  assert message in str(error.value)


def test_gym_without_reasoning_gym_names_the_extra(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(UserError, match=r"pip install -e '[^']*\[gym\]'"):
    resolve(dict(fn='gym'))


@pytest.mark.parametrize(
  'spec, good, message',
  [
    (dict(fn='numeric'), row('7'), 'holds no number'),
    (dict(fn='multiple_choice'), row('A', options=['blue', 'red']), 'none of its options'),
    (dict(fn='instructions'), row(instructions=[dict(id='no_comma')]), "holds no 'instructions'"),
    (dict(fn='json_schema'), row(schema={}), 'holds no schema'),
  ],
)
def test_rows_that_a_grader_cannot_judge_by_are_told_where_all_are_so(spec, good, message):
  named, bad = [('mine', resolve(spec))], [row('no answer of a kind')] * 250
  check_rows(named, [])
  check_rows(named, [good, *bad])
  with pytest.raises(UserError, match=f"'mine' can grade none of the rows .*{message}"):
    check_rows(named, bad)


def test_parts_are_graders_of_their_own_with_a_weight_and_a_name():
  form = dict(fn='tagged', tag='b', weight=0.5)
  own = dict(fn='own_resolve:compute_score', bonus=0.5, name='mine')
  spec = dict(fn='number', workers=3, deadline_s=1.0, right=1.0, parts=(form, own))
  found = resolve_parts(spec)
  assert [part.name for part in found] == ['number', 'tagged', 'mine']
  assert weights(spec) == tuple(part.weight for part in found) == (1.0, 0.5, 1.0)
  assert [part.grader('<b>7</b>', row()) for part in found] == [1.0, 1.0, 0.5]
  assert [part.name for part in resolve_parts(dict(fn='own_resolve:as_dict'))] == ['as_dict']


@pytest.mark.parametrize(
  'change, message',
  [
    (dict(right='1'), "config.rewards.right='1' must be a finite number"),
    (dict(parts=('exact',)), r"config.rewards.parts\[0\]='exact' must be a dict"),
    (
      dict(parts=(dict(fn='exact'), dict(weight=1))),
      r'config.rewards.parts\[1\]=.* must be a dict',
    ),
    (dict(parts=(dict(fn='nubmer'),)), r"config.rewards.parts\[0\].fn='nubmer' is unknown"),
    (
      dict(parts=(dict(fn='exact', tag='x'),)),
      r"config.rewards.parts\[0\].tag='x' is not a setting",
    ),
    (
      dict(parts=(dict(fn='exact', weight=True),)),
      r'config.rewards.parts\[0\].weight=True must be',
    ),
    (
      dict(parts=(dict(fn='number'),)),
      r"config.rewards.parts\[0\] is named 'number' as another is",
    ),
    (
      dict(parts=(dict(fn='own_broken:f'),)),
      r"config.rewards.parts\[0\].fn='own_broken:f': importing",
    ),
  ],
)
def test_bad_parts_are_told(change, message):
  with pytest.raises(UserError, match=message):
    resolve_parts(dict(fn='number') | change)
