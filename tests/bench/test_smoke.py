"""Every benchmark runs with `--smoke` and writes its results, started as a user would start it."""

from __future__ import annotations

import ast
import os
import pathlib
import subprocess
import sys

import pytest
import quick

BENCH = pathlib.Path(__file__).parent
ROOT = BENCH.parents[1]


def is_program(path: pathlib.Path) -> bool:
  """Whether a module can be run with `python -m`."""
  return any(
    isinstance(node, ast.If) and '__main__' in ast.unparse(node.test)
    for node in ast.parse(path.read_text()).body
  )


BENCHMARKS = sorted(path.stem for path in BENCH.glob('*.py') if is_program(path))


def missing(name: str) -> str:
  """The requirement of a benchmark that this machine lacks, or ''."""
  if name == 'slices' and os.environ.get('JAXRL_LLM_REQUIRE_AOT') != '1':
    return '' if _imports('libtpu') else "needs libtpu: pip install '.[aot]'"
  if (
    name in ('decode', 'step_time', 'time_to_accuracy')
    and os.environ.get('JAXRL_LLM_REQUIRE_PARITY') != '1'
  ):
    return '' if _imports('trl') else "needs transformers and trl: pip install '.[parity]'"
  if name == 'serving':
    return '' if _imports('starlette') else "needs starlette and uvicorn: pip install '.[serve]'"
  if name == 'code_grading' and os.environ.get('JAXRL_LLM_REQUIRE_SANDBOX') != '1':
    from jaxrl_llm.rewards.code_execution import sandbox

    return sandbox.unavailable_reason()
  return ''


def _imports(name: str) -> bool:
  import importlib.util

  return importlib.util.find_spec(name) is not None


@pytest.mark.parametrize('name', BENCHMARKS)
def test_smoke(name, tmp_path):
  if requirement := missing(name):
    pytest.skip(requirement)
  path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
  env = os.environ | dict(PYTHONPATH=path, JAX_PLATFORMS='cpu', XLA_FLAGS=quick.flags(1))
  process = subprocess.run(
    [sys.executable, '-m', f'tests.bench.{name}', '--smoke', '--write'], cwd=tmp_path, env=env, timeout=280,
    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
  )  # fmt: skip
  assert process.returncode == 0, process.stdout
  assert not os.listdir(tmp_path), 'a smoke run must not write where real runs do'
  assert 'written to ' in process.stdout


def test_no_module_shadows_the_standard_library():
  """A script's folder comes first on sys.path: `selectors.py` beside it would shadow Python's."""
  folders = [BENCH, BENCH / 'lib', ROOT / 'tests']
  shadowing = [
    str(path.relative_to(ROOT))
    for folder in folders
    for path in folder.glob('*.py')
    if path.stem in sys.stdlib_module_names
  ]
  assert shadowing == []
