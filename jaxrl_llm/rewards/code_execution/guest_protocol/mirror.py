"""Stand-ins on the tests' side for classes and objects of the answer.

A class of the answer is a class here, with stand-ins for its bases and the special methods that it has; its objects are
objects of that class, which ask the other side for everything. An object of a class that derives from int, str, tuple,
… also holds the plain value, which alone is compared.

No object may pass for a value that it is not. It is never shown a plain value to compare itself with. Where it gets
one as the other operand, it is of a class that the tests name, and nothing is read off the result by which a
difference from an expected value could be denied: see `_binary`. What these rules stop is an error of the row for a
class that the tests name, since a right program could mean it, and an ordinary TypeError for any other.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxrl_llm.rewards.code_execution.guest_protocol import wire


class CannotRun(BaseException):
  """The tests do what cannot be done. An error of the row: no test's `except Exception` is to catch this."""


HOLDERS = {
  kind.__name__: kind for kind in (int, float, complex, str, bytes, tuple, frozenset, *wire.MUTABLE)
}
_LATE = dict(Decimal='decimal', Fraction='fractions')  # imported where they are met
# Standard modules whose errors tests may catch.
_ERRORS = frozenset(
  'json.decoder decimal dataclasses queue asyncio.exceptions statistics struct csv copy enum configparser'.split()
)
_COMPARERS = (
  'tests',
  'unittest.mock',
  'jaxrl_llm.rewards.code_execution.guest_protocol.pytest_stub',
  '_pytest.python_api',
)
# What isinstance, inspect and asyncio look for.
_KINDS = {
  kind.__name__: kind
  for kind in (
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.GeneratorType),
    *(types.CodeType, types.AsyncGeneratorType, map, filter, zip, enumerate, reversed),
  )
}

_TEXT = ('__str__', '__repr__', '__format__')
_PLAIN = (
  *('__call__', '__next__', '__enter__', '__exit__', '__aiter__', '__anext__', '__aenter__', '__aexit__'),
  *('__setitem__', '__delitem__', '__dir__'),
)  # fmt: skip
_READ = (
  *('__len__', '__iter__', '__reversed__', '__getitem__', '__bool__', '__abs__', '__int__', '__float__'),
  *('__complex__', '__round__', '__trunc__', '__floor__', '__ceil__', '__bytes__'),
  *('__length_hint__', '__neg__', '__pos__', '__invert__', '__index__'),
)  # fmt: skip
_SAME_KIND = ('__neg__', '__pos__', '__invert__')  # which give another object, as a rule
_COMPARE = dict(__lt__='lt', __le__='le', __gt__='gt', __ge__='ge')
# Operators by which a value is compared with an expected one, as in abs(f(2) - 4) < 1e-9.
_DIFFERENCE = ('sub', 'truediv', 'floordiv', 'mod', 'divmod', 'xor')
_OPERATORS = ('add', 'mul', 'matmul', 'pow', 'lshift', 'rshift', 'and', 'or', *_DIFFERENCE)


class Mirror(type):
  """The class of stand-ins for classes."""

  def __new__(cls, name: str, bases: tuple, space: dict, **more: Any) -> Any:
    above = [base._link for base in bases if isinstance(base, Mirror)]
    if above and '_link' not in space:
      raise above[0].cannot(f'they derive {name} from a class of the answer')
    return super().__new__(cls, name, bases, space, **more)

  def __call__(cls, *args: Any, **keywords: Any) -> Any:
    return cls._link.ask('__call__', cls, *args, **keywords)

  def __getattr__(cls, name: str) -> Any:
    return cls._link.ask('__getattr__', cls, name)

  def __setattr__(cls, name: str, value: Any) -> None:
    if name.startswith('_abc') or name in ('_named', '__doc__'):
      type.__setattr__(cls, name, value)
    else:
      cls._link.ask('__setattr__', cls, name, value)

  def __instancecheck__(cls, value: Any) -> bool:
    if type.__instancecheck__(cls, value):
      return True
    # Of its own objects the answer may say so: a class registered with an ABC.
    return _ours(value) and cls._link.ask('__instancecheck__', cls, value) is True

  def __iter__(cls) -> Any:
    return cls._link.ask('__iter__', cls)

  def __len__(cls) -> int:
    return cls._link.ask('__len__', cls)

  def __bool__(cls) -> bool:
    return True

  def __getitem__(cls, key: Any) -> Any:
    return cls._link.ask('__getitem__', cls, key)

  def __contains__(cls, value: Any) -> bool:
    return _ours(value) and cls._link.ask('__contains__', cls, value) is True

  def __reversed__(cls) -> Any:
    return cls._link.ask('__reversed__', cls)


