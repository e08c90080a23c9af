"""JSON encoding of values, for both sides of the pipe.

Plain values are encoded by their content: the types below, matched by exact class, so that a subclass's `__eq__` has no
effect. A list, dict, set or bytearray may carry a number, by which a later change on one side reaches the other. Any
other object stays where it is and is encoded as a number: see Peer.export.
"""

from __future__ import annotations

import builtins
import collections
import importlib
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
  from jaxrl_llm.rewards.code_execution.guest_protocol.peer import Peer

Value: TypeAlias = Any  # a Python value of the program or of its tests
Packed: TypeAlias = Any  # its JSON; the other side may send anything

SERIES = {k.__name__: k for k in (list, set, collections.deque, bytearray, tuple, frozenset, bytes)}
MUTABLE = (list, set, collections.deque, bytearray, dict)
VIEWS = {type({}.keys()): 'keys', type({}.values()): 'values', type({}.items()): 'items'}
_DATA = (
  *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range),
  *(slice, memoryview, enumerate, zip, map, filter, reversed, object, types.NoneType),
)
# Classes that both sides have. No functions: a program must not make the tests' side run `eval`.
TYPES = {kind.__name__: kind for kind in _DATA} | {
  name: kind
  for name, kind in vars(builtins).items()
  if isinstance(kind, type) and issubclass(kind, BaseException)
}
_SINGLE = {'Ellipsis': ..., 'NotImplemented': NotImplemented}


def _moment(value: Value) -> tuple:
  return value.hour, value.minute, value.second, value.microsecond, value.tzinfo


# (module, class) → constructor arguments that make an equal value.
_NEW: dict[tuple[str, str], Callable[[Value], tuple]] = {
  ('decimal', 'Decimal'): lambda v: (str(v),),
  ('fractions', 'Fraction'): lambda v: (v.numerator, v.denominator),
  ('datetime', 'date'): lambda v: (v.year, v.month, v.day),
  ('datetime', 'time'): _moment,
  ('datetime', 'datetime'): lambda v: (v.year, v.month, v.day, *_moment(v)),
  ('datetime', 'timedelta'): lambda v: (v.days, v.seconds, v.microseconds),
  ('datetime', 'timezone'): lambda v: (v.utcoffset(None), v.tzname(None)),
  ('uuid', 'UUID'): lambda v: (str(v),),
  ('pathlib', 'PosixPath'): lambda v: (str(v),),
  ('pathlib', 'PurePosixPath'): lambda v: (str(v),),
  ('collections', 'Counter'): lambda v: (dict(v),),
  ('collections', 'OrderedDict'): lambda v: (list(v.items()),),
  ('collections', 'defaultdict'): lambda v: (v.default_factory, dict(v)),
  ('collections', 'ChainMap'): lambda v: tuple(v.maps),
  ('builtins', 'mappingproxy'): lambda v: (dict(v),),
}  # fmt: skip
_HOME = {('builtins', 'mappingproxy'): types.MappingProxyType}


def _recipe(kind: type) -> tuple[str, str] | None:
  """The key in _NEW of exactly this class, None for another class of the same name."""
  key = (kind.__module__, kind.__qualname__)
  if type(key[0]) is not str or key not in _NEW:
    return None
  home = _HOME.get(key) or getattr(sys.modules.get(key[0]), key[1], None)
  return key if home is kind else None


def pack(value: Value, peer: Peer) -> Packed:
  """A value as JSON. peer: assigns numbers to containers, and to objects that stay on this side."""
  kind = type(value)
  if value is None or kind in (bool, float, str):
    return value
  if kind is int:
    return value if -(2**63) < value < 2**63 else ['int', format(value, 'x')]
  if kind is dict:
    number = peer.share(value)
    return ['dict', number, [[pack(k, peer), pack(v, peer)] for k, v in value.items()]]
  if SERIES.get(kind.__name__) is kind:
    number = peer.share(value) if kind in MUTABLE else 0
    more = [value.maxlen] if kind is collections.deque else []
    return [kind.__name__, number, [pack(part, peer) for part in value], *more]
  if kind is complex:
    return ['complex', value.real, value.imag]
  if kind in (range, slice):
    return [kind.__name__, *(pack(part, peer) for part in (value.start, value.stop, value.step))]
  if kind in VIEWS:
    with peer.unshared():
      return ['view', VIEWS[kind], pack(list(value), peer)]
  if kind is memoryview:
    return ['memoryview', pack(value.tobytes(), peer)]
  return _pack_rare(value, kind, peer)


