"""Programs that try to pass tests without the correct values, by the messages that they send to the tests' side."""

from __future__ import annotations

import os

import pytest

from jaxrl_llm.rewards.code_execution import graders, sandbox
from jaxrl_llm.types import Row


@pytest.fixture(autouse=True)
def needs_sandbox():
  if reason := sandbox.unavailable_reason():
    if os.environ.get('JAXRL_LLM_REQUIRE_SANDBOX') == '1':
      pytest.fail(f'JAXRL_LLM_REQUIRE_SANDBOX=1, but {reason}')
    pytest.skip(reason)


def score(program: str, tests: str | list[str], wall_s: float = 20.0, **more) -> float:
  row = Row('id', '', (), '', '', dict(tests=tests) | more)
  return graders.unit_tests(program, row, share=True, wall_s=wall_s)


# Tests of f(2) == 4 in different forms; an object that deceives one of them would pass it.
NUMBER = [
  'assert f(2) == 4',
  'assert 4 == f(2)',
  'assert not f(2) != 4',
  'assert abs(f(2) - 4) < 1e-9',
  'assert abs(4 - f(2)) < 1e-9',
  'assert not (f(2) - 4)',
  'assert f(2) / 4 == 1',
  'assert f(2) < 5 and f(2) > 3',
  'assert 3 <= f(2) <= 5',
  'assert f(2) in (4, 5)',
  'assert {f(2): 1}[4] == 1',
  'assert float(f(2) - 4) == 0',
  'assert int(f(2) ^ 4) == 0',
  'assert round(f(2) - 4, 3) == 0',
  'assert divmod(f(2), 4) == (1, 0)',
  'import math\nassert math.isclose(f(2), 4)',
  'import math\nassert math.isclose(f(2) - 4, 0, abs_tol=1e-9)',
  'import pytest\nassert f(2) == pytest.approx(4)',
  'x = f(2)\nx -= 4\nassert abs(x) < 1e-9',
  'assert (f(2) - 4) ** 2 < 1e-9',
  'assert type(f(2)) is int',
  'import unittest\nclass T(unittest.TestCase):\n  def test(self): self.assertAlmostEqual(f(2), 4)',
  'assert sorted([f(2), 4])[0] == 4 and f(2) == 4',
  'assert max(f(2), 4) == 4 and f(2) == 4',
  'from decimal import Decimal\nassert Decimal(4) == f(2)',
]
TEXT = [
  'assert f(2) == "ab"',
  'assert f(2).strip() == "ab"',
  'assert f(2) in ("ab", "cd")',
  'assert "ab" in [f(2)]',
  'assert f(2) + "c" == "abc"',
]
LIST = [
  'assert f(2) == [1, 2]',
  'assert [1, 2] == f(2)',
  'assert 1 in f(2) and 2 in f(2) and len(f(2)) == 2',
  'assert sorted(f(2)) == [1, 2]',
  'assert list(f(2)) == [1, 2]',
  'assert set(f(2)) - {1, 2} == set() and set(f(2))',
  'assert not f(2) ^ {1, 2}',
  'assert list(f(2) - {1, 2}) == [] and len(f(2)) == 2',
]
YES = """
class Yes{base}:
  def __eq__(self, other): return True
  def __ne__(self, other): return False
  def __getattr__(self, name): return self
  def __call__(self, *args, **more): return self
  def __bool__(self): return False
  def __contains__(self, other): return True
  def __instancecheck__(self, other): return True
  __lt__ = __le__ = __gt__ = __ge__ = lambda self, other: True
  __hash__ = lambda self: hash(4)
  __len__ = lambda self: 2
  __iter__ = lambda self: iter(())
  __float__ = lambda self: {zero}.0
  __int__ = __index__ = __abs__ = lambda self: {zero}
  __round__ = lambda self, n=0: {zero}
  __format__ = lambda self, spec: 'ab'
for name in 'add sub mul truediv floordiv mod pow xor and or matmul divmod'.split():
  for part in ('', 'r', 'i'):
    setattr(Yes, f'__{{part}}{{name}}__', lambda self, other: {result})
f = lambda x: Yes({args})
"""


def yes(base: str = '', args: str = '', result: str = 'self', zero: int = 0) -> str:
  return YES.format(base=base, args=args, result=result, zero=zero)


