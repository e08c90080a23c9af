"""Checkpoints: device arrays by orbax, host state beside them, committed together by one rename."""

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
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from absl import logging
from jax.experimental import multihost_utils

from jaxrl_llm.checkpointing import manifest, safe_files
from jaxrl_llm.types import UserError

_NAME = re.compile(r'step_(\d{6,})$')
_LEFTOVER = re.compile(r'step_\d{6,}\.(part|old)$')  # of a kill while saving, or while deleting
_SPARE = 1.1  # disk asked for, over the bytes to be written
_ARRAY = '__array__'  # stands in host.json for an array of host.npz
# Orbax measures its patience by the wall clock, which may be set forward. A process that died is found out otherwise.
_PATIENCE_S = 10 * 365 * 86400


class Saver:
  """Writes checkpoints of one run behind its back, one at a time. To be used in `with`.

  In a run of many processes all of them make the same calls, on a folder that all of them see.
  """

  def __init__(self, folder: str, keep: int, committed: Callable[[int], None] | None = None):
    """Keeps the newest `keep` checkpoints in `folder`; committed(step) is called when one is on disk."""
    self._folder, self._keep, self._committed = os.path.abspath(folder), keep, committed
    self._thread: threading.Thread | None = None
    self._error: Exception | None = None

  def __enter__(self) -> Saver:
    return self

  def __exit__(self, kind: Any, *_: Any) -> None:
    if self._thread is not None:
      self._thread.join()  # what is half written is finished
    if kind is None:  # else another error is told
      self.check()

  def save(self, step: int, tree: Any, host: dict[str, Any]) -> None:
    """Writes `folder`/step_NNNNNN whole or not at all, then drops all but the newest.

    `tree` holds device arrays of any sharding, or numpy arrays; `host` nests dicts and lists of JSON
    values and numpy arrays. It returns when the device's arrays may be donated; what was not yet told of
    the save before is raised. A kill at any moment leaves the older checkpoints whole. Raises UserError
    when the disk is too full. Source: none.
    """
    self.wait()
    part = os.path.join(self._folder, f'step_{step:06d}.part')
    encoded = _encode(host)  # what cannot be kept is told before anything is written
    if _first():
      os.makedirs(self._folder, exist_ok=True)
      _remove_leftovers(self._folder)
    _barrier(f'begin {step}')  # all have done their part of the one before, and it is committed
    check_space(self._folder, tree)
    # Uncompressed: random float32 loses an eighth of its size to zstd, at several times the time.
    handler = ocp.PyTreeCheckpointHandler(use_compression=False)
    writer = ocp.AsyncCheckpointer(handler, timeout_secs=_PATIENCE_S)
    try:
      written = jax.tree.map(_held, tree)
      writer.save(os.path.join(part, 'device'), ocp.args.PyTreeSave(written))
    except Exception as error:
      writer.close()
      shutil.rmtree(part, ignore_errors=True)
      raise _explained(self._folder, error) from error
    self._thread = threading.Thread(
      target=self._commit, args=(writer, step, encoded, _leaves(tree)), name=f'checkpoint {step}'
    )
    self._thread.start()

  def wait(self) -> None:
    """Returns when all is on disk; raises what went wrong there."""
    if self._thread is not None:
      self._thread.join()
    self.check()

  def check(self) -> None:
    """Raises what is known to have gone wrong with the last save; does not wait for it."""
    error, self._error = self._error, None
    if error is not None:
      raise _explained(self._folder, error) from error

  def _commit(self, writer: Any, step: int, encoded: Any, leaves: dict[str, Any]) -> None:
    target = os.path.join(self._folder, f'step_{step:06d}')
    part, old = f'{target}.part', f'{target}.old'
    try:
      with writer:
        writer.wait_until_finished()  # of all processes
      if _first():
        safe_files.retry(_seal, part, encoded, leaves)
        _read_back(os.path.join(part, 'device'), leaves)
        if os.path.exists(target):  # broken, or `latest` would have begun from it
          safe_files.rename(target, old)
        safe_files.rename(part, target)
        safe_files.flush(self._folder)
        _retain(self._folder, step, self._keep)
        if self._committed is not None:
          self._committed(step)
    except Exception as error:
      shutil.rmtree(part, ignore_errors=True)
      self._error = error


def save(folder: str, step: int, tree: Any, host: dict[str, Any], *, keep: int) -> None:
  """One checkpoint, on disk when this returns: see `Saver`. Source: none."""
  with Saver(folder, keep) as saver:
    saver.save(step, tree, host)
  _barrier(f'end {step}')


