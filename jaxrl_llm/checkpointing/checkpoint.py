"""Checkpoints: device arrays by Orbax and the host state in one folder, committed by one rename."""

from __future__ import annotations

import functools
import io
import json
import logging as std_logging
import os
import re
import shutil
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from absl import logging
from jax.experimental import multihost_utils

from jaxrl_llm.checkpointing import manifest, safe_files
from jaxrl_llm.distributed import host_memory
from jaxrl_llm.types import Array, UserError

PyTree: TypeAlias = Any  # of arrays, or of abstract arrays
HostState: TypeAlias = dict[str, Any]  # nested dicts and lists of JSON values and numpy arrays
Leaves: TypeAlias = dict[str, list]  # path → [shape, dtype]

_NAME = re.compile(r'step_(\d{6,})$')
_LEFTOVER = re.compile(r'step_\d{6,}\.(part|old)$')  # left by a kill during a save or a deletion
_DISK_MARGIN = 1.1  # required free bytes / bytes of the arrays
_ARRAY = '__array__'  # key in host.json that refers to an array of host.npz
# Orbax measures this timeout by the wall clock, which may jump. Dead processes are detected by the watchdog instead.
_TIMEOUT_S = 10 * 365 * 86400


class Saver:
  """Writes the checkpoints of a run in a background thread, one at a time. A context manager.

  In a run of several processes, all of them make the same calls with the same shared folder.
  """

  def __init__(self, folder: str, keep: int, on_commit: Callable[[int], None] | None = None):
    """Keeps the newest `keep` checkpoints in `folder`; on_commit(step) is called when one is on disk."""
    self._folder, self._keep, self._on_commit = os.path.abspath(folder), keep, on_commit
    self._thread: threading.Thread | None = None
    self._error: Exception | None = None

  def __enter__(self) -> Saver:
    std_logging.getLogger('absl').addFilter(self._is_not_commit_error)
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
    if self._thread is not None:
      self._thread.join()  # finishes the checkpoint that is being written
    std_logging.getLogger('absl').removeFilter(self._is_not_commit_error)
    if kind is None:  # an error in the block takes precedence
      self.check()

  def _is_not_commit_error(self, record: std_logging.LogRecord) -> bool:
    """Drops the traceback that Orbax logs before it raises the same error, which `check` raises."""
    return 'Handler Commit operations' not in record.getMessage()

  def save(self, step: int, tree: PyTree, host: HostState) -> None:
    """Starts to write `folder`/step_NNNNNN atomically; afterwards all but the newest checkpoints are deleted.

    `tree` holds device arrays of any sharding or numpy arrays; `host` nests dicts and lists of JSON values and numpy
    arrays. Returns when the device arrays may be donated. Raises the error of the previous save, and UserError when the
    disk is too full. A kill at any moment leaves the older checkpoints intact.
    """
    self.wait()
    part = os.path.join(self._folder, f'step_{step:06d}.part')
    encoded = _encode(host)  # raises for unsupported types before anything is written
    if _is_process_0():
      os.makedirs(self._folder, exist_ok=True)
      _remove_leftovers(self._folder)
    _barrier(f'begin {step}')  # the previous checkpoint is committed on all processes
    check_space(self._folder, tree)
    # Uncompressed: zstd saves an eighth of float32 weights and takes several times longer.
    handler = ocp.PyTreeCheckpointHandler(use_compression=False)
    writer = ocp.AsyncCheckpointer(handler, timeout_secs=_TIMEOUT_S)
    try:
      host_memory.return_freed()  # what the copies leave of it would be held beside them
      written = jax.tree.map(_stable_copy, tree)
      writer.save(os.path.join(part, 'device'), ocp.args.PyTreeSave(written))
    except Exception as error:
      writer.close()
      shutil.rmtree(part, ignore_errors=True)
      raise _user_error(self._folder, error) from error
    self._thread = threading.Thread(
      target=self._commit, args=(writer, step, encoded, _leaves(tree)), name=f'checkpoint {step}'
    )
    self._thread.start()

  def wait(self) -> None:
    """Waits until the last checkpoint is on disk, and raises its error."""
    if self._thread is not None:
      self._thread.join()
    self.check()

  def check(self) -> None:
    """Raises the error of the last save if it has failed already; does not wait."""
    error, self._error = self._error, None
    if error is not None:
      raise _user_error(self._folder, error) from error

  def _commit(
    self,
    writer: ocp.AsyncCheckpointer,
    step: int,
    encoded: tuple[str, list[np.ndarray]],
    leaves: Leaves,
  ) -> None:
    target = os.path.join(self._folder, f'step_{step:06d}')
    part, old = f'{target}.part', f'{target}.old'
    try:
      with writer:
        writer.wait_until_finished()  # of all processes
      if _is_process_0():
        safe_files.retry(_seal, part, encoded, leaves)
        _read_back(os.path.join(part, 'device'), leaves)
        if os.path.exists(target):  # damaged, otherwise `latest` would have resumed from it
          safe_files.rename(target, old)
        safe_files.rename(part, target)
        safe_files.flush(self._folder)
        _retain(self._folder, step, self._keep)
        if self._on_commit is not None:
          self._on_commit(step)
    except Exception as error:
      shutil.rmtree(part, ignore_errors=True)
      self._error = error


