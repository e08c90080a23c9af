"""The program's side: runs the program and performs the operations that the tests' side requests on its objects."""

from __future__ import annotations

import ast
import builtins
import collections
import copy
import importlib
import io
import linecache
import math
import operator
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO

from jaxrl_llm.rewards.code_execution.guest_protocol import wire
from jaxrl_llm.rewards.code_execution.guest_protocol.peer import Peer
from jaxrl_llm.rewards.code_execution.guest_protocol.wire import Packed, Value

if TYPE_CHECKING:
  import asyncio

_MOST_PRINTED = 1 << 20
PROGRAM_FILE = 'answer.py'

# Operations on objects that the tests' side may request, besides the functions of `operator` such as `add`.
_UNARY = (len, iter, next, reversed, str, repr, bytes, bool, hash, abs, int, float, complex, dir)
_OPERATIONS: dict[str, Callable] = {
  '__call__': lambda function, /, *args, **keywords: function(*args, **keywords),
  '__getattr__': getattr,
  '__setattr__': setattr,
  '__delattr__': delattr,
  '__contains__': lambda container, item: item in container,
  '__instancecheck__': lambda kind, value: isinstance(value, kind),
  '__format__': format,
  '__round__': round,
  '__divmod__': divmod,
  '__trunc__': math.trunc,
  '__floor__': math.floor,
  '__ceil__': math.ceil,
  '__length_hint__': operator.length_hint,
  '__enter__': lambda value: type(value).__enter__(value),
  '__exit__': lambda value, *error: type(value).__exit__(value, *error),
  '__aiter__': aiter,
  '__anext__': lambda value: type(value).__anext__(value),
  '__aenter__': lambda value: type(value).__aenter__(value),
  '__aexit__': lambda value, *error: type(value).__aexit__(value, *error),
  '__copy__': copy.copy,
  '__deepcopy__': lambda value, memory=None: copy.deepcopy(value),
  **{f'__{function.__name__}__': function for function in _UNARY},
}
# Objects of a class that derives from one of these are sent with a plain copy of their value.
_PLAIN_COPY: dict[type, Callable[[Value], Value]] = {
  int: lambda v: int.__add__(v, 0),
  float: lambda v: float.__add__(v, 0.0),
  complex: lambda v: complex.__add__(v, 0),
  str: str.__str__,
  bytes: lambda v: bytes.__add__(v, b''),
  tuple: lambda v: tuple(tuple.__iter__(v)),
  frozenset: lambda v: frozenset(frozenset.__iter__(v)),
}
# The same for classes of modules that are slow to import. A program with such a value has imported the module.
_PLAIN_COPY_LATE: dict[tuple[str, str], Callable[[type, Value], Value]] = {
  ('decimal', 'Decimal'): lambda kind, v: kind(kind.__str__(v)),
  ('fractions', 'Fraction'): lambda kind, v: kind(v.numerator, v.denominator),
}
_CONTENT: dict[type, Callable[[Value], Value]] = {
  dict: lambda v: dict(dict.items(v)),
  **{k: lambda v, k=k: k(k.__iter__(v)) for k in (list, set, wire.SERIES['deque'], bytearray)},
}


def _plain_copies() -> dict[type, Callable[[Value], Value]]:
  late = {
    getattr(sys.modules[module], name): copy_of
    for (module, name), copy_of in _PLAIN_COPY_LATE.items()
    if module in sys.modules
  }
  return _PLAIN_COPY | {
    kind: lambda v, kind=kind, copy_of=copy_of: copy_of(kind, v) for kind, copy_of in late.items()
  }


