"""The part of pytest that tests of programs use, where pytest itself is not in the sandbox."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from jaxrl_llm.rewards.code_execution.guest_protocol.wire import Value

if TYPE_CHECKING:
  import io


class Raises:
  """with raises(E, match=…) as info: … info.value is the error."""

  def __init__(self, expected: type | tuple[type, ...], match: str | None = None):
    self.expected, self.match, self.value, self.type = expected, match, None, None

  def __enter__(self) -> Raises:
    return self

  def __exit__(
    self, kind: type | None, value: BaseException | None, trace: types.TracebackType | None
  ) -> bool:
    assert kind is not None, f'DID NOT RAISE {self.expected}'
    if not issubclass(kind, self.expected):
      return False
    self.value, self.type = value, kind
    if self.match is not None:
      assert re.search(self.match, str(value)), f'{self.match!r} does not match {str(value)!r}'
    return True


def raises(
  expected: type | tuple[type, ...], *call: Value, match: str | None = None, **keywords: Value
) -> Raises:
  """A context, or a direct call of a function with its arguments."""
  context = Raises(expected, match)
  if call:
    with context:
      call[0](*call[1:], **keywords)
  return context


class approx:
  """Equal to numbers within the tolerance, also inside of lists, tuples and dicts."""

  __array_ufunc__ = None

  def __init__(self, expected: Value, rel: float | None = None, abs: float | None = None):
    self.expected, self.rel, self.abs = expected, rel, abs

  def __eq__(self, actual: Value) -> bool:
    want = self.expected
    if isinstance(want, dict):
      return actual.keys() == want.keys() and all(self._of(v) == actual[k] for k, v in want.items())
    if isinstance(want, list | tuple) or hasattr(want, 'tolist'):
      return len(actual) == len(want) and all(self._of(w) == f for f, w in zip(actual, want))  # noqa: B905
    if isinstance(actual, bool | int | float | complex) or hasattr(actual, '__float__'):
      if actual == want:
        return True
      absolute = 1e-12 if self.abs is None else self.abs
      relative = 0 if self.rel is None and self.abs is not None else (self.rel or 1e-6)
      near = max(absolute, relative * abs(want))
      return abs(want) != float('inf') and bool(abs(_number(actual) - want) <= near)
    return False

  __hash__ = None

  def _of(self, want: Value) -> approx:
    return approx(want, self.rel, self.abs)


def _number(value: Value) -> Value:
  return value if isinstance(value, bool | int | float | complex) else float(value)


def _parametrize(names: str | Sequence[str], values: Iterable, ids: Value = None) -> Callable:
  del ids
  names = [n.strip() for n in names.split(',')] if isinstance(names, str) else list(names)
  rows = [dict(zip(names, row if len(names) > 1 else [row], strict=True)) for row in values]

  def mark(test: Callable) -> Callable:
    test.cases = [*getattr(test, 'cases', ()), rows]
    return test

  return mark


class _Marks:
  parametrize = staticmethod(_parametrize)

  def __getattr__(self, name: str) -> Value:
    if name in ('asyncio', 'timeout', 'slow', 'unit'):
      return lambda *args, **more: args[0] if args and callable(args[0]) else lambda test: test
    raise Unknown(f'pytest.mark.{name}')


class Unknown(BaseException):
  """A part of pytest, or a fixture, that does not exist here."""


def fixture(function: Callable | None = None, **settings: Value) -> Callable:
  """Mark a function as a fixture: tests get its value by its name."""
  del settings
  if function is None:
    return fixture
  function.is_fixture = True
  return function


class _Printed:
  """The fixture capsys."""

  def __init__(self, out: io.StringIO, err: io.StringIO):
    self._streams = (out, err)

  def readouterr(self) -> types.SimpleNamespace:
    texts = [stream.getvalue() for stream in self._streams]
    for stream in self._streams:
      stream.seek(0)
      stream.truncate()
    return types.SimpleNamespace(out=texts[0], err=texts[1])


@contextlib.contextmanager
def capsys() -> Iterator[_Printed]:
  """A context that captures printed text."""
  import io

  with contextlib.redirect_stdout(io.StringIO()) as out:
    with contextlib.redirect_stderr(io.StringIO()) as err:
      yield _Printed(out, err)


def run(test: Callable, names: dict[str, Value], other: Callable | None = None) -> None:
  """Call a test with each of its parametrized cases and with the fixtures of `names`.

  other: returns the value of any other argument. Without it such an argument raises Unknown.
  """
  for case in itertools.product(*getattr(test, 'cases', ())):
    with contextlib.ExitStack() as stack:
      values = {name: value for row in case for name, value in row.items()}
      finish(test(**_arguments(test, values, names, stack, other)))


def finish(value: Value) -> None:
  """Run the coroutine of an async test."""
  if isinstance(value, types.CoroutineType):
    import asyncio

    asyncio.run(value)


def _arguments(
  test: Callable, values: dict, names: dict, stack: contextlib.ExitStack, other: Callable | None
) -> dict[str, Value]:
  import inspect  # slow to import

  return {
    name: _value(name, values, names, stack, other)
    for name, parameter in inspect.signature(test).parameters.items()
    if parameter.default is parameter.empty or name in values
  }


def _value(
  name: str, values: dict, names: dict, stack: contextlib.ExitStack, other: Callable | None
) -> Value:
  if name in values:
    return values[name]
  function = names.get(name)
  if getattr(function, 'is_fixture', False) is True:
    value = function(**_arguments(function, values, names, stack, other))
    if isinstance(value, types.GeneratorType):
      generator, value = value, next(value)
      stack.callback(next, generator, None)
  elif name == 'capsys':
    value = stack.enter_context(capsys())
  elif other is None:
    raise Unknown(f'the fixture {name!r}')
  else:
    value = other()
  values[name] = value
  return value


def module() -> types.ModuleType:
  """The module for `import pytest`."""
  stub = types.ModuleType('pytest')
  vars(stub).update(raises=raises, approx=approx, fixture=fixture, mark=_Marks(), fail=_fail)
  stub.__getattr__ = _unknown
  return stub


def _fail(reason: str = '', pytrace: bool = True) -> None:
  raise AssertionError(reason)


def _unknown(name: str) -> Value:
  if name.startswith('__'):
    raise AttributeError(name)
  raise Unknown(f'pytest.{name}')


def install() -> None:
  """Register the stub as the module pytest."""
  sys.modules.setdefault('pytest', module())