def save(folder: str, step: int, tree: PyTree, host: HostState, *, keep: int) -> None:
  """Writes one checkpoint as `Saver` does; it is on disk when this returns."""
  with Saver(folder, keep) as saver:
    saver.save(step, tree, host)
  _barrier(f'end {step}')


def latest(folder: str, only: int | None = None) -> int | None:
  """Returns the newest step whose checkpoint is intact, or None without checkpoints. `only` restricts it to one step.

  Damaged ones are logged. Raises UserError when all are damaged, because starting over would overwrite the metrics of
  the run, and when `only` does not exist.
  """
  intact, damage = None, ''
  if _is_process_0():
    steps = sorted(saved_steps(folder), reverse=True)
    if only is not None and only not in steps:
      raise UserError(f'--step={only} has no checkpoint in {folder}; there are: {steps or "none"}.')
    for step in steps if only is None else [only]:
      path = os.path.join(folder, f'step_{step:06d}')
      damage = manifest.damage(path)
      if not damage:
        intact = step
        break
      logging.warning('%s is broken (%s) and is skipped.', path, damage)
  # Process 0 decides for all, because files may become visible later on the others.
  code = -2 if intact is None and damage else -1 if intact is None else intact
  if jax.process_count() > 1:
    code = int(multihost_utils.broadcast_one_to_all(np.int32(code)))
  if code == -2:
    raise UserError(
      f'{folder} holds {"only broken checkpoints" if only is None else f"a broken checkpoint of --step={only}"} '
      f'({damage or "see process 0"}); restore an intact one, '
      'or delete them to start over from step 0.'
    )
  return None if code == -1 else code


def restore(folder: str, step: int, abstract: PyTree) -> tuple[PyTree, HostState]:
  """Returns the saved tree and host state, bit for bit.

  The leaves of `abstract` have the shapes and dtypes of the saved ones. A leaf with a sharding, on any mesh, is
  restored
  as a device array with this sharding; one without as a numpy array. Raises UserError when the checkpoint is of another
  model or batch.
  """
  path = os.path.join(os.path.abspath(folder), f'step_{step:06d}')
  _check_leaves(path, _leaves(abstract))
  with ocp.StandardCheckpointer() as reader:
    # With several processes the read is collective, so that none of them may repeat it alone.
    read = (
      reader.restore
      if jax.process_count() > 1
      else functools.partial(safe_files.retry, reader.restore)
    )
    tree = read(os.path.join(path, 'device'), jax.tree.map(_restore_argument, abstract))
  tree = jax.tree.map(
    lambda x, like: x if like.size else np.zeros(like.shape, like.dtype), tree, abstract
  )
  return tree, _decode(path)