class ProgramPeer(Peer):
  """The peer that holds the program's objects, by number."""

  def __init__(self, read: BinaryIO, write: BinaryIO):
    super().__init__(read, write)
    self.module = types.ModuleType('answer')
    self._imported: Callable[[str], bool] = bool
    self._loop: asyncio.AbstractEventLoop | None = None

  def run(self, source: bytes) -> None:
    """Run the program, reply whether it failed, and serve requests until the pipe closes."""
    sys.modules['answer'] = self.module  # dataclasses and pickle look it up
    builtins.input = lambda prompt='': self.request('input', str(prompt))
    self._reply(['request', ['run', [source.decode('utf-8', 'surrogatepass')], {}], [], ''])
    for line in self._read:
      self.serve(line)

  def perform(self, name: str, args: list, keywords: dict) -> Value:
    if name in _OPERATIONS:
      return _OPERATIONS[name](*args, **keywords)
    if method := getattr(self, f'_{name}', None):
      return method(*args, **keywords)
    return getattr(operator, name)(*args)

  def _run(self, source: str) -> None:
    linecache.cache[PROGRAM_FILE] = (len(source), None, source.splitlines(True), PROGRAM_FILE)
    code = compile(source.encode('utf-8', 'surrogatepass'), PROGRAM_FILE, 'exec', dont_inherit=True)
    self._imported = _imported(source)
    exec(code, vars(self.module))

  def _name(self, name: str) -> tuple[Value, str]:
    """(value, origin) of a name; the origin is defined, imported or module."""
    names = vars(self.module)
    if name not in names and hasattr(names.get('Solution'), name):
      return getattr(names['Solution'](), name), 'defined'
    if isinstance(names[name], types.ModuleType):
      return None, 'module'
    return names[name], 'imported' if self._imported(name) else 'defined'

  def _set_name(self, name: str, value: Value) -> None:
    vars(self.module)[name] = value

  def _public(self) -> list[str]:
    return [name for name in vars(self.module) if not name.startswith('_')]

  def _plain(self, value: Value) -> Value:
    return next(content(value) for kind, content in _CONTENT.items() if isinstance(value, kind))

  def _await(self, value: Value) -> Value:
    async def wait() -> Value:
      return await value

    import asyncio  # slow to import, and rarely needed

    if self._loop is None:
      self._loop = asyncio.new_event_loop()
      asyncio.set_event_loop(self._loop)
    return self._loop.run_until_complete(wait())

  def _dataclass(self, name: str, value: Value, *args: Value, **more: Value) -> Value:
    return getattr(importlib.import_module('dataclasses'), name)(value, *args, **more)

  def _describe(self, kind: type) -> dict[str, Value]:
    """The description from which the tests' side builds the stand-in for a class."""
    above = [k for k in kind.__mro__ if k is not object]
    copies = _plain_copies()
    plain = [k for k in above if k in copies or k in _CONTENT or wire.TYPES.get(k.__name__) is k]
    defined = [k for k in above if k not in plain]
    special = {name for k in above for name in vars(k) if name.startswith('__')}
    return dict(
      name=str(kind.__name__), module=str(kind.__module__),
      doc=kind.__doc__ if isinstance(kind.__doc__, str) else None,
      bases=[k for k in kind.__bases__ if k is not object],
      special=sorted(n for n in special if getattr(kind, n, None) is not None),
      defined=sorted({name for k in defined for name in vars(k)}),
      hashes=getattr(kind, '__hash__', None) is not None,
      plain_name=next((k.__name__ for k in above if k in copies or k in _CONTENT), ''),
    )  # fmt: skip

  def export(self, value: Value) -> list:
    if isinstance(value, Remote):
      return ['yours', object.__getattribute__(value, '_number')]
    if isinstance(value, type):
      return ['class', self.number(value)]
    if isinstance(value, BaseException):
      return self.pack_error(value)
    for kind, copy_of in _plain_copies().items():
      if isinstance(value, kind):
        plain = wire.pack(copy_of(value), self)
        return ['mine', self.number(value), self.number(type(value)), plain]
    return ['mine', self.number(value), self.number(type(value)), None]

  def find(self, kind: str, *packed: Packed) -> Value:
    if kind == 'yours':
      return self.objects[packed[0]]
    if kind == 'error':
      return self.unpack_error([kind, *packed])
    if kind == 'named':
      name, fields, values = packed
      return collections.namedtuple(name, fields)(*(wire.unpack(v, self) for v in values))
    number, name, doc, called = packed
    if number not in self.stand_ins:
      self.stand_in(number, Function(self, number, name, doc) if called else Remote(self, number))
    return self.stand_ins[number]

  def pack_error(self, error: BaseException) -> list:
    if number := getattr(error, '_theirs', 0):
      return ['yours', number]
    try:
      args = wire.pack(tuple(error.args), self)
    except Exception:  # nested too deep, or hostile
      args = ['tuple', 0, []]
    cause = error.__cause__
    packed = self.pack_error(cause) if cause is not None and cause is not error else None
    return [
      'error',
      wire.pack(type(error), self),
      args,
      _message(error),
      self.number(error),
      packed,
    ]

  def unpack_error(self, packed: list) -> BaseException:
    """The stand-in for an error of the tests; raised again, it reaches them as the same object."""
    if packed[0] == 'yours':
      return self.objects[packed[1]]
    _, kind, args, number = packed
    error = self.stand_ins.get(number)
    if error is None:
      kind = wire.TYPES[kind]
      error = self.stand_in(number, kind.__new__(kind, *wire.unpack(args, self)))
      error._theirs = number
    return error

  def printed(self) -> str:
    text = sys.stdout.buffer.getvalue()
    if not text:
      return ''
    sys.stdout.seek(0)
    sys.stdout.truncate()
    return text.decode('utf-8', 'replace')[:_MOST_PRINTED]


