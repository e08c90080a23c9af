"""The public API: names of `jaxrl_llm` itself, loaded on first use."""

from __future__ import annotations

import importlib
import pathlib
import re
import subprocess
import sys

import pytest

import jaxrl_llm

# Public name → the object that it stands for.
API = {
  'Config': 'config.schema:Config',
  'Curriculum': 'curriculum.curriculum:Curriculum',
  'UserError': 'types:UserError',
  'coefficients': 'objective:coefficients',
  'default_config': 'config.schema:default',
  'forward': 'models.decoder:forward',
  'load_config': 'config.loading:load',
  'load_model': 'models.load:load',
  'run': 'train:run',
  'sample': 'rollout.text_generation:sample',
  'score': 'rewards:score',
}
FUNCTIONS = (
  'train.run', 'models.load', 'models.forward', 'rollout.sample', 'objective.coefficients',
  'curriculum.Curriculum', 'rewards.score', 'types.UserError',
)  # fmt: skip


def output(code: str) -> str:
  return subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True, timeout=120
  ).stdout


def test_importing_the_package_imports_no_jax():
  code = 'import sys, jaxrl_llm; print({"jax", "jaxlib", "numpy"} & {*sys.modules})'
  assert output(code) == 'set()\n'


def test_what_grading_workers_use_imports_no_jax():
  code = (
    'import sys, jaxrl_llm; jaxrl_llm.score; jaxrl_llm.Curriculum; jaxrl_llm.load_config; '
    'print("jax" in sys.modules)'
  )
  assert output(code) == 'False\n'


@pytest.mark.parametrize('name', API)
def test_a_public_name_is_the_object_of_its_module(name):
  module, _, attribute = API[name].partition(':')
  want = getattr(importlib.import_module(f'jaxrl_llm.{module}'), attribute)
  assert getattr(jaxrl_llm, name) is want


@pytest.mark.parametrize('path', FUNCTIONS)
def test_a_function_is_reached_through_its_package_in_a_fresh_process(path):
  assert output(f'import jaxrl_llm; print(callable(jaxrl_llm.{path}))') == 'True\n'


def test_all_names_exist_and_others_do_not():
  assert set(API) < set(jaxrl_llm.__all__) <= set(dir(jaxrl_llm))
  assert all(getattr(jaxrl_llm, name) is not None for name in jaxrl_llm.__all__)
  with pytest.raises(AttributeError, match="'jaxrl_llm' has no attribute 'nothing'"):
    jaxrl_llm.nothing  # noqa: B018


def test_the_version_is_a_version_and_types_are_shipped():
  assert re.fullmatch(r'\d+\.\d+\.\d+(\+\w+)?', jaxrl_llm.__version__)
  package = pathlib.Path(jaxrl_llm.__file__).parent
  project = (package.parent / 'pyproject.toml').read_text()
  assert (package / 'py.typed').exists() and "'jaxrl_llm' = ['py.typed']" in project
