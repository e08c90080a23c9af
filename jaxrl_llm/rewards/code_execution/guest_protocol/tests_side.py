"""The tests' side: runs the row's tests, in whose names the answer's functions and classes are stand-ins.

So the answer never meets a test, an expected value, or the place where the verdict is written: all it can do is return
the right values.
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
from typing import Any

from jaxrl_llm.rewards.code_execution.guest_protocol import mirror, pytest_stub
from jaxrl_llm.rewards.code_execution.guest_protocol.link import Link
from jaxrl_llm.rewards.code_execution.guest_protocol.mirror import CannotRun
from jaxrl_llm.rewards.code_execution.guest_protocol.plan import (
  ANSWER_MODULES,
  Source,
  free_names,
  plan,
)

# Where names come from that tests use without importing them.
_USUAL = (
  *('collections', 'math', 'itertools', 'functools', 'typing', 'datetime', 'decimal', 'fractions'),
  *('dataclasses', 'enum', 'random', 're', 'copy'),
)
_PACKAGES = ('np', 'numpy', 'pd', 'pandas', 'plt', 'pytest')


class Names(dict):
  """The globals of tests: what they do not define comes from the answer; Python's own names do not, unless `own`."""

  def __init__(self, link: Link, entry: str, free: set[str]):
    super().__init__(__name__='tests', __builtins__=builtins)
    self._link, self._free = link, free
    self._own = {node.id for node in ast.walk(ast.parse(entry)) if isinstance(node, ast.Name)}

  def __missing__(self, name: str) -> Any:
    if hasattr(builtins, name) and name not in self._own:
      raise KeyError(name)
    try:
      found, origin = self._link.ask('name', name)
    except KeyError:
      found, origin = None, ''
    # An answer may be an import, but not where the tests have forgotten theirs.
    wanted = name in self._own or self._free <= {name}
    if origin != 'defined' and not wanted and _usual(name):
      raise self._link.cannot(
        f"NameError: they use {name!r} and do not import it; do so in the row's setup"
      )
    if origin in ('', 'module'):
      raise KeyError(name)
    return self.keep(name, found)

  def keep(self, name: str, found: Any) -> Any:
    """Classes and functions are asked for once; other names may come to mean something else."""
    if isinstance(found, mirror.Mirror):
      # LeetCode's Solution is a place for functions: its operators are not what is tested.
      if name.lstrip('_')[:1].isupper() and name != 'Solution':
        found._named = True
      self[name] = found
    elif getattr(found, '__class__', None) is types.FunctionType:
      self[name] = found
    return found

  def entry(self, source: str) -> Any:
    """What an entry point names."""
    return eval(compile(source, 'entry_point', 'eval'), self)


def _usual(name: str) -> bool:
  """Whether a name is one that programs get by an import."""
  return name in (*sys.stdlib_module_names, *_PACKAGES) or any(
    hasattr(importlib.import_module(module), name) for module in _USUAL
  )


class AnswerModule(types.ModuleType):
  """The answer, as tests import it."""

  def __init__(self, name: str, names: Names):
    super().__init__(name)
    vars(self).update(_names=names, __path__=[])

  def __getattr__(self, name: str) -> Any:
    if name == '__all__':
      return self._names._link.ask('public')
    if name.startswith('__'):
      raise AttributeError(name)
    try:
      found, origin = self._names._link.ask('name', name)
    except KeyError:
      raise AttributeError(f'the answer has no {name!r}') from None
    if origin != 'module':
      return self._names.keep(name, found)
    if name not in sys.stdlib_module_names:
      raise AttributeError(f'{name!r} of the answer is a module')
    return importlib.import_module(name)

  def __setattr__(self, name: str, value: Any) -> None:
    if name.startswith('__'):
      super().__setattr__(name, value)
    else:
      self._names._link.ask('set_name', name, value)


def _forward_dataclasses(link: Link) -> None:
  """asdict and its like look into objects of the answer: there they find what they look for."""
  import dataclasses  # slow to import, and few need it

  for name in ('asdict', 'astuple', 'fields', 'replace'):
    local = getattr(dataclasses, name)

    def function(value: Any, *args: Any, local: Any = local, **more: Any) -> Any:
      theirs = isinstance(value, mirror.Mirror) or isinstance(type(value), mirror.Mirror)
      return (
        link.ask('dataclass', local.__name__, value, *args, **more)
        if theirs
        else local(value, *args, **more)
      )

    setattr(dataclasses, name, function)


def judged(names: Names, link: Link, planned: list[Source], entry: str) -> Iterator[bool]:
  """Whether each test passes. Raises CannotRun for one that cannot be run, whatever the answer."""
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
  else:  # whatever else a test calls its argument, it is what the row has it test
    pytest_stub.run(test, names, (lambda: names.entry(entry)) if entry else None)


def _call_class(test: type, names: Names) -> None:
  import unittest  # slow to import, too

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
    found = test()
    for before in ('setup_method', 'setup'):
      getattr(found, before, lambda: None)()
    pytest_stub.run(getattr(found, name), names)


def _passes(test: Callable, link: Link) -> bool:
  error = None
  try:
    test()
  except BaseException as raised:
    error = raised
  if isinstance(error, pytest_stub.Unknown):
    link.cannot(f'they need {error}, which is not in the sandbox')
  if isinstance(error, ImportError | FileNotFoundError) and not link.raised(error):
    if not (isinstance(error, ImportError) and error.name in ANSWER_MODULES):
      link.cannot(f'{type(error).__name__}: {error}')
  if link.fault is not None:  # also where an `except` of the tests has caught it
    raise link.fault
  return error is None and not link.gone  # a bare except may have swallowed that


def _prepare(names: Names, link: Link, job: dict[str, Any]) -> bool:
  """Runs what stands before the tests; False where the answer is at fault that it fails."""
  for name in ANSWER_MODULES:
    sys.modules.setdefault(name, AnswerModule(name, names))
  if importlib.util.find_spec('pytest') is None:
    pytest_stub.install()
  if any('dataclasses' in source for source in job['tests']):
    _forward_dataclasses(link)
  lines = job['program'].splitlines(True)
  linecache.cache['answer.py'] = (len(job['program']), None, lines, 'answer.py')
  # A prompt may be the beginning of a program and no program.
  with contextlib.suppress(Exception):
    exec(job['prompt'], names)
    for name in names._own:
      names.pop(name, None)
  try:
    exec(job['setup'], names)
  except Exception as error:
    if link.fault is None and not link.raised(error):
      link.cannot(f'the setup fails: {type(error).__name__}: {error}')
  if link.fault is not None:
    raise link.fault
  return not link.gone


def judge(link: Link, job: dict[str, Any], verdict: Any) -> None:
  """Writes how many tests there are, then 1 or 0 for each; or E and why they cannot be run."""
  try:
    planned = plan(job['tests'], job['setup'], job['entry'])
    verdict.write(f'{sum(len(source.called) or 1 for source in planned)}\n')
    verdict.flush()
    loaded = link.loaded()
    free = free_names([*job['tests'], job['setup']])
    names = Names(link, job['entry'], free)
    loaded = loaded and _prepare(names, link, job)
    for passed in judged(names, link, planned, job['entry']) if loaded else ():
      verdict.write('01'[passed])
      verdict.flush()
    verdict.write('\n')
  except (CannotRun, SyntaxError) as error:
    kind = '' if isinstance(error, CannotRun) else f'{type(error).__name__}: '
    verdict.write(f'E{kind}{" ".join(str(error).split())}\n')
  verdict.flush()