def latest(folder: str, only: int | None = None) -> int | None:
  """The newest step whose checkpoint is whole, None where none was ever saved; of `only`, that. Source: none.

  Broken ones are named in a warning. Raises UserError when all are broken: to begin again from
  nothing, over the metrics of the run, is the user's decision. Likewise where `only` does not exist.
  """
  found, told = None, ''
  if _first():
    there = sorted(saved_steps(folder), reverse=True)
    if only is not None and only not in there:
      raise UserError(f'--step={only} has no checkpoint in {folder}; there are: {there or "none"}.')
    for step in there if only is None else [only]:
      path = os.path.join(folder, f'step_{step:06d}')
      told = manifest.damage(path)
      if not told:
        found = step
        break
      logging.warning('%s is broken (%s) and is skipped.', path, told)
  # One process looks, all hear: files may show late on the others.
  code = -2 if found is None and told else -1 if found is None else found
  if jax.process_count() > 1:
    code = int(multihost_utils.broadcast_one_to_all(np.int32(code)))
  if code == -2:
    raise UserError(
      f'{folder} holds {"only broken checkpoints" if only is None else f"a broken checkpoint of --step={only}"} '
      f'({told or "see process 0"}); put a whole one back, '
      'or delete them to begin again from step 0.'
    )
  return None if code == -1 else code


def restore(folder: str, step: int, abstract: Any) -> tuple[Any, dict[str, Any]]:
  """The saved tree and host state, bit for bit. Source: none.

  Every leaf of `abstract` has the shape and dtype of the saved one. A leaf with a sharding, of any
  mesh, comes back as a device array in it; a leaf without one as a numpy array. Raises UserError
  when the checkpoint is of another model or batch.
  """
  path = os.path.join(os.path.abspath(folder), f'step_{step:06d}')
  _fits(path, _leaves(abstract))
  with ocp.StandardCheckpointer() as reader:
    # Of many processes none may read twice what the others read once together.
    read = (
      reader.restore
      if jax.process_count() > 1
      else functools.partial(safe_files.retry, reader.restore)
    )
    tree = read(os.path.join(path, 'device'), jax.tree.map(_placed, abstract))
  tree = jax.tree.map(
    lambda x, like: x if like.size else np.zeros(like.shape, like.dtype), tree, abstract
  )
  return tree, _decode(path)


def host_state(folder: str, step: int) -> dict[str, Any]:
  """The saved host state alone: no device is touched. Source: none."""
  return _decode(os.path.join(os.path.abspath(folder), f'step_{step:06d}'))


def saved_config(folder: str) -> dict[str, Any] | None:
  """The configuration of the newest checkpoint whose host state is as it was written; None where there is none."""
  for step in sorted(saved_steps(folder), reverse=True):
    path = os.path.join(folder, f'step_{step:06d}')
    if not manifest.damage(path, 'host.json'):
      return json.loads(safe_files.read(os.path.join(path, 'host.json'))).get('config')
  return None


def check_space(folder: str, tree: Any) -> None:
  """Raises UserError, with both numbers, when the disk cannot hold one more checkpoint of `tree`.

  `tree` may be abstract. Source: none.
  """
  needed = int(_SPARE * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)))
  while not os.path.exists(folder):
    folder = os.path.dirname(os.path.abspath(folder))
  free = shutil.disk_usage(folder).free
  if free < needed:
    raise UserError(
      f'{folder} has {_size(free)} free and a checkpoint needs {_size(needed)}; make room, or '
      'choose another --workdir.'
    )


def _told_by_us(record: std_logging.LogRecord) -> bool:
  return 'Handler Commit operations' not in record.getMessage()


# Orbax also logs an error of its thread, with a traceback, before it raises it.
std_logging.getLogger('absl').addFilter(_told_by_us)


def _first() -> bool:
  return jax.process_index() == 0


def _barrier(name: str) -> None:
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(f'checkpoint {name}')


def saved_steps(folder: str) -> list[int]:
  """The steps of the checkpoints there, whole or not. Source: none."""
  names = os.listdir(folder) if os.path.isdir(folder) else []
  return [int(m.group(1)) for m in map(_NAME.match, names) if m]


def _remove_leftovers(folder: str) -> None:
  for name in os.listdir(folder):
    if _LEFTOVER.match(name):
      shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def _retain(folder: str, step: int, keep: int) -> None:
  """Keeps `step` and the keep − 1 before it.

  Steps after it are of a run that was overtaken: `latest` found them broken and began earlier.
  Counted as new ones, they would push whole checkpoints out.
  """
  steps = sorted(saved_steps(folder))
  kept = [s for s in steps if s <= step][-max(keep, 1) :]
  for other in set(steps) - set(kept):
    path = os.path.join(folder, f'step_{other:06d}')
    safe_files.rename(path, f'{path}.old')  # half deleted, it must not look like a checkpoint
  _remove_leftovers(folder)


def _seal(part: str, encoded: tuple[str, list[np.ndarray]], leaves: dict[str, Any]) -> None:
  """Adds the host state, then the list of all files with their checksums, and flushes to disk."""
  text, arrays = encoded
  np.savez(os.path.join(part, 'host.npz'), **{f'a{i}': x for i, x in enumerate(arrays)})
  _write(os.path.join(part, 'host.json'), text)
  _write(os.path.join(part, manifest.NAME), manifest.make(part, leaves))
  for at, _, names in os.walk(part):
    for name in (*names, ''):
      safe_files.flush(os.path.join(at, name))