DECEIVERS = dict(
  object=yes(),
  zero=yes(result='0'),
  number=yes('(int)', '7'),
  number_zero=yes('(int)', '7', '0'),
  fraction=yes('(float)', '7.5', '0.0'),
  text=yes('(str)', '"x"'),
  items=yes('(list)', '[9]'),
  pair=yes('(tuple)', '(9, 9)'),
  mapping=yes('(dict)', '{9: 9}'),
  collection=yes('(set)', '{9}', 'set()'),
  decimal='from decimal import Decimal\n' + yes('(Decimal)', '7', '0'),
  rational='from fractions import Fraction\n' + yes('(Fraction)', '7', '0'),
  abstract='import numbers\n'
  + yes()
  + '\nnumbers.Number.register(Yes); numbers.Rational.register(Yes)',
  named_like='from collections import Counter\n'
  + yes('(Counter)', '{9: 9}').replace('Yes', 'Counter2')
  + '\nCounter2.__name__ = Counter2.__qualname__ = "Counter"; Counter2.__module__ = "collections"',
  enum='import enum\nclass E(enum.IntEnum):\n  A = 7\n  def __eq__(self, other): return True\n'
  '  __hash__ = int.__hash__\nf = lambda x: E.A',
  error=yes('(Exception)'),
  type_of_types='class M(type):\n  __eq__ = lambda *_: True\n  __hash__ = type.__hash__\n'
  '  __instancecheck__ = __contains__ = __lt__ = __gt__ = lambda *_: True\n'
  '  __sub__ = __rsub__ = lambda *_: 0\nclass C(metaclass=M): pass\nf = lambda x: C',
)


@pytest.mark.parametrize('name', DECEIVERS)
def test_deceiving_objects_pass_no_test_of_a_plain_value(name):
  # One run for each list: all its tests must fail.
  for tests in (NUMBER, TEXT, LIST):
    assert score(DECEIVERS[name], tests) == 0.0, tests


NAMED = [('zero', test) for test in NUMBER + LIST if '[f(2)' not in test and 'type(' not in test]
NAMED += [
  (name, NUMBER[n]) for name in ('object', 'number_zero', 'pair') for n in (0, 3, 7, 17, 18)
]
NAMED += [('items', test) for test in LIST]


@pytest.mark.parametrize('name, test', NAMED)
def test_objects_of_a_class_that_the_tests_name_pass_none_either(name, test):
  """Such objects have more rights, but none of these; the row may be refused instead."""
  try:
    assert score(DECEIVERS[name] + 'f = Yes', 'Yes\n' + test) == 0.0
  except ValueError as error:
    assert 'the tests of row id cannot be run: they' in str(error)


RAW = """
import json, os, sys
side = sys.modules['jaxrl_llm.rewards.code_execution.guest_protocol.program_peer']
peer = next(o for o in __import__('gc').get_objects() if isinstance(o, side.ProgramPeer))
def send(*message):
  peer._write.write(json.dumps(message).encode() + b'\\n'); peer._write.flush()
def reply(self, message):
  {body}
side.ProgramPeer._reply = reply
"""
MESSAGES = dict(
  no_json='self._write.write(b"yes\\n"); self._write.flush()',
  no_list='self._write.write(b"7\\n"); self._write.flush()',
  unknown_kind='send("verdict", 4, [], "")',
  unknown_class='send("value", ["new", "os", "system", 0, ["echo"]], [], "")',
  builtin_function='send("value", ["type", "eval"], [], "")',
  number_that_is_none='send("value", ["yours", 999], [], "")',
  class_of_itself='send("value", ["class", 5], [], "")',
  held_of_another_kind='send("value", ["mine", 7, 8, "text"], [], "")',
  no_text='send("value", 0, [], 7)',
  changes_of_nothing='send("value", 0, [["list", -1, [4]], ["list", -2, [4]], ["dict", -3, []]], "")',
  deep='self._write.write(b"[" * 100000 + b"\\n"); self._write.flush()',
  calls='send("request", ["__call__", [["yours", 1]], {}], [], "")',
  looks='send("request", ["__getattr__", [["yours", 1], "__globals__"], {}], [], "")',
  inputs='send("request", ["input", [], {}], [], "")',
  raises_what_is_none='send("raise", ["error", ["type", "int"], ["tuple", 0, []], "", 1, None], [], "")',
  raises_the_end='send("raise", ["error", ["type", "SystemExit"], ["tuple", 0, [0]], "", 1, None], [], "")',
  raises_the_unknown='send("raise", ["yours", 3], [], "")',
  never_ends='send("request", ["input", [], {}], [], "")\n  while True: send("request", ["input", [], {}], [], "")',
  long_line='self._write.write(b"[" + b"7," * (40 << 20))',
)


@pytest.mark.parametrize('name', MESSAGES)
def test_no_message_is_a_verdict(name):
  program = RAW.format(body=MESSAGES[name])
  tests = [
    'xs = [3, 1]\nassert f(xs, len) == 4',
    'def test_f(): assert f([4], lambda: 4) is not None',
  ]
  assert score(program + 'def f(*args): return 4', tests, wall_s=6.0) == 0.0


