"""Run directories in object stores, against servers on loopback: moto's S3 and an emulator of GCS.

tests/bench/faults.py --store kills runs at many more moments.
"""

from __future__ import annotations

import os
import pathlib
import signal
import time

import faults
import forks
import object_stores
import pytest
import tiers

from jaxrl_llm.checkpointing import manifest, metrics_log, mirror, object_store, store_lock
from jaxrl_llm.types import UserError


@pytest.fixture(scope='module', params=['s3', 'gs'])
def server(request, tmp_path_factory):
  if not object_stores.is_installed(request.param):
    pytest.skip('no server is installed')
  with object_stores.serve(request.param, tmp_path_factory.mktemp('server') / 'log') as store:
    yield store


@pytest.fixture
def store(server, request, monkeypatch):
  """A directory of its own in the server's bucket."""
  for name, value in server.env.items():
    monkeypatch.setenv(name, value)
  return object_store.Store(server.url(request.node.name))


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
  run = tmp_path_factory.mktemp('uninterrupted') / 'run'
  status, out = faults.JobRunner(run.parent).start(run)
  assert status == 0, out
  return run


def new_mirror(store, folder: pathlib.Path) -> mirror.Mirror:
  folder.mkdir()
  return mirror.Mirror(store, str(folder))


def save(folder: pathlib.Path, step: int, content: bytes) -> pathlib.Path:
  """A checkpoint with a manifest."""
  path = folder / f'checkpoints/step_{step:06d}'
  (path / 'device').mkdir(parents=True)
  (path / 'device/d').write_bytes(content)
  (path / 'manifest.json').write_text(manifest.make(str(path), {}))
  return path


def test_objects(store, server):
  """Conditional writes succeed on the generation that was read alone; the official client reads the same."""
  absent, before = store.read_versioned('a/x')
  assert absent is None and store.write_if('a/x', b'1', before)
  if server.scheme == 's3':  # the emulator of GCS ignores conditions
    assert store.write_if('a/x', b'2', before) is None and store.read('a/x') == b'1'
    _, generation = store.read_versioned('a/x')
    assert store.write_if('a/x', b'3', generation)
    assert store.write_if('a/x', b'4', generation) is None and store.read('a/x') == b'3'
  first = int(server.scheme == 'gs')  # the emulator refuses empty objects
  objects = [(f'b/{i:02d}', bytes([i]) * i) for i in range(first, 20)]
  store.write_many(iter(objects))
  assert list(store.read_many(store.names('b/'))) == objects
  path = store.url.removeprefix(server.url(''))
  assert (
    server.objects(path) == dict(store.read_many(store.names()))
    and len(store.names()) == 21 - first
  )
  store.delete('b/')
  assert store.names() == ['a/x']


def test_logs_are_numbered_parts_that_a_resume_cuts(store, server, tmp_path, monkeypatch):
  monkeypatch.setattr(mirror, '_MAX_PARTS', 2)
  first = new_mirror(store, tmp_path / 'first')
  log = tmp_path / 'first/metrics.jsonl'
  for text in ('a\nb\n', 'a\nb\nc\nd\n{"unfini', 'a\nb\nC\n', 'a\nb\nC\ne\n'):
    log.write_text(text)
    first.push()
    first.push()  # nothing changed
  names = [f'logs/metrics.jsonl/{n:06d}.{at:012d}' for n, at in enumerate((0, 4, 4, 6))]
  assert store.names() == names
  second = new_mirror(store, tmp_path / 'second')
  second.pull()
  assert (tmp_path / 'second/metrics.jsonl').read_text() == 'a\nb\nC\ne\n'
  path = store.url.removeprefix(server.url(''))
  copy = server.copy(path, tmp_path / 'copy')
  assert (copy / 'metrics.jsonl').read_text() == 'a\nb\nC\ne\n'
  second.merge_parts()
  assert store.names() == ['logs/metrics.jsonl/000004.000000000000']
  (tmp_path / 'second/metrics.jsonl').write_text('a\nf\n')
  second.push()
  assert store.read('logs/metrics.jsonl/000005.000000000002') == b'f\n'


