"""Concurrent writes, special files, and transient errors of file systems."""

from __future__ import annotations

import errno
import json
import os
import threading
import types
import zipfile

import pytest

from jaxrl_llm.checkpointing import metrics_log, run_dir, safe_files
from jaxrl_llm.config import loading as configs
from jaxrl_llm.models import default_model
from jaxrl_llm.report import device, live
from jaxrl_llm.runner import run_logger


@pytest.fixture
def no_waiting(monkeypatch):
  """Replaces the waits between attempts; returns the list of their seconds."""
  waits = []
  monkeypatch.setattr(safe_files.time, 'sleep', waits.append)
  return waits


def at_once(monkeypatch, work) -> list:
  """Runs work(0) and work(1) in two threads that both write before either renames; returns their errors."""
  barrier, real, errors = threading.Barrier(2), os.replace, []

  def replace(*args):
    if threading.current_thread() in threads and not getattr(met, 'once', False):
      met.once = True
      barrier.wait(30)
    return real(*args)

  def run(index):
    try:
      work(index)
    except Exception as error:
      errors.append(error)

  met = threading.local()
  monkeypatch.setattr(os, 'replace', replace)
  threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return errors


def compiled(folder, monkeypatch):
  """The record of compile times in a cache shared by all runs of a machine."""
  monkeypatch.setattr(run_logger, 'jax', types.SimpleNamespace(
    config=types.SimpleNamespace(jax_compilation_cache_dir=str(folder)),
    devices=lambda: [types.SimpleNamespace(device_kind='cpu')],
  ))  # fmt: skip
  return run_logger._CompileTimes(configs.default(), True)


def test_two_runs_at_once_share_the_record_of_compile_times(tmp_path, monkeypatch):
  runs = [compiled(tmp_path, monkeypatch) for _ in range(2)]
  assert at_once(monkeypatch, lambda i: runs[i].keep(1.5)) == []
  assert os.listdir(tmp_path) == ['seconds.json'] and runs[0].last() == 1.5


@pytest.mark.parametrize('text', ['', '[1]', '3', '{"a', '{"KEY": "x"}', '{"KEY": [1]}'])
def test_a_damaged_record_of_compile_times_is_none(tmp_path, monkeypatch, text):
  run = compiled(tmp_path, monkeypatch)
  (tmp_path / 'seconds.json').write_text(text.replace('KEY', run._key))
  assert run.last() is None
  run.keep(2.0)
  assert run.last() == 2.0


def test_a_cache_that_cannot_be_written_ends_no_run(tmp_path, monkeypatch):
  (tmp_path / 'file').write_text('')
  compiled(tmp_path / 'file' / 'cache', monkeypatch).keep(1.0)


WRITERS = dict(
  workdir=lambda path: run_dir.write(path, 'x'),
  curriculum=lambda path: safe_files.write(path, 'x'),
  page=lambda path: live.page.write(path, []),
  device=lambda path: device._read_trace(os.path.dirname(path), []),
  metrics=lambda path: metrics_log.Writer(path, 0).__exit__(),
)


@pytest.mark.parametrize('name', WRITERS)
def test_a_file_may_be_written_by_two_at_once(name, tmp_path, monkeypatch):
  monkeypatch.setattr(live.page, 'render', lambda *a: 'x')
  monkeypatch.setattr(device.xplane, 'read', lambda *a: dict(x=1))
  path = str(tmp_path / 'file.json')
  assert at_once(monkeypatch, lambda _: WRITERS[name](path)) == []
  assert [p for p in os.listdir(tmp_path) if p.endswith('.part')] == []


def failing(monkeypatch, owner, name, number, times):
  """owner.name raises the error in its first `times` calls."""
  real, left = getattr(owner, name), [times]

  def wrapped(*args, **keywords):
    left[0] -= 1
    if left[0] >= 0:
      raise OSError(number, os.strerror(number))
    return real(*args, **keywords)

  monkeypatch.setattr(owner, name, wrapped)
  return left


