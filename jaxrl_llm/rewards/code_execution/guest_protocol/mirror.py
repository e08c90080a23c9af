"""Stand-ins on the tests' side for classes and objects of the program.

A class of the program is represented by a class with stand-ins for its bases and with its special methods. Its objects
are objects of that class and forward every operation to the other side. An object of a class that derives from int,
str, tuple, … also holds its plain value, which alone is compared.

No object may pass for a value that it is not. The program never gets a plain value to compare an object with. Where an
object gets a plain value as the other operand, its class is one that the tests name, and no result is read by which a
difference from an expected value could be denied: see `_binary`. An operation that these rules forbid is an error of
the row for a class that the tests name, because a correct program could need it, and a TypeError for any other class.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from jaxrl_llm.rewards.code_execution.guest_protocol import wire
from jaxrl_llm.rewards.code_execution.guest_protocol.errors import ProgramError, error_space
from jaxrl_llm.rewards.code_execution.guest_protocol.wire import Value

if TYPE_CHECKING:
  from jaxrl_llm.rewards.code_execution.guest_protocol.tests_peer import TestsPeer

Description: TypeAlias = dict[str, Value]  # of a class: see ProgramPeer._describe


_BASES = (int, float, complex, str, bytes, tuple, frozenset, *wire.MUTABLE)
PLAIN_TYPES = {kind.__name__: kind for kind in _BASES}
_LATE = dict(Decimal='decimal', Fraction='fractions')  # imported on demand
# Standard modules whose errors tests may catch.
_ERRORS = frozenset(
  'json.decoder decimal dataclasses queue asyncio.exceptions statistics struct csv copy enum configparser'.split()
)
_COMPARERS = (
  *('tests', 'unittest.mock', '_pytest.python_api'),
  'jaxrl_llm.rewards.code_execution.guest_protocol.pytest_stub',
)
# Classes that isinstance, inspect and asyncio recognize.
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
_SAME_KIND = ('__neg__', '__pos__', '__invert__')  # which usually return another object
_COMPARE = dict(__lt__='lt', __le__='le', __gt__='gt', __ge__='ge')
# Operators by which a value is compared with an expected one, as in abs(f(2) - 4) < 1e-9.
_DIFFERENCE = ('sub', 'truediv', 'floordiv', 'mod', 'divmod', 'xor')
_OPERATORS = ('add', 'mul', 'matmul', 'pow', 'lshift', 'rshift', 'and', 'or', *_DIFFERENCE)


class Mirror(type):
  """The metaclass of stand-ins for classes."""

  def __new__(cls, name: str, bases: tuple, space: dict, **more: Value) -> Value:
    above = [base._link for base in bases if isinstance(base, Mirror)]
    if above and '_link' not in space:
      raise above[0].cannot(f'they derive {name} from a class of the program')
    return super().__new__(cls, name, bases, space, **more)

  def __call__(cls, *args: Value, **keywords: Value) -> Value:
    return cls._link.request('__call__', cls, *args, **keywords)

  def __getattr__(cls, name: str) -> Value:
    return cls._link.request('__getattr__', cls, name)

  def __setattr__(cls, name: str, value: Value) -> None:
    if name.startswith('_abc') or name in ('_named', '__doc__'):
      type.__setattr__(cls, name, value)
    else:
      cls._link.request('__setattr__', cls, name, value)

  def __instancecheck__(cls, value: Value) -> bool:
    if type.__instancecheck__(cls, value):
      return True
    # The program decides for its own objects: their class may be registered with an ABC.
    return _is_stand_in(value) and cls._link.request('__instancecheck__', cls, value) is True

  def __iter__(cls) -> Value:
    return cls._link.request('__iter__', cls)

  def __len__(cls) -> int:
    return cls._link.request('__len__', cls)

  def __bool__(cls) -> bool:
    return True

  def __getitem__(cls, key: Value) -> Value:
    return cls._link.request('__getitem__', cls, key)

  def __contains__(cls, value: Value) -> bool:
    return _is_stand_in(value) and cls._link.request('__contains__', cls, value) is True

  def __reversed__(cls) -> Value:
    return cls._link.request('__reversed__', cls)


def _named(kind: type) -> bool:
  """Whether the tests name the class or one of its bases."""
  return any(vars(k).get('_named') for k in kind.__mro__)


class Object(metaclass=Mirror):
  """A stand-in for an object of the program."""

  _link: TestsPeer = None  # set in every derived class
  _plain_type: type | None = None  # the class of its plain value
  _known: type | None = None  # the class of the standard library that isinstance must report

  def __getattribute__(self, name: str) -> Value:
    kind = type(self)
    if name == '__class__':
      return kind._known or kind
    # pickle and copy look these up on the object.
    if name in ('__reduce_ex__', '__copy__', '__deepcopy__'):
      return object.__getattribute__(self, name)
    plain_type = kind._plain_type
    if (
      plain_type is not None
      and hasattr(plain_type, name)
      and not (name in kind._defined and _named(kind))
    ):
      return object.__getattribute__(_content(self) if plain_type in wire.MUTABLE else self, name)
    return kind._link.request('__getattr__', self, name)

  def __setattr__(self, name: str, value: Value) -> None:
    type(self)._link.request('__setattr__', self, name, value)

  def __delattr__(self, name: str) -> None:
    type(self)._link.request('__delattr__', self, name)

  def __copy__(self) -> Value:
    return type(self)._link.request('__copy__', self)

  def __deepcopy__(self, memory: Value) -> Value:
    return type(self)._link.request('__deepcopy__', self)

  def __reduce_ex__(self, protocol: int) -> Value:
    raise type(self)._link.cannot('they pickle an object of the program')


def _content(value: Value) -> Value:
  """The plain value of an object, or the object itself without one."""
  kind = type(value)
  if not isinstance(kind, Mirror) or kind._plain_type is None:
    return value
  if kind._plain_type in wire.MUTABLE:
    return kind._link.request('plain', value)
  return kind._link.plain[kind._link.number_of[id(value)]]


def _is_stand_in(value: Value) -> bool:
  return isinstance(type(value), Mirror)


def _equal(self: Object, other: Value) -> bool:
  kind = type(self)
  defined = '__eq__' in kind._defined
  if kind._plain_type is not None and not (defined and _is_stand_in(other) and _named(kind)):
    return _content(self) == _content(other)
  if _is_stand_in(other):
    return kind._link.request('__eq__', self, other) is True
  if type(other).__module__ in _COMPARERS:
    return NotImplemented  # mock.ANY and approx compare themselves
  if defined and other is not None and _named(kind):
    raise kind._link.cannot(f'they compare a {kind.__name__} of the program with a plain value')
  return False  # given the plain value, its __eq__ could claim equality


def _hash(self: Object) -> int:
  kind = type(self)
  return (
    hash(_content(self)) if kind._plain_type is not None else kind._link.request('__hash__', self)
  )


def _read(name: str) -> Callable:
  """A special method that gets no plain value except a key."""

  def method(self: Object, /, *args: Value) -> Value:
    kind = type(self)
    if kind._plain_type is not None and not (_named(kind) and name in kind._defined):
      return getattr(_content(self), name)(*args)
    link, tainted = kind._link, kind._link.tainted
    result = link.request(name, self, *args)
    if link.number_of[id(self)] in tainted:
      if name not in _SAME_KIND or not _is_stand_in(result) or type(result)._plain_type is not None:
        raise link.cannot(f'they read {name} of the difference of a {kind.__name__} and a value')
      tainted.add(link.number_of[id(result)])
    return result

  return method


def _plain(name: str) -> Callable:
  def method(self: Object, /, *args: Value, **keywords: Value) -> Value:
    if name in ('__exit__', '__aexit__'):
      args = (*args[:2], None)  # a traceback is not sent
    return type(self)._link.request(name, self, *args, **keywords)

  return method


def _contains(self: Object, value: Value) -> bool:
  kind = type(self)
  if kind._plain_type is not None and not (_named(kind) and '__contains__' in kind._defined):
    return _content(value) in _content(self)
  if _is_stand_in(value) or (_named(kind) and '__contains__' in kind._special):
    return kind._link.request('__contains__', self, value) is True
  # An object whose __contains__ is always true could pass for a container of the value: compare its items here.
  return any(item is value or item == value for item in kind._link.request('__iter__', self))


def _binary(method_name: str, name: str, reflected: bool = False) -> Callable:
  """An operator. With a plain operand the result must be an object; a difference is tainted and cannot be read."""

  def method(self: Object, other: Value) -> Value:
    kind = type(self)
    link = kind._link
    if kind._plain_type is not None and not (_named(kind) and method_name in kind._defined):
      return getattr(_content(self), method_name)(_content(other))
    both_objects = _is_stand_in(other)
    if not both_objects and not _named(kind):
      return NotImplemented
    if name in _COMPARE.values():
      if not both_objects:
        raise link.cannot(f'they order a {kind.__name__} of the program and a plain value')
      return link.request(name, self, other)
    pair = (other, self) if reflected else (self, other)
    result = link.request(
      {'and': 'and_', 'or': 'or_', 'divmod': '__divmod__'}.get(name, name), *pair
    )
    return _tainted(link, kind, pair, result, name in _DIFFERENCE and not both_objects)

  return method


def _tainted(link: TestsPeer, kind: type, operands: tuple, result: Value, differs: bool) -> Value:
  """`result`, tainted where it is a difference from a plain value, or an operand is tainted.

  Raises RowError where a tainted result is no object: the tests would read it.
  """
  inherits = any(_is_stand_in(v) and link.number_of[id(v)] in link.tainted for v in operands)
  if inherits or differs:
    if not _is_stand_in(result) or type(result)._plain_type is not None:
      raise link.cannot(f'they read the difference of a {kind.__name__} of the program and a value')
    link.tainted.add(link.number_of[id(result)])
  return result


def _in_place(method_name: str, name: str) -> Callable:
  """As `_binary`: in `x -= 4`, too, the object gets a plain 4, and its result may be anything."""

  def method(self: Object, other: Value) -> Value:
    kind = type(self)
    link, both_objects, plain_type = kind._link, _is_stand_in(other), kind._plain_type
    if plain_type is not None and not _named(kind):
      changed = getattr(_content(self), method_name, None)
      return NotImplemented if changed is None else changed(_content(other))
    if not both_objects and not _named(kind):
      return NotImplemented
    result = link.request(name, self, other)
    if plain_type in wire.MUTABLE and result is not self:
      raise link.cannot(f'{method_name} of a {kind.__name__} gives another object')
    return _tainted(link, kind, (self, other), result, name[1:] in _DIFFERENCE and not both_objects)

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
  """An object of the program without a stand-in."""

  number: int


def stand_in_class(link: TestsPeer, number: int) -> type:
  """The stand-in for the program's class of that number."""
  description = link.request('describe', Reference(number))
  if standard := _standard(description):
    return standard
  special, defined = set(description['special']), set(description['defined'])
  plain_name = description['plain_name']
  if plain_name in _LATE:
    plain_type = getattr(importlib.import_module(_LATE[plain_name]), plain_name)
  else:
    plain_type = PLAIN_TYPES.get(plain_name)
  fixed = plain_type is not None and plain_type not in wire.MUTABLE
  errors = [b for b in description['bases'] if issubclass(b, BaseException)]
  space = dict(
    _link=link, _defined=defined, _special=special, _plain_type=plain_type, _named=False,
    _known=_known(description, plain_type),
    __module__=str(description['module']), __doc__=description['doc'],
  )  # fmt: skip
  if errors:
    space |= error_space()
  else:
    space |= _methods(special, defined, plain_type, description['hashes'])
  bases = tuple(b for b in description['bases'] if issubclass(b, Object | BaseException)) or (
    Object,
  )
  if fixed and not any(issubclass(b, plain_type) for b in bases):
    bases = (*bases, plain_type)
  try:
    stand_in = type.__call__(Mirror, str(description['name']), bases, space)
  except TypeError:  # the omitted bases leave no consistent method resolution order
    bases = (errors[0],) if errors else (Object, *((plain_type,) if fixed else ()))
    stand_in = type.__call__(Mirror, str(description['name']), bases, space)
  _register(stand_in, description['bases'])
  return stand_in


