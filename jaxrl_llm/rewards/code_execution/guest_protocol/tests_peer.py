"""The tests' side of the pipe: stand-ins for the program's objects, and the operations that the program may request."""

from __future__ import annotations

import builtins
import importlib
import io
import operator
import sys
import types
from collections.abc import Callable
from typing import BinaryIO

from jaxrl_llm.rewards.code_execution.guest_protocol import mirror, wire
from jaxrl_llm.rewards.code_execution.guest_protocol.errors import RowError
from jaxrl_llm.rewards.code_execution.guest_protocol.peer import Peer
from jaxrl_llm.rewards.code_execution.guest_protocol.wire import Packed, Value


class Gone(BaseException):
  """The program's process has ended, or sent an invalid message.

  A BaseException, so that no test's `except Exception` catches it.
  """


_FUNCTIONS = (
  *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodWrapperType),
  *(types.MethodDescriptorType, types.WrapperDescriptorType, operator.itemgetter),
  *(operator.attrgetter, operator.methodcaller, importlib.import_module('functools').partial),
)
_STREAMS = (io.StringIO, io.BytesIO)
_VISIBLE = ('tests', 'unittest.mock')  # modules whose objects the program may inspect
# Functions that would give the program access to the tests' names, or let it run other code there.
_FORBIDDEN = frozenset(
  (eval, exec, compile, getattr, setattr, delattr, vars, globals, locals, dir, open, __import__, type)
)  # fmt: skip
# Operations that the program may request on an object of the tests, besides calling it.
_OPERATIONS: dict[str, Callable] = {
  **{f'__{f.__name__}__': f for f in (len, iter, next, bool, hash, str, repr, abs, int, float)},
  **{f'__{n}__': getattr(operator, n) for n in ('getitem', 'setitem', 'delitem', 'contains')},
  **{f'__{n}__': getattr(operator, n) for n in ('eq', 'lt', 'le', 'gt', 'ge', 'neg')},
  **{f'__{n}__': getattr(operator, n) for n in ('add', 'sub', 'mul', 'truediv')},
  '__radd__': lambda a, b: b + a,
  '__rmul__': lambda a, b: b * a,
  '__enter__': lambda value: type(value).__enter__(value),
  '__exit__': lambda value, *error: type(value).__exit__(value, *error),
}


