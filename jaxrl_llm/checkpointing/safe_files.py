"""Atomic writes, reads of regular files only, and retries for transient errors of network file systems.

Network file systems return EIO or ESTALE while a server is replaced. Every operation here is retried a few times before
its error is raised. After a failed fsync Linux marks the lost pages as clean, so that a second fsync would succeed
without writing them: the write itself is repeated.
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
# Libraries in C++ and Rust raise errors of other types whose text contains that of the system error.
_TRANSIENT_TEXTS = tuple(os.strerror(number) for number in TRANSIENT)
_WAITS_S = (0.1, 0.5, 2.5)  # between attempts
# Errors of fsync on file systems that do not support it, for folders or at all.
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
  """The path is a folder, a named pipe, a device or a socket, where a regular file is needed."""


def is_transient(error: BaseException) -> bool:
  """Returns whether a retry may succeed: the error is typical of a network file system that recovers."""
  if isinstance(error, OSError) and error.errno is not None:
    return error.errno in TRANSIENT
  return isinstance(error, Exception) and any(text in str(error) for text in _TRANSIENT_TEXTS)


def retry(operation: Callable, *args: Any, **keywords: Any) -> Any:
  """Returns operation(*args, **keywords), called again after each transient error, at most four times in total.

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
  """os.replace with retries. A server may rename and lose only the reply: that counts as done."""
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
  """Returns a unique name next to `path` for a file that is being written."""
  return f'{path}.{secrets.token_hex(8)}{_PART}'


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
  """Yields a temporary path to write to and renames it to `path` at the end. After an error it is removed."""
  part = part_name(path)
  try:
    yield part
    os.replace(part, path)
  except BaseException:
    with contextlib.suppress(OSError):
      os.remove(part)
    raise


def write(path: str, content: str | bytes) -> None:
  """Writes a file atomically, creates the folders above it, and flushes it to disk."""
  # A lone surrogate has no UTF-8 encoding; \udXXX is its escape in JSON, too.
  data = content.encode('utf-8', 'backslashreplace') if isinstance(content, str) else content

  def attempt() -> None:
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with replacing(path) as part, open(part, 'xb') as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())

  retry(attempt)


def kind(path: str) -> str:
  """Returns 'a folder', 'a named pipe', 'a device' or 'a socket'; '' for a regular file or where nothing exists."""
  try:
    mode = retry(os.stat, path).st_mode
  except (OSError, ValueError):
    return ''
  return next((name for is_kind, name in _KINDS if is_kind(mode)), '')


def open_regular(path: str, mode: str = 'r', **keywords: Any) -> IO:
  """`open` for regular files. Raises NotRegularError for others: a named pipe may block, and a device may never end."""
  if special := kind(path):
    raise NotRegularError(errno.EINVAL, f'it is {special}, not a regular file', path)
  if 'b' not in mode:
    keywords.setdefault('encoding', 'utf-8')
  return retry(open, path, mode, **keywords)


def read(path: str) -> bytes:
  """Returns the content of a regular file."""

  def attempt() -> bytes:
    with open_regular(path, 'rb') as file:
      return file.read()

  return retry(attempt)


def flush(path: str) -> None:
  """Flushes a file or a folder to disk, where the file system supports it.

  A file whose fsync fails is copied anew from the page cache.
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

  def copy_anew() -> None:
    with replacing(path) as part:
      shutil.copy2(path, part)
      _sync(part)

  retry(copy_anew)


def _sync(path: str) -> None:
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  except OSError as error:
    if error.errno not in _NO_FSYNC:
      raise
  finally:
    os.close(handle)


def lock(path: str) -> IO[str] | None:
  """Locks a file against other processes until it is closed; None on a file system without locks.

  Raises BlockingIOError where another process has it.
  """
  import fcntl  # absent on Windows, where this module must still be importable

  file = open_regular(path, 'a+')
  try:
    # A record lock is not inherited by workers and ends with this process in any case.
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError as error:
    file.close()
    if error.errno in (errno.EACCES, errno.EAGAIN):
      raise BlockingIOError(errno.EAGAIN, 'locked by another process', path) from error
    return None
  return file


def remove_parts(folder: str) -> None:
  """Removes partial files of killed processes. No other process may be writing to the folder."""
  for name in os.listdir(folder) if os.path.isdir(folder) else ():
    if name.endswith(_PART) and not os.path.isdir(os.path.join(folder, name)):
      with contextlib.suppress(OSError):
        os.remove(os.path.join(folder, name))


def file_write_problem(path: str) -> str:
  """Returns why no file can be written at `path`, or ''."""
  if os.path.isdir(path):
    return 'it is a folder'
  if special := kind(path):
    return f'it is {special}'
  return _create_problem(os.path.dirname(os.path.abspath(path)))


def folder_write_problem(path: str) -> str:
  """Returns why no new folder can be created at `path`, or '' if it is absent or empty and its parent is writable."""
  if os.path.lexists(path) and not os.path.isdir(path):
    return 'it is a file'
  try:
    if os.path.isdir(path) and os.listdir(path):
      return 'it is not empty'
  except OSError as error:
    return str(error.strerror)
  return _create_problem(os.path.dirname(os.path.abspath(path)))


def _create_problem(folder: str) -> str:
  """Returns why nothing can be created in `folder`, which may not exist yet, or ''."""
  while not os.path.lexists(folder):
    folder = os.path.dirname(folder)
  if not os.path.isdir(folder):
    return f'{folder} is a file'
  # By an attempt: access() is wrong for root and for read-only network mounts.
  probe = part_name(os.path.join(folder, 'probe'))
  try:
    with open(probe, 'xb'):
      pass
    os.remove(probe)
  except OSError as error:
    return f'{folder}: {error.strerror}'
  return ''
