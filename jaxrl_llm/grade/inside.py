"""What runs inside sandboxes: an answer in one, its tests in another, and between them calls and plain values.

The tests' side holds a stand-in for every name that the tests use and neither they nor Python define. Calling it sends
the arguments over a pipe; the answer's side calls the real thing and sends back what it returned. So the answer never
meets a test, an expected value, or the place where the verdict is told: all it can do is return the right values.

Values cross as what they are made of: None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict,
deque, range, Decimal, Fraction, and subclasses of these as the class they derive from, whatever __eq__ they bring. Any
other object stays where it was made, and what crosses is a handle to it. A handle equals no plain value, whatever its
object says; two handles are compared by their objects. What a call changes in a list, dict, set or deque that it was
given is changed on the tests' side too.

Run as `python inside.py answer` and `python inside.py tests VERDICT`, each with stdin and stdout tied to the other's.
No part of the package is imported here: this file is all that a sandbox sees of it.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import importlib
import json
import operator
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

_LINE_BYTES = 1 << 26  # beyond it a message is cut, and what is cut is no message


class Gone(BaseException):
  """The answer's process is gone, or sends what is no message. No test's `except Exception` is to meet this."""


class CannotCross(BaseException):
  """The tests pass something that cannot be sent. Their fault, not the answer's."""


class AnswerError(Exception):
  """Stands for an exception of the answer's own class."""


_DEQUE = collections.deque
_SERIES = {k.__name__: k for k in (list, tuple, set, frozenset, _DEQUE, bytes, bytearray)}
_TEXTS = {
  'Decimal': 'decimal',
  'Fraction': 'fractions',
}  # class → module, imported only where it is met
_MUTABLE = (list, dict, set, _DEQUE, bytearray)


def pack(value: Any, handle: Callable[[Any], int]) -> Any:
  """A value as JSON; `handle` numbers what has to stay. Source: none."""
  kind = type(value)
  if value is None or kind is bool or kind is float:
    return value
  if isinstance(value, int):  # base-class methods: a subclass's own are not asked
    value = int.__add__(value, 0)
    return value if -(2**63) < value < 2**63 else ['int', format(value, 'x')]
  if isinstance(value, float):
    return float.__add__(value, 0.0)
  if isinstance(value, str):
    return str.__str__(value)
  if isinstance(value, complex):
    return ['complex', value.real, value.imag]
  if isinstance(value, range):
    return ['range', *(pack(part, handle) for part in (value.start, value.stop, value.step))]
  if isinstance(value, dict):
    return ['dict', [[pack(k, handle), pack(v, handle)] for k, v in dict.items(value)]]
  for name, made in _SERIES.items():
    if isinstance(value, made):
      return [name, [pack(part, handle) for part in made.__iter__(value)]]
  if _TEXTS.get(kind.__name__) == kind.__module__ and kind is _text(kind.__name__):
    return [kind.__name__, kind.__str__(value)]
  if kind.__module__ == 'numpy' and getattr(value, 'ndim', 1) == 0:
    return pack(value.item(), handle)
  return ['handle', handle(value)]


def unpack(told: Any, find: Callable[[int], Any]) -> Any:
  """What `pack` told; `find` knows the handles. Source: none."""
  if not isinstance(told, list):
    return told
  name, *rest = told
  if name == 'handle':
    return find(rest[0])
  if name == 'int':
    return int(rest[0], 16)
  if name == 'complex':
    return complex(*rest)
  if name == 'range':
    return range(*(unpack(part, find) for part in rest))
  if name == 'dict':
    return {unpack(k, find): unpack(v, find) for k, v in rest[0]}
  if name in _TEXTS:
    return _text(name)(rest[0])
  return _SERIES[name]([unpack(part, find) for part in rest[0]])


def _text(name: str) -> type:
  return getattr(importlib.import_module(_TEXTS[name]), name)


# What one side may ask of the other's objects. Not `contains` nor any other way to show them a plain value but as an
# argument: an object that says yes to all would pass for the expected value.
_UNARY = {f'__{f.__name__}__': f for f in (len, iter, next, str, repr, bool, hash)}
_BINARY = {
  f'__{name}__': getattr(operator, name)
  for name in ('lt', 'le', 'gt', 'ge', 'add', 'sub', 'mul', 'matmul', 'truediv', 'floordiv', 'mod')
}
_ASKED = {
  '__call__': lambda function, /, *args, **keywords: function(*args, **keywords),
  '__getattr__': getattr,
  '__setattr__': setattr,
  '__getitem__': operator.getitem,
  '__setitem__': operator.setitem,
  '__delitem__': operator.delitem,
  '__instancecheck__': lambda kind, value: isinstance(value, kind),
  '__eq__': operator.eq,
  **_UNARY,
  **_BINARY,
}


