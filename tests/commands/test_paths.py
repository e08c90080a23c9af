"""Paths that a user names: to write where nothing can be written, and to read what is no file. One sentence each."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import subprocess
import sys

import pytest
import run_folder
import tiny_job

from jaxrl_llm import main

ROOT = pathlib.Path(__file__).parents[2]


def refused(capsys, *argv: str) -> str:
  """The one sentence of a refused command."""
  assert main.main(list(argv)) == 2
  text = capsys.readouterr().err.strip()
  assert text.startswith('error: ') and '\n' not in text and text.endswith('.'), text
  return text


@pytest.fixture
def flags(tmp_path) -> list[str]:
  config = tiny_job.config_file(tmp_path, **tiny_job.UNTAUGHT)
  return [f'--config={config}', f'--workdir={tmp_path}/run']


def bad_target(tmp_path, where: str) -> str:
  """A path at which nothing can be written."""
  (tmp_path / 'file').write_text('held')
  (tmp_path / 'full').mkdir(exist_ok=True)
  (tmp_path / 'full/x').write_text('held')
  if not (tmp_path / 'pipe').exists():
    os.mkfifo(tmp_path / 'pipe')
  if where == 'unwritable':
    return '/proc/nothing/here'
  return str(tmp_path / where)


FOLDERS = dict(file='is a file', unwritable='/proc', full='is not empty', pipe='is a file')
FOLDERS |= {'file/below/it': 'is a file'}
FILES = dict(full='is a folder', unwritable='/proc', pipe='is a named pipe')
FILES |= {'file/below/it': 'is a file'}


@pytest.mark.parametrize('where', FOLDERS)
@pytest.mark.parametrize('adapter', [[], ['--adapter', '--config.lora.rank=2']])
def test_export_says_where_it_cannot_write_before_anything_is_loaded(
  where, adapter, tmp_path, flags, capsys, monkeypatch
):
  monkeypatch.setattr(
    'jaxrl_llm.commands.export.export_checkpoint', lambda *a: pytest.fail('loaded')
  )
  path = bad_target(tmp_path, where)
  message = refused(capsys, *flags, '--mode=export', f'--to={path}', *adapter)
  assert f'--to={path} cannot be written: ' in message and FOLDERS[where] in message
  assert (tmp_path / 'file').read_text() == 'held' and not (tmp_path / 'run').exists()


@pytest.mark.parametrize('where', FILES)
@pytest.mark.parametrize(
  'mode, flag',
  [('report', '--to'), ('fit', '--plot'), ('compile', '--report'), ('layout', '--report')],
)
def test_every_mode_says_where_it_cannot_write(where, mode, flag, tmp_path, flags, capsys):
  path = bad_target(tmp_path, where)
  message = refused(capsys, *flags, f'--mode={mode}', f'{flag}={path}')
  assert f'{flag}={path} cannot be written: ' in message and FILES[where] in message
  assert 'name another' in message


def test_a_report_makes_the_folders_above_it(tmp_path, capsys):
  run = run_folder.make(tmp_path / 'run')
  path = tmp_path / 'new/folder/page.html'
  assert main.main([f'--workdir={run}', '--mode=report', f'--to={path}']) == 0
  assert path.exists()


@pytest.mark.parametrize(
  'argv',
  [
    ['--mode=generate', '--prompts=PATH'],
    ['--mode=eval', '--against=PATH'],
    ['--config=PATH'],
    ['--config.data.source=jsonl', '--config.data.path=PATH'],
    ['--config.data.source=jsonl', '--config.data.path=PATH.parquet'],
    ['--config.data.source=jsonl', '--config.data.path=DATASET'],
    ['--config.model=PATH.gguf'],
    ['--config.lora.rank=2', '--config.lora.init=ADAPTER'],
  ],
)  # fmt: skip
@pytest.mark.parametrize('what', ['pipe', 'zero', 'folder'])
def test_what_is_no_file_is_not_read(argv, what, tmp_path, flags, capsys):
  for path in (
    'PATH',
    'PATH.gguf',
    'PATH.parquet',
    'ADAPTER/adapter_model.safetensors',
    'DATASET/data.arrow',
  ):
    path = tmp_path / path
    path.parent.mkdir(exist_ok=True)
    dict(pipe=os.mkfifo, zero=lambda p: p.symlink_to('/dev/zero'), folder=os.mkdir)[what](path)
  (tmp_path / 'ADAPTER/adapter_config.json').write_text('{"r": 2, "lora_alpha": 16}')
  (tmp_path / 'DATASET/dataset_info.json').write_text('{}')
  state = dict(_data_files=[dict(filename='data.arrow')], _fingerprint='x', _format_columns=None,
               _format_kwargs={}, _format_type=None, _output_all_columns=False, _split='train')  # fmt: skip
  (tmp_path / 'DATASET/state.json').write_text(json.dumps(state))
  ends = ('PATH', 'PATH.gguf', 'PATH.parquet', 'DATASET', 'ADAPTER')
  named = [a.replace('=', f'={tmp_path}/', 1) if a.endswith(ends) else a for a in argv]
  refused(capsys, *flags, *named)


@pytest.mark.parametrize('name', ['metrics.jsonl', 'config.json', 'timing.json', 'eval/step_000000.json',
                                  'rollouts/step_000000.jsonl', 'curriculum.json', 'environment.json'])  # fmt: skip
def test_a_named_pipe_in_a_run_directory_stops_no_report(name, tmp_path, capsys):
  run = pathlib.Path(run_folder.make(tmp_path / 'run'))
  (run / name).unlink(missing_ok=True)
  os.mkfifo(run / name)
  assert main.main([f'--workdir={run}', '--mode=report']) in (0, 2)
  assert main.main([f'--workdir={run}', '--mode=fit']) in (0, 2)
  assert 'Traceback' not in capsys.readouterr().err


def test_a_run_directory_with_a_named_pipe_is_one_sentence(tmp_path, flags, capsys):
  (tmp_path / 'run').mkdir()
  for name in ('config.json', '.lock', 'metrics.jsonl'):
    os.mkfifo(tmp_path / 'run' / name)
    assert 'named pipe' in refused(capsys, *flags)
    (tmp_path / 'run' / name).unlink()


# Reads of the kernel's own files, and of what a sandbox holds.
OWN = (
  'safe_files.py',
  'rewards/worker.py',
  'rewards/code_execution/sandbox.py',
  'rewards/code_execution/guest_protocol/start.py',
  'rewards/code_execution/program_io.py',
)


def test_every_read_of_a_file_looks_at_what_it_is():
  found = []
  for path in sorted((ROOT / 'jaxrl_llm').rglob('*.py')):
    if str(path.relative_to(ROOT / 'jaxrl_llm')) in OWN:
      continue
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == 'open':
        mode = node.args[1].value if len(node.args) > 1 else 'r'
        if mode in ('r', 'rb'):
          found.append(f'{path.name}:{node.lineno}')
  assert found == []


def test_a_disk_that_goes_on_failing_ends_a_command_in_one_sentence(flags, capsys, monkeypatch):
  def fail(*_):
    raise OSError(5, 'Input/output error', '/mnt/x')

  monkeypatch.setattr('jaxrl_llm.train.run', fail)
  message = refused(capsys, *flags)
  assert (
    '/mnt/x' in message
    and 'also when tried again' in message
    and 'the same command goes on' in message
  )


MISSING = """
import sys
for name in ('resource', 'fcntl', 'pwd', 'grp', 'termios', 'tty', 'pty'):
  sys.modules[name] = None
