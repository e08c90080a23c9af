"""manifest.json of a checkpoint: length and CRC-32 of every file, shape and dtype of every array, a digest of itself.

{"files": {name: [bytes, crc]}, "leaves": {path: [shape, dtype]}, "digest": SHA-256 of the other two}. Manifests that
were written before there was a digest have the first two fields alone.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from typing import Any

from jaxrl_llm.checkpointing import safe_files

NAME = 'manifest.json'
_CHUNK_BYTES = 2**22
_FIELDS = {'files', 'leaves'}


def make(folder: str, leaves: dict[str, Any]) -> str:
  """The text of the manifest of all files that are in `folder` now."""
  files = {name: safe_files.retry(checksum, os.path.join(folder, name)) for name in _files(folder)}
  held = dict(files=files, leaves=leaves)
  return json.dumps(held | dict(digest=_digest(held)))


def read(folder: str) -> dict[str, Any]:
  """The manifest as it was written. Raises OSError where it cannot be read and ValueError where it is damaged."""
  try:
    held = json.loads(safe_files.read(os.path.join(folder, NAME)))
    digest = held.pop('digest', None)
    whole = held.keys() == _FIELDS and digest in (None, _digest(held))
  except (AttributeError, TypeError, RecursionError) as error:
    raise ValueError(f'{NAME} is not as it was written ({error})') from error
  except ValueError as error:
    raise ValueError(
      f'{NAME} is not as it was written ({type(error).__name__}: {error})'
    ) from error
  if not whole:
    raise ValueError(f'{NAME} is not as it was written')
  return held


def damage(folder: str, *names: str) -> str:
  """What is wrong with these files of a checkpoint, with all where none is named; '' when they are as written."""
  try:
    files = read(folder)['files']
    for name, expected in files.items() if not names else [(n, files[n]) for n in names]:
      if safe_files.retry(checksum, os.path.join(folder, name), expected[0]) != expected:
        return f'{name} is not as it was written'
  except ValueError as error:
    return str(error)
  except (OSError, KeyError, TypeError, AttributeError, IndexError) as error:
    return f'{type(error).__name__}: {error}'
  return ''


def checksum(path: str, expected_bytes: int | None = None) -> list[int]:
  """[bytes, CRC-32]; a file of another length than expected is not read."""
  size, crc = os.path.getsize(path), 0
  if expected_bytes not in (None, size):
    return [size, -1]
  with safe_files.open_regular(path, 'rb') as file:
    for chunk in iter(functools.partial(file.read, _CHUNK_BYTES), b''):
      crc = zlib.crc32(chunk, crc)
  return [size, crc]


def _files(folder: str) -> Iterator[str]:
  for at, _, names in os.walk(folder):
    for name in sorted(names):
      if os.path.join(at, name) != os.path.join(folder, NAME):  # of an earlier try
        yield os.path.relpath(os.path.join(at, name), folder)


def _digest(held: dict[str, Any]) -> str:
  return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()
