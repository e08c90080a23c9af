"""Ordinary programs with ordinary tests: name → (program, (old, new) that makes it wrong, tests)."""

from __future__ import annotations

from tests.rewards.code_execution.idioms_of_objects import OBJECTS

VALUES = dict(
  counter=(
    'from collections import Counter\ndef count(s): return Counter(s)',
    ('Counter(s)', 'Counter(s[1:])'),
    'assert count("aab").most_common(1) == [("a", 2)]\nassert count("aab")["z"] == 0',
  ),
  counter_arithmetic=(
    'from collections import Counter\ndef count(s): return Counter(s)',
    ('Counter(s)', 'Counter(s[1:])'),
    'from collections import Counter\nassert count("aab") - Counter("ab") == Counter("a")',
  ),
  defaultdict=(
    'from collections import defaultdict\ndef group(xs):\n  d = defaultdict(list)\n'
    '  for x in xs: d[len(x)].append(x)\n  return d',
    ('len(x)', 'len(x) + 1'),
    'g = group(["a", "bb", "c"])\nassert g[1] == ["a", "c"] and g[7] == []\n'
    'assert g == {1: ["a", "c"], 2: ["bb"], 7: []}',
  ),
  ordered_dict=(
    'from collections import OrderedDict\ndef order(d): return OrderedDict(sorted(d.items()))',
    ('sorted(d.items())', 'd'),
    'o = order({"b": 1, "a": 2})\no.move_to_end("a")\nassert list(o) == ["b", "a"]\n'
    'assert next(iter(order({"b": 1, "a": 2}))) == "a"',
  ),
  deque=(
    'from collections import deque\ndef last(xs): return deque(xs, maxlen=2)',
    ('maxlen=2', 'maxlen=3'),
    'q = last([1, 2, 3])\nq.append(4)\nassert list(q) == [3, 4] and q.maxlen == 2',
  ),
  namedtuple=(
    'from collections import namedtuple\nPoint = namedtuple("Point", "x y")\n'
    'def mirror(p): return p._replace(x=-p.x)',
    ('-p.x', 'p.x'),
    'p = mirror(Point(1, 2))\nassert p.x == -1 and p == (-1, 2) and p._fields == ("x", "y")\n'
    'assert isinstance(p, Point) and Point(x=1, y=2)._asdict() == {"x": 1, "y": 2}',
  ),
  typed_namedtuple=(
    'from typing import NamedTuple\nclass Money(NamedTuple):\n  units: int\n  sign: str = "$"\n'
    '  def show(self): return f"{self.sign}{self.units}"',
    ('{self.units}', '{self.units + 1}'),
    'm = Money(5)\nassert m.show() == "$5" and m.units == 5 and m == (5, "$")',
  ),
  enum=(
    'from enum import Enum\nclass Color(Enum):\n  RED = 1\n  BLUE = 2\n'
    'def other(c): return Color.BLUE if c is Color.RED else Color.RED',
    ('c is Color.RED', 'c is Color.BLUE'),
    'assert other(Color.RED) is Color.BLUE and other(Color.BLUE) == Color.RED\n'
    'assert [c.name for c in Color] == ["RED", "BLUE"] and Color["RED"].value == 1\n'
    'assert Color(2) is Color.BLUE and len(Color) == 2 and Color.RED in Color',
  ),
  int_enum=(
    'from enum import IntEnum\nclass Level(IntEnum):\n  LOW = 1\n  HIGH = 3\n'
    'def level(n): return Level.HIGH if n > 5 else Level.LOW',
    ('n > 5', 'n < 5'),
    'assert level(9) == 3 and level(9).name == "HIGH" and level(1) is Level.LOW\n'
    'assert level(9) + 1 == 4 and level(1) < level(9) and isinstance(level(9), Level)',
  ),
  flag=(
    'from enum import Flag\nclass Mode(Flag):\n  READ = 1\n  WRITE = 2\n'
    'def mode(s): return Mode.READ | Mode.WRITE if s == "rw" else Mode.READ',
    ('s == "rw"', 's == "r"'),
    'assert Mode.WRITE in mode("rw") and Mode.WRITE not in mode("r")\n'
    'assert mode("rw") == Mode.READ | Mode.WRITE and mode("r").value == 1',
  ),
  dates=(
    'from datetime import date, timedelta\ndef after(d, n): return d + timedelta(days=n)',
    ('days=n', 'days=n + 1'),
    'import datetime\nassert after(datetime.date(2024, 2, 28), 2) == datetime.date(2024, 3, 1)\n'
    'assert after(datetime.date(2024, 1, 1), 1).isoformat() == "2024-01-02"',
  ),
  datetimes=(
    'from datetime import datetime, timezone, timedelta\n'
    'def read(s): return datetime.fromisoformat(s).replace(tzinfo=timezone.utc)\n'
    'def between(a, b): return b - a',
    ('fromisoformat(s)', 'fromisoformat(s).replace(year=2001)'),
    'from datetime import datetime, timedelta, timezone\n'
    'assert read("2024-01-02T03:04:05") == datetime(2024, 1, 2, 3, 4, 5, tzinfo=timezone.utc)\n'
    'assert between(datetime(2024, 1, 1), datetime(2024, 1, 2)) == timedelta(days=1)\n'
    'assert between(datetime(2024, 1, 1), datetime(2024, 1, 2)).total_seconds() == 86400',
  ),
  decimals=(
    'from decimal import Decimal\ndef price(s): return Decimal(s).quantize(Decimal("0.01"))',
    ('"0.01"', '"0.1"'),
    'from decimal import Decimal\nassert price("2.675") == Decimal("2.68")\n'
    'assert str(price("1")) == "1.00"',
  ),
  fractions=(
    'from fractions import Fraction\ndef half(x): return Fraction(x) / 2',
    ('/ 2', '/ 3'),
    'from fractions import Fraction\nassert half(3) == Fraction(3, 2) and half(3).numerator == 3',
  ),
  dict_keys=(
    'def names(d): return d.keys()',
    ('d.keys()', 'd.values()'),
    'assert names({"a": 1, "b": 2}) == {"a", "b"} and sorted(names({"b": 1})) == ["b"]\n'
    'assert "a" in names({"a": 1}) and len(names({})) == 0',
  ),
  dict_items=(
    'def pairs(d): return d.items()\ndef values(d): return d.values()',
    ('d.values()', 'd.keys()'),
    'assert pairs({"a": 1}) == {("a", 1)} and list(values({"a": 1})) == [1]\n'
    'assert dict(pairs({"a": 1})) == {"a": 1}',
  ),
  own_exception=(
    'class EmptyError(Exception):\n  def __init__(self, what, code=7):\n'
    '    super().__init__(f"{what} is empty")\n    self.code = code\n'
    'def first(xs):\n  if not xs: raise EmptyError("list")\n  return xs[0]',
    ('if not xs: raise EmptyError("list")', 'if not xs: raise ValueError("list")'),
    'assert first([1]) == 1\ntry:\n  first([])\nexcept EmptyError as error:\n'
    '  assert str(error) == "list is empty" and error.code == 7\nelse:\n  assert False',
  ),
  pytest_raises=(
    'class BankError(ValueError): pass\ndef draw(n):\n  if n > 5: raise BankError("too much: 9")\n  return n',
    ('n > 5', 'n > 50'),
    'import pytest\ndef test_error():\n  with pytest.raises(BankError, match=r"too much: \\d") as info:\n'
    '    draw(9)\n  assert isinstance(info.value, ValueError)\n'
    '@pytest.mark.parametrize("n, want", [(1, 1), (2, 2)])\ndef test_draw(n, want):\n'
    '  assert draw(n) == pytest.approx(want)',
  ),
  builtin_errors=(
    'import json\ndef at(xs, i):\n  if i < 0: raise IndexError("below")\n  return xs[i]\n'
    'def read(s): return json.loads(s)',
    ('i < 0', 'i < -9'),
    'import json\nfor i in (-1, 5):\n  try: at([1], i)\n  except IndexError: pass\n  else: assert False\n'
    'try: read("{")\nexcept json.JSONDecodeError: pass\nelse: assert False',
  ),
  error_cause=(
    'class LoadError(Exception): pass\ndef load(s):\n  try: return int(s)\n'
    '  except ValueError as error: raise LoadError(s) from error',
    ('from error', 'from None'),
    'try: load("x")\nexcept LoadError as error:\n'
    '  assert isinstance(error.__cause__, ValueError) and error.args == ("x",)\nelse: assert False',
  ),
  unittest_raises=(
    'class StackError(Exception): pass\nclass Stack:\n  def pop(self): raise StackError("empty")',
    ('raise StackError', 'raise KeyError'),
    'import unittest\nclass T(unittest.TestCase):\n  def test_pop(self):\n'
    '    with self.assertRaises(StackError): Stack().pop()\n'
    '    self.assertRaisesRegex(StackError, "emp", Stack().pop)',
  ),
  context_manager=(
    'class Log:\n  def __init__(self): self.lines = []\n'
    '  def __enter__(self): self.lines.append("in"); return self\n'
    '  def __exit__(self, kind, value, trace):\n    self.lines.append("out")\n    return kind is KeyError',
    ('"out"', '"in"'),
    'with Log() as log:\n  assert log.lines == ["in"]\n  raise KeyError("x")\n'
    'assert log.lines == ["in", "out"]',
  ),
  contextmanager_function=(
    'import contextlib\nseen = []\n@contextlib.contextmanager\ndef tag(name):\n'
    '  seen.append(f"<{name}>")\n  yield name\n  seen.append(f"</{name}>")',
    ('</{name}>', '<{name}>'),
    'with tag("b") as name:\n  assert name == "b"\nassert seen == ["<b>", "</b>"]',
  ),
  asynchronous=(
    'import asyncio\nasync def double(x):\n  await asyncio.sleep(0.001)\n  return 2 * x\n'
    'async def all_of(xs): return await asyncio.gather(*(double(x) for x in xs))',
    ('2 * x', '3 * x'),
    'import asyncio\nassert asyncio.run(double(2)) == 4\nassert asyncio.run(all_of([1, 2])) == [2, 4]\n'
    'async def both(): return await asyncio.gather(double(1), double(2))\n'
    'assert asyncio.run(both()) == [2, 4] and asyncio.iscoroutinefunction(double)',
  ),
  async_test=(
    'async def ticks(n):\n  for i in range(n): yield i\nclass Door:\n'
    '  async def __aenter__(self): return "open"\n  async def __aexit__(self, *error): return None',
    ('range(n)', 'range(n + 1)'),
    'import asyncio\nasync def collect(): return [x async for x in ticks(3)]\n'
    'async def test_ticks():\n  assert await collect() == [0, 1, 2]\n'
    '  async with Door() as door: assert door == "open"',
  ),
  captured_print=(
    'def hello(name): print("Hello,", name)',
    ('Hello', 'Hallo'),
    'import contextlib, io\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n  hello("Ann")\n'
    'assert out.getvalue() == "Hello, Ann\\n"',
  ),
  captured_by_pytest=(
    'def hello(name): print("Hello,", name)',
    ('Hello', 'Hallo'),
    'def test_hello(capsys):\n  hello("Ann")\n  assert capsys.readouterr().out == "Hello, Ann\\n"',
  ),
  patched_print_and_input=(
    'def greet():\n  name = input("Name? ")\n  print(f"Hi {name}")',
    ('Hi', 'Ho'),
    'import io, sys\nfrom unittest.mock import patch\n'
    'with patch("builtins.input", return_value="Bo"), patch("sys.stdout", new_callable=io.StringIO) as out:\n'
    '  greet()\nassert out.getvalue() == "Hi Bo\\n"',
  ),
  mutable_global=(
    'items = []\ncount = 0\ndef add(x):\n  global count\n  items.append(x); count += 1',
    ('count += 1', 'count += 2'),
    'assert count == 0\nadd(1); add(2)\nassert items == [1, 2] and count == 2\n'
    'items.clear(); add(3)\nassert items == [3]',
  ),
  mutable_attribute=(
    'class Node:\n  def __init__(self, value): self.value, self.children = value, []\n'
    '  def total(self): return self.value + sum(child.total() for child in self.children)',
    ('self.value + sum', 'sum'),
    'root = Node(1)\nroot.children.append(Node(2))\nroot.children.append(Node(3))\n'
    'assert root.total() == 6 and len(root.children) == 2',
  ),
  linked_list=(
    'class Node:\n  def __init__(self, value, next=None): self.value, self.next = value, next\n'
    'def turn(node):\n  last = None\n  while node: node.next, last, node = last, node, node.next\n  return last',
    ('return last', 'return None'),
    'node = turn(Node(1, Node(2)))\nassert node.value == 2 and node.next.value == 1\n'
    'assert node.next.next is None',
  ),
  absolute=(
    'class V:\n  def __init__(self, x, y): self.x, self.y = x, y\n'
    '  def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5\n  def __neg__(self): return V(-self.x, -self.y)\n'
    '  def __bool__(self): return bool(self.x or self.y)',
    ('** 0.5', '** 1.5'),
    'assert abs(V(3, 4)) == 5.0 and abs(abs(V(1, 1)) - 1.41421356) < 1e-6\n'
    'assert (-V(1, 2)).x == -1 and V(1, 0) and not V(0, 0)',
  ),
  conversions=(
    'class Celsius:\n  def __init__(self, t): self.t = t\n  def __float__(self): return float(self.t)\n'
    '  def __int__(self): return int(self.t)\n  def __round__(self, n=0): return round(self.t, n)\n'
    '  def __index__(self): return int(self.t)\n  def __format__(self, spec): return format(self.t, spec) + "C"',
    ('+ "C"', '+ "F"'),
    'c = Celsius(21.55)\nassert float(c) == 21.55 and int(c) == 21 and round(c, 1) in (21.5, 21.6)\n'
    'assert f"{c:.1f}".endswith("C") and hex(c) == "0x15"',
  ),
  contains=(
    'class Interval:\n  def __init__(self, a, b): self.a, self.b = a, b\n'
    '  def __contains__(self, x): return self.a <= x < self.b',
    ('< self.b', '< 0'),
    'assert 3 in Interval(1, 5) and 5 not in Interval(1, 5)',
  ),
  inspection=(
    'import inspect\ndef area(width: int, height: int = 2) -> int:\n  """Of a rectangle."""\n'
    '  return width * height\ndef numbers():\n  yield 1',
    ('height: int = 2', 'height: int = 3'),
    'import inspect\nassert list(inspect.signature(area).parameters) == ["width", "height"]\n'
    'assert inspect.signature(area).parameters["height"].default == 2\n'
    'assert area.__doc__ == "Of a rectangle." and area.__name__ == "area"\n'
    'assert inspect.isgeneratorfunction(numbers) and not inspect.isgeneratorfunction(area)\n'
    'assert area.__annotations__["return"] is int and callable(area) and inspect.isfunction(area)',
  ),
  source_code=(
    'def total(n):\n  return n if n < 1 else n + total(n - 1)',
    ('n + total(n - 1)', 'sum(range(n + 1))'),
    'import inspect\nassert total(4) == 10 and inspect.getsource(total).count("total(") == 2',
  ),
  generator=(
    'def evens():\n  n = 0\n  while True:\n    yield n\n    n += 2',
    ('n += 2', 'n += 3'),
    'import itertools, types\nassert list(itertools.islice(evens(), 3)) == [0, 2, 4]\n'
    'g = evens()\nassert next(g) == 0 and next(g) == 2 and isinstance(g, types.GeneratorType)\n'
    'for a, b in zip(evens(), [0, 2]): assert a == b',
  ),
  generator_send=(
    'def average():\n  total, count, mean = 0, 0, None\n  while True:\n    total += yield mean\n'
    '    count += 1\n    mean = total / count',
    ('total / count', 'total'),
    'g = average()\nnext(g)\nassert g.send(2) == 2 and g.send(4) == 3\ng.close()\n'
    'try: next(g)\nexcept StopIteration: pass\nelse: assert False',
  ),
  iterator_class=(
    'class Down:\n  def __init__(self, n): self.n = n\n  def __iter__(self): return self\n'
    '  def __next__(self):\n    if self.n <= 0: raise StopIteration\n    self.n -= 1\n    return self.n',
    ('self.n <= 0', 'self.n <= 1'),
    'assert list(Down(3)) == [2, 1, 0] and 1 in Down(3) and sum(Down(4)) == 6\n'
    'from collections.abc import Iterator\nassert isinstance(Down(1), Iterator)',
  ),
  lazy_builtins=(
    'def squares(xs): return map(lambda x: x * x, xs)\ndef pairs(a, b): return zip(a, b)\n'
    'def numbered(xs): return enumerate(xs, 1)\ndef even(xs): return filter(lambda x: x % 2 == 0, xs)',
    ('x * x', 'x + x'),
    'assert list(squares([1, 3])) == [1, 9] and list(pairs([1], "a")) == [(1, "a")]\n'
    'assert dict(numbered("ab")) == {1: "a", 2: "b"} and list(even(range(4))) == [0, 2]\n'
    'assert isinstance(squares([]), map)',
  ),
  sets=(
    'def common(a, b): return set(a) & set(b)\ndef frozen(a): return frozenset(a)',
    ('&', '|'),
    'assert common([1, 2], [2, 3]) == {2} and frozen([1, 1]) == frozenset({1})\n'
    'assert {frozen([1]): 2}[frozenset([1])] == 2 and common("ab", "b") <= {"a", "b"}',
  ),
)  # fmt: skip
IDIOMS = VALUES | OBJECTS