def _named(kind: type) -> bool:
  return any(vars(k).get('_named') for k in kind.__mro__)


class Object(metaclass=Mirror):
  """An object of the answer's."""

  _link: Any = None
  _held: Any = None  # the class of the plain value that it holds
  _known: Any = None  # a class of the standard library that isinstance is to find

  def __getattribute__(self, name: str) -> Any:
    kind = type(self)
    if name == '__class__':
      return kind._known or kind
    if name in (
      '__reduce_ex__',
      '__copy__',
      '__deepcopy__',
    ):  # pickle and copy ask the object for them
      return object.__getattribute__(self, name)
    held = kind._held
    if held is not None and hasattr(held, name) and not (name in kind._own and _named(kind)):
      return object.__getattribute__(_content(self) if held in wire.MUTABLE else self, name)
    return kind._link.ask('__getattr__', self, name)

  def __setattr__(self, name: str, value: Any) -> None:
    type(self)._link.ask('__setattr__', self, name, value)

  def __delattr__(self, name: str) -> None:
    type(self)._link.ask('__delattr__', self, name)

  def __copy__(self) -> Any:
    return type(self)._link.ask('__copy__', self)

  def __deepcopy__(self, memory: Any) -> Any:
    return type(self)._link.ask('__deepcopy__', self)

  def __reduce_ex__(self, protocol: int) -> Any:
    raise type(self)._link.cannot('they pickle an object of the answer')


def _content(value: Any) -> Any:
  """The plain value that an object holds, or the object."""
  kind = type(value)
  if not isinstance(kind, Mirror) or kind._held is None:
    return value
  if kind._held in wire.MUTABLE:
    return kind._link.ask('plain', value)
  return kind._link.plain[kind._link.number_of[id(value)]]


def _ours(value: Any) -> bool:
  return isinstance(type(value), Mirror)


def _equal(self: Any, other: Any) -> bool:
  kind = type(self)
  own = '__eq__' in kind._own
  if kind._held is not None and not (own and _ours(other) and _named(kind)):
    return _content(self) == _content(other)
  if _ours(other):
    return kind._link.ask('__eq__', self, other) is True
  if type(other).__module__ in _COMPARERS:
    return NotImplemented  # mock.ANY, approx: they decide
  if own and other is not None and _named(kind):
    raise kind._link.cannot(f'they compare a {kind.__name__} of the answer with a plain value')
  return False  # never shown a plain value: it would say that it equals it


def _hash(self: Any) -> int:
  kind = type(self)
  return hash(_content(self)) if kind._held is not None else kind._link.ask('__hash__', self)


def _read(name: str) -> Callable:
  """A special method that is shown no plain value but a key."""

  def method(self: Any, /, *args: Any) -> Any:
    kind = type(self)
    if kind._held is not None and not (_named(kind) and name in kind._own):
      return getattr(_content(self), name)(*args)
    link, tainted = kind._link, kind._link.tainted
    found = link.ask(name, self, *args)
    if link.number_of[id(self)] in tainted:
      if name not in _SAME_KIND or not _ours(found) or type(found)._held is not None:
        raise link.cannot(f'they read {name} of the difference of a {kind.__name__} and a value')
      tainted.add(link.number_of[id(found)])
    return found

  return method


