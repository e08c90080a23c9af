"""Checkpoints: bit-exact on any mesh, intact after a kill at any moment; the last intact one is never lost."""

from __future__ import annotations

import builtins
import errno
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import quick
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.checkpointing import checkpoint, safe_files
from jaxrl_llm.types import UserError

ROOT = pathlib.Path(__file__).parents[2]


class State(NamedTuple):
  """The structure that a run saves: nested dicts with integer keys, moments, counters, a batch."""

  params: Any
  opt_state: Any
  step: Any


def mesh(*sizes: int) -> Mesh:
  count = int(np.prod(sizes))
  axes = ('fsdp', 'tensor')[: len(sizes)]
  devices = np.array(jax.devices()[:count]).reshape(sizes)
  return Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(sizes))


def make_tree(on: Mesh, seed: int = 0) -> tuple[State, dict]:
  random = np.random.default_rng(seed)
  put = lambda x, *axes: jax.device_put(x, NamedSharding(on, PartitionSpec(*axes)))  # noqa: E731
  kernel = random.standard_normal((16, 8), np.float32)
  kernel[0, :4] = [
    -0.0,
    np.inf,
    np.nan,
    np.float32(1e-42),
  ]  # values that an inexact round trip changes
  params = {
    'layers': {i: {'q': {'kernel': put(kernel + i, *on.axis_names)}} for i in (0, 1)},
    'norm': put(random.standard_normal(8, np.float32).astype(ml_dtypes.bfloat16)),
  }
  moments = (jax.tree.map(lambda x: x * 2, params), put(np.int32(3)))
  batch = {
    'tokens_BxT': random.integers(0, 99, (8, 5), np.int32),  # numpy, as a pending batch may be
    'reason_B': put(np.arange(8, dtype=np.int8), on.axis_names[0]),
    'key': put(jax.random.key(seed + 7)),
    'feature_BxF': np.zeros((8, 0), np.float32),  # no elements, as without a correctness head
  }
  return State(params, moments, put(np.int32(4))), batch


def abstract(tree: Any) -> Any:
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, 'sharding', None)), tree
  )


def bits(x: Any) -> bytes:
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  return np.asarray(x).tobytes()


def assert_same_bits(actual: Any, expected: Any) -> None:
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for path, x in jax.tree_util.tree_leaves_with_path(expected):
    y = dict(jax.tree_util.tree_leaves_with_path(actual))[path]
    assert (y.dtype, y.shape) == (x.dtype, x.shape) and bits(y) == bits(x), path


HOST = dict(
  curriculum=dict(evidence=np.array([[0.1, np.nan]]), visits=np.array([3, 4], np.int32)),
  fingerprint='abc',
  step=12,
  random=np.random.default_rng(3).bit_generator.state,  # integers beyond 64 bits
  nested=[dict(a=np.arange(3, dtype=np.uint8)), None, 0.1, 'a/b'],
)


def test_arrays_and_host_state_come_back_bit_for_bit(tmp_path):
  tree = make_tree(mesh(4, 2))
  checkpoint.save(str(tmp_path), 12, tree, HOST, keep=2)
  restored, host = checkpoint.restore(str(tmp_path), 12, abstract(tree))
  assert_same_bits(restored, tree)
  assert isinstance(restored[1]['tokens_BxT'], np.ndarray)
  assert restored[0].params['layers'][1]['q']['kernel'].sharding == NamedSharding(
    mesh(4, 2), PartitionSpec('fsdp', 'tensor')
  )
  assert {k: v for k, v in host.items() if k not in ('curriculum', 'nested')} == {
    k: v for k, v in HOST.items() if k not in ('curriculum', 'nested')
  }
  np.testing.assert_array_equal(host['curriculum']['evidence'], HOST['curriculum']['evidence'])
  assert host['curriculum']['visits'].dtype == np.int32
  assert host['nested'][1:] == [None, 0.1, 'a/b'] and host['nested'][0]['a'].dtype == np.uint8