import os, signal
for name in ('SIGALRM', 'SIGPROF', 'ITIMER_REAL', 'ITIMER_PROF', 'setitimer', 'SIGKILL', 'SIGXCPU'):
  delattr(signal, name)
for name in ('geteuid', 'getuid', 'fork', 'memfd_create', 'pidfd_open', 'mkfifo'):
  delattr(os, name)
"""


def without_posix(code: str) -> subprocess.CompletedProcess:
  env = os.environ | dict(PYTHONPATH=str(ROOT), JAX_PLATFORMS='cpu')
  return subprocess.run(
    [sys.executable, '-c', MISSING + code], env=env, capture_output=True, text=True
  )


def test_the_parts_can_be_imported_without_what_windows_lacks():
  code = """
import importlib, pkgutil
import jaxrl_llm
for found in pkgutil.walk_packages(jaxrl_llm.__path__, 'jaxrl_llm.'):
  if found.name == 'jaxrl_llm.rewards.gym.server':  # a program of the sandbox, which is Linux
    continue
  importlib.import_module(found.name)
"""
  done = without_posix(code)
  assert done.returncode == 0, done.stderr[-2000:]


def test_on_windows_a_command_says_which_systems_are_supported():
  done = without_posix(
    "sys.platform = 'win32'\nfrom jaxrl_llm import main\nsys.exit(main.main(['--mode=train']))"
  )
  message = done.stderr.strip()
  assert done.returncode == 2 and '\n' not in message, message
  assert 'Linux' in message and 'macOS' in message and 'WSL2' in message and 'win32' in message