def _imported(source: str) -> Callable[[str], bool]:
  """A predicate of names that the program imports and does not bind otherwise."""
  imported, bound, star = set(), set(), False
  for node in ast.walk(ast.parse(source.encode('utf-8', 'surrogatepass'))):
    if isinstance(node, ast.Import | ast.ImportFrom):
      names = [(alias.asname or alias.name).partition('.')[0] for alias in node.names]
      star = star or '*' in names
      imported.update(names)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
      bound.add(node.name)
    elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
      bound.add(node.id)
  return lambda name: (star or name in imported) and name not in bound


def _message(error: BaseException) -> str:
  try:
    return str(error)[:500]
  except BaseException:  # the class may define __str__
    return ''


class Remote:
  """An object of the tests: its operations run on the tests' side, which refuses names that begin with _."""

  def __init__(self, peer: ProgramPeer, number: int):
    object.__setattr__(self, '_peer', peer)
    object.__setattr__(self, '_number', number)

  def __getattr__(self, name: str) -> Value:
    return self._peer.request('__getattr__', self, name)

  def __setattr__(self, name: str, value: Value) -> None:
    self._peer.request('__setattr__', self, name, value)

  def __eq__(self, other: Value) -> Value:
    return self is other or self._peer.request('__eq__', self, other)


def _forward(name: str) -> Callable:
  def method(self: Remote, /, *args: Value, **keywords: Value) -> Value:
    return self._peer.request(name, self, *args, **keywords)

  return method


REMOTE = (
  *('__call__', '__len__', '__iter__', '__next__', '__bool__', '__hash__', '__str__', '__repr__'),
  *('__getitem__', '__setitem__', '__delitem__', '__contains__', '__enter__', '__exit__'),
  *(
    '__lt__',
    '__le__',
    '__gt__',
    '__ge__',
    '__add__',
    '__sub__',
    '__mul__',
    '__radd__',
    '__rmul__',
  ),
  *('__abs__', '__neg__', '__int__', '__float__', '__truediv__'),
)
for _name in REMOTE:
  setattr(Remote, _name, _forward(_name))


class Function(Remote):
  """A function of the tests."""

  def __init__(self, peer: ProgramPeer, number: int, name: str, doc: str | None):
    super().__init__(peer, number)
    # functools.wraps copies these.
    for key, value in dict(
      __name__=name, __qualname__=name, __doc__=doc, __module__='tests'
    ).items():
      object.__setattr__(self, key, value)

  def __getattr__(self, name: str) -> Value:
    raise AttributeError(name)

  def __get__(self, instance: Value, owner: Value = None) -> Value:
    return self if instance is None else types.MethodType(self, instance)

  def __bool__(self) -> bool:
    return True


def captured_stream() -> io.TextIOWrapper:
  """A stream that stores printed text."""
  return io.TextIOWrapper(io.BytesIO(), 'utf-8', 'backslashreplace', write_through=True)
