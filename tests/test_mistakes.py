"""Each mistake of tests/mistakes.py is answered in one sentence, before anything is compiled or written."""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import re
import sys

import bad_input
import mistakes
import pytest
import run_folder

from jaxrl_llm import main

MISTAKES = mistakes.read()


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> pathlib.Path:
  """The folder in which a new user types."""
  root = tmp_path_factory.mktemp('user')
  for name, content in mistakes.FILES.items():
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text(content)
  run_folder.make(root / 'run', prompts=8)
  path = root / 'run' / 'config.json'
  settings = json.loads(path.read_text())
  settings['data'] |= dict(source='digits', chat=False)
  path.write_text(json.dumps(settings | dict(model='scratch')))
  return root


def hide(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
  """An import of `package` fails, as where it is not installed."""
  for name in [name for name in sys.modules if name.split('.')[0] == package]:
    monkeypatch.setitem(sys.modules, name, None)
  monkeypatch.setitem(sys.modules, package, None)
  version = importlib.metadata.version

  def version_of(name: str) -> str:
    if name == package:
      raise importlib.metadata.PackageNotFoundError(name)
    return version(name)

  monkeypatch.setattr(importlib.metadata, 'version', version_of)


@pytest.mark.parametrize('mistake', MISTAKES, ids=lambda mistake: mistake.typed)
def test_a_mistake_is_answered_in_one_sentence(mistake, folder, monkeypatch, capfd):
  monkeypatch.chdir(folder)
  monkeypatch.syspath_prepend(str(folder))
  monkeypatch.delitem(sys.modules, 'my_task', raising=False)  # of another test file
  monkeypatch.setenv('HF_HUB_OFFLINE', '1')
  if mistake.without:
    hide(mistake.without, monkeypatch)
  words = mistake.argv
  if 'jsonl' not in mistakes.STARTS[mistake.group] and '--config=tiny' in words:
    words.append('--config.data.size=200')  # of 20,000 rows, which take a second
  before = sorted(folder.rglob('*'))
  with bad_input.up_to_compiling():
    try:
      code = main.main(words)
    except SystemExit as stop:  # argparse
      code = int(stop.code or 0)
  message = bad_input.sentence(code, capfd.readouterr().err)
  expected = '.*'.join(re.escape(part) for part in mistake.answer.split('…'))
  assert re.fullmatch(expected, message), message
  assert '--' in message or 'config.' in message
  written = [path for path in sorted(folder.rglob('*')) if path not in before]
  assert [path for path in written if '__pycache__' not in path.parts] == []


def test_the_list_is_long_and_without_repetition():
  typed = [f'{" ".join(mistake.argv)} {mistake.without}' for mistake in MISTAKES]
  assert len(set(typed)) == len(typed) >= 60


def test_users_read_the_current_list():
  assert mistakes.README.read_text() == mistakes.page(), 'run python tests/mistakes.py'
