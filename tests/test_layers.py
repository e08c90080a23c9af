"""Imports point down only; siblings never import each other; configs import nothing of ours."""

from __future__ import annotations

import ast
import pathlib
import re
import sys
import tomllib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = 'jaxrl_llm'

# From the bottom up. A package may import those of lower rows, and no others.
LAYERS = (
  ('types',),
  ('config', 'distributed'),
  ('checkpointing',),
  ('data', 'models', 'rewards'),
  ('curriculum', 'environments', 'monitoring', 'objective', 'replay', 'rollout'),
  ('learner', 'serving'),
  ('step',),
  ('profiling',),
  ('report',),
  ('runner',),
  ('evaluation',),
  ('commands',),
  ('train',),
  ('main',),
)
RANK = {name: rank for rank, row in enumerate(LAYERS) for name in row}

# Where the name to import differs from the name to install.
IMPORTED_AS = {'absl_py': 'absl', 'orbax_checkpoint': 'orbax'}


def imported(path: pathlib.Path, root: pathlib.Path, nested: bool = True) -> Iterator[str]:
  """Absolute dotted names that a file imports; without `nested`, only what runs at import."""
  tree = ast.parse(path.read_text(), str(path))
  for node in ast.walk(tree) if nested else _at_import(tree):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      here = path.relative_to(root).parts[: -node.level] if node.level else ()
      base = '.'.join((*here, *filter(None, [node.module])))
      yield from (f'{base}.{alias.name}' for alias in node.names)


def _at_import(node: ast.AST) -> Iterator[ast.AST]:
  for child in ast.iter_child_nodes(node):
    for_types = isinstance(child, ast.If) and ast.unparse(child.test) == 'TYPE_CHECKING'
    if not for_types and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
      yield child
      yield from _at_import(child)


def files(root: pathlib.Path, folder: str) -> list[pathlib.Path]:
  return sorted((root / folder).rglob('*.py'))


def unit(dotted: str) -> str | None:
  """'jaxrl_llm.models.load' → 'models'; '' for the package itself; None for anything else."""
  first, *rest = dotted.split('.')
  return None if first != PACKAGE else (rest[0] if rest else '')


def breaches(root: pathlib.Path) -> list[str]:
  """One sentence for every import that does not point down."""
  found = []
  for path in files(root, PACKAGE):
    name = str(path.relative_to(root))
    own = unit('.'.join(path.relative_to(root).with_suffix('').parts))
    if own == '__init__':
      found += [f'{name} imports {n}.' for n in imported(path, root) if unit(n) is not None]
      continue
    for dotted in imported(path, root):
      other = unit(dotted)
      if other is not None and other != own and RANK.get(other, len(LAYERS)) >= RANK.get(own, -1):
        found.append(f'{name} imports {dotted}, which is not below it.')
  for path in files(root, 'configs'):
    found += [
      f'{path.relative_to(root)} imports {n}.' for n in imported(path, root) if unit(n) is not None
    ]
  return found


def foreign(root: pathlib.Path, core: set[str]) -> list[str]:
  """One sentence for every import of an optional dependency that runs when a module is imported."""
  allowed = core | set(sys.stdlib_module_names) | {PACKAGE}
  return [
    f'{path.relative_to(root)} imports {dotted} when it is imported.'
    for path in files(root, PACKAGE)
    for dotted in imported(path, root, nested=False)
    if dotted.split('.')[0] not in allowed
  ]


def core_dependencies() -> set[str]:
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
  names = (re.split(r'[^\w.-]', line)[0].replace('-', '_') for line in project['dependencies'])
  return {IMPORTED_AS.get(name, name) for name in names}


def test_imports_point_down():
  assert files(ROOT, PACKAGE), 'no source found: the test looks in the wrong place'
  assert breaches(ROOT) == []


def test_every_package_has_a_row_and_the_root_holds_five_files():
  found = {unit('.'.join(p.relative_to(ROOT).with_suffix('').parts)) for p in files(ROOT, PACKAGE)}
  assert found - {'__init__'} == set(RANK) and len(LAYERS) <= 15
  assert len(list((ROOT / PACKAGE).glob('*.py'))) <= 5


def test_optional_dependencies_are_imported_where_they_are_used():
  assert foreign(ROOT, core_dependencies()) == []


@pytest.mark.parametrize(
  'path, source, why',
  [
    ('jaxrl_llm/objective/trust_region.py', 'from jaxrl_llm.rollout import sampling', 'not below'),
    ('jaxrl_llm/curriculum/selection.py', 'import jaxrl_llm.replay.buffer', 'not below'),
    ('jaxrl_llm/curriculum/selection.py', 'from ..replay import buffer', 'not below'),
    ('jaxrl_llm/data/files.py', 'from jaxrl_llm import rewards', 'not below'),
    ('jaxrl_llm/distributed/sharding.py', 'from jaxrl_llm import config', 'not below'),
    ('jaxrl_llm/rewards/pool.py', 'def f():\n  from jaxrl_llm.train import run', 'not below'),
    ('jaxrl_llm/types.py', 'from jaxrl_llm.config.stages import pick', 'not below'),
    ('jaxrl_llm/new.py', 'from jaxrl_llm import step', 'not below'),
    ('jaxrl_llm/data/files.py', 'from jaxrl_llm.new import thing', 'not below'),
    ('jaxrl_llm/step.py', 'from jaxrl_llm import train', 'not below'),
    ('jaxrl_llm/data/files.py', 'import jaxrl_llm', 'not below'),
    ('jaxrl_llm/__init__.py', 'from jaxrl_llm import train', 'imports jaxrl_llm.train'),
    ('configs/grpo.py', 'from jaxrl_llm.config import schema', 'imports jaxrl_llm.config'),
  ],
)
def test_a_planted_breach_is_found(tmp_path, path, source, why):
  (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
  (tmp_path / path).write_text(source)
  (found,) = breaches(tmp_path)
  assert path in found and why in found


@pytest.mark.parametrize(
  'path, source',
  [
    ('jaxrl_llm/objective/ratio.py', 'from jaxrl_llm.objective import trust_region'),
    ('jaxrl_llm/objective/ratio.py', 'from . import trust_region\nfrom ..types import Batch'),
    ('jaxrl_llm/step.py', 'from jaxrl_llm import learner, objective\nimport jax'),
    ('jaxrl_llm/models/load.py', 'import jaxrl_llm.types'),
    ('configs/grpo.py', 'import ml_collections'),
  ],
)
def test_an_import_that_points_down_is_no_breach(tmp_path, path, source):
  (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
  (tmp_path / path).write_text(source)
  assert breaches(tmp_path) == []


def test_a_planted_optional_dependency_is_found(tmp_path):
  (tmp_path / PACKAGE / 'data').mkdir(parents=True)
  source = (
    'import numpy as np\nif np:\n  import torch.nn\nif TYPE_CHECKING:\n  import grain\n'
    'def f():\n  import wandb\n'
  )
  (tmp_path / PACKAGE / 'data' / 'files.py').write_text(source)
  assert foreign(tmp_path, {'numpy'}) == [
    'jaxrl_llm/data/files.py imports torch.nn when it is imported.'
  ]
