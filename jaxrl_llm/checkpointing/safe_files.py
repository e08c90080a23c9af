"""Files that are written whole, regular files only, and retries for file systems that fail for a moment.

Network file systems answer EIO or ESTALE while a server is replaced. Every operation here is tried again a few times
before its error is raised. After a failed fsync Linux counts the lost pages as clean, so a second fsync proves nothing:
what is tried again is the writing itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

_TRANSIENT_NAMES = ('EIO', 'ESTALE', 'ETIMEDOUT', 'EREMOTEIO')  # not all exist on every system
TRANSIENT = tuple(getattr(errno, name) for name in _TRANSIENT_NAMES if hasattr(errno, name))
# Libraries in C++ and Rust raise errors of their own, whose text holds that of the system.
_TRANSIENT_TEXTS = tuple(os.strerror(number) for number in TRANSIENT)
_WAITS_S = (0.1, 0.5, 2.5)  # between the tries
# What fsync answers where a file system has none, for folders or at all.
_NO_FSYNC = (errno.EINVAL, errno.EBADF, errno.EACCES, errno.EPERM, errno.ENOSYS, errno.EISDIR)
_NO_FSYNC += (errno.ENOTSUP, errno.EOPNOTSUPP)
_PART = '.part'
_KINDS = (
  (stat.S_ISDIR, 'a folder'),
  (stat.S_ISFIFO, 'a named pipe'),
  (stat.S_ISCHR, 'a device'),
  (stat.S_ISBLK, 'a device'),
  (stat.S_ISSOCK, 'a socket'),
)


class NotRegularError(OSError):
  """A path that holds a folder, a named pipe, a device or a socket where a file is read."""


def is_transient(error: BaseException) -> bool:
  """Whether an error is one of those that pass by themselves on a network file system."""
  if isinstance(error, OSError) and error.errno is not None:
    return error.errno in TRANSIENT
  return isinstance(error, Exception) and any(text in str(error) for text in _TRANSIENT_TEXTS)


def retry(operation: Callable, *args: Any, **keywords: Any) -> Any:
  """operation(*args, **keywords), called again after each transient error, at most four times in all.

  The operation must be safe to repeat. Raises the last error.
  """
  for wait_s in _WAITS_S:
    try:
      return operation(*args, **keywords)
    except Exception as error:
      if not is_transient(error):
        raise
      time.sleep(wait_s)
  return operation(*args, **keywords)


def rename(source: str, target: str) -> None:
  """os.replace, tried again. A server may rename and lose the answer alone: that counts as done."""
  failed = False

  def attempt() -> None:
    nonlocal failed
    try:
      os.replace(source, target)
    except FileNotFoundError:
      if not failed or os.path.lexists(source) or not os.path.lexists(target):
        raise
    except OSError:
      failed = True
      raise

  retry(attempt)


def part_name(path: str) -> str:
  """A name beside `path` that no other process, thread or machine takes, for what is not whole yet."""
  return f'{path}.{secrets.token_hex(8)}{_PART}'


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
  """Gives a new name to write to, and renames it to `path` at the end; after an error nothing of it is left."""
  part = part_name(path)
  try:
    yield part
    os.replace(part, path)
  except BaseException:
    with contextlib.suppress(OSError):
      os.remove(part)
    raise


def write(path: str, content: str | bytes) -> None:
  """Writes a file whole or not at all, with the folders above it, and to the disk itself."""
  # A lone surrogate has no UTF-8; as \udXXX it is what JSON would say anyway.
  data = content.encode('utf-8', 'backslashreplace') if isinstance(content, str) else content

  def attempt() -> None:
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with replacing(path) as part, open(part, 'xb') as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())

  retry(attempt)


def kind(path: str) -> str:
  """'a folder', 'a named pipe', 'a device' or 'a socket'; '' for a regular file and for what does not exist."""
  try:
    mode = retry(os.stat, path).st_mode
  except (OSError, ValueError):
    return ''
  return next((name for is_kind, name in _KINDS if is_kind(mode)), '')


def open_regular(path: str, mode: str = 'r', **keywords: Any) -> IO:
  """`open` for regular files. NotRegularError for others: opening a named pipe waits forever, a device never ends."""
  if found := kind(path):
    raise NotRegularError(errno.EINVAL, f'it is {found}, not a regular file', path)
  if 'b' not in mode:
    keywords.setdefault('encoding', 'utf-8')
  return retry(open, path, mode, **keywords)


def read(path: str) -> bytes:
  """The content of a regular file."""

  def attempt() -> bytes:
    with open_regular(path, 'rb') as file:
      return file.read()

  return retry(attempt)


def flush(path: str) -> None:
  """A file or a folder to the disk itself, where the file system can.

  A file whose fsync fails is written again from memory, which still holds it.
  """
  try:
    _sync(path)
    return
  except OSError as error:
    if not is_transient(error):
      raise
  if os.path.isdir(path):
    retry(_sync, path)
    return

  def again() -> None:
    with replacing(path) as part:
      shutil.copy2(path, part)
      _sync(part)

  retry(again)


def _sync(path: str) -> None:
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  except OSError as error:
    if error.errno not in _NO_FSYNC:
      raise
  finally:
    os.close(handle)


def remove_parts(folder: str) -> None:
  """Removes what killed processes left half written. Only for a folder that nobody else writes to now."""
  for name in os.listdir(folder) if os.path.isdir(folder) else ():
    if name.endswith(_PART) and not os.path.isdir(os.path.join(folder, name)):
      with contextlib.suppress(OSError):
        os.remove(os.path.join(folder, name))


def file_write_problem(path: str) -> str:
  """Why no file can be written at `path`, '' where one can."""
  if os.path.isdir(path):
    return 'it is a folder'
  if found := kind(path):
    return f'it is {found}'
  return _why_no_entry(os.path.dirname(os.path.abspath(path)))


def folder_write_problem(path: str) -> str:
  """Why no folder can be filled at `path`, '' where it can: it is absent or empty, and may be made and renamed."""
  if os.path.lexists(path) and not os.path.isdir(path):
    return 'it is a file'
  try:
    if os.path.isdir(path) and os.listdir(path):
      return 'it is not empty'
  except OSError as error:
    return str(error.strerror)
  return _why_no_entry(os.path.dirname(os.path.abspath(path)))


def _why_no_entry(folder: str) -> str:
  """Why nothing can be made in `folder`, which may itself be still to be made."""
  while not os.path.lexists(folder):
    folder = os.path.dirname(folder)
  if not os.path.isdir(folder):
    return f'{folder} is a file'
  # By trying: access() answers for root and for read-only network mounts what is not so.
  probe = part_name(os.path.join(folder, 'probe'))
  try:
    with open(probe, 'xb'):
      pass
    os.remove(probe)
  except OSError as error:
    return f'{folder}: {error.strerror}'
  return ''