def test_a_checkpoint_counts_once_its_marker_exists(store, tmp_path, monkeypatch):
  monkeypatch.setattr(mirror, 'PIECE_BYTES', 1000)
  writer = new_mirror(store, tmp_path / 'writer')
  content = os.urandom(4321)
  for step in (2, 4, 6):
    save(tmp_path / 'writer', step, content + bytes([step]))
    writer.commit(step, 2, lambda: None)
  markers = [name for name in store.names('checkpoints/') if name.endswith('.complete')]
  assert markers == [f'checkpoints/step_{s:06d}.complete' for s in (4, 6)]
  assert not any('step_000002' in name for name in store.names())

  def pull(name: str, step: int | None = None) -> list[str]:
    new_mirror(store, tmp_path / name).pull_checkpoint(step)
    return sorted(os.listdir(tmp_path / name / 'checkpoints'))

  def torn():
    raise RuntimeError

  save(tmp_path / 'writer', 8, content)
  with pytest.raises(RuntimeError):
    writer.commit(8, 2, torn)
  assert any('step_000008-' in name for name in store.names()) and pull('torn') == ['step_000006']
  copy = tmp_path / 'torn/checkpoints/step_000006'
  assert (copy / 'device/d').read_bytes() == content + bytes([6]) and not manifest.damage(str(copy))
  assert pull('chosen', 4) == ['step_000004']
  with pytest.raises(UserError, match=r'--step=2 .* there are: \[6, 4\]'):
    pull('absent', 2)
  # A damaged object: the checkpoint before it is copied, too.
  (damaged,) = [n for n in store.names() if 'step_000006-' in n and n.endswith('device/d~0001')]
  store.write(damaged, bytes(1000))
  assert pull('damaged') == ['step_000004', 'step_000006']
  # The next checkpoint removes what is torn, and what is newer than itself.
  save(tmp_path / 'writer', 5, content)
  writer.commit(5, 2, lambda: None)
  folders = {name.split('/')[1].split('-')[0].split('.')[0] for name in store.names('checkpoints/')}
  assert folders == {'step_000004', 'step_000005'}


def test_two_runs_in_one_directory(store, monkeypatch):
  alive, other = (store_lock.Lock(store, owner, lease_s=1.0) for owner in ('alive', 'other'))
  alive.acquire()
  monkeypatch.setattr(time, 'sleep', lambda s: alive.renew())
  with pytest.raises(UserError, match='is in use by alive'):
    other.acquire()
  monkeypatch.undo()
  again = store_lock.Lock(store, 'alive', lease_s=100.0)
  again.acquire()  # the same machine knows that its former process is dead
  other.acquire()  # which does not renew its lock
  with pytest.raises(UserError, match='was taken over'):
    again.renew()
  other.release()
  assert store.names() == []


def test_a_run_killed_again_and_again_equals_an_uninterrupted_one(server, uninterrupted, tmp_path):
  job = faults.JobRunner(tmp_path, server.env)
  url = server.url('killed/run')
  kills = [('marked', 1), ('upload', 9), ('marker', 1), ('unmarked', 1)]
  for number, (at, skip) in enumerate(kills[: tiers.REPEATS * (2 if server.scheme == 's3' else 1)]):
    status, out = job.start(tmp_path / 'run', url=url, fault=dict(kind='kill', at=at, skip=skip))
    assert status == -signal.SIGKILL, (at, out)
    copy = server.copy('killed/run', tmp_path / f'copy {number}')
    faults.assert_same(copy, uninterrupted, complete=False)
    assert not manifest.damage(str(faults.newest(copy)))
  status, out = job.start(tmp_path / 'run', url=url)
  assert status == 0 and 'resuming at step' in out and f'everything is in {url}' in out, out
  copy = server.copy('killed/run', tmp_path / 'copy')
  faults.assert_same(copy, uninterrupted)
  assert 'lock.json' not in server.objects('killed/run')
  if server.scheme == 's3':
    check_modes(server, url, tmp_path)


def check_modes(server, url: str, folder: pathlib.Path) -> None:
  """The modes that read a run, of one in a store."""

  def command(*argv: str, workdir: str = url) -> str:
    process = forks.start([f'--workdir={workdir}', *argv], folder / 'mode', **server.env)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    return out

  before = server.objects('killed')
  assert f'the report is {url}/report.html' in command('--mode=report')
  command('--mode=report', f'--to={server.url("killed/other.html")}')
  assert '1 run' in command('--mode=report', workdir=server.url('killed'))
  assert 'greedy' in command('--mode=eval', '--step=11')
  assert '> 1' in command('--mode=generate', '--prompt=1')
  command('--mode=export', f'--to={folder / "export"}')
  assert (folder / 'export/model.safetensors').exists()
  after = server.objects('killed')
  written = {name for name in after if after[name] != before.get(name)}
  assert written - {'run/report.html'} == {'other.html', 'runs.html', 'run/eval/step_000011.json'}
  assert after['run/report.html'] == after['other.html'] and b'run0' in after['other.html']