def _plain(name: str) -> Callable:
  def method(self: Any, /, *args: Any, **keywords: Any) -> Any:
    if name in ('__exit__', '__aexit__'):
      args = (*args[:2], None)  # a traceback stays here
    return type(self)._link.ask(name, self, *args, **keywords)

  return method


def _contains(self: Any, value: Any) -> bool:
  kind = type(self)
  if kind._held is not None and not (_named(kind) and '__contains__' in kind._own):
    return _content(value) in _content(self)
  if _ours(value) or (_named(kind) and '__contains__' in kind._special):
    return kind._link.ask('__contains__', self, value) is True
  # An object that says yes to all would pass for a container of the expected value: its items are compared here.
  return any(item is value or item == value for item in kind._link.ask('__iter__', self))


def _binary(method_name: str, name: str, reflected: bool = False) -> Callable:
  """An operator. With a plain operand, what it gives must be an object; of a difference, nothing can be read."""

  def method(self: Any, other: Any) -> Any:
    kind = type(self)
    link = kind._link
    if kind._held is not None and not (_named(kind) and method_name in kind._own):
      return getattr(_content(self), method_name)(_content(other))
    ours = _ours(other)
    if not ours and not _named(kind):
      return NotImplemented
    if name in _COMPARE.values():
      if not ours:
        raise link.cannot(f'they order a {kind.__name__} of the answer and a plain value')
      return link.ask(name, self, other)
    pair = (other, self) if reflected else (self, other)
    found = link.ask({'and': 'and_', 'or': 'or_', 'divmod': '__divmod__'}.get(name, name), *pair)
    inherits = any(_ours(v) and link.number_of[id(v)] in link.tainted for v in pair)
    if inherits or (name in _DIFFERENCE and not ours):
      if not _ours(found) or type(found)._held is not None:
        raise link.cannot(
          f'they read the difference of a {kind.__name__} of the answer and a value'
        )
      link.tainted.add(link.number_of[id(found)])
    return found

  return method


def _in_place(method_name: str, name: str) -> Callable:
  """As `_binary`: `x -= 4` shows x a 4, too, and what is bound to x then may be anything."""

  def method(self: Any, other: Any) -> Any:
    kind = type(self)
    link, ours, held = kind._link, _ours(other), kind._held
    if held is not None and not _named(kind):
      changed = getattr(_content(self), method_name, None)
      return NotImplemented if changed is None else changed(_content(other))
    if not ours and not _named(kind):
      return NotImplemented
    found = link.ask(name, self, other)
    if held in wire.MUTABLE and found is not self:
      raise link.cannot(f'{method_name} of a {kind.__name__} gives another object')
    inherits = any(_ours(v) and link.number_of[id(v)] in link.tainted for v in (self, other))
    if inherits or (name[1:] in _DIFFERENCE and not ours):
      if not _ours(found) or type(found)._held is not None:
        raise link.cannot(
          f'they read the difference of a {kind.__name__} of the answer and a value'
        )
      link.tainted.add(link.number_of[id(found)])
    return found

  return method


METHODS = {name: _plain(name) for name in (*_TEXT, *_PLAIN)}
METHODS |= {name: _read(name) for name in _READ} | {'__contains__': _contains}
METHODS |= {name: _binary(name, short) for name, short in _COMPARE.items()}
for _short in _OPERATORS:
  METHODS[f'__{_short}__'] = _binary(f'__{_short}__', _short)
  METHODS[f'__r{_short}__'] = _binary(f'__r{_short}__', _short, True)
  if _short != 'divmod':
    METHODS[f'__i{_short}__'] = _in_place(f'__i{_short}__', f'i{_short}')


class Reference(NamedTuple):
  """An object of the answer's without a stand-in."""

  number: int


