"""Limits of size and vocabulary: lengths of functions and files, fields of records, words of a private dialect."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]
LINES, POSITIONAL, BRANCHES, FIELDS = 60, 8, 15, 15
# The sections of the configuration list one field for each setting.
SCHEMA = ('jaxrl_llm/config/schema.py', 'jaxrl_llm/config/data_sections.py')
WORDS = re.compile(r'\b(told|tell|tells|nobody|nowhere)\b')
BANNED_MODULES = set(
  'aid tell look same together sight turn floor outer seats span weigh inside facts'.split()
)


def sources() -> list[pathlib.Path]:
  return sorted((ROOT / 'jaxrl_llm').rglob('*.py'))


def name_of(path: pathlib.Path) -> str:
  return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
  return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
  """Nodes of a function without those of the functions in it."""
  for child in ast.iter_child_nodes(function):
    if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
      yield child
      yield from own_nodes(child)


def complexity(function: ast.AST) -> int:
  """McCabe's number: 1 + decisions."""
  decisions = ast.If | ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler | ast.match_case
  return 1 + sum(isinstance(node, decisions) for node in own_nodes(function))


def fields(node: ast.ClassDef) -> int:
  return sum(isinstance(item, ast.AnnAssign) for item in node.body)


def is_record(node: ast.ClassDef) -> bool:
  names = {
    ast.unparse(x).split('(')[0].rpartition('.')[2] for x in (*node.bases, *node.decorator_list)
  }
  return bool(names & {'NamedTuple', 'dataclass', 'TypedDict'})


def faults(source: str, name: str) -> list[str]:
  """One sentence for each function or record over its limit."""
  found, tree = [], ast.parse(source, name)
  for node in functions(tree):
    where = f'{name}:{node.lineno} {node.name}'
    lines = node.end_lineno - node.lineno + 1
    positional = len(node.args.posonlyargs) + len(node.args.args)
    if lines > LINES:
      found.append(f'{where} has {lines} lines, more than {LINES}.')
    if positional > POSITIONAL:
      found.append(f'{where} has {positional} positional parameters, more than {POSITIONAL}.')
    if complexity(node) > BRANCHES:
      found.append(f'{where} has complexity {complexity(node)}, more than {BRANCHES}.')
  for node in ast.walk(tree):
    if (
      isinstance(node, ast.ClassDef)
      and is_record(node)
      and fields(node) > FIELDS
      and name not in SCHEMA
    ):
      found.append(
        f'{name}:{node.lineno} {node.name} has {fields(node)} fields, more than {FIELDS}.'
      )
  return found


def test_functions_and_records_are_small():
  assert [fault for path in sources() for fault in faults(path.read_text(), name_of(path))] == []


@pytest.mark.parametrize(
  'source, why',
  [
    ('def f():\n' + '  x = 1\n' * 60, '61 lines'),
    ('def f(a, b, c, d, e, g, h, i, j):\n  pass', '9 positional'),
    ('def f(x):\n' + '  if x: pass\n' * 15, 'complexity 16'),
    ('class R(NamedTuple):\n' + ''.join(f'  f{i}: int\n' for i in range(16)), '16 fields'),
    (
      '@dataclasses.dataclass(frozen=True)\nclass R:\n'
      + ''.join(f'  f{i}: int\n' for i in range(16)),
      '16 fields',
    ),
  ],
)
def test_a_planted_fault_is_found(source, why):
  (found,) = faults(source, 'm.py')
  assert why in found


def count(pattern: re.Pattern) -> int:
  """Lines that match, in the package and the README."""
  files = [*sources(), ROOT / 'README.md', *sorted((ROOT / 'jaxrl_llm').rglob('*.md'))]
  files += [p for p in sorted((ROOT / 'jaxrl_llm' / 'report' / 'assets').iterdir()) if p.is_file()]
  return sum(bool(pattern.search(line)) for path in files for line in path.read_text().splitlines())


def test_the_private_vocabulary_is_gone():
  assert count(WORDS) <= 20
  assert count(re.compile('Source: none')) == 0
  assert not BANNED_MODULES & {path.stem for path in sources()}


def test_settings_are_typed():
  assert count(re.compile('config: Any')) == 0
  assert sum(len(re.findall(r'\bAny\b', path.read_text())) for path in sources()) <= 250


def test_the_readme_and_the_notes_are_short():
  assert len((ROOT / 'README.md').read_text().split()) <= 1300
  assert len((ROOT / 'BUILD_NOTES.md').read_text().split()) <= 3000
