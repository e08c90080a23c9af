"""The tests' side of the pipe: what the answer's objects are here, and what it may do with objects of the tests."""

from __future__ import annotations

import builtins
import importlib
import io
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

from jaxrl_llm.rewards.code_execution.guest_protocol import mirror, wire
from jaxrl_llm.rewards.code_execution.guest_protocol.mirror import CannotRun
from jaxrl_llm.rewards.code_execution.guest_protocol.peer import Peer


class Gone(BaseException):
  """The answer's process is gone, or sends what is no message. No test's `except Exception` is to meet this."""


_FUNCTIONS = (
  *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodWrapperType),
  *(types.MethodDescriptorType, types.WrapperDescriptorType, operator.itemgetter),
  *(operator.attrgetter, operator.methodcaller, importlib.import_module('functools').partial),
)
_STREAMS = (io.StringIO, io.BytesIO)
_SHOWN = ('tests', 'unittest.mock')  # modules whose objects the answer may look into
# Functions that would give the answer what it is not to have: the tests' names, other code to run.
_KEPT = frozenset(
  {
    eval,
    exec,
    compile,
    getattr,
    setattr,
    delattr,
    vars,
    globals,
    locals,
    dir,
    open,
    __import__,
    type,
  }
)
# What the answer may ask of an object of the tests, beside calling it.
_ASKED: dict[str, Callable] = {
  **{f'__{f.__name__}__': f for f in (len, iter, next, bool, hash, str, repr, abs, int, float)},
  **{f'__{n}__': getattr(operator, n) for n in ('getitem', 'setitem', 'delitem', 'contains')},
  **{f'__{n}__': getattr(operator, n) for n in ('eq', 'lt', 'le', 'gt', 'ge', 'neg')},
  **{f'__{n}__': getattr(operator, n) for n in ('add', 'sub', 'mul', 'truediv')},
  '__radd__': lambda a, b: b + a,
  '__rmul__': lambda a, b: b * a,
  '__enter__': lambda value: type(value).__enter__(value),
  '__exit__': lambda value, *error: type(value).__exit__(value, *error),
}


