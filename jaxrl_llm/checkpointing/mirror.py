"""The local copy of a run directory in an object store: what is fetched, and how changes are published.

The form of a run directory in a store is that of storage.py.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator

from absl import logging

from jaxrl_llm.checkpointing import manifest, safe_files, store_lock
from jaxrl_llm.checkpointing.object_store import PIECE_BYTES, Store, StoreError
from jaxrl_llm.types import UserError

# Files that only grow, or are cut at a resume.
LOGS = ('metrics.jsonl', 'choices.jsonl', 'sft.jsonl')
_PART = re.compile(r'((?:.*/)?)logs/([^/]+)/(\d{6,})\.(\d{12,})')
_MAX_PARTS = 200  # of a log before a start replaces them by one
_CHECKPOINTS = 'checkpoints/'
_COMPLETE = re.compile(r'checkpoints/step_(\d{6,})\.complete')
_NOT_COPIED = re.compile(r'(?:.*/)?(?:checkpoints/|lock\.json$)')
_PIECE = re.compile(r'(.*)~\d{4,}')


class Mirror:
  """A folder and the run directory in a store that it is a copy of. Methods may be called by several threads."""

  def __init__(self, store: Store, root: str):
    self._store, self._root = store, root
    self._stamps: dict[str, tuple[int, int]] = {}  # key → size and modification time when published
    self._logs: dict[str, bytes] = {}  # name → published content
    self._parts: dict[str, int] = {}  # name → number of the next part
    self._mutex = threading.RLock()

  @property
  def url(self) -> str:
    """The run directory in the store."""
    return self._store.url

  def pull(self, *, rollouts: bool = True) -> None:
    """Copies all files but the checkpoints; a copy is then equal to the store. Directories below are copied, too."""
    names = [name for name in self._store.names() if not _NOT_COPIED.match(name)]
    parts, plain = [name for name in names if _PART.fullmatch(name)], []
    for name in names:
      if not _PART.fullmatch(name) and (rollouts or not name.startswith('rollouts/')):
        plain.append(name)
    for name, content in self._store.read_many(plain):
      if content is not None:  # deleted meanwhile
        path = self._path(name)
        safe_files.write(path, content)
        self._stamps[name] = _stamp(path)
    self._pull_logs(parts)

  def pull_checkpoint(self, step: int | None = None) -> None:
    """Copies the newest checkpoint whose files are intact, or that of `step`; nothing where there is none.

    Damaged ones are copied, too, so that their readers see that there were some. Raises UserError without that step.
    """
    names = self._store.names(_CHECKPOINTS)
    whole = sorted(_whole(names), reverse=True)
    if step is not None and step not in whole:
      raise UserError(
        f'--step={step} has no checkpoint in {self.url}; there are: {whole or "none"}.'
      )
    for each in whole if step is None else [step]:
      self._download(names, each)
      if not (damage := manifest.damage(self._checkpoint(each))):
        return
      logging.warning('the checkpoint of step %d in %s is broken (%s).', each, self.url, damage)

  def push(self) -> None:
    """Publishes the files that changed since the last call, all but the checkpoints."""
    with self._mutex:
      stamps: dict[str, tuple[int, int]] = {}
      self._store.write_many(self._changed(stamps))
      self._stamps |= stamps
      for name in LOGS:
        self._push_log(name)

  def commit(self, step: int, keep: int, before_marker: Callable[[], None]) -> None:
    """Publishes the checkpoint of `step`, with everything before it; deletes all but the newest `keep`.

    `before_marker` is called before the checkpoint begins to count, and may raise.
    """
    self.push()
    # A name of its own, so that a checkpoint of the same step stays whole until the marker is replaced.
    folder = f'step_{step:06d}-{secrets.token_hex(4)}'
    for key, content in _pieces(self._checkpoint(step), f'{_CHECKPOINTS}{folder}/'):
      self._store.write(key, content)
      # Writes can fail silently, so objects are read back.
      if self._store.read(key) != content:
        raise StoreError(f'{self.url}/{key} has other content than was written; check the store.')
    before_marker()
    self._store.write(_marker(step), json.dumps(dict(folder=folder)).encode())
    self._delete_others(step, keep)

  def _delete_others(self, step: int, keep: int) -> None:
    """Deletes checkpoints, markers first, by the rule of checkpoint.py, and folders that no marker names."""
    names = self._store.names(_CHECKPOINTS)
    whole = _whole(names)
    retained = [s for s in sorted(whole) if s <= step][-max(keep, 1) :]
    for other in set(whole) - set(retained):
      self._store.delete(_marker(other))
    named = {self._folder(s) for s in retained}
    for folder in {f'{_CHECKPOINTS}{name.split("/")[1]}/' for name in names if name.count('/') > 1}:
      if folder not in named:
        self._store.delete(folder)

  def _folder(self, step: int) -> str:
    """The prefix of the objects of a checkpoint that is complete; '' where its marker is damaged or deleted."""
    try:
      folder = json.loads(self._store.read(_marker(step)) or b'')['folder']
    except (ValueError, KeyError, TypeError):
      return ''
    return f'{_CHECKPOINTS}{folder}/'

  def _changed(self, stamps: dict[str, tuple[int, int]]) -> Iterator[tuple[str, bytes]]:
    """(key, content) of the files that changed; their stamps are added to `stamps`."""
    for key in _files(self._root):
      try:
        stamp = _stamp(self._path(key))
        if key not in LOGS and stamp != self._stamps.get(key):
          content = safe_files.read(self._path(key))
          stamps[key] = stamp
          yield key, content
      except FileNotFoundError:  # removed or renamed meanwhile
        continue

  def _push_log(self, name: str) -> None:
    """Publishes the content of a log behind the part that is published already."""
    try:
      content = safe_files.read(self._path(name))
    except FileNotFoundError:
      return
    content = content[: content.rfind(b'\n') + 1]  # a line may be in the middle of being written
    old = self._logs.get(name, b'')
    begin = content.rfind(b'\n', 0, _common_bytes(old, content)) + 1
    if begin < len(content):
      number = self._parts.get(name, 0)
      self._store.write(f'logs/{name}/{number:06d}.{begin:012d}', content[begin:])
      self._parts[name], self._logs[name] = number + 1, content

  def _pull_logs(self, keys: list[str]) -> None:
    """Puts the parts of logs together."""
    logs: dict[tuple[str, str], list[tuple[int, int, str]]] = {}
    for key in keys:
      folder, name, number, begin = _PART.fullmatch(key).groups()  # pyright: ignore[reportOptionalMemberAccess]
      logs.setdefault((folder, name), []).append((int(number), int(begin), key))
    for (folder, name), parts in logs.items():
      parts = _from_last_whole(sorted(parts))
      content = b''
      contents = dict(self._store.read_many([key for _, _, key in parts]))
      for index, (number, begin, key) in enumerate(parts):
        part = contents[key]
        if part is None or number != parts[0][0] + index or begin > len(content):
          logging.warning(
            '%s/%s does not follow the part before it; later ones are left out.', self.url, key
          )
          break
        content = content[:begin] + part
      path = self._path(f'{folder}{name}')
      safe_files.write(path, content)
      if folder:  # of a run below, which is only read
        self._stamps[f'{folder}{name}'] = _stamp(path)
      else:
        self._logs[name], self._parts[name] = content, parts[-1][0] + 1

  def merge_parts(self) -> None:
    """Replaces the parts of long logs by one part each. Only the process with the lock may call it."""
    for name, number in self._parts.items():
      parts = self._store.names(f'logs/{name}/')
      if len(parts) > _MAX_PARTS:
        self._store.write(f'logs/{name}/{number:06d}.{0:012d}', self._logs[name])
        self._parts[name] = number + 1
        for key in parts:
          self._store.delete(key)

  def _download(self, names: list[str], step: int) -> None:
    """Copies the objects of a checkpoint; pieces of a file are joined."""
    folder, target = self._folder(step), self._checkpoint(step)
    os.makedirs(target)  # also of a damaged one without objects
    keys = [name for name in names if folder and name.startswith(folder)]
    for key, content in self._store.read_many(keys):
      name = key.removeprefix(folder)
      piece = _PIECE.fullmatch(name)
      path = _inside(target, piece.group(1) if piece else name)
      os.makedirs(os.path.dirname(path), exist_ok=True)
      with open(path, 'ab') as file:  # keys are sorted
        file.write(content or b'')

  def _checkpoint(self, step: int) -> str:
    """The local folder of a checkpoint."""
    return os.path.join(self._root, 'checkpoints', f'step_{step:06d}')

  def _path(self, key: str) -> str:
    return _inside(self._root, key)


class Publisher:
  """Publishes a mirror and renews its lock in threads, every few seconds until the end of its block."""

  def __init__(self, mirror: Mirror, lock: store_lock.Lock, keep: int):
    """The newest `keep` checkpoints stay. The lock is renewed four times in a lease."""
    self._mirror, self._lock, self._keep, self._stop = mirror, lock, keep, threading.Event()
    self._error: UserError | None = None
    # A long upload must not delay the renewal.
    self._threads = [
      threading.Thread(target=self._repeat, args=(call,), name='publisher', daemon=True)
      for call in (lock.renew, mirror.push)
    ]
    for thread in self._threads:
      thread.start()

  @property
  def url(self) -> str:
    """The run directory in the store."""
    return self._mirror.url

  def commit(self, step: int) -> None:
    """Publishes a checkpoint. Raises UserError where another process has taken the lock over."""
    if self._error is not None:
      raise self._error
    self._mirror.commit(step, self._keep, self._lock.renew)

  def __enter__(self) -> Publisher:
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
    """Publishes the rest. After an error in the block, which takes precedence, a failure is logged."""
    self._stop.set()
    for thread in self._threads:
      thread.join()
    try:
      if self._error is not None:
        raise self._error
      self._mirror.push()
    except UserError as error:
      if kind is None:
        raise
      logging.warning('%s', error)

  def _repeat(self, call: Callable[[], None]) -> None:
    while not self._stop.wait(self._lock.lease_s / 4):
      try:
        call()
      except StoreError as error:  # tried again, at the latest with the next checkpoint
        logging.warning('%s', error)
      except UserError as error:  # the lock is lost
        self._error = error
        self._stop.set()


def _from_last_whole(parts: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
  """The parts from the last one on that begins at byte 0."""
  firsts = [index for index, (_, begin, _) in enumerate(parts) if begin == 0]
  return parts[firsts[-1] :] if firsts else parts


def _whole(names: list[str]) -> list[int]:
  """The steps of the checkpoints that are complete."""
  return [int(m.group(1)) for m in map(_COMPLETE.fullmatch, names) if m]


def _marker(step: int) -> str:
  return f'{_CHECKPOINTS}step_{step:06d}.complete'


def _inside(root: str, key: str) -> str:
  """The file of an object. Raises UserError for a key that leads out of the folder."""
  path = os.path.normpath(os.path.join(root, key))
  if not path.startswith(f'{root}{os.sep}'):
    raise UserError(f'the store holds an object {key!r}, which is no file of a run; remove it.')
  return path


def _pieces(folder: str, prefix: str) -> Iterator[tuple[str, bytes]]:
  """(key, content) of the files of a checkpoint; a large file is cut into pieces NAME~0000, NAME~0001, …"""
  for name in _files(folder):
    path = os.path.join(folder, name)
    size = os.path.getsize(path)
    with safe_files.open_regular(path, 'rb') as file:
      for begin in range(0, max(size, 1), PIECE_BYTES):
        mark = f'~{begin // PIECE_BYTES:04d}' if size > PIECE_BYTES else ''
        yield f'{prefix}{name}{mark}', file.read(PIECE_BYTES)


def _common_bytes(a: bytes, b: bytes) -> int:
  """The length of the common prefix, by bisection: comparing slices is fast."""
  low, high = 0, min(len(a), len(b))
  a_view, b_view = memoryview(a), memoryview(b)
  while low < high:
    middle = (low + high + 1) // 2
    if a_view[low:middle] == b_view[low:middle]:
      low = middle
    else:
      high = middle - 1
  return low


def _files(root: str) -> Iterator[str]:
  """The relative paths of the files of a run directory that are published as they are, without its checkpoints."""
  for folder, subfolders, names in os.walk(root):
    if folder == root:
      subfolders[:] = [name for name in subfolders if name != 'checkpoints']
    for name in sorted(names):
      path = os.path.join(folder, name)
      if not name.endswith('.part') and name != '.lock' and not safe_files.kind(path):
        yield os.path.relpath(path, root)


def _stamp(path: str) -> tuple[int, int]:
  found = os.stat(path)
  return found.st_size, found.st_mtime_ns