def _pack_rare(value: Value, kind: type, peer: Peer) -> list:
  for name, single in _SINGLE.items():
    if value is single:
      return ['single', name]
  if isinstance(value, type):
    known = TYPES.get(value.__name__) is value
    return ['type', value.__name__] if known else peer.export(value)
  if key := _recipe(kind):
    number = peer.share(value) if isinstance(value, dict) else 0
    with peer.unshared():  # the arguments exist only for the message
      return ['new', *key, number, [pack(part, peer) for part in _NEW[key](value)]]
  if kind.__module__ == 'numpy' and (packed := _pack_array(value, peer)):
    return packed
  return peer.export(value)


def _pack_array(value: Value, peer: Peer) -> list | None:
  """An array of numbers, booleans or text, or a scalar of numpy; None for anything else."""
  numpy = sys.modules['numpy']
  if type(value) is not numpy.ndarray and not isinstance(value, numpy.generic):
    return None
  if value.dtype.kind not in 'biufcSU':
    return None
  return ['array', value.dtype.str, list(value.shape), pack(value.ravel().tolist(), peer)]


def unpack(packed: Packed, peer: Peer) -> Value:
  """The value of JSON from `pack`. May raise any Exception for other JSON."""
  if not isinstance(packed, list):
    return packed
  name, *rest = packed
  if name == 'dict' or name in SERIES:
    return _unpack_series(packed, peer)
  if name == 'int':
    return int(rest[0], 16)
  if name == 'complex':
    return complex(*rest)
  if name in ('range', 'slice'):
    return TYPES[name](*(unpack(part, peer) for part in rest))
  if name == 'view':
    return _view(rest[0], unpack(rest[1], peer))
  if name == 'memoryview':
    return memoryview(unpack(rest[0], peer))
  if name == 'single':
    return _SINGLE[rest[0]]
  if name == 'type':
    return TYPES[rest[0]]
  if name == 'new':
    key = (rest[0], rest[1])
    kind = _HOME.get(key) or (key in _NEW and getattr(importlib.import_module(key[0]), key[1]))
    args = [unpack(part, peer) for part in rest[3]]
    if key[1] == 'Fraction' and not all(type(arg) is int for arg in args):
      raise TypeError(
        'a fraction of objects'
      )  # a Fraction would store these, and compute with them
    return peer.shared(rest[2], kind(*args))
  if name == 'array':
    return _array(*rest, peer)
  return peer.find(name, *rest)


def _unpack_series(packed: list, peer: Peer) -> Value:
  name, number, parts, *more = packed
  if name == 'dict':
    return peer.shared(number, {unpack(k, peer): unpack(v, peer) for k, v in parts})
  series = SERIES[name]([unpack(part, peer) for part in parts], *more)
  return peer.shared(number, series)


def _view(name: str, items: list) -> Value:
  if name == 'keys':
    return dict.fromkeys(items).keys()
  return dict(items).items() if name == 'items' else dict(enumerate(items)).values()


def _array(kind: str, shape: list, items: Packed, peer: Peer) -> Value:
  numpy = importlib.import_module('numpy')
  array = numpy.array(unpack(items, peer), numpy.dtype(kind)).reshape(shape)
  return array if shape else array[()]


def replace_content(target: Value, source: Value) -> None:
  """Give a list, dict, set, deque or bytearray the content of another."""
  if target is source:
    return
  if isinstance(target, list | bytearray):
    target[:] = source
    return
  target.clear()
  (target.extend if isinstance(target, collections.deque) else target.update)(source)