class Answer:
  """The answer's side: runs it, and does what the other side asks."""

  def __init__(self, calls: Any, replies: Any):
    self.calls, self.replies = calls, replies
    self.module = types.ModuleType('answer')
    self.kept: dict[int, Any] = {}

  def serve(self, source: bytes) -> None:
    """Runs the source, says so, and answers until nobody asks. Source: none."""
    sys.modules['answer'] = self.module  # where dataclasses and pickle look
    self._reply(lambda: exec(compile(source, 'answer.py', 'exec'), vars(self.module)))
    for line in self.calls:
      name, told, keywords = json.loads(line)
      if name == 'name':
        self._reply(lambda told=told: vars(self.module)[told])
        continue
      args = unpack(told, self.kept.get)
      named = {key: unpack(value, self.kept.get) for key, value in keywords.items()}
      given = args if any(isinstance(arg, _MUTABLE) for arg in args) else ()
      self._reply(lambda name=name, args=args, named=named: _ASKED[name](*args, **named), given)

  def _pack(self, value: Any) -> Any:
    def handle(other: Any) -> int:
      self.kept[id(other)] = other  # kept, so that its number stays its own
      return id(other)

    return pack(value, handle)

  def _reply(self, work: Callable, given: Any = ()) -> None:
    """Tells what `work` returns or raises, and what became of `given`, or [] where it is what it was."""
    try:
      before = self._pack(given)
      value = self._pack(work())
      after = self._pack(given)
      told = ['value', value, after if after != before else []]
    except BaseException as error:
      known = [k.__name__ for k in type(error).__mro__ if getattr(builtins, k.__name__, 0) is k]
      told = ['raise', known[0], _words(error)]
    self.replies.write(json.dumps(told).encode() + b'\n')
    self.replies.flush()


def _words(error: BaseException) -> str:
  try:
    return str(error)[:500]
  except BaseException:  # its own __str__
    return ''


class Handle:
  """An object of the answer's: all but its number is asked over the pipe."""

  __slots__ = ('_handle', '_ask')

  def __init__(self, number: int, ask: Callable):
    object.__setattr__(self, '_handle', number)
    object.__setattr__(self, '_ask', ask)

  def __getattr__(self, name: str) -> Any:
    return self._ask('__getattr__', self, name)

  def __eq__(self, other: Any) -> bool:
    # Never shown a plain value: it would say that it equals it.
    return isinstance(other, Handle) and self._ask('__eq__', self, other) is True

  def __hash__(self) -> int:
    return self._ask('__hash__', self)


def _asking(name: str) -> Callable:
  def method(self: Handle, /, *args: Any, **keywords: Any) -> Any:
    return self._ask(name, self, *args, **keywords)

  return method


def _among_handles(name: str) -> Callable:
  def method(self: Handle, other: Any) -> Any:
    # Of `answer - expected` the object would learn what it has to be.
    return self._ask(name, self, other) if isinstance(other, Handle) else NotImplemented

  return method


for _name in _ASKED:
  if _name not in ('__getattr__', '__eq__', '__hash__'):
    setattr(Handle, _name, (_among_handles if _name in _BINARY else _asking)(_name))


class Link:
  """The tests' side of the pipe."""

  def __init__(self, replies: Any, calls: Any):
    self.replies, self.calls = replies, calls
    self.gone = False

  def loaded(self) -> bool:
    """Waits for the answer to have run; whether it did without an error. Source: none."""
    try:
      self._hear()
    except Exception:
      return False
    return True

  def name(self, name: str) -> Any:
    """What the answer calls so. Source: none."""
    return self._say('name', name, {})[0]

  def ask(self, name: str, /, *args: Any, **keywords: Any) -> Any:
    """Has the answer's side do one of _ASKED. Source: none."""
    told = [pack(list(args), self._number), {k: pack(v, self._number) for k, v in keywords.items()}]
    value, changed = self._say(name, *told)
    if changed:
      for mine, theirs in zip(args, unpack(changed, self._handle), strict=True):
        _become(mine, theirs)
    return value

  def _say(self, *message: Any) -> tuple[Any, Any]:
    try:
      self.calls.write(json.dumps(message).encode() + b'\n')
      self.calls.flush()
    except OSError as error:
      self.gone = True
      raise Gone from error
    return self._hear()

  def _hear(self) -> tuple[Any, Any]:
    line = self.replies.readline(_LINE_BYTES)
    try:
      kind, *told = json.loads(line)
      if kind == 'value':
        return unpack(told[0], self._handle), told[1]
      error = getattr(builtins, told[0], AnswerError)
      words = str(told[1])
    except Exception as broken:
      self.gone = True
      raise Gone from broken
    if not issubclass(error, Exception):  # sys.exit, KeyboardInterrupt
      raise AnswerError(words)
    try:
      found = error(words)
    except TypeError:  # UnicodeDecodeError and its like, which take more than words
      found = AnswerError(words)
    raise found

  def _handle(self, number: int) -> Handle:
    return Handle(int(number), self.ask)

  def _number(self, value: Any) -> int:
    if isinstance(value, Handle):
      return value._handle
    raise CannotCross(f'the tests pass a {type(value).__name__}, which is no plain value')


