"""As idioms.py: programs with classes and higher-order functions, and tests with imports."""

from __future__ import annotations

OBJECTS = dict(
  dataclass=(
    'from dataclasses import dataclass, field\n@dataclass(order=True)\nclass Item:\n  price: float\n'
    '  name: str = "x"\n  tags: list = field(default_factory=list)\n  @property\n'
    '  def gross(self): return self.price * 2',
    ('self.price * 2', 'self.price * 3'),
    'import dataclasses\na = Item(1.5, "a")\nassert a == Item(1.5, "a") != Item(2, "a") and a.gross == 3.0\n'
    'assert repr(a) == "Item(price=1.5, name=\'a\', tags=[])" and a < Item(2)\n'
    'a.tags.append("t")\nassert dataclasses.asdict(a) == {"price": 1.5, "name": "a", "tags": ["t"]}\n'
    'assert dataclasses.is_dataclass(a) and [f.name for f in dataclasses.fields(Item)] == ["price", "name", "tags"]\n'
    'assert dataclasses.replace(a, price=4).gross == 8 and sorted([Item(3), Item(1)])[0].price == 1',
  ),
  frozen_dataclass=(
    'from dataclasses import dataclass\n@dataclass(frozen=True)\nclass P:\n  x: int\n  y: int',
    ('frozen=True', 'eq=True'),
    'import dataclasses\nassert len({P(1, 2), P(1, 2), P(2, 1)}) == 2\n'
    'try: P(1, 2).x = 3\nexcept dataclasses.FrozenInstanceError: pass\nelse: assert False',
  ),
  operators=(
    'class Vec:\n  def __init__(self, x, y): self.x, self.y = x, y\n'
    '  def __add__(self, o): return Vec(self.x + o.x, self.y + o.y)\n'
    '  def __mul__(self, k): return Vec(self.x * k, self.y * k)\n  __rmul__ = __mul__\n'
    '  def __sub__(self, o): return Vec(self.x - o.x, self.y - o.y)\n'
    '  def __eq__(self, o): return isinstance(o, Vec) and (self.x, self.y) == (o.x, o.y)\n'
    '  def __iadd__(self, o): self.x += o.x; self.y += o.y; return self\n'
    '  def __repr__(self): return f"Vec({self.x}, {self.y})"',
    ('self.x * k', 'self.x + k'),
    'assert Vec(1, 2) + Vec(3, 4) == Vec(4, 6) and Vec(1, 2) * 3 == Vec(3, 6) == 3 * Vec(1, 2)\n'
    'v = Vec(1, 1)\nw = v\nv += Vec(1, 2)\nassert w is v and v == Vec(2, 3) and repr(v) == "Vec(2, 3)"\n'
    'assert (Vec(3, 3) - Vec(1, 2)).y == 1 and Vec(1, 2) != Vec(2, 1)',
  ),
  operators_with_numbers=(
    'class Money:\n  def __init__(self, n): self.n = n\n'
    '  def __add__(self, o): return Money(self.n + getattr(o, "n", o))\n'
    '  __radd__ = __add__\n  def __sub__(self, o): return Money(self.n - getattr(o, "n", o))\n'
    '  def __truediv__(self, k): return Money(self.n / k)\n  def __eq__(self, o): return self.n == o.n\n'
    '  def __lt__(self, o): return self.n < o.n',
    ('self.n / k', 'self.n * k'),
    'assert sum([Money(1), Money(2)]) == Money(3) and (Money(6) / 3).n == 2 and (Money(6) - 4).n == 2\n'
    'assert max(Money(1), Money(5)).n == 5 and sorted([Money(2), Money(1)])[0] == Money(1)',
  ),
  matrix_product=(
    'class Matrix:\n  def __init__(self, rows): self.rows = rows\n'
    '  def __getitem__(self, at): return self.rows[at[0]][at[1]]\n'
    '  def __setitem__(self, at, value): self.rows[at[0]][at[1]] = value\n'
    '  def __matmul__(self, v): return [sum(a * b for a, b in zip(row, v)) for row in self.rows]\n'
    '  def __len__(self): return len(self.rows)',
    ('a * b', 'a + b'),
    'm = Matrix([[1, 2], [3, 4]])\nassert m[1, 0] == 3 and m @ [1, 1] == [3, 7] and len(m) == 2\n'
    'm[0, 0] = 5\nassert m[0, 0] == 5 and m.rows == [[5, 2], [3, 4]]',
  ),
  properties=(
    'class Square:\n  made = 0\n  def __init__(self, side): self.side = side; Square.made += 1\n  @property\n'
    '  def side(self): return self._side\n  @side.setter\n  def side(self, value):\n'
    '    if value < 0: raise ValueError("negative side")\n    self._side = value\n'
    '  @property\n  def area(self): return self._side ** 2',
    ('** 2', '** 3'),
    's = Square(3)\ns.side = 4\nassert s.area == 16 and Square.made == 1\n'
    'try: s.side = -1\nexcept ValueError as e: assert "negative" in str(e)\nelse: assert False\n'
    'try: s.area = 5\nexcept AttributeError: pass\nelse: assert False',
  ),
  closures=(
    'def counter():\n  n = 0\n  def step(by=1):\n    nonlocal n\n    n += by\n    return n\n  return step\n'
    'def adder(k): return lambda x: x + k',
    ('x + k', 'x - k'),
    'a, b = counter(), counter()\nassert (a(), a(), b(), a(5)) == (1, 2, 1, 7) and adder(3)(4) == 7\n'
    'assert [f(1) for f in map(adder, [1, 2])] == [2, 3]',
  ),
  star_arguments=(
    'def join(first, *rest, sep="-", **more): return sep.join([first, *rest, *sorted(more)])',
    ('sorted(more)', 'more.values()'),
    'assert join("a", "b", sep="+", z="1", y="2") == "a+b+y+z" and join(*"ab") == "a-b"\n'
    'assert join("a", **{"k": "1"}) == "a-k"',
  ),
  recursion=(
    'def flat(xs): return [y for x in xs for y in (flat(x) if isinstance(x, list) else [x])]\n'
    'def hanoi(n): return 0 if n == 0 else 2 * hanoi(n - 1) + 1',
    ('+ 1', '+ 2'),
    'assert flat([1, [2, [3]]]) == [1, 2, 3] and hanoi(5) == 31',
  ),
  key_functions=(
    'def order(xs, key=None, reverse=False): return sorted(xs, key=key, reverse=reverse)',
    ('key=key,', 'key=None,'),
    'assert order(["bb", "a"], key=len) == ["a", "bb"] and order([1, -2], key=lambda x: -x) == [1, -2]\n'
    'import operator\nassert order([(1, "b"), (2, "a")], key=operator.itemgetter(1))[0] == (2, "a")\n'
    'assert order(["B", "a"], key=str.lower) == ["a", "B"]',
  ),
  callbacks=(
    'class Bus:\n  def __init__(self): self.calls = []\n  def on(self, call): self.calls.append(call)\n'
    '  def fire(self, *args): return [call(*args) for call in self.calls]\n'
    'def compose(*fs):\n  def run(x):\n    for f in reversed(fs): x = f(x)\n    return x\n  return run',
    ('reversed(fs)', 'fs'),
    'got = []\nbus = Bus()\nbus.on(got.append)\nbus.on(lambda x: x * 2)\n'
    'assert bus.fire(3) == [None, 6] and got == [3]\n'
    'assert compose(lambda x: x + 1, lambda x: x * 2)(5) == 11',
  ),
  failing_callback=(
    'def retry(f, times=3):\n  for n in range(times):\n    try: return f()\n    except ValueError:\n'
    '      if n == times - 1: raise',
    ('times - 1', 'times'),
    'tries = []\ndef flaky():\n  tries.append(1)\n  if len(tries) < 3: raise ValueError("no")\n  return "ok"\n'
    'assert retry(flaky) == "ok" and len(tries) == 3\ndef never(): raise ValueError("never")\n'
    'try: retry(never)\nexcept ValueError as error: assert str(error) == "never"\nelse: assert False',
  ),
  decorators=(
    'import functools\ndef twice(f):\n  @functools.wraps(f)\n  def run(*args, **more):\n    f(*args, **more)\n'
    '    return f(*args, **more)\n  return run',
    ('    return f(*args', '    return (*args'),
    'calls = []\n@twice\ndef note(x, end="!"):\n  """Notes."""\n  calls.append(x)\n  return x + end\n'
    'assert note("a", end="?") == "a?" and calls == ["a", "a"]\n'
    'assert note.__name__ == "note" and note.__doc__ == "Notes."',
  ),
  builtin_subclasses=(
    'class Name(str):\n  def loud(self): return Name(self.upper() + "!")\n'
    'class Stack(list):\n  def push(self, x): self.append(x)\n  def append(self, x): super().append(x * 2)\n'
    'class Config(dict):\n  def __getattr__(self, name): return self[name]\n'
    'class Meters(float):\n  unit = "m"',
    ('x * 2', 'x'),
    'n = Name("bo").loud()\nassert n == "BO!" and isinstance(n, str) and isinstance(n, Name) and n.lower() == "bo!"\n'
    's = Stack()\ns.push(1); s.append(2)\nassert s == [2, 4] and isinstance(s, list) and len(s) == 2 and s[0] == 2\n'
    'assert Config(a=1).a == 1 and Config(a=1) == {"a": 1} and isinstance(Config(), dict)\n'
    'assert Meters(2.5) * 2 == 5.0 and Meters(1).unit == "m"',
  ),
  lru_cache_class=(
    'from collections import OrderedDict\nclass LRU(OrderedDict):\n  def __init__(self, size):\n'
    '    super().__init__(); self.size = size\n  def put(self, k, v):\n    self[k] = v\n    self.move_to_end(k)\n'
    '    if len(self) > self.size: self.popitem(last=False)\n  def see(self, k): return self.get(k, -1)',
    ('last=False', 'last=True'),
    'c = LRU(2)\nc.put(1, 1); c.put(2, 2); c.put(3, 3)\nassert c.see(1) == -1 and c.see(3) == 3 and list(c) == [2, 3]',
  ),
  complex_numbers=(
    'def turn(z): return z * 1j\ndef roots(): return [1j, -1j]',
    ('z * 1j', 'z * 2j'),
    'assert turn(1 + 2j) == -2 + 1j and turn(1).imag == 1 and abs(turn(3 + 4j)) == 5 and roots() == [1j, -1j]',
  ),
  binary_data=(
    'def code(s): return s.encode()[::-1]\ndef grow(): return bytearray(b"ab")\ndef view(b): return memoryview(b)',
    ('[::-1]', ''),
    'assert code("ab") == b"ba" and code("ab").hex() == "6261"\nb = grow()\nb.append(99)\nassert b == b"abc"\n'
    'assert bytes(view(b"xy")) == b"xy"',
  ),
  special_floats=(
    'def worst(): return float("-inf")\ndef unknown(): return float("nan")\ndef tiny(): return -0.0',
    ('"-inf"', '"inf"'),
    'import math\nassert worst() == -math.inf and math.isnan(unknown()) and unknown() != unknown()\n'
    'assert math.copysign(1, tiny()) == -1',
  ),
  big_integers=(
    'def fact(n): return 1 if n < 2 else n * fact(n - 1)\ndef power(): return 2 ** 20000',
    ('n - 1)', 'n - 1) + 1'),
    'import math\nassert fact(50) == math.factorial(50) and power().bit_length() == 20001',
  ),
  tuples_and_lists=(
    'def minmax(xs): return min(xs), max(xs)\ndef rows(): return [(1, [2, (3,)])]',
    ('min(xs), max(xs)', '[min(xs), max(xs)]'),
    'low, high = minmax([3, 1])\nassert (low, high) == minmax([3, 1]) == (1, 3) and minmax([3, 1]) != [1, 3]\n'
    'assert rows() == [(1, [2, (3,)])] and rows() != [[1, [2, [3]]]] and type(rows()[0]) is tuple',
  ),
  ranges=(
    'def odd(n): return range(1, n, 2)',
    ('range(1', 'range(0'),
    'assert odd(6) == range(1, 6, 2) and list(odd(6)) == [1, 3, 5] and 3 in odd(6) and odd(6)[-1] == 5',
  ),
  container_class=(
    'class Bag:\n  def __init__(self, *xs): self.xs = list(xs)\n  def __len__(self): return len(self.xs)\n'
    '  def __iter__(self): return iter(self.xs)\n  def __getitem__(self, i): return self.xs[i]\n'
    '  def __delitem__(self, i): del self.xs[i]\n  def __call__(self, x): return self.xs.count(x)\n'
    '  def __reversed__(self): return reversed(self.xs)\n  def __hash__(self): return 7\n'
    '  def __str__(self): return "Bag!"',
    ('self.xs.count(x)', '0'),
    'b = Bag(1, 2, 2)\nassert len(b) == 3 and list(b) == [1, 2, 2] and b[0] == 1 and b[1:] == [2, 2] and b(2) == 2\n'
    'del b[0]\nassert list(reversed(b)) == [2, 2] and hash(b) == 7 and str(b) == f"{b}" == "Bag!" and 2 in b\n'
    'x, y = b\nassert [*b, x] == [2, 2, 2] and callable(b)',
  ),
  static_and_class_methods=(
    'class Tool:\n  size = 3\n  @staticmethod\n  def double(x): return 2 * x\n  @classmethod\n'
    '  def make(cls): t = cls(); t.new = True; return t',
    ('2 * x', '3 * x'),
    'assert Tool.double(2) == 4 == Tool().double(2) and Tool.make().new is True and Tool.size == 3\n'
    'Tool.size = 5\nassert Tool().size == 5 and isinstance(Tool.make(), Tool)',
  ),
  cached_function=(
    'import functools\n@functools.lru_cache(maxsize=None)\ndef fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)',
    ('n if n < 2', '1 if n < 2'),
    'assert fib(30) == 832040 and fib.cache_info().currsize == 31\nfib.cache_clear()\n'
    'assert fib.cache_info().hits == 0 and fib(3) == 2',
  ),
  inheritance=(
    'from abc import ABC, abstractmethod\nclass Shape(ABC):\n  @abstractmethod\n  def area(self): ...\n'
    '  def __str__(self): return f"{type(self).__name__} {self.area()}"\nclass Box(Shape):\n'
    '  def __init__(self, a): self.a = a\n  def area(self): return self.a ** 2',
    ('self.a ** 2', 'self.a'),
    'assert str(Box(3)) == "Box 9" and isinstance(Box(1), Shape) and issubclass(Box, Shape)\n'
    'assert type(Box(1)) is Box and type(Box(1)).__name__ == "Box" and hasattr(Box(1), "area")\n'
    'try: Shape()\nexcept TypeError: pass\nelse: assert False',
  ),
  object_dictionary=(
    'class User:\n  def __init__(self, name): self.name = name; self.age = 5',
    ('self.age = 5', 'self.age = 6'),
    'assert vars(User("a")) == {"name": "a", "age": 5} == User("a").__dict__\nu = User("a")\ndel u.age\n'
    'assert not hasattr(u, "age") and getattr(u, "age", 1) == 1',
  ),
  copies=(
    'import copy\nclass Grid:\n  def __init__(self, n): self.cells = [0] * n\n'
    '  def __eq__(self, o): return self.cells == o.cells',
    ('[0] * n', '[1] * n'),
    'import copy\na = Grid(2)\nb = copy.deepcopy(a)\nb.cells[0] = 9\n'
    'assert a.cells == [0, 0] and b.cells == [9, 0] and a != b and copy.copy(a) == a',
  ),
  regular_expressions=(
    'import re\ndef find(s): return re.search(r"(?P<n>\\d+)", s)',
    ('\\d+', '\\d'),
    'assert find("ab12").group() == "12" and find("ab12")["n"] == "12" and find("ab") is None\n'
    'assert find("x7").span() == (1, 2)',
  ),
  arguments_of_the_tests_own_classes=(
    'def names(people): return sorted(p.name for p in people)\ndef rename(p, name): p.name = name; return p',
    ('p.name for', 'p.name[1:] for'),
    'class Person:\n  def __init__(self, name): self.name = name\n'
    'assert names([Person("b"), Person("a")]) == ["a", "b"]\np = Person("x")\n'
    'assert rename(p, "y") is p and p.name == "y"',
  ),
  text_streams=(
    'def shout(source, target):\n  for line in source: target.write(line.upper())',
    ('upper', 'title'),
    'import io\nout = io.StringIO()\nshout(io.StringIO("ab\\ncd\\n"), out)\nassert out.getvalue() == "AB\\nCD\\n"',
  ),
  same_object=(
    'def sort_here(xs): xs.sort(); return xs\nclass One:\n  it = None\n  @classmethod\n  def get(cls):\n'
    '    cls.it = cls.it or cls()\n    return cls.it',
    ('xs.sort(); return xs', 'return sorted(xs)'),
    'xs = [2, 1]\nassert sort_here(xs) is xs and xs == [1, 2] and One.get() is One.get()',
  ),
  solution_import=(
    'def add(a, b): return a + b\nLIMIT = 3',
    ('a + b', 'a - b'),
    'from solution import add, LIMIT\nimport solution\nassert add(1, 2) == 3 == LIMIT == solution.add(1, 2)',
  ),
  solution_class=(
    'class Solution:\n  def twoSum(self, nums, target):\n'
    '    return [[i, j] for j in range(len(nums)) for i in range(j) if nums[i] + nums[j] == target][0]',
    ('[i, j]', '[j, i]'),
    'assert Solution().twoSum([2, 7, 1], 9) == [0, 1]\nassert twoSum(nums=[3, 3], target=6) == [0, 1]',
  ),
)  # fmt: skip