def _methods(special: set, defined: set, plain_type: type | None, hashes: bool) -> dict[str, Value]:
  wanted = set(METHODS) & (special if plain_type is None or plain_type in wire.MUTABLE else defined)
  if plain_type is None or plain_type in wire.MUTABLE:
    wanted |= {'__str__', '__repr__', '__format__', '__dir__'}
  # A class with only one of __add__ and __radd__ gets both; the other side resolves which one applies.
  for name in _OPERATORS:
    if {f'__{name}__', f'__r{name}__'} & wanted:
      wanted |= {f'__{name}__', f'__r{name}__'} - ({f'__r{name}__'} if plain_type else set())
  methods = {name: METHODS[name] for name in wanted}
  if '__getitem__' in wanted and '__iter__' not in wanted:
    methods['__iter__'] = METHODS['__iter__']  # the other side iterates by index
  return methods | dict(__eq__=_equal, __hash__=_hash if hashes else None)


def _known(description: Description, plain_type: type | None) -> type | None:
  if plain_type in wire.MUTABLE:
    return plain_type
  known = _KINDS.get(description['name'])
  if known is None and description['module'] in sys.stdlib_module_names:
    known = getattr(sys.modules.get(description['module']), description['name'], None)
  return known if isinstance(known, type) and plain_type is None else None