def mirror(link: Any, number: int) -> type:
  """The stand-in for the answer's class of that number."""
  told = link.ask('describe', Reference(number))
  if found := _standard(told):
    return found
  special, own, holds = set(told['special']), set(told['own']), told['holds']
  if holds in _LATE:
    held = getattr(importlib.import_module(_LATE[holds]), holds)
  else:
    held = HOLDERS.get(holds)
  fixed = held is not None and held not in wire.MUTABLE
  errors = [b for b in told['bases'] if issubclass(b, BaseException)]
  space = dict(
    _link=link, _own=own, _special=special, _held=held, _named=False, __doc__=told['doc']
  )
  space |= dict(__module__=str(told['module']), _known=_known(told, held))
  if errors:
    space |= error_space()
  else:
    space |= _methods(special, own, held, told['hashes'])
  bases = tuple(b for b in told['bases'] if issubclass(b, Object | BaseException)) or (Object,)
  if fixed and not any(issubclass(b, held) for b in bases):
    bases = (*bases, held)
  try:
    found = type.__call__(Mirror, str(told['name']), bases, space)
  except TypeError:  # an order of bases that cannot be had without those left out
    bases = (errors[0],) if errors else (Object, *((held,) if fixed else ()))
    found = type.__call__(Mirror, str(told['name']), bases, space)
  _register(found, told['bases'])
  return found


def _methods(special: set, own: set, held: type | None, hashes: bool) -> dict[str, Any]:
  wanted = set(METHODS) & (special if held is None or held in wire.MUTABLE else own)
  if held is None or held in wire.MUTABLE:
    wanted |= {'__str__', '__repr__', '__format__', '__dir__'}
  # 3 + x asks x first where its class has only __radd__, and the other side finds out.
  for name in _OPERATORS:
    if {f'__{name}__', f'__r{name}__'} & wanted:
      wanted |= {f'__{name}__', f'__r{name}__'} - ({f'__r{name}__'} if held else set())
  found = {name: METHODS[name] for name in wanted}
  if '__getitem__' in wanted and '__iter__' not in wanted:
    found['__iter__'] = METHODS['__iter__']  # by items from 0 up, on the other side
  return found | dict(__eq__=_equal, __hash__=_hash if hashes else None)


def _known(told: dict, held: type | None) -> type | None:
  if held in wire.MUTABLE:
    return held
  found = _KINDS.get(told['name'])
  if found is None and told['module'] in sys.stdlib_module_names:
    found = getattr(sys.modules.get(told['module']), told['name'], None)
  return found if isinstance(found, type) and held is None else None


def _standard(told: dict) -> type | None:
  """An error class of the standard library, which both sides have."""
  if told['module'] not in _ERRORS:
    return None
  found = getattr(importlib.import_module(told['module']), told['name'], None)
  return found if isinstance(found, type) and issubclass(found, Exception) else None


def _register(found: type, bases: list) -> None:
  """Makes a class one of the abstract classes of the standard library that the answer derives it from."""
  for base in bases:
    known = getattr(base, '_known', None)
    if hasattr(known, 'register') and known is not found:
      known.register(found)


class AnswerError(Exception):
  """Stands for an error that ends programs, or that cannot be made here."""


def make_error(link: Any, kind: Any, args: Any, words: str, number: int) -> BaseException:
  """The stand-in for an error of the answer. Only what a test may meet: neither Ctrl-C nor the end of a generator."""
  if not isinstance(kind, type) or not issubclass(kind, Exception | SystemExit):
    return AnswerError(words)
  try:
    found = BaseException.__new__(kind, *args) if isinstance(kind, Mirror) else kind(*args)
  except Exception:
    try:
      found = kind.__new__(kind, *args)
    except Exception:
      return AnswerError(words)
  if isinstance(kind, Mirror):
    BaseException.__setattr__(found, '_words', words)
    link.stand_in(number, found)
  return found


def error_space() -> dict[str, Any]:
  """What stand-ins for classes of errors have instead of the methods of Object."""

  def __str__(self: Any) -> str:
    return self._words

  def __getattr__(self: Any, name: str) -> Any:
    if name == '_words':
      return ''
    return type(self)._link.ask('__getattr__', self, name)

  return dict(__str__=__str__, __getattr__=__getattr__)