class Link(Peer):
  """Stand-ins for the answer's objects. `fault` is the first error of the row that was met, whoever caught it."""

  sign = -1

  def __init__(self, read: Any, write: Any):
    super().__init__(read, write)
    self.gone = False
    self.fault: CannotRun | None = None
    self.plain: dict[int, Any] = {}  # what objects of classes that derive from int, str, … hold
    self.tainted: set[int] = set()  # objects that are a difference from a plain value
    self._from_answer: dict[int, BaseException] = {}

  def cannot(self, reason: str) -> CannotRun:
    """The error of a row whose tests need what there is not."""
    self.fault = self.fault or CannotRun(reason)
    return self.fault

  def raised(self, error: BaseException) -> bool:
    """Whether an error came from the answer."""
    return id(error) in self._from_answer

  def loaded(self) -> bool:
    """Waits for the answer to have run; whether it did without an error."""
    try:
      self._hear()
    except Exception:
      return False
    return True

  def _hear(self) -> Any:
    try:
      return super()._hear()
    except (Gone, CannotRun):
      raise
    except Exception as error:
      if self.raised(error):
        raise
      self.gone = True  # what it sends is no message
      raise Gone from error

  def _send(self, kind: str, packed: Any) -> None:
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

  def do(self, name: str, args: list, keywords: dict) -> Any:
    if name == 'input':
      return builtins.input(*args)  # as the tests may have patched it
    value, *rest = args
    if id(value) not in self._numbers:
      raise TypeError('this is no object of the tests')
    if name == '__call__':
      return value(*rest, **keywords)
    if name in ('__iter__', '__next__') and isinstance(value, types.GeneratorType):
      return _ASKED[name](value)
    if type(value).__module__ not in _SHOWN and type(value) not in _STREAMS:
      raise TypeError(f'{name} of a {type(value).__name__} of the tests')
    if name in ('__getattr__', '__setattr__') and not rest[0].startswith('_'):
      return (getattr if name == '__getattr__' else setattr)(value, *rest)
    if name not in _ASKED:
      raise AttributeError(rest[0] if rest else name)
    return _ASKED[name](value, *rest)

  def export(self, value: Any) -> list:
    if isinstance(value, mirror.Reference):
      return ['yours', value.number]
    if isinstance(value, mirror.Mirror) or isinstance(type(value), mirror.Mirror):
      return ['yours', self.number_of[id(value)]]
    if isinstance(value, types.CoroutineType) and id(value) in self.number_of:
      return ['yours', self.number_of[id(value)]]
    if isinstance(value, BaseException):
      return self.pack_error(value)
    kind = type(value)
    for base in mirror.HOLDERS.values():
      if isinstance(value, base):
        return self._pack_derived(value, base)
    if isinstance(value, type | types.BuiltinFunctionType) and value in _KEPT:
      raise self.cannot(f'they pass {value.__name__}, which an answer must not call here')
    called = isinstance(value, (*_FUNCTIONS, type))
    if (
      called
      or kind.__module__ in _SHOWN
      or kind in _STREAMS
      or isinstance(value, types.GeneratorType)
    ):
      name = getattr(value, '__name__', kind.__name__)
      doc = getattr(value, '__doc__', None) if called else None
      return ['theirs', self.number(value), str(name), doc, called]
    if hasattr(kind, '__next__') and kind.__module__ in ('builtins', 'itertools'):
      return self.export(part for part in value)
    raise self.cannot(f'they pass a {kind.__name__}, which cannot be sent')

  def _pack_derived(self, value: Any, base: type) -> Any:
    fields = getattr(value, '_fields', None)
    if base is tuple and fields:
      return ['named', type(value).__name__, list(fields), [wire.pack(v, self) for v in value]]
    return wire.pack(base(value), self)

  def find(self, kind: str, *packed: Any) -> Any:
    if kind == 'yours':
      return self.own[packed[0]]
    if kind == 'error':
      return self.unpack_error([kind, *packed])
    number = int(packed[0])
    if number in self.stand_ins:
      return self.stand_ins[number]
    if kind == 'class':
      return self.stand_in(number, mirror.mirror(self, number))
    return self.stand_in(number, self._object(number, self.find('class', packed[1]), packed[2]))

  def _object(self, number: int, kind: type, plain: Any) -> Any:
    if '__await__' in kind._special:
      return self._coroutine(number)
    if kind._held is None or kind._held in wire.MUTABLE:
      return object.__new__(kind)
    held = self.plain[number] = wire.unpack(plain, self)
    if type(held) is not kind._held:
      raise TypeError(f'no {kind._held.__name__}: {type(held).__name__}')
    return kind._held.__new__(kind, held)

  def _coroutine(self, number: int) -> Any:
    async def wait() -> Any:
      return self.ask('await', mirror.Reference(number))

    return wait()

  def pack_error(self, error: BaseException) -> list:
    if id(error) in self.number_of:
      return ['yours', self.number_of[id(error)]]
    if isinstance(error, Gone | CannotRun):
      raise error
    kind = next(k for k in type(error).__mro__ if wire.TYPES.get(k.__name__) is k)
    with self.unshared():
      try:
        args = wire.pack(tuple(error.args), self)
      except CannotRun:
        args = ['tuple', 0, [str(error)]]
    return ['error', kind.__name__, args, self.number(error)]

  def unpack_error(self, packed: list) -> BaseException:
    if packed[0] == 'yours':
      found = self.own[packed[1]]
      if not isinstance(found, BaseException):
        raise TypeError('no error')
      return self._note(found)
    _, kind, args, words, number, cause = packed
    if number in self.stand_ins:
      return self._note(self.stand_ins[number])
    args = wire.unpack(args, self)
    found = mirror.make_error(self, wire.unpack(kind, self), args, str(words), int(number))
    if cause is not None:
      found.__cause__ = self.unpack_error(cause)
    return self._note(found)

  def _note(self, error: BaseException) -> BaseException:
    self._from_answer[id(error)] = error
    return error

  def print(self, text: str) -> None:
    if text:
      sys.stdout.write(text)
