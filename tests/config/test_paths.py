"""Configs are found by name, in a checkout and in a wheel; a mistyped flag is answered with the field meant."""

from __future__ import annotations

import pathlib
import tomllib

import pytest

from jaxrl_llm.commands import flags
from jaxrl_llm.config import loading as configs
from jaxrl_llm.config import paths, suggestions
from jaxrl_llm.types import UserError

ROOT = pathlib.Path(__file__).parents[2]
RECIPES = sorted((ROOT / 'configs').rglob('*.py'))


def write(folder: pathlib.Path, body: str, name: str) -> None:
  (folder / name).write_text(f'def get_config():\n  return {body}\n')


def refusal(call, *args) -> str:
  """The message of a UserError."""
  with pytest.raises(UserError) as caught:
    call(*args)
  return str(caught.value)


@pytest.mark.parametrize(
  'flag, meant',
  [
    ('--steps=10', '--config.steps=10'),
    ('--optimizer.b1=0.5', '--config.optimizer.b1=0.5'),
    ('--ngram=2', ''),
    ('--completion_token=8', '--config.completion_tokens=8'),
    ('--learning_rate', '--config.optimizer.learning_rate or --config.sft.learning_rate'),
  ],
)
def test_an_unknown_flag_is_answered_with_the_field_meant(flag, meant, capsys):
  assert suggestions.flag(flag) == meant
  with pytest.raises(SystemExit) as stopped:
    flags.parse([flag])
  text = capsys.readouterr().err
  assert stopped.value.code == 2 and f'unrecognized arguments: {flag}' in text
  assert (f'; did you mean {meant}' if meant else flag) in text


def test_configs_are_found_by_name(tmp_path, monkeypatch):
  by_name = configs.load('gspo')
  assert by_name == configs.load(str(ROOT / 'configs' / 'methods' / 'gspo.py'))
  monkeypatch.chdir(tmp_path)  # anywhere
  for name in ('gspo.py', 'configs/gspo.py', 'configs/methods/gspo.py', 'configs/gspo'):
    assert configs.load(name) == by_name
  write(tmp_path, 'dict(base="gspo", steps=2)', 'own.py')
  assert configs.load('own.py').steps == 2
  assert 'did you mean --config=gspo.' in refusal(configs.load, 'gsppo')
  assert 'does not exist' in refusal(configs.load, 'folder/gspo.py')


def test_names_of_configs_are_unique():
  stems = [path.stem for path in RECIPES]
  assert len(set(stems)) == len(stems) == len(paths.names())


def test_the_wheel_holds_every_package_and_config():
  """In a wheel, configs/ is the package jaxrl_llm.configs."""
  setuptools = tomllib.loads((ROOT / 'pyproject.toml').read_text())['tool']['setuptools']
  assert setuptools['package-dir'] == {'jaxrl_llm.configs': 'configs'}
  found = {
    '.'.join((*prefix, *path.parent.relative_to(ROOT).parts))
    for prefix, folder in (((), 'jaxrl_llm'), (('jaxrl_llm',), 'configs'))
    for path in (ROOT / folder).rglob('*.py')
  }
  assert set(setuptools['packages']) == found
  for path in (ROOT / 'configs').rglob('*.jsonl'):
    package = '.'.join(('jaxrl_llm', *path.parent.relative_to(ROOT).parts))
    assert '*.jsonl' in setuptools['package-data'][package]
