"""Run directories at gs://… and s3://…: a local copy that is read and written as any folder, and published.

An object store can neither append nor rename, so that files are published in this form:

    config.json, rollouts/step_000012.jsonl, …    as they are, again when they change
    logs/metrics.jsonl/000003.000000004711        numbered parts of a log; the second number is the byte of the log
                                                  at which the part begins and all earlier content ends
    checkpoints/step_000012-1b2c3d4e/…            the files of a checkpoint and the manifest with their checksums
    checkpoints/step_000012.complete              names that folder and is written last; others do not count
    lock.json                                     see store_lock.py

Everything is published before the marker of each checkpoint, and from time to time in between. A process may be killed
at any moment: the next one begins with the newest checkpoint and the logs up to it.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import platform
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.types import UserError

if TYPE_CHECKING:
  from jaxrl_llm.checkpointing.mirror import Publisher

_SCHEME = re.compile(r'\w+://')
_URLS: dict[str, str] = {}  # local copy → URL, for messages


def is_remote(path: str) -> bool:
  """Whether a path is the URL of a store. Raises UserError for a store that cannot be used."""
  if not _SCHEME.match(path):
    return False
  if not path.startswith(('gs://', 's3://')):
    raise UserError(f'{path} is in no store that can be used; name a folder, gs://… or s3://…')
  return True


def shown(text: str) -> str:
  """A message or a path with URLs in place of their local copies."""
  for folder, url in _URLS.items():
    text = text.replace(folder, url)
  return text


class Staged(NamedTuple):
  """A run directory to train in."""

  root: str  # a local folder
  publisher: Publisher | None = None  # of a remote one, on process 0


@contextlib.contextmanager
def training(workdir: str, keep: int) -> Iterator[Staged]:
  """The local folder of a run; that of a remote one is published until the end of the block, with `keep` checkpoints.

  The remote run directory is locked. Several processes need one folder for local copies that all of them share. Raises
  UserError where the store cannot be used or the directory is in use.
  """
  if not is_remote(workdir):
    yield Staged(workdir)
    return
  import jax  # imported late, as below: --help and a misspelled flag do not wait for it

  with contextlib.ExitStack() as stack:
    root = _staging(workdir)
    _URLS[root] = workdir.rstrip('/')
    publisher = None
    if jax.process_index() == 0:
      publisher = stack.enter_context(_published(workdir, root, keep))
    _check_shared(root)
    yield Staged(root, publisher)


@contextlib.contextmanager
def reading(
  workdir: str, *, checkpoint: bool = False, step: int | None = None, rollouts: bool = True
) -> Iterator[str]:
  """A local folder with the run directories at `workdir`; files that are written there are published at the end.

  `checkpoint` adds the newest one, or that of `step`. Raises UserError where the store cannot be used.
  """
  if not is_remote(workdir):
    yield workdir
    return
  from jaxrl_llm.checkpointing import mirror, object_store

  object_store.Store(workdir, probe=True).names('config.json')  # a wrong address fails soon
  with _temporary(workdir) as root:
    copy = mirror.Mirror(object_store.Store(workdir), root)
    copy.pull(rollouts=rollouts)
    if checkpoint:
      copy.pull_checkpoint(step)
    yield root
    copy.push()


@contextlib.contextmanager
def target(path: str) -> Iterator[str]:
  """A local path to write a file to, which is published at the end if `path` is remote."""
  if not path or not is_remote(path):
    yield path
    return
  from jaxrl_llm.checkpointing import object_store

  folder, _, name = path.rpartition('/')
  store = object_store.Store(folder, probe=True)
  with _temporary(folder) as root:
    local = os.path.join(root, name)
    yield local
    store.write(name, safe_files.read(local))


def config_file(workdir: str) -> str:
  """The config.json of a run, or a local copy of a remote one; '' where there is none."""
  if not is_remote(workdir):
    path = os.path.join(workdir, 'config.json')
    return path if os.path.isfile(path) else ''
  from jaxrl_llm.checkpointing import object_store

  store = object_store.Store(workdir, probe=True)
  content = store.read('config.json') if store.names('config.json') else None
  if content is None:
    return ''
  root = tempfile.mkdtemp()
  atexit.register(shutil.rmtree, root, ignore_errors=True)
  _URLS[root] = workdir
  path = os.path.join(root, 'config.json')
  safe_files.write(path, content)
  return path


@contextlib.contextmanager
def _published(url: str, root: str, keep: int) -> Iterator[Publisher]:
  """Locks the remote directory, copies it to `root`, and publishes the changes there until the end of the block."""
  from jaxrl_llm.checkpointing import mirror, object_store, store_lock

  os.makedirs(os.path.dirname(root), exist_ok=True)
  with _locked_here(root, url):
    object_store.Store(url, probe=True).names('config.json')  # a wrong address fails soon
    store = object_store.Store(url)
    # No other process of this machine uses this copy, so that a lock of this owner is that of a killed process.
    lock = store_lock.Lock(store, f'{platform.node()} ({_boot()}, {root})')
    lock.acquire()
    try:
      shutil.rmtree(root, ignore_errors=True)  # left by a killed process: the store counts
      os.makedirs(root)
      copy = mirror.Mirror(store, root)
      copy.pull()
      copy.merge_parts()
      copy.pull_checkpoint()
      with mirror.Publisher(copy, lock, keep) as publisher:
        yield publisher
    finally:
      shutil.rmtree(root, ignore_errors=True)
      with contextlib.suppress(UserError):  # the next start waits for the end of the lease
        lock.release()


@contextlib.contextmanager
def _locked_here(root: str, url: str) -> Iterator[None]:
  try:
    file = safe_files.lock(f'{root}.lock')
  except BlockingIOError as error:
    raise UserError(
      f'--workdir={url} is in use by another process; wait for it, or give another --workdir.'
    ) from error
  try:
    yield
  finally:
    if file is not None:
      file.close()


def _check_shared(root: str) -> None:
  """Raises UserError where the processes of a run do not share the folder of local copies."""
  import jax
  import numpy as np
  from jax.experimental import multihost_utils

  from jaxrl_llm.distributed import sharding

  if jax.process_count() == 1:
    return
  number = secrets.randbelow(2**31)
  if jax.process_index() == 0:
    safe_files.write(f'{root}.{number}', '')
  number = int(multihost_utils.broadcast_one_to_all(np.int32(number)))
  missing = sharding.any_process(not os.path.exists(f'{root}.{number}'))
  if jax.process_index() == 0:
    os.remove(f'{root}.{number}')
  if missing:
    raise UserError(
      f'the processes of a run in a store need a folder for local copies that all of them share, and {_cache()} is '
      'not shared; set JAXRL_LLM_CACHE to one that is.'
    )


@contextlib.contextmanager
def _temporary(url: str) -> Iterator[str]:
  """A folder that is removed at the end; its name is that of the run."""
  os.makedirs(_cache(), exist_ok=True)
  with tempfile.TemporaryDirectory(dir=_cache()) as folder:
    root = os.path.join(folder, os.path.basename(url.rstrip('/')))
    os.makedirs(root)
    _URLS[root] = url.rstrip('/')
    yield root


def _staging(url: str) -> str:
  """The local copy of a run on this machine: the same one for each start, named after the run."""
  url = url.rstrip('/')
  key = hashlib.sha256(url.encode()).hexdigest()[:16]
  return os.path.join(_cache(), key, os.path.basename(url))


def _cache() -> str:
  cache = os.environ.get('JAXRL_LLM_CACHE') or os.path.expanduser('~/.cache/jaxrl_llm')
  return os.path.join(os.path.abspath(cache), 'runs')


def _boot() -> str:
  """Identifies this start of the machine, where the system has a name for it: hosts may have equal names."""
  try:
    return safe_files.read('/proc/sys/kernel/random/boot_id').decode().strip()
  except OSError:
    return ''