@pytest.mark.parametrize('bad', [{'a': object()}, {1: 2}, {'a': np.array([{}], object)}])
def test_host_state_that_cannot_be_kept_is_refused_before_anything_is_written(tmp_path, bad):
  with pytest.raises(TypeError):
    checkpoint.save(str(tmp_path / 'c'), 1, {'a': np.zeros(2)}, bad, keep=1)
  assert not (tmp_path / 'c').exists()


@pytest.mark.parametrize('sizes', [(1, 1), (2, 4), (8, 1)])
def test_restored_onto_another_mesh(tmp_path, sizes):
  tree, other = make_tree(mesh(4, 2)), make_tree(mesh(*sizes), seed=1)
  checkpoint.save(str(tmp_path), 3, tree, {}, keep=1)
  restored, _ = checkpoint.restore(str(tmp_path), 3, abstract(other))
  assert_same_bits(restored, tree)
  for x, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(other), strict=True):
    assert getattr(x, 'sharding', None) == getattr(expected, 'sharding', None)


_TWO_DEVICES = """
import sys
sys.path[:0] = ['tests', 'tests/checkpointing']
import jax
import test_checkpoint as t
from jaxrl_llm.checkpointing import checkpoint
assert len(jax.devices()) == 2
tree = t.make_tree(t.mesh(2, 1), seed=1)  # other values: only shapes and shardings are used
restored, host = checkpoint.restore(sys.argv[1], 1, t.abstract(tree))
t.assert_same_bits(restored, t.make_tree(t.mesh(2, 1)))
assert host == dict(a=1)
checkpoint.save(sys.argv[1], 2, restored, host, keep=2)
"""


def test_carried_from_eight_devices_to_a_process_with_two_and_back(tmp_path):
  tree = make_tree(mesh(4, 2))
  checkpoint.save(str(tmp_path), 1, tree, dict(a=1), keep=2)
  _run(_TWO_DEVICES, str(tmp_path), devices=2)
  assert checkpoint.latest(str(tmp_path)) == 2
  restored, _ = checkpoint.restore(str(tmp_path), 2, abstract(tree))
  assert_same_bits(restored, tree)


def _run(code: str, *argv: str, devices: int = 1) -> str:
  return _finish(_start(code, *argv, devices=devices))


