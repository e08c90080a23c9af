"""Rows whose tests cannot run are errors; the usual forms of tests run."""

from __future__ import annotations

import os

import pytest

from jaxrl_llm import rewards
from jaxrl_llm.rewards import ERROR
from jaxrl_llm.rewards.code_execution import graders, sandbox
from jaxrl_llm.types import Row


@pytest.fixture(autouse=True)
def needs_sandbox():
  if reason := sandbox.unavailable_reason():
    if os.environ.get('JAXRL_LLM_REQUIRE_SANDBOX') == '1':
      pytest.fail(f'JAXRL_LLM_REQUIRE_SANDBOX=1, but {reason}')
    pytest.skip(reason)


def score(program: str, **extra) -> float:
  return graders.unit_tests(program, Row('id', '', (), '', '', extra), wall_s=20.0)


RIGHT = 'import math\nfrom collections import Counter\ndef f(x): return x + x\ndef g(x): return x'
BROKEN = {
  'a missing module': (
    dict(tests='import torch_missing\nassert f(2) == 4'),
    "they import 'torch_missing', which is not in the sandbox; config.rewards.packages=True",
  ),
  'a module of a module': (
    dict(tests='from torch_missing.nn import Linear\nassert f(2) == 4'),
    "they import 'torch_missing.nn'",
  ),
  'a module of the setup': (
    dict(tests='assert f(2) == 4', setup='import torch_missing'),
    "they import 'torch_missing'",
  ),
  'a module imported in a function': (
    dict(tests='def test_f():\n  import torch_missing\n  assert f(2) == 4'),
    "they import 'torch_missing'",
  ),
  'a name that no module has': (
    dict(tests='from math import cosinus\nassert f(2) == 4'),
    "ImportError: cannot import name 'cosinus'",
  ),
  'a module that was not imported': (
    dict(tests='assert math.isclose(f(2), 4) and g(1) == 1'),
    "NameError: they use 'math' and do not import it; import it in the row's setup",
  ),
  'a class that was not imported': (
    dict(tests='assert Counter([f(2)]) == {4: 1}'),
    "NameError: they use 'Counter'",
  ),
  'a module that was not imported, in a TestCase': (
    dict(
      tests='import unittest\nclass T(unittest.TestCase):\n  def test(self): assert math.isclose(f(2), 4)'
    ),
    "NameError: they use 'math'",
  ),
  'a name without an import': (
    dict(tests='assert f(2) == 4 and np.isclose(f(2), 4)'),
    "NameError: they use 'np'",
  ),
  'an invalid entry point': (
    dict(tests='def check(candidate): assert candidate(2) == 4', entry_point='def f'),
    "the entry_point 'def f' is not a function",
  ),
  'an entry point that is a number': (
    dict(tests='def check(candidate): assert candidate(2) == 4', entry_point='7'),
    "the entry_point '7' is not a function",
  ),
  'check without an entry point': (
    dict(tests='def check(candidate): assert candidate(2) == 4'),
    r'they define check\(candidate\), and the row has no entry_point',
  ),
  'functions without a call': (
    dict(tests='import math\nCASES = [1]\ndef run_all(): assert f(2) == 5'),
    'nothing is tested by',
  ),
  'an empty test': (dict(tests=['assert f(2) == 4', '']), "nothing is tested by ''"),
  'a comment': (dict(tests=['# assert f(2) == 4']), 'nothing is tested by'),
  'a setup that fails': (
    dict(tests='assert f(2) == 4', setup='x = 1 / 0'),
    'the setup fails: ZeroDivisionError',
  ),
  'syntax': (dict(tests='assert f(2) = 4'), 'SyntaxError'),
  'syntax of the setup': (dict(tests='assert f(2) == 4', setup='def'), 'SyntaxError'),
  'an unknown fixture': (
    dict(tests='def test_f(benchmark): assert f(2) == 4'),
    "they need the fixture 'benchmark', which is not in the sandbox",
  ),
  'an unknown part of pytest': (
    dict(tests='import pytest\ndef test_f():\n  with pytest.warns(UserWarning): f(2)'),
    'they need pytest.warns',
  ),
  'a missing file': (
    dict(tests='assert f(2) == len(open("data.txt").read())'),
    'FileNotFoundError',
  ),
  'a value that cannot be sent': (
    dict(tests='import math\nassert f(math) == 1'),
    'they pass a module, which cannot be sent',
  ),
  'the second of two tests': (
    dict(tests=['assert f(2) == 4', 'import math\nassert f(math) == 4']),
    'they pass a module',
  ),
  'an error that the tests catch': (
    dict(tests='import math\ntry: f(math)\nexcept BaseException: pass'),
    'they pass a module',
  ),
}


@pytest.mark.parametrize('name', BROKEN)
def test_tests_that_cannot_be_run_are_an_error_of_the_row(name):
  extra, message = BROKEN[name]
  with pytest.raises(ValueError, match=f'the tests of row id cannot be run: .*{message}'):
    score(RIGHT, **extra)


def test_such_a_row_is_counted_as_an_error_and_scores_nothing():
  rows = [
    Row('a', '', (), '', '', dict(tests=t))
    for t in ('import no_such_module\nassert f(2)', 'assert f(2) == 4')
  ]
  with rewards.Pool(dict(fn='unit_tests', workers=1, wall_s=20.0, deadline_s=60.0)) as pool:
    scores = pool.score(rows, [RIGHT] * 2)
  assert scores.outcome_B.tolist()[0] == ERROR and scores.reward_B.tolist() == [0.0, 1.0]
  assert "the tests of row a cannot be run: they import 'no_such_module'" in scores.message
  assert scores.counts['grade/errors'] == 1