ENDLESS = dict(
  iteration='class E:\n  def __iter__(self): return self\n  def __next__(self): return 9\ndef f(x): return E()',
  generator='def f(x):\n  while True: yield 9',
  callbacks='def f(x, g=None):\n  while g: g(9)\n  return 9',
  printing='def f(x):\n  while True: print("x" * 99999)',
)


@pytest.mark.parametrize('name', ENDLESS)
def test_endless_results_are_stopped(name):
  tests = ['assert 4 in f(2)', 'assert list(f(2)) == [4]']
  if name == 'callbacks':
    tests = ['assert f(2, lambda x: x) == 4']
  assert score(ENDLESS[name], tests, wall_s=3.0) == 0.0


HOSTILE_ERRORS = """
class Bad(Exception):
  def __str__(self): {text}
  __repr__ = __str__
  __class__ = property(lambda self: {kind})
def f(x): raise Bad(*{args})
"""


@pytest.mark.parametrize(
  'fields',
  [
    dict(text='raise SystemExit(0)', kind='Bad', args='[1]'),
    dict(text='while True: pass', kind='Bad', args='[1]'),
    dict(text='return self', kind='AssertionError', args='[1]'),
    dict(text='return "x" * (1 << 26)', kind='Bad', args='["x" * (1 << 24)]'),
    dict(text='return 1 / 0', kind='SystemExit', args='[Exception]'),
  ],
)
def test_errors_with_hostile_messages_are_failures(fields):
  program = HOSTILE_ERRORS.format(**fields)
  tests = [
    'assert f(2) == 4',
    'try: f(2)\nexcept ValueError: pass',
    'def test_f(): assert f(2) == 4',
  ]
  tests.append(
    'import unittest\nclass T(unittest.TestCase):\n  def test_f(self): self.assertEqual(f(2), 4)'
  )
  assert score(program, tests, wall_s=4.0) == 0.0


@pytest.mark.parametrize(
  'raised',
  [
    'unittest.SkipTest("x")',
    'KeyboardInterrupt',
    'GeneratorExit',
    'SystemExit(0)',
    'StopIteration',
  ],
)
def test_no_error_makes_a_test_pass(raised):
  tests = ['def test_f(): assert f(2) == 4', 'assert [f(x) for x in [2]] == [4]']
  tests.append(
    'import unittest\nclass T(unittest.TestCase):\n  def test_f(self): self.assertEqual(f(2), 4)'
  )
  assert score(f'import unittest\ndef f(x): raise {raised}', tests) == 0.0


def test_the_functions_of_the_tests_can_only_be_called():
  program = """
import gc, sys
side = sys.modules['jaxrl_llm.rewards.code_execution.guest_protocol.program_peer']
peer = next(o for o in gc.get_objects() if isinstance(o, side.ProgramPeer))
NAMES = '__globals__ __closure__ __code__ gi_frame __self__ __class__ __dict__ _secret _x __func__ __init__'.split()
def f(g, x):
  found = ''
  for name in NAMES:
    for look in (getattr, lambda g, name: peer.request('__getattr__', g, name)):
      try: found += str(look(g, name))
      except (AttributeError, TypeError): pass
  return 4 if 'SECRET' in found else x
"""
  tests = [
    'SECRET = 4\ndef g(): return SECRET\nassert f(g, 0) == 4',
    'SECRET = 4\nassert f(lambda: SECRET, 0) == 4',
    'SECRET = 4\nassert f((SECRET for _ in range(3)), 0) == 4',
    'SECRET = 4\nclass P:\n  def secret(self): return SECRET\nassert f(P().secret, 0) == 4',
    'SECRET = 4\nclass P:\n  _secret = "SECRET"\n  def __init__(self): self.__dict__["_x"] = "SECRET"\n'
    'assert f(P(), 0) == 4',
  ]
  assert score(program, tests) == 0.0


def test_functions_that_give_access_to_the_tests_are_not_sent():
  for function in ('eval', 'exec', 'getattr', 'vars', 'open', '__import__', 'type'):
    with pytest.raises(ValueError, match=f'they pass {function}, which a program must not call'):
      score('def f(g): return g', f'assert f({function}) == 4')


def test_a_function_of_the_program_runs_in_its_sandbox():
  program = 'def f(x): return eval\ndef g(x): return "__import__(\'os\').getpid()"'
  tests = 'import os\nassert f(2)(g(2)) == os.getpid() or __import__("sys").modules is None'
  assert score(program, tests) in (0.0, 1.0)
  # Process ids may be equal in separate namespaces; a name of the tests exists only on their side.
  program = 'def f(x): return eval\ndef g(x): return "SECRET"'
  assert score(program, 'SECRET = 4\nassert f(2)(g(2)) == 4') == 0.0
