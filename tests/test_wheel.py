"""The wheel: built, checked, installed in a clean environment, and run there by its console script.

Needs a package index. The environment is made new each time, so that nothing of this clone is importable.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest
import quick

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = ('pyproject.toml', 'README.md', 'LICENSE', 'jaxrl_llm', 'configs')
# A reward function of a user in the folder from which the script is started.
OWN = 'def odd(solution_str, **_):\n  return float(len(solution_str) % 2)\n'
TINY = (
  '--config=tiny', '--config.steps=2', '--config.prompts=4', '--config.rollouts=4', '--config.sft.steps=2',
  '--config.sft.prompts=4', '--config.data.size=40', '--config.evaluation.prompts=4', '--config.evaluation.samples=1',
  '--config.scratch.width=32', '--config.scratch.layers=1', '--config.scratch.heads=2', '--config.scratch.kv_heads=1',
  '--config.scratch.mlp=64', '--config.rewards.fn=own:odd',
)  # fmt: skip

pytestmark = pytest.mark.timeout(1800)


def run(*command: str, cwd: pathlib.Path, **env: str) -> str:
  done = subprocess.run(
    [*map(str, command)], cwd=cwd, env=os.environ | env, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
  return done.stdout


@pytest.fixture(scope='module')
def wheel(tmp_path_factory) -> pathlib.Path:
  """Built from a copy, because setuptools writes into the folder."""
  folder = tmp_path_factory.mktemp('source')
  ignored = shutil.ignore_patterns('__pycache__', '*.egg-info')
  for name in SOURCES:
    copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
    copy(ROOT / name, folder / name, **(dict(ignore=ignored) if copy is shutil.copytree else {}))
  out = folder / 'dist'
  run(sys.executable, '-m', 'pip', 'wheel', '-q', '--no-deps', '-w', out, '.', cwd=folder)
  (path,) = out.glob('*.whl')
  return path


def test_it_holds_all_modules_the_configs_and_the_assets(wheel):
  names = set(zipfile.ZipFile(wheel).namelist())
  package = {
    str(p.relative_to(ROOT))
    for p in (ROOT / 'jaxrl_llm').rglob('*')
    if p.is_file() and '__pycache__' not in p.parts and p.name != 'README.md'
  }
  configs = {
    f'jaxrl_llm/{p.relative_to(ROOT)}'
    for p in (ROOT / 'configs').rglob('*')
    if p.suffix in ('.py', '.jsonl')
  }
  assert package - names == set() and configs - names == set()
  assert any(name.endswith('LICENSE') for name in names)
  assert not [name for name in names if name.startswith(('tests/', 'configs/'))]
  assert wheel.stat().st_size < 2_000_000


def test_its_metadata_pass_twine(wheel):
  pytest.importorskip('twine')
  out = run(sys.executable, '-m', 'twine', 'check', '--strict', wheel, cwd=wheel.parent)
  assert 'PASSED' in out


def test_a_clean_environment_runs_the_console_script(wheel, tmp_path):
  run(sys.executable, '-m', 'venv', tmp_path / 'env', cwd=tmp_path)
  binary = tmp_path / 'env/bin'
  clean = dict(PYTHONPATH='', JAX_PLATFORMS='cpu', XLA_FLAGS=quick.flags(1))
  run(binary / 'pip', 'install', '-q', '--disable-pip-version-check', wheel, cwd=tmp_path)
  script = binary / 'jaxrl-llm'
  assert '--workdir' in run(script, '--help', cwd=tmp_path, **clean)
  (tmp_path / 'own.py').write_text(OWN)
  run(script, *TINY, '--workdir=run', cwd=tmp_path, **clean)
  rows = [json.loads(x) for x in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()]
  assert [row['training/global_step'] for row in rows] == [0, 1]
  assert (tmp_path / 'run/report.html').stat().st_size > 20_000
  assert 'all' in run(script, '--mode=eval', '--workdir=run', cwd=tmp_path, **clean)
  found = run(
    binary / 'python', '-c', 'import jaxrl_llm; print(jaxrl_llm.__file__)', cwd=tmp_path, **clean
  )
  assert pathlib.Path(found.strip()).is_relative_to(tmp_path / 'env')
  command = [script, '--config=sums', '--config.model=scratch', '--workdir=x']
  refused = subprocess.run(
    command, cwd=tmp_path, env=os.environ | clean, capture_output=True, text=True
  )
  assert refused.returncode == 2 and "pip install 'jaxrl-llm[gym]'" in refused.stderr