def _read_back(device: str, leaves: dict[str, Any]) -> None:
  """Decodes every array, one at a time; raises where a file does not hold what the index says.

  A disk may take a write without a word and not have it. Only sizes are compared: nothing is left in memory of
  what an accelerator held.
  """
  context = ts.Context()
  where = dict(driver='ocdbt', base=f'file://{device}/')
  names = [key.decode() for key in ts.KvStore.open(where, context=context).result().list().result()]
  names = [name.removesuffix('.zarray').rstrip('/') for name in names if name.endswith('.zarray')]
  if len(names) != len(leaves):
    raise OSError(f'{device} holds {len(names)} arrays, not {len(leaves)}')
  for name in names:
    spec = dict(driver='zarr', kvstore=where | dict(path=name))
    ts.open(spec, context=context, open=True).result().read().result()


def _write(path: str, text: str) -> None:
  with open(path, 'w', encoding='utf-8') as file:
    file.write(text)


def _explained(folder: str, error: Exception) -> Exception:
  """A disk that others filled up meanwhile, or that fails, as a sentence. Anything else is passed on."""
  reason = str(error)
  if 'No space left' in reason or 'Disk quota' in reason:
    free = _size(shutil.disk_usage(folder).free)
    return UserError(
      f'{folder} became full while a checkpoint was written ({free} free); make room and start '
      'again: the checkpoints before are whole.'
    )
  if safe_files.is_transient(error):
    return UserError(
      f'{folder} failed while a checkpoint was written ({error}), also when tried again; check the disk or the network '
      'mount, and the same command goes on from the checkpoint before.'
    )
  return error


def _size(count_bytes: float) -> str:
  return f'{count_bytes / 1e9:.2f} GB' if count_bytes >= 1e9 else f'{count_bytes / 1e6:.1f} MB'


def _leaves(tree: Any) -> dict[str, Any]:
  """Path → [shape, dtype] of every leaf."""
  flat = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path): [list(x.shape), str(x.dtype)] for path, x in flat}


def _fits(path: str, wanted: dict[str, Any]) -> None:
  """Compares before orbax does, which would cast another dtype without a word."""
  try:
    saved = manifest.read(path)['leaves']
  except (OSError, ValueError) as error:
    raise UserError(f'{path} is no whole checkpoint ({error}); use one that is.') from error
  for name in sorted(saved.keys() | wanted.keys()):
    if saved.get(name) != wanted.get(name):
      raise UserError(
        f'{path} does not fit this config: {name} is {saved.get(name, "absent")} there and '
        f'{wanted.get(name, "absent")} here; give the old config, or another --workdir.'
      )


def _held(leaf: Any) -> Any:
  """A leaf that stays as it is while orbax writes it.

  It copies what an accelerator holds before it returns, but the memory of a CPU is written as it is, and the
  step that follows donates it.
  """
  if isinstance(leaf, jax.Array) and leaf.size and jax.default_backend() == 'cpu':
    return jax.device_put(leaf, leaf.sharding, may_alias=False)
  return _sized(leaf)


def _sized(leaf: Any) -> Any:
  """A leaf as orbax is to write it: an array of no elements, which it refuses, as a zero."""
  return leaf if leaf.size else np.zeros((), leaf.dtype)


def _placed(leaf: Any) -> Any:
  """What orbax is to restore a leaf as: without a sharding, a numpy array (of no memory, here)."""
  if not leaf.size:
    return _sized(leaf)
  if getattr(leaf, 'sharding', None) is not None:
    return leaf
  return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def _encode(host: dict[str, Any]) -> tuple[str, list[np.ndarray]]:
  """Host state as JSON, with arrays replaced by numbers, and these arrays."""
  arrays: list[np.ndarray] = []

  def split(value):
    if isinstance(value, np.ndarray | np.generic | jax.Array):
      array = np.array(value)  # a copy: it is written while the run goes on
      if array.dtype.kind not in 'biufcUS':  # others would be pickled, or lose their type
        raise TypeError(f'an array of {array.dtype} cannot be kept in the host state')
      arrays.append(array)
      return {_ARRAY: len(arrays) - 1}
    if isinstance(value, dict):
      if not all(isinstance(k, str) and k != _ARRAY for k in value):
        raise TypeError(f'keys of the host state must be strings, not {list(value)}')
      return {k: split(v) for k, v in value.items()}
    return [split(v) for v in value] if isinstance(value, list | tuple) else value

  return json.dumps(split(host)), arrays


def _decode(path: str) -> dict[str, Any]:
  with np.load(
    io.BytesIO(safe_files.read(os.path.join(path, 'host.npz'))), allow_pickle=False
  ) as file:
    arrays = {name: file[name] for name in file.files}
  join = lambda d: arrays[f'a{d[_ARRAY]}'] if _ARRAY in d else d  # noqa: E731
  return json.loads(safe_files.read(os.path.join(path, 'host.json')), object_hook=join)
