"""manifest.json of a checkpoint: length and CRC-32 of every file, shape and dtype of every array, and a digest.

Format: {"files": {name: [bytes, crc]}, "leaves": {path: [shape, dtype]}, "digest": SHA-256 of the other two fields}.
Older manifests lack the digest.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import zlib
from collections.abc import Iterator

from jaxrl_llm.checkpointing import safe_files

NAME = 'manifest.json'
_CHUNK_BYTES = 2**22
_FIELDS = {'files', 'leaves'}


def make(folder: str, leaves: dict[str, list]) -> str:
  """Returns the text of a manifest of the files in `folder`."""
  files = {name: safe_files.retry(checksum, os.path.join(folder, name)) for name in _files(folder)}
  content = dict(files=files, leaves=leaves)
  return json.dumps(content | dict(digest=_digest(content)))


def read(folder: str) -> dict[str, dict]:
  """Returns the files and leaves. Raises OSError where the manifest cannot be read and ValueError where it is
  damaged."""
  try:
    content = json.loads(safe_files.read(os.path.join(folder, NAME)))
    digest = content.pop('digest', None)
    intact = content.keys() == _FIELDS and digest in (None, _digest(content))
  except (AttributeError, TypeError, RecursionError) as error:
    raise ValueError(f'{NAME} is damaged ({error})') from error
  except ValueError as error:
    raise ValueError(f'{NAME} is damaged ({type(error).__name__}: {error})') from error
  if not intact:
    raise ValueError(f'{NAME} is damaged')
  return content


def damage(folder: str, *names: str) -> str:
  """Returns what is wrong with these files of a checkpoint (all files if none is named), or '' if they are intact."""
  try:
    files = read(folder)['files']
    for name, expected in files.items() if not names else [(n, files[n]) for n in names]:
      if safe_files.retry(checksum, os.path.join(folder, name), expected[0]) != expected:
        return f'{name} is damaged'
  except ValueError as error:
    return str(error)
  except (OSError, KeyError, TypeError, AttributeError, IndexError) as error:
    return f'{type(error).__name__}: {error}'
  return ''


def checksum(path: str, expected_bytes: int | None = None) -> list[int]:
  """Returns [bytes, CRC-32]. A file of another length than expected is not read and gets CRC -1."""
  size, crc = os.path.getsize(path), 0
  if expected_bytes not in (None, size):
    return [size, -1]
  with safe_files.open_regular(path, 'rb') as file:
    for chunk in iter(functools.partial(file.read, _CHUNK_BYTES), b''):
      crc = zlib.crc32(chunk, crc)
  return [size, crc]


def _files(folder: str) -> Iterator[str]:
  for root, _, names in os.walk(folder):
    for name in sorted(names):
      path = os.path.join(root, name)
      if path != os.path.join(folder, NAME):  # left by an earlier attempt
        yield os.path.relpath(path, folder)


def _digest(content: dict[str, dict]) -> str:
  return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