def _become(mine: Any, theirs: Any) -> None:
  """Makes a value of the tests' what the answer made of its copy."""
  if isinstance(mine, list | bytearray) and isinstance(theirs, list | bytearray):
    mine[:] = theirs
  elif isinstance(mine, dict | set) and isinstance(theirs, dict | set):
    mine.clear()
    mine.update(theirs)
  elif isinstance(mine, _DEQUE):
    mine.clear()
    mine.extend(theirs)


class Names(dict):
  """The globals of tests: what they do not define comes from the answer; Python's own names do not, unless `own`."""

  def __init__(self, link: Link, own: tuple[str, ...]):
    super().__init__(__name__='tests', __builtins__=builtins)
    self._link, self._own = link, own

  def __missing__(self, name: str) -> Any:
    if hasattr(builtins, name) and name not in self._own:
      raise KeyError(name)
    self[name] = found = self._link.name(name)
    return found


def plan(sources: list[str], entry: str) -> list[tuple[str, list[str]]]:
  """For every source: what in it is to be called, one test each; nothing: it is itself a test. Source: none."""
  planned = []
  for source in sources:
    called = []
    for node in ast.parse(source).body:
      if isinstance(node, ast.FunctionDef):
        called += [node.name] * (node.name.startswith('test') or (node.name == 'check' and entry != ''))  # fmt: skip
      elif isinstance(node, ast.ClassDef) and any('TestCase' in ast.unparse(b) for b in node.bases):
        called.append(node.name)
    planned.append((source, called))
  return planned


def judged(names: Names, link: Link, planned: list, entry: str) -> Iterator[bool]:
  """Whether each test passes. Source: none."""
  for source, called in planned:
    ready = _passes(lambda source=source: exec(compile(source, 'tests.py', 'exec'), names), link)
    if not called:
      yield ready
    for name in called:
      yield ready and _passes(lambda name=name: _call(names, name, entry), link)


def _call(names: Names, name: str, entry: str) -> None:
  test = names[name]
  if isinstance(test, type):
    import unittest  # slow to import, and few need it

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(test).run(result)
    assert result.testsRun and result.wasSuccessful()
  elif test.__code__.co_argcount:
    test(names._link.name(entry))
  else:
    test()


def _passes(test: Callable, link: Link) -> bool:
  try:
    test()
  except CannotCross:
    raise
  except BaseException:
    return False
  return not link.gone  # a bare except may have swallowed that


def tests(link: Link, job: dict[str, Any], verdict: Any) -> None:
  """Tells how many tests there are, then 1 or 0 for each; or E and why they cannot be run. Source: none."""
  try:
    planned = plan(job['tests'], job['entry'])
    verdict.write(f'{sum(len(called) or 1 for _, called in planned)}\n')
    verdict.flush()
    loaded = link.loaded()
    names = Names(link, (job['entry'],))
    # A prompt may be the beginning of a program and no program.
    with contextlib.suppress(Exception):
      exec(job['prompt'], names)
      names.pop(job['entry'], None)
    if job['setup'] and not _passes(lambda: exec(job['setup'], names), link):
      loaded = False
    for passed in judged(names, link, planned, job['entry']) if loaded else ():
      verdict.write('01'[passed])
      verdict.flush()
    verdict.write('\n')
  except (CannotCross, SyntaxError) as error:
    verdict.write(f'E{type(error).__name__}: {error}\n')
  verdict.flush()


def main() -> None:
  """One of the two sides. Source: none."""
  sys.set_int_max_str_digits(0)
  read, write = os.fdopen(os.dup(0), 'rb'), os.fdopen(os.dup(1), 'wb')
  null = os.open('/dev/null', os.O_RDWR)
  for stream in (0, 1, 2):  # what is printed goes nowhere
    os.dup2(null, stream)
  if sys.argv[1] == 'answer':
    with open('/box/answer.py', 'rb') as file:
      source = file.read()
    Answer(read, write).serve(source)
  else:
    with open('/box/job.json') as file:
      job = json.load(file)
    with os.fdopen(int(sys.argv[2]), 'w') as verdict:
      tests(Link(read, write), job, verdict)


if __name__ == '__main__':
  main()