def _start(code: str, *argv: str, devices: int = 1) -> subprocess.Popen:
  return subprocess.Popen(
    [sys.executable, '-c', code, *argv],
    cwd=ROOT,
    env=os.environ
    | dict(JAX_PLATFORMS='cpu', XLA_FLAGS=quick.flags(devices), PYTHONPATH=str(ROOT)),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def _finish(process: subprocess.Popen) -> str:
  out, _ = process.communicate(timeout=240)
  assert process.returncode == 0, out
  return out


# One process does the slow imports and forks a child for every moment of a kill. It has no threads when it forks.
_KILLED = """
import os, pathlib, shutil, signal, sys, threading, time
import numpy as np
from jaxrl_llm.checkpointing import checkpoint

def content(step): return {'a': np.full((700, 700), step, np.float32), 'b': {0: np.int32([step])}}
def save(folder, step): checkpoint.save(folder, step, content(step), dict(step=step), keep=1)
def die(): os.kill(os.getpid(), signal.SIGKILL)

def patch(module, name, matches, after):
  real = getattr(module, name)
  def wrapped(*args, **kw):
    if not matches(*args): return real(*args, **kw)
    if after: real(*args, **kw)
    die()
  setattr(module, name, wrapped)

def half_deleted(path, **_):
  if not path.endswith('.old'): return
  os.remove(os.path.join(path, 'host.json'))
  die()

def has_device_files(folder):
  try: return any(f.is_file() for f in pathlib.Path(folder).glob('*.part/device*/**/*'))
  except FileNotFoundError: return False  # renamed while it was walked

def half_written(folder):
  def watch():
    while not has_device_files(folder): pass
    die()
  watcher = threading.Thread(target=watch, daemon=True)
  watcher.start()
  checkpoint._seal = lambda *_: watcher.join()  # otherwise the save may end before this thread runs

def is_seal(path, *_): return path.endswith('manifest.json')
def is_commit(old, new): return old.endswith('.part')
def is_host(path, *_): return path.endswith('host.json')
moments = {
  'device': lambda f: half_written(f),
  'host': lambda f: patch(checkpoint, '_write', is_host, False),
  'manifest': lambda f: patch(checkpoint, '_write', is_seal, False),
  'sealed': lambda f: patch(checkpoint, '_write', is_seal, True),
  'commit': lambda f: patch(os, 'replace', is_commit, False),
  'committed': lambda f: patch(os, 'replace', is_commit, True),
  'retention': lambda f: setattr(shutil, 'rmtree', half_deleted),
}

def moment(folder, prepare):
  save(folder, 1)
  prepare(folder)
  save(folder, 2)

def endless(folder):
  for step in range(1, 10**6): save(folder, step)

def fork(do, *args):
  child = os.fork()
  if not child:
    do(*args)
    os._exit(9)  # not killed: the test must fail
  return child

def killed(child):
  return os.WIFSIGNALED(os.waitpid(child, 0)[1])

root = sys.argv[1]
for name, prepare in moments.items():
  assert killed(fork(moment, os.path.join(root, name), prepare)), name
delays = [float(x) for x in sys.argv[2:]]
for i, delay in enumerate(delays):
  folder = pathlib.Path(root, f'random{i}')
  child = fork(endless, str(folder))
  while not (folder / 'step_000001').exists(): time.sleep(0.005)
  time.sleep(delay)
  os.kill(child, signal.SIGKILL)
  assert killed(child)
"""


@pytest.fixture(scope='module')
def killed_runs(tmp_path_factory):
  folder = tmp_path_factory.mktemp('killed')
  random = np.random.default_rng(0)
  _run(_KILLED, str(folder), *(f'{x:.3f}' for x in random.uniform(0, 0.4, 4)))
  return folder, {name: os.listdir(folder / name) for name in os.listdir(folder)}


KILLED_AT = dict(device=1, host=1, manifest=1, sealed=1, commit=1, committed=2, retention=2)


def content(step: int) -> dict:
  return {'a': np.full((700, 700), step, np.float32), 'b': {0: np.int32([step])}}


@pytest.mark.parametrize('moment', [*KILLED_AT, *(f'random{i}' for i in range(4))])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(killed_runs, moment):
  folder = str(killed_runs[0] / moment)
  step = checkpoint.latest(folder)
  assert step == KILLED_AT.get(moment, step) and step >= 1
  restored, host = checkpoint.restore(folder, step, content(0))
  assert_same_bits(restored, content(step))
  assert host == dict(step=step)
  checkpoint.save(folder, step + 1, content(step + 1), {}, keep=1)
  assert os.listdir(folder) == [f'step_{step + 1:06d}']  # and no partial folder is left


def test_the_kills_above_did_leave_half_made_folders(killed_runs):
  """Otherwise the previous test would prove nothing."""
  for name, left in dict(device='.part', host='.part', commit='.part', retention='.old').items():
    assert any(x.endswith(left) for x in killed_runs[1][name]), name


def damage(path: pathlib.Path, kind: str) -> str:
  """Damages a checkpoint; returns a part of the warning."""
  files = [p for p in (path / 'device').rglob('*') if p.is_file() and p.parent.name == 'd']
  largest = max(files, key=lambda p: p.stat().st_size)
  if kind == 'manifest':
    (path / 'manifest.json').write_text('{"files": {')
    return 'JSONDecodeError'
  if kind == 'missing':
    os.remove(path / 'device' / '_METADATA')
    return '_METADATA'
  data = bytearray(largest.read_bytes())
  if kind == 'bit':
    data[len(data) // 2] ^= 1
  largest.write_bytes(data[: len(data) // 2] if kind == 'short' else data)
  return largest.name


@pytest.mark.parametrize('kind', ['bit', 'short', 'missing', 'manifest'])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, caplog, kind):
  for step in (1, 2):
    checkpoint.save(str(tmp_path), step, content(step), {}, keep=2)
  named = damage(tmp_path / 'step_000002', kind)
  assert checkpoint.latest(str(tmp_path)) == 1
  assert 'step_000002 is broken' in caplog.text and named in caplog.text


def test_damage_never_pushes_a_whole_checkpoint_out(tmp_path):
  """20 is intact, 40 damaged, and the run resumes from 20 with another interval: saving 30 must not lose both."""
  for step in (20, 40):
    checkpoint.save(str(tmp_path), step, content(step), {}, keep=2)
  damage(tmp_path / 'step_000040', 'bit')
  assert checkpoint.latest(str(tmp_path)) == 20
  checkpoint.save(str(tmp_path), 30, content(30), {}, keep=1)
  assert os.listdir(tmp_path) == ['step_000030'] and checkpoint.latest(str(tmp_path)) == 30


def test_when_all_are_damaged_nothing_is_begun_again_silently(tmp_path):
  checkpoint.save(str(tmp_path), 1, content(1), {}, keep=2)
  damage(tmp_path / 'step_000001', 'short')
  with pytest.raises(UserError, match='only broken checkpoints .* delete them to start over'):
    checkpoint.latest(str(tmp_path))


def test_nothing_saved_is_nothing_found(tmp_path):
  assert checkpoint.latest(str(tmp_path / 'absent')) is None
  (tmp_path / 'step_000001.part').mkdir()
  assert checkpoint.latest(str(tmp_path)) is None


def test_the_newest_are_kept_and_a_step_may_be_saved_again(tmp_path):
  for step in (2, 4, 6, 8):
    checkpoint.save(str(tmp_path), step, content(step), {}, keep=2)
  assert sorted(os.listdir(tmp_path)) == ['step_000006', 'step_000008']
  checkpoint.save(str(tmp_path), 8, content(9), {}, keep=2)
  restored, _ = checkpoint.restore(str(tmp_path), 8, content(0))
  assert_same_bits(restored, content(9))
  assert sorted(os.listdir(tmp_path)) == ['step_000006', 'step_000008']


def test_the_old_one_goes_only_after_the_new_one_is_whole(tmp_path, monkeypatch):
  checkpoint.save(str(tmp_path), 1, content(1), {}, keep=1)
  monkeypatch.setattr(checkpoint, '_seal', lambda *_: (_ for _ in ()).throw(RuntimeError('cable')))
  with pytest.raises(RuntimeError, match='cable'):
    checkpoint.save(str(tmp_path), 2, content(2), {}, keep=1)
  assert os.listdir(tmp_path) == ['step_000001'] and checkpoint.latest(str(tmp_path)) == 1


def test_a_full_disk_is_told_in_bytes_before_and_while_writing(tmp_path, monkeypatch):
  checkpoint.save(str(tmp_path), 1, content(1), {}, keep=1)
  monkeypatch.setattr(shutil, 'disk_usage', lambda _: types.SimpleNamespace(free=2 * 10**6))
  with pytest.raises(UserError, match=r'2.0 MB free and a checkpoint needs 2.2 MB; make room'):
    checkpoint.save(str(tmp_path), 2, content(2), {}, keep=1)
  monkeypatch.setattr(checkpoint, 'check_space', lambda *_: None)
  full = OSError(28, 'No space left on device')
  monkeypatch.setattr(checkpoint, '_seal', lambda *_: (_ for _ in ()).throw(full))
  with pytest.raises(UserError, match='became full .* earlier checkpoints are intact'):
    checkpoint.save(str(tmp_path), 2, content(2), {}, keep=1)
  assert os.listdir(tmp_path) == ['step_000001']


def test_no_bit_of_a_manifest_can_flip_unseen(tmp_path):
  """Either the older, intact checkpoint is used, or the newer one exactly as it was saved."""
  for step in (1, 2):
    checkpoint.save(str(tmp_path), step, {'a': np.full((3, 2), step, np.float32)}, {}, keep=2)
  path = tmp_path / 'step_000002/manifest.json'
  data, counts = path.read_bytes(), {1: 0, 2: 0}
  for position in np.linspace(0, 8 * len(data) - 1, 400).astype(int):
    flipped = bytearray(data)
    flipped[position // 8] ^= 1 << (position % 8)
    path.write_bytes(flipped)
    step = checkpoint.latest(str(tmp_path))
    counts[step] += 1
    if step == 2:
      restored, _ = checkpoint.restore(str(tmp_path), 2, {'a': np.zeros((3, 2), np.float32)})
      assert (restored['a'] == 2).all(), position
  assert counts[1] > 390, counts
  path.write_bytes(data)
  assert checkpoint.latest(str(tmp_path)) == 2


def test_a_manifest_of_before_it_had_a_digest_still_counts(tmp_path):
  checkpoint.save(str(tmp_path), 1, content(1), {}, keep=2)
  path = tmp_path / 'step_000001/manifest.json'
  manifest = json.loads(path.read_text())
  path.write_text(json.dumps({name: manifest[name] for name in ('files', 'leaves')}))
  assert checkpoint.latest(str(tmp_path)) == 1
  restored, _ = checkpoint.restore(str(tmp_path), 1, content(0))
  assert_same_bits(restored, content(1))


@pytest.mark.parametrize('name', ['manifest.json', 'host.json', 'host.npz', 'device/_METADATA'])
def test_a_named_pipe_in_the_place_of_a_file_is_damage_and_does_not_wait(tmp_path, name):
  for step in (1, 2):
    checkpoint.save(str(tmp_path), step, content(step), {}, keep=2)
  path = tmp_path / 'step_000002' / name
  if name == 'host.json':  # recorded with no bytes, as a pipe has
    manifest = json.loads((tmp_path / 'step_000002/manifest.json').read_text())
    files = manifest['files'] | {'host.json': [0, 0]}
    text = json.dumps(dict(files=files, leaves=manifest['leaves']))
    (tmp_path / 'step_000002/manifest.json').write_text(text)
  path.unlink()
  os.mkfifo(path)
  assert checkpoint.latest(str(tmp_path)) == 1


FAILS = dict(
  rename=(os, 'replace', lambda *a: True),
  fsync=(os, 'fsync', lambda *a: True),
  host_state=(np, 'savez', lambda *a, **k: True),
  checksum=(builtins, 'open', lambda path, *a, **k: str(path).endswith('host.npz')),
)


@pytest.mark.parametrize('name', FAILS)
@pytest.mark.parametrize('number', [errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_for_a_moment_costs_no_checkpoint(tmp_path, monkeypatch, name, number):
  failing(monkeypatch, *FAILS[name], number, times=2)
  checkpoint.save(str(tmp_path), 1, content(1), {}, keep=2)
  monkeypatch.undo()
  assert os.listdir(tmp_path) == ['step_000001'] and checkpoint.latest(str(tmp_path)) == 1
  restored, _ = checkpoint.restore(str(tmp_path), 1, content(0))
  assert_same_bits(restored, content(1))


def test_a_disk_that_goes_on_failing_is_one_sentence(tmp_path, monkeypatch):
  checkpoint.save(str(tmp_path), 1, content(1), {}, keep=2)
  failing(monkeypatch, *FAILS['rename'], errno.ESTALE, times=100)
  with pytest.raises(
    UserError, match='Stale file handle.* check the disk .* same command then resumes'
  ):
    checkpoint.save(str(tmp_path), 2, content(2), {}, keep=2)
  monkeypatch.undo()
  assert os.listdir(tmp_path) == ['step_000001']


def test_a_rename_that_happened_and_failed_has_happened(tmp_path, monkeypatch):
  """A network file system may lose the reply alone."""
  monkeypatch.setattr(safe_files.time, 'sleep', lambda s: None)
  real, times = os.replace, [0]

  def replace(source, target):
    times[0] += 1
    real(source, target)
    if times[0] == 1:
      raise OSError(errno.EIO, 'Input/output error')

  monkeypatch.setattr(os, 'replace', replace)
  checkpoint.save(str(tmp_path), 1, content(1), {}, keep=2)
  assert checkpoint.latest(str(tmp_path)) == 1


def test_reading_is_tried_again_before_a_checkpoint_counts_as_broken(tmp_path, monkeypatch):
  checkpoint.save(str(tmp_path), 1, content(1), {}, keep=2)
  of_checkpoint = lambda path, *a, **k: 'step_000001' in str(path)  # noqa: E731
  failing(monkeypatch, builtins, 'open', of_checkpoint, errno.EIO, times=2)
  assert checkpoint.latest(str(tmp_path)) == 1
  real, left = ocp.StandardCheckpointer.restore, [2]

  def restore(self, *args):
    left[0] -= 1
    if left[0] >= 0:
      raise ValueError('DATA_LOSS: Input/output error [OS error 5]')
    return real(self, *args)

  monkeypatch.setattr(ocp.StandardCheckpointer, 'restore', restore)
  assert_same_bits(checkpoint.restore(str(tmp_path), 1, content(0))[0], content(1))


def failing(monkeypatch, owner, name, matches, number, times):
  """owner.name raises the error in its first `times` calls with matching arguments; retries do not wait."""
  monkeypatch.setattr(safe_files.time, 'sleep', lambda s: None)
  real, left = getattr(owner, name), [times]

  def wrapped(*args, **keywords):
    left[0] -= matches(*args, **keywords)
    if left[0] >= 0 and matches(*args, **keywords):
      raise OSError(number, os.strerror(number))
    return real(*args, **keywords)

  monkeypatch.setattr(owner, name, wrapped)


@pytest.mark.parametrize(
  'change, text',
  [
    (lambda t: t | {'a': np.zeros((700, 701), np.float32)}, r"\['a'\] is .*700, 700.* and .*701"),
    (
      lambda t: t | {'a': np.zeros((700, 700), np.float16)},
      r"\['a'\] is .*float32.* and .*float16",
    ),
    (lambda t: {'a': t['a']}, r"\['b'\]\[0\] is .* there and absent here"),
    (lambda t: t | {'c': t['a']}, r"\['c'\] is absent there"),
  ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, change, text):
  checkpoint.save(str(tmp_path), 1, content(1), {}, keep=1)
  with pytest.raises(UserError, match=text):
    checkpoint.restore(str(tmp_path), 1, change(content(0)))


_ONE_OF_TWO = """
import sys
import jax, numpy as np
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxrl_llm.checkpointing import checkpoint
assert jax.process_count() == 2 and len(jax.devices()) == 4
def placed(on, axes, value):
  sharding = NamedSharding(on, PartitionSpec(*axes))
  return jax.make_array_from_callback(value.shape, sharding, lambda i: value[i])
wide = Mesh(np.array(jax.devices()), ('fsdp',), axis_types=(AxisType.Auto,))
square = Mesh(np.array(jax.devices()).reshape(2, 2), ('a', 'b'), axis_types=(AxisType.Auto,) * 2)
value = np.random.default_rng(0).standard_normal((8, 4), np.float32)
tree = {'w': placed(wide, ('fsdp',), value), 'n': placed(wide, (), np.int32(3))}
for step in (1, 2, 3):
  checkpoint.save(sys.argv[1], step, tree, dict(step=step), keep=2)
assert checkpoint.latest(sys.argv[1]) == 3
expected = {'w': placed(square, ('b', 'a'), value), 'n': placed(square, (), np.int32(3))}
shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
restored, host = checkpoint.restore(sys.argv[1], 3, jax.tree.map(shape, expected))
assert host == dict(step=3)
for name in expected:
  for x, y in zip(restored[name].addressable_shards, expected[name].addressable_shards, strict=True):
    assert x.index == y.index and np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes()
"""


def test_two_processes_write_one_checkpoint(tmp_path):
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  processes = [_start(_ONE_OF_TWO, str(tmp_path), address, str(i), devices=2) for i in (0, 1)]
  for process in processes:
    _finish(process)
  assert sorted(os.listdir(tmp_path)) == ['step_000002', 'step_000003']
  restored, _ = checkpoint.restore(
    str(tmp_path), 3, {'w': np.zeros((8, 4), np.float32), 'n': np.zeros((), np.int32)}
  )
  expected = np.random.default_rng(0).standard_normal((8, 4), np.float32)
  assert restored['w'].tobytes() == expected.tobytes()
  assert json.loads((tmp_path / 'step_000003/host.json').read_text()) == dict(step=3)
