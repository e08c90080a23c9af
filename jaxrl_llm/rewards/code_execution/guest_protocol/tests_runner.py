"""Runs the row's tests; the program's functions and classes are stand-ins in their names.

The program never gets a test, an expected value, or access to the verdict. It can only return correct values.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import linecache
import sys
import types
from collections.abc import Callable, Iterator
from typing import TextIO, TypedDict

from jaxrl_llm.rewards.code_execution.guest_protocol import mirror, pytest_stub
from jaxrl_llm.rewards.code_execution.guest_protocol.errors import RowError
from jaxrl_llm.rewards.code_execution.guest_protocol.plan import (
  PROGRAM_MODULES,
  Source,
  free_names,
  plan,
)
from jaxrl_llm.rewards.code_execution.guest_protocol.tests_peer import TestsPeer
from jaxrl_llm.rewards.code_execution.guest_protocol.wire import Value


class Job(TypedDict):
  """The tests of a row: the content of job.json."""

  tests: list[str]  # sources
  setup: str
  entry: str  # the entry point, '' for none
  prompt: str
  program: str


# Modules with names that tests use without importing them.
_STANDARD = (
  *('collections', 'math', 'itertools', 'functools', 'typing', 'datetime', 'decimal', 'fractions'),
  *('dataclasses', 'enum', 'random', 're', 'copy'),
)
_PACKAGES = ('np', 'numpy', 'pd', 'pandas', 'plt', 'pytest')


class Names(dict):
  """The globals of the tests. Names that they do not define come from the program.

  Python's builtins do not, except for the names of the entry point.
  """

  def __init__(self, link: TestsPeer, entry: str, free: set[str]):
    super().__init__(__name__='tests', __builtins__=builtins)
    self._link, self._free = link, free
    self._entry_names = {
      node.id for node in ast.walk(ast.parse(entry)) if isinstance(node, ast.Name)
    }

  def __missing__(self, name: str) -> Value:
    if hasattr(builtins, name) and name not in self._entry_names:
      raise KeyError(name)
    try:
      value, origin = self._link.request('name', name)
    except KeyError:
      value, origin = None, ''
    # The program may import the name, but not in place of an import that the tests lack.
    wanted = name in self._entry_names or self._free <= {name}
    if origin != 'defined' and not wanted and _importable(name):
      raise self._link.cannot(
        f"NameError: they use {name!r} and do not import it; import it in the row's setup"
      )
    if origin in ('', 'module'):
      raise KeyError(name)
    return self.store(name, value)

  def store(self, name: str, value: Value) -> Value:
    """Store classes and functions, so that they are requested once; other names may be rebound."""
    if isinstance(value, mirror.Mirror):
      # LeetCode's Solution is a namespace of functions; its operators are not under test.
      if name.lstrip('_')[:1].isupper() and name != 'Solution':
        value._named = True
      self[name] = value
    elif getattr(value, '__class__', None) is types.FunctionType:
      self[name] = value
    return value

  def entry(self, source: str) -> Value:
    """The object that the entry point names."""
    return eval(compile(source, 'entry_point', 'eval'), self)


def _importable(name: str) -> bool:
  """Whether programs usually import a name."""
  return name in (*sys.stdlib_module_names, *_PACKAGES) or any(
    hasattr(importlib.import_module(module), name) for module in _STANDARD
  )


class ProgramModule(types.ModuleType):
  """The program as a module that tests import."""

  def __init__(self, name: str, names: Names):
    super().__init__(name)
    vars(self).update(_names=names, __path__=[])

  def __getattr__(self, name: str) -> Value:
    if name == '__all__':
      return self._names._link.request('public')
    if name.startswith('__'):
      raise AttributeError(name)
    try:
      value, origin = self._names._link.request('name', name)
    except KeyError:
      raise AttributeError(f'the program has no {name!r}') from None
    if origin != 'module':
      return self._names.store(name, value)
    if name not in sys.stdlib_module_names:
      raise AttributeError(f'{name!r} of the program is a module')
    return importlib.import_module(name)

  def __setattr__(self, name: str, value: Value) -> None:
    if name.startswith('__'):
      super().__setattr__(name, value)
    else:
      self._names._link.request('set_name', name, value)


def _forward_dataclasses(link: TestsPeer) -> None:
  """Let asdict, astuple, fields and replace run on the program's side for objects of the program."""
  import dataclasses  # slow to import, and rarely needed

  for name in ('asdict', 'astuple', 'fields', 'replace'):
    local = getattr(dataclasses, name)

    def function(value: Value, *args: Value, local: Value = local, **more: Value) -> Value:
      of_program = isinstance(value, mirror.Mirror) or isinstance(type(value), mirror.Mirror)
      return (
        link.request('dataclass', local.__name__, value, *args, **more)
        if of_program
        else local(value, *args, **more)
      )

    setattr(dataclasses, name, function)