def _standard(description: Description) -> type | None:
  """An error class of the standard library, which both sides have."""
  if description['module'] not in _ERRORS:
    return None
  known = getattr(importlib.import_module(description['module']), description['name'], None)
  return known if isinstance(known, type) and issubclass(known, Exception) else None


def _register(stand_in: type, bases: list) -> None:
  """Register a class with the abstract classes of the standard library that it derives from."""
  for base in bases:
    known = getattr(base, '_known', None)
    if hasattr(known, 'register') and known is not stand_in:
      known.register(stand_in)


def make_error(
  link: TestsPeer, kind: Value, args: Value, message: str, number: int
) -> BaseException:
  """The stand-in for an error of the program.

  Errors that a test must not get, such as KeyboardInterrupt and GeneratorExit, become a ProgramError.
  """
  if not isinstance(kind, type) or not issubclass(kind, Exception | SystemExit):
    return ProgramError(message)
  try:
    error = BaseException.__new__(kind, *args) if isinstance(kind, Mirror) else kind(*args)
  except Exception:
    try:
      error = kind.__new__(kind, *args)
    except Exception:
      return ProgramError(message)
  if isinstance(kind, Mirror):
    BaseException.__setattr__(error, '_error_text', message)
    link.stand_in(number, error)
  return error