def test_a_store_that_cannot_be_used_is_answered_in_one_sentence(server, monkeypatch, capsys):
  from jaxrl_llm import main

  for name, value in server.env.items():
    monkeypatch.setenv(name, value)
  answers = {
    server.url('run'): 'holds no run: it has no config.json',
    f'{server.scheme}://': 'names no bucket',
    'abfs://bucket/run': 'name a folder, gs://… or s3://…',
  }
  if server.scheme == 's3':  # the emulator of GCS has another answer than Google
    answers[server.url('run', bucket='absent')] = 'the bucket does not exist; create it'
  for url, answer in answers.items():
    assert main.main(['--mode=eval', f'--workdir={url}']) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith('error: ')]
    assert answer in line and url in line
  monkeypatch.setattr(object_store, '_PROBE', object_store._PROBE | dict(max_retries=1))
  closed = f'http://127.0.0.1:{object_stores.free_port()}'
  for name in ('AWS_ENDPOINT_URL', 'TENSORSTORE_GCS_HTTP_URL'):
    monkeypatch.setenv(name, closed)
  assert main.main(['--mode=eval', f'--workdir={server.url("run")}']) == 2
  assert 'cannot be reached, also when tried again' in capsys.readouterr().err


def test_wrong_credentials_are_answered_in_one_sentence(tmp_path, monkeypatch):
  pytest.importorskip('moto')
  monkeypatch.setenv('INITIAL_NO_AUTH_ACTION_COUNT', '1')  # after the bucket was created
  with object_stores.serve('s3', tmp_path / 'log') as server:
    for name, value in server.env.items():
      monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match='credentials are missing or have no permission there'):
      object_store.Store(server.url('run')).write('a', b'')


def test_a_run_goes_on_after_the_network_was_gone(uninterrupted, tmp_path):
  pytest.importorskip('moto')
  relay, run = object_stores.Relay(), tmp_path / 'run'
  with object_stores.serve('s3', tmp_path / 'log', through=relay.port) as server:
    relay.target = int(server.address.rpartition(':')[2])
    relay.join()
    job = faults.JobRunner(tmp_path, server.env)
    argv = [f'--config={job.config}', f'--workdir={server.url("gone/run")}']
    process = forks.start(argv, run, **server.env)
    while not any('.complete' in key for key in server.objects('gone')):
      assert process.poll() is None, process.text()
      time.sleep(0.02)
    relay.cut()
    time.sleep(2.0)
    assert process.poll() is None, process.text()
    relay.join()
    out, _ = process.communicate()
    assert process.returncode == 0, out
    faults.assert_same(server.copy('gone/run', tmp_path / 'copy'), uninterrupted)


def test_processes_share_a_local_copy(tmp_path):
  pytest.importorskip('moto')
  with object_stores.serve('s3', tmp_path / 'log') as server:
    job = faults.JobRunner(tmp_path, steps=2, evaluation=dict(every=0, prompts=8, samples=0))

    def start(caches: list[str]) -> list[tuple[int, str]]:
      argv = [
        f'--config={job.config}',
        f'--workdir={server.url("two/run")}',
        '--processes=2',
        '--config.mesh.fsdp=2',
      ]
      argv.append(f'--coordinator=127.0.0.1:{object_stores.free_port()}')
      started = [
        forks.start(
          [*argv, f'--process={i}'], tmp_path / 'run', JAXRL_LLM_CACHE=cache, **server.env
        )
        for i, cache in enumerate(caches)
      ]
      texts = [process.communicate()[0] for process in started]
      return [(process.returncode, text) for process, text in zip(started, texts, strict=True)]

    for status, text in start([str(tmp_path / 'a'), str(tmp_path / 'b')]):
      assert status == 2 and 'set JAXRL_LLM_CACHE to one that is' in text, text
    for status, text in start([str(tmp_path / 'a')] * 2):
      assert status == 0, text
    copy = server.copy('two/run', tmp_path / 'copy')
    assert len(metrics_log.read(str(copy / 'metrics.jsonl'))) == 2
    assert not manifest.damage(str(faults.newest(copy)))