def results(names: Names, link: TestsPeer, planned: list[Source], entry: str) -> Iterator[bool]:
  """Run the tests; yield whether each passes. Raises RowError for a test that no program could pass."""
  for source in planned:
    code = compile(source.text, 'tests.py', 'exec', dont_inherit=True)
    ready = _passes(lambda code=code: exec(code, names), link)
    if not source.called:
      yield ready
    for name in source.called:
      yield ready and _passes(lambda name=name: _call(names, name, entry), link)


def _call(names: Names, name: str, entry: str) -> None:
  test = names[name]
  if isinstance(test, type):
    _call_class(test, names)
  elif name == 'check' and entry:
    pytest_stub.finish(test(names.entry(entry)))
  else:  # an argument of any other name is the entry point
    pytest_stub.run(test, names, (lambda: names.entry(entry)) if entry else None)


def _call_class(test: type, names: Names) -> None:
  import unittest  # slow to import

  if issubclass(test, unittest.TestCase):
    errors = []
    result = unittest.TestResult()
    result.addError = lambda case, error: errors.append(error[1])
    unittest.defaultTestLoader.loadTestsFromTestCase(test).run(result)
    if errors:
      raise errors[0]
    assert result.testsRun and result.wasSuccessful()
    return
  for name in [name for name in vars(test) if name.startswith('test')]:
    instance = test()
    for before in ('setup_method', 'setup'):
      getattr(instance, before, lambda: None)()
    pytest_stub.run(getattr(instance, name), names)


def _passes(test: Callable, link: TestsPeer) -> bool:
  error = None
  try:
    test()
  except BaseException as raised:
    error = raised
  if isinstance(error, pytest_stub.Unknown):
    link.cannot(f'they need {error}, which is not in the sandbox')
  if isinstance(error, ImportError | FileNotFoundError) and not link.raised(error):
    if not (isinstance(error, ImportError) and error.name in PROGRAM_MODULES):
      link.cannot(f'{type(error).__name__}: {error}')
  if link.fault is not None:  # even if an `except` of the tests has caught it
    raise link.fault
  return error is None and not link.gone  # a bare except may have caught Gone


def _prepare(names: Names, link: TestsPeer, job: Job) -> bool:
  """Run the prompt and the setup; return False where the program makes them fail."""
  for name in PROGRAM_MODULES:
    sys.modules.setdefault(name, ProgramModule(name, names))
  if importlib.util.find_spec('pytest') is None:
    pytest_stub.install()
  if any('dataclasses' in source for source in job['tests']):
    _forward_dataclasses(link)
  lines = job['program'].splitlines(True)
  linecache.cache['answer.py'] = (len(job['program']), None, lines, 'answer.py')
  # A prompt may be the beginning of a program, which does not compile.
  with contextlib.suppress(Exception):
    exec(job['prompt'], names)
    for name in names._entry_names:
      names.pop(name, None)
  try:
    exec(job['setup'], names)
  except Exception as error:
    if link.fault is None and not link.raised(error):
      link.cannot(f'the setup fails: {type(error).__name__}: {error}')
  if link.fault is not None:
    raise link.fault
  return not link.gone


def write_verdict(link: TestsPeer, job: Job, verdict: TextIO) -> None:
  """Write the number of tests, then 1 or 0 for each; or E and the reason that they cannot run."""
  try:
    planned = plan(job['tests'], job['setup'], job['entry'])
    verdict.write(f'{sum(len(source.called) or 1 for source in planned)}\n')
    verdict.flush()
    loaded = link.loaded()
    free = free_names([*job['tests'], job['setup']])
    names = Names(link, job['entry'], free)
    loaded = loaded and _prepare(names, link, job)
    for passed in results(names, link, planned, job['entry']) if loaded else ():
      verdict.write('01'[passed])
      verdict.flush()
    verdict.write('\n')
  except (RowError, SyntaxError) as error:
    kind = '' if isinstance(error, RowError) else f'{type(error).__name__}: '
    verdict.write(f'E{kind}{" ".join(str(error).split())}\n')
  verdict.flush()