def saved_config(folder: str) -> HostState | None:
  """Returns the config of the newest checkpoint whose host state is intact, or None."""
  for step in sorted(saved_steps(folder), reverse=True):
    path = os.path.join(folder, f'step_{step:06d}')
    if not manifest.damage(path, 'host.json'):
      return json.loads(safe_files.read(os.path.join(path, 'host.json'))).get('config')
  return None


def check_space(folder: str, tree: PyTree) -> None:
  """Raises UserError when the disk has no room for one more checkpoint of `tree`, which may be abstract."""
  needed = int(_DISK_MARGIN * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)))
  while not os.path.exists(folder):
    folder = os.path.dirname(os.path.abspath(folder))
  free = shutil.disk_usage(folder).free
  if free < needed:
    raise UserError(
      f'{folder} has {_size(free)} free and a checkpoint needs {_size(needed)}; make room, or '
      'choose another --workdir.'
    )


def _is_process_0() -> bool:
  return jax.process_index() == 0


def _barrier(name: str) -> None:
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(f'checkpoint {name}')


def saved_steps(folder: str) -> list[int]:
  """Returns the steps of the checkpoints in `folder`, intact or not."""
  names = os.listdir(folder) if os.path.isdir(folder) else []
  return [int(m.group(1)) for m in map(_NAME.match, names) if m]


def _remove_leftovers(folder: str) -> None:
  for name in os.listdir(folder):
    if _LEFTOVER.match(name):
      shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def _retain(folder: str, step: int, keep: int) -> None:
  """Deletes all checkpoints but `step` and the keep − 1 before it.

  Later steps are damaged checkpoints of an earlier start, which `latest` has skipped. Counted as new ones, they would
  displace intact checkpoints.
  """
  steps = sorted(saved_steps(folder))
  retained = [s for s in steps if s <= step][-max(keep, 1) :]
  for other in set(steps) - set(retained):
    path = os.path.join(folder, f'step_{other:06d}')
    safe_files.rename(
      path, f'{path}.old'
    )  # a partially deleted folder must not look like a checkpoint
  _remove_leftovers(folder)


def _seal(part: str, encoded: tuple[str, list[np.ndarray]], leaves: Leaves) -> None:
  """Adds the host state and the manifest of all files, and flushes them to disk."""
  text, arrays = encoded
  np.savez(os.path.join(part, 'host.npz'), **{f'a{i}': x for i, x in enumerate(arrays)})
  _write(os.path.join(part, 'host.json'), text)
  _write(os.path.join(part, manifest.NAME), manifest.make(part, leaves))
  for root, _, names in os.walk(part):
    for name in (*names, ''):
      safe_files.flush(os.path.join(root, name))


def _read_back(device: str, leaves: Leaves) -> None:
  """Decodes every array, one at a time. Raises where a file does not match its index.

  Writes can fail silently, so files are read back. Values are not compared, because the arrays of an accelerator are no
  longer in host memory.
  """
  context = ts.Context()
  store = dict(driver='ocdbt', base=f'file://{device}/')
  names = [key.decode() for key in ts.KvStore.open(store, context=context).result().list().result()]
  names = [name.removesuffix('.zarray').rstrip('/') for name in names if name.endswith('.zarray')]
  if len(names) != len(leaves):
    raise OSError(f'{device} holds {len(names)} arrays, not {len(leaves)}')
  for name in names:
    spec = dict(driver='zarr', kvstore=store | dict(path=name))
    ts.open(spec, context=context, open=True).result().read().result()


def _write(path: str, text: str) -> None:
  with open(path, 'w', encoding='utf-8') as file:
    file.write(text)