LIMITS = {
  'a class derived from the program': 'class Mine(Box): pass\nassert Mine(1).n == 1',
  'order with a number': 'assert Box(1) < 5',
  'difference from a number': 'assert Box(7) - 3 == 4',
  'equality with a number': 'assert Box(4) == 4',
  'size of a difference': 'assert abs(Box(7) / 3) > 1',
  'a pickle': 'import pickle\nassert pickle.loads(pickle.dumps(Box(1))).n == 1',
}
BOX = """
class Box:
  def __init__(self, n): self.n = n
  def __lt__(self, other): return self.n < getattr(other, 'n', other)
  def __eq__(self, other): return self.n == getattr(other, 'n', other)
  def __sub__(self, other): return self.n - getattr(other, 'n', other)
  def __truediv__(self, other): return Box(self.n / other)
  def __abs__(self): return abs(self.n)
"""


@pytest.mark.parametrize('name', LIMITS)
def test_a_forbidden_operation_on_an_object_of_the_program_is_an_error_of_the_row(name):
  with pytest.raises(ValueError, match='the tests of row id cannot be run: they'):
    score(BOX, tests=LIMITS[name])


METHOD = 'class Solution:\n  def f(self, x): return x + x'


@pytest.mark.parametrize(
  'program, extra',
  [
    (METHOD, dict(tests='def check(candidate): assert candidate(x=2) == 4', entry_point='Solution().f')),
    (METHOD, dict(tests='def check(candidate): assert candidate(2) == 4', entry_point='f')),
    (RIGHT, dict(tests='def test_it(function): assert function(2) == 4', entry_point='f')),
    (METHOD, dict(tests='assert Solution().f(2) == 4 == f(2)')),
    (METHOD, dict(tests='from solution import Solution\ndef test_f(): assert Solution().f(2) == 4')),
    (RIGHT, dict(tests='from solution import f\nassert f(2) == 4')),
    (RIGHT, dict(tests='from solution import *\nassert f(2) == 4')),
    (RIGHT, dict(tests='import solution as s\nassert s.f(2) == 4 and s.math.floor(4.5) == 4')),
    (RIGHT, dict(tests='from your_module import f\nclass TestF:\n  def test_it(self): assert f(2) == 4')),
    (RIGHT, dict(tests='import main\nassert main.f(2) == 4')),
    (RIGHT, dict(tests='try:\n  import numpy_missing\nexcept ImportError: pass\nassert f(2) == 4')),
    ('from math import gcd', dict(tests='assert gcd(4, 6) == 2')),
    ('from math import gcd', dict(tests='assert gcd(4, 6) == sum([2])', entry_point='gcd')),
    ('def gcd(a, b): return 2', dict(tests='assert gcd(4, 6) == 2 and other(1)', setup='other = abs')),
    (RIGHT, dict(tests='async def test_f(): assert f(2) == 4')),
    (
      RIGHT,
      dict(
        tests='import pytest\n@pytest.fixture\ndef two():\n  yield 2\n'
        '@pytest.mark.parametrize("want", [4, 4.0])\ndef test_f(two, want): assert f(two) == want'
      ),
    ),
  ],
)  # fmt: skip
def test_forms_of_tests_that_data_use_run(program, extra):
  assert score(program, **extra) == 1.0
  wrong = program.replace('x + x', 'x').replace('gcd', 'lcm').replace('return 2', 'return 3')
  assert score(wrong, **extra) == 0.0


@pytest.mark.parametrize(
  'program',
  ['def h(x): return x', 'import double as f', 'import math as f', '1 / 0', 'f = 7', 'def f('],
)
def test_a_program_that_lacks_a_name_scores_0(program):
  for extra in (
    dict(tests='assert f(2) == 4 and g(2) == 2'),
    dict(tests='from solution import f\nassert f(2) == 4'),
    dict(tests='def check(candidate): assert candidate(2) == 4', entry_point='f'),
    dict(tests='def check(candidate): assert candidate(2) == 4', entry_point='Solution().f'),
    dict(tests='def test_f(): assert f(2) == 4'),
  ):
    assert score(program, **extra) == 0.0


LEETCODE = """
from typing import List

class Solution:
  def twoSum(self, nums: List[int], target: int) -> List[int]:
"""


@pytest.mark.parametrize(
  'text, want',
  [
    ('    return [nums.index(target - nums[0]), 0][::-1]', 1),
    ('```python\nclass Solution:\n  def twoSum(self, nums, target): return [0, 1]\n```', 1),
    ('    return [0, 0]', 0),
    ('```python\nclass Solution:\n  def twoSum(self, nums, target): return [1, 0]\n```', 0),
    ('```python\ndef twoSum(nums, target): return [0, 1]\n```', 0),
  ],
)
def test_methods_in_the_form_of_humaneval(text, want):
  extra = dict(test='def check(candidate): assert candidate(nums=[2, 7], target=9) == [0, 1]')
  row = Row('id', LEETCODE, (), '', '', extra | dict(entry_point='Solution().twoSum'))
  assert graders.human_eval(text, row, wall_s=20.0) == want


def test_arrays_are_sent_where_numpy_is_installed():
  program = 'import numpy as np\ndef f(n): return np.arange(n) * 1.5\ndef g(a): return a.sum()'
  tests = (
    'import numpy as np\nassert np.allclose(f(3), [0, 1.5, 3]) and f(3).shape == (3,) and g(np.ones((2, 2))) == 4\n'
    'assert f(2).dtype == np.float64 and (f(2) == np.array([0, 1.5])).all()'
  )
  row = Row('id', '', (), '', '', dict(tests=tests))
  settings = dict(wall_s=60.0, program_mb=2048, packages=True)
  assert graders.unit_tests(program, row, **settings) == 1.0
  assert graders.unit_tests(program.replace('1.5', '2.5'), row, **settings) == 0.0