@pytest.mark.parametrize('number', safe_files.TRANSIENT)
@pytest.mark.parametrize('name', ['replace', 'fsync'])
def test_a_write_is_tried_again(name, number, tmp_path, monkeypatch, no_waiting):
  failing(monkeypatch, os, name, number, 2)
  run_dir.write(str(tmp_path / 'a.json'), '{}')
  assert (tmp_path / 'a.json').read_text() == '{}' and os.listdir(tmp_path) == ['a.json']
  assert no_waiting == [0.1, 0.5]


@pytest.mark.parametrize(
  'number, tries', [(errno.EIO, 4), (errno.ESTALE, 4), (errno.ENOSPC, 1), (errno.EACCES, 1)]
)
def test_tries_are_bounded_and_only_for_what_may_pass(
  number, tries, tmp_path, monkeypatch, no_waiting
):
  left = failing(monkeypatch, os, 'replace', number, 100)
  with pytest.raises(OSError) as caught:
    safe_files.write(str(tmp_path / 'a'), 'x')
  assert caught.value.errno == number and 100 - left[0] == tries and os.listdir(tmp_path) == []


def test_an_error_in_the_words_of_another_library_is_known_by_its_text():
  assert safe_files.is_transient(
    ValueError('DATA_LOSS: read failed: Input/output error [os error 5]')
  )
  assert not safe_files.is_transient(ValueError('No such file'))
  assert not safe_files.is_transient(KeyboardInterrupt('Input/output error'))


def test_a_row_of_metrics_is_written_once_however_often_its_disk_fails(
  tmp_path, monkeypatch, no_waiting
):
  path = tmp_path / 'metrics.jsonl'
  with metrics_log.Writer(str(path), 0) as writer:
    writer.write({metrics_log.STEP: 0})
    failing(monkeypatch, os, 'fsync', errno.EIO, 3)
    writer.write({metrics_log.STEP: 1, 'x': 'ä'})
    writer.write({metrics_log.STEP: 2})
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  assert [row[metrics_log.STEP] for row in rows] == [0, 1, 2] and len(no_waiting) == 3


def test_a_file_whose_fsync_fails_is_written_again(tmp_path, monkeypatch, no_waiting):
  path = tmp_path / 'a'
  path.write_bytes(b'abc')
  inode = path.stat().st_ino
  failing(monkeypatch, os, 'fsync', errno.EIO, 1)
  safe_files.flush(str(path))
  assert path.read_bytes() == b'abc' and path.stat().st_ino != inode
  assert os.listdir(tmp_path) == ['a']


def test_what_is_no_regular_file_is_not_opened(tmp_path):
  os.mkfifo(tmp_path / 'fifo')
  for path, kind in (
    (tmp_path / 'fifo', 'named pipe'),
    (tmp_path, 'folder'),
    ('/dev/zero', 'device'),
  ):
    with pytest.raises(OSError, match=f'it is a {kind}, not a regular file'):
      safe_files.open_regular(str(path))
  with pytest.raises(FileNotFoundError):
    safe_files.open_regular(str(tmp_path / 'absent'))


def test_what_a_killed_process_left_goes_with_the_next_start(tmp_path):
  run_dir.open_run(str(tmp_path), configs.default())
  left = [
    safe_files.part_name(str(tmp_path / name)) for name in ('metrics.jsonl', 'rollouts/a', 'eval/b')
  ]
  for path in left:
    open(path, 'x').close()
  run_dir.open_run(str(tmp_path), configs.default())
  assert not [path for path in left if os.path.exists(path)]


def test_two_processes_unpack_the_embedded_model_at_once(tmp_path, monkeypatch):
  """Both have the same process id, as in containers that share a cache."""
  with zipfile.ZipFile(tmp_path / 'a.whl', 'w') as wheel:
    wheel.writestr('model.gguf', b'GGUF')
  monkeypatch.setenv('JAXRL_LLM_CACHE', str(tmp_path / 'cache'))
  assert at_once(monkeypatch, lambda _: default_model.unpack(str(tmp_path / 'a.whl'))) == []
  assert [name.endswith('.gguf') for name in os.listdir(tmp_path / 'cache')] == [True]