def _user_error(folder: str, error: Exception) -> Exception:
  """A UserError for a full or failing disk; other errors are returned unchanged."""
  reason = str(error)
  if 'No space left' in reason or 'Disk quota' in reason:
    free = _size(shutil.disk_usage(folder).free)
    return UserError(
      f'{folder} became full while a checkpoint was written ({free} free); make room and start '
      'again: earlier checkpoints are intact.'
    )
  if safe_files.is_transient(error):
    return UserError(
      f'{folder} failed while a checkpoint was written ({error}), also after retries; check the disk or the network '
      'mount; the same command then resumes from the previous checkpoint.'
    )
  return error


def _size(count_bytes: float) -> str:
  return f'{count_bytes / 1e9:.2f} GB' if count_bytes >= 1e9 else f'{count_bytes / 1e6:.1f} MB'


def _leaves(tree: PyTree) -> Leaves:
  """{path: [shape, dtype]} of every leaf."""
  flat = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path): [list(x.shape), str(x.dtype)] for path, x in flat}


def _check_leaves(path: str, expected: Leaves) -> None:
  """Raises UserError where shapes or dtypes differ. Orbax would cast another dtype silently."""
  try:
    saved = manifest.read(path)['leaves']
  except (OSError, ValueError) as error:
    raise UserError(f'{path} is no intact checkpoint ({error}); use another one.') from error
  for name in sorted(saved.keys() | expected.keys()):
    if saved.get(name) != expected.get(name):
      raise UserError(
        f'{path} does not fit this config: {name} is {saved.get(name, "absent")} there and '
        f'{expected.get(name, "absent")} here; give the old config and the --mode that trained it, or another '
        '--workdir.'
      )


def _stable_copy(leaf: Array) -> Array:
  """A leaf that later steps do not change while Orbax writes it.

  Orbax copies arrays of an accelerator before it returns, but writes arrays of a CPU from their own memory, which the
  next step donates.
  """
  if isinstance(leaf, jax.Array) and leaf.size and jax.default_backend() == 'cpu':
    return jax.device_put(leaf, leaf.sharding, may_alias=False)
  return _nonempty(leaf)


def _nonempty(leaf: Array) -> Array:
  """The leaf, or a zero in place of an array without elements, which Orbax refuses."""
  return leaf if leaf.size else np.zeros((), leaf.dtype)


def _restore_argument(leaf: Array) -> Array:
  """The restore argument of Orbax: a leaf without a sharding becomes a numpy array (a broadcast view, without
  memory)."""
  if not leaf.size:
    return _nonempty(leaf)
  if getattr(leaf, 'sharding', None) is not None:
    return leaf
  return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def _encode(host: HostState) -> tuple[str, list[np.ndarray]]:
  """Returns the host state as JSON, with arrays replaced by indices, and the arrays."""
  arrays: list[np.ndarray] = []

  def split(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic | jax.Array):
      array = np.array(value)  # a copy: it is written while the run continues
      if array.dtype.kind not in 'biufcUS':  # other types would be pickled or changed
        raise TypeError(f'an array of {array.dtype} cannot be stored in the host state')
      arrays.append(array)
      return {_ARRAY: len(arrays) - 1}
    if isinstance(value, dict):
      if not all(isinstance(k, str) and k != _ARRAY for k in value):
        raise TypeError(f'keys of the host state must be strings, not {list(value)}')
      return {k: split(v) for k, v in value.items()}
    return [split(v) for v in value] if isinstance(value, list | tuple) else value

  return json.dumps(split(host)), arrays


def _decode(path: str) -> HostState:
  with np.load(
    io.BytesIO(safe_files.read(os.path.join(path, 'host.npz'))), allow_pickle=False
  ) as file:
    arrays = {name: file[name] for name in file.files}
  join = lambda d: arrays[f'a{d[_ARRAY]}'] if _ARRAY in d else d  # noqa: E731
  return json.loads(safe_files.read(os.path.join(path, 'host.json')), object_hook=join)
