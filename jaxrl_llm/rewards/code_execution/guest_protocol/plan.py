"""The tests of a row, parsed without running them; sources that can never run are an error of the row."""

from __future__ import annotations

import ast
import builtins
import importlib.util
from typing import NamedTuple

from jaxrl_llm.rewards.code_execution.guest_protocol.errors import RowError

# Names under which tests import the program, where no such module can be imported.
PROGRAM_MODULES = frozenset(
  'solution answer main submission candidate program your_module my_module your_solution user_code'.split()
)


class Source(NamedTuple):
  """One of the row's tests."""

  text: str
  called: list[str]  # its test functions and classes; empty: the source itself is one test


def plan(sources: list[str], setup: str, entry: str) -> list[Source]:
  """Parse the tests of every source. Raises SyntaxError, and RowError for sources without a test."""
  if entry:
    _check_entry(entry)
  _check_imports(ast.parse(setup))
  planned = []
  for source in sources:
    tree = ast.parse(source)
    _check_imports(tree)
    called = [node.name for node in tree.body if _is_test(node, entry)]
    if not called and not any(_acts(node) for node in tree.body):
      check = any(getattr(node, 'name', '') == 'check' for node in tree.body)
      reason = 'they define check(candidate), and the row has no entry_point'
      raise RowError(reason if check else f'nothing is tested by {source[:60]!r}')
    planned.append(Source(source, called))
  return planned


def _is_test(node: ast.stmt, entry: str) -> bool:
  if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
    return node.name.startswith('test') or (node.name == 'check' and entry != '')
  if not isinstance(node, ast.ClassDef):
    return False
  if any('TestCase' in ast.unparse(base) for base in node.bases):
    return True
  names = [getattr(part, 'name', '') for part in node.body]
  return node.name.startswith('Test') and any(name.startswith('test') for name in names)


def _acts(node: ast.stmt) -> bool:
  """Whether a statement can fail because of the program."""
  if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import):
    return False
  if isinstance(node, ast.ImportFrom):
    return node.module in PROGRAM_MODULES
  if isinstance(node, ast.Assign | ast.AnnAssign):
    return any(isinstance(part, ast.Call) for part in ast.walk(node))
  return not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _check_entry(entry: str) -> None:
  """Raise RowError unless the entry point is f, Class.f, Class().f or module.f, as an expression."""
  try:
    root = ast.parse(entry, mode='eval').body
  except SyntaxError:
    root = None
  while isinstance(root, ast.Attribute | ast.Call):
    root = root.value if isinstance(root, ast.Attribute) else root.func
  if not isinstance(root, ast.Name):
    raise RowError(
      f'the entry_point {entry!r} is not a function: write f, or Class().f for a method'
    )


def _check_imports(tree: ast.Module) -> None:
  """Raise RowError for a module that cannot be imported, unless the import is in a try statement."""
  tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try)]
  optional = {id(node) for statement in tries for node in ast.walk(statement)}
  for node in ast.walk(tree):
    names = []
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      names = [node.module or '.' * node.level]
    for name in names if id(node) not in optional else ():
      root = name.partition('.')[0]
      if root not in (*PROGRAM_MODULES, 'pytest') and not (root and importlib.util.find_spec(root)):
        raise RowError(
          f'they import {name!r}, which is not in the sandbox; config.rewards.packages=True adds the installed packages'
        )


def free_names(sources: list[str]) -> set[str]:
  """Names that the sources use and do not bind, without Python's builtins."""
  used, bound = set(), set(vars(builtins)) | {'__file__'}
  for node in (node for source in sources for node in ast.walk(ast.parse(source))):
    if isinstance(node, ast.Name):
      (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
      bound.add(node.name)
    elif isinstance(node, ast.arg):
      bound.add(node.arg)
    elif isinstance(node, ast.alias):
      bound.add((node.asname or node.name).partition('.')[0])
    elif isinstance(node, ast.ExceptHandler) and node.name:
      bound.add(node.name)
  return used - bound