class TestsPeer(Peer):
  """The peer that holds stand-ins for the program's objects. `fault` is the first error of the row, even if caught."""

  sign = -1

  def __init__(self, read: BinaryIO, write: BinaryIO):
    super().__init__(read, write)
    self.gone = False
    self.fault: RowError | None = None
    # plain values of objects whose classes derive from int, str, …
    self.plain: dict[int, Value] = {}
    self.tainted: set[int] = set()  # objects that are the difference of an object and a plain value
    self._from_program: dict[int, BaseException] = {}

  def cannot(self, reason: str) -> RowError:
    """Record and return the error of a row whose tests need something unavailable."""
    self.fault = self.fault or RowError(reason)
    return self.fault

  def raised(self, error: BaseException) -> bool:
    """Whether an error came from the program."""
    return id(error) in self._from_program

  def loaded(self) -> bool:
    """Wait until the program has run; return whether it ended without an error."""
    try:
      self._receive()
    except Exception:
      return False
    return True

  def _receive(self) -> Value:
    try:
      return super()._receive()
    except (Gone, RowError):
      raise
    except Exception as error:
      if self.raised(error):
        raise
      self.gone = True  # it sent an invalid message
      raise Gone from error

  def _send(self, kind: str, packed: Packed) -> None:
    try:
      super()._send(kind, packed)
    except OSError as error:
      self.gone = True
      raise Gone from error

  def _reply(self, message: list) -> None:
    try:
      super()._reply(message)
    finally:
      if self.gone:
        raise Gone

  def perform(self, name: str, args: list, keywords: dict) -> Value:
    if name == 'input':
      return builtins.input(*args)  # the tests may have patched it
    value, *rest = args
    if id(value) not in self._numbers:
      raise TypeError('not an object of the tests')
    if name == '__call__':
      return value(*rest, **keywords)
    if name in ('__iter__', '__next__') and isinstance(value, types.GeneratorType):
      return _OPERATIONS[name](value)
    if type(value).__module__ not in _VISIBLE and type(value) not in _STREAMS:
      raise TypeError(f'{name} of a {type(value).__name__} of the tests')
    if name in ('__getattr__', '__setattr__') and not rest[0].startswith('_'):
      return (getattr if name == '__getattr__' else setattr)(value, *rest)
    if name not in _OPERATIONS:
      raise AttributeError(rest[0] if rest else name)
    return _OPERATIONS[name](value, *rest)

  def export(self, value: Value) -> list:
    if isinstance(value, mirror.Reference):
      return ['yours', value.number]
    if isinstance(value, mirror.Mirror) or isinstance(type(value), mirror.Mirror):
      return ['yours', self.number_of[id(value)]]
    if isinstance(value, types.CoroutineType) and id(value) in self.number_of:
      return ['yours', self.number_of[id(value)]]
    if isinstance(value, BaseException):
      return self.pack_error(value)
    kind = type(value)
    for base in mirror.PLAIN_TYPES.values():
      if isinstance(value, base):
        return self._pack_derived(value, base)
    if isinstance(value, type | types.BuiltinFunctionType) and value in _FORBIDDEN:
      raise self.cannot(f'they pass {value.__name__}, which a program must not call here')
    is_callable = isinstance(value, (*_FUNCTIONS, type))
    if (
      is_callable
      or kind.__module__ in _VISIBLE
      or kind in _STREAMS
      or isinstance(value, types.GeneratorType)
    ):
      name = getattr(value, '__name__', kind.__name__)
      doc = getattr(value, '__doc__', None) if is_callable else None
      return ['theirs', self.number(value), str(name), doc, is_callable]
    if hasattr(kind, '__next__') and kind.__module__ in ('builtins', 'itertools'):
      return self.export(part for part in value)
    raise self.cannot(f'they pass a {kind.__name__}, which cannot be sent')

  def _pack_derived(self, value: Value, base: type) -> Packed:
    fields = getattr(value, '_fields', None)
    if base is tuple and fields:
      return ['named', type(value).__name__, list(fields), [wire.pack(v, self) for v in value]]
    return wire.pack(base(value), self)

  def find(self, kind: str, *packed: Packed) -> Value:
    if kind == 'yours':
      return self.objects[packed[0]]
    if kind == 'error':
      return self.unpack_error([kind, *packed])
    number = int(packed[0])
    if number in self.stand_ins:
      return self.stand_ins[number]
    if kind == 'class':
      return self.stand_in(number, mirror.stand_in_class(self, number))
    return self.stand_in(number, self._object(number, self.find('class', packed[1]), packed[2]))

  def _object(self, number: int, kind: type, plain: Packed) -> Value:
    if '__await__' in kind._special:
      return self._coroutine(number)
    if kind._plain_type is None or kind._plain_type in wire.MUTABLE:
      return object.__new__(kind)
    value = self.plain[number] = wire.unpack(plain, self)
    if type(value) is not kind._plain_type:
      raise TypeError(f'not a {kind._plain_type.__name__}: {type(value).__name__}')
    return kind._plain_type.__new__(kind, value)

  def _coroutine(self, number: int) -> Value:
    async def wait() -> Value:
      return self.request('await', mirror.Reference(number))

    return wait()

  def pack_error(self, error: BaseException) -> list:
    if id(error) in self.number_of:
      return ['yours', self.number_of[id(error)]]
    if isinstance(error, Gone | RowError):
      raise error
    kind = next(k for k in type(error).__mro__ if wire.TYPES.get(k.__name__) is k)
    with self.unshared():
      try:
        args = wire.pack(tuple(error.args), self)
      except RowError:
        args = ['tuple', 0, [str(error)]]
    return ['error', kind.__name__, args, self.number(error)]

  def unpack_error(self, packed: list) -> BaseException:
    if packed[0] == 'yours':
      error = self.objects[packed[1]]
      if not isinstance(error, BaseException):
        raise TypeError('not an error')
      return self._record_error(error)
    _, kind, args, message, number, cause = packed
    if number in self.stand_ins:
      return self._record_error(self.stand_ins[number])
    args = wire.unpack(args, self)
    error = mirror.make_error(self, wire.unpack(kind, self), args, str(message), int(number))
    if cause is not None:
      error.__cause__ = self.unpack_error(cause)
    return self._record_error(error)

  def _record_error(self, error: BaseException) -> BaseException:
    self._from_program[id(error)] = error
    return error

  def print(self, text: str) -> None:
    if text:
      sys.stdout.write(text)
