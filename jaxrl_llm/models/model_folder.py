"""Reads files of a model folder, which may be untrusted: they must lie in the folder and be regular files."""

from __future__ import annotations

import json
import os

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.types import JsonObject, JsonValue, UserError

_MAX_BYTES = 2**28  # of a text file; the index of the largest models has about 2**23


def locate(folder: str, name: JsonValue) -> str:
  """The path of a file in `folder`. Raises UserError for a name or link that leads out of it.

  A link may lead within the folder or, in the layout of the hub's cache, from snapshots/<revision> to blobs.
  """
  is_plain = isinstance(name, str) and name == os.path.basename(name) and '\0' not in name
  if not is_plain or name in ('', '.', '..'):
    raise UserError(
      f'config.model={folder!r} names the file {name!r}, which does not lie in it; fetch the model from a source that '
      'you trust.'
    )
  path, root = os.path.join(folder, name), os.path.realpath(folder)
  repository, parent = os.path.split(os.path.dirname(root))
  allowed = [root, os.path.join(repository, 'blobs')] if parent == 'snapshots' else [root]
  real = os.path.realpath(path)
  if not any(real.startswith(os.path.join(directory, '')) for directory in allowed):
    raise UserError(
      f'config.model={folder!r}: {name} is a link out of the folder, to {real}; put the file itself there.'
    )
  if kind := safe_files.kind(path):
    raise UserError(f'config.model={folder!r}: {name} is {kind}, not a file; copy it again.')
  return path


def read_json(folder: str, name: str) -> JsonObject:
  """The JSON object in folder/name, {} for a missing file. Raises UserError for one that is unreadable."""
  text = read_text(folder, name)
  try:
    value = {} if text is None else json.loads(text)
  except (ValueError, RecursionError) as error:
    raise UserError(
      f'config.model={folder!r}: {name} is unreadable ({error}); copy it again.'
    ) from error
  if not isinstance(value, dict):
    raise UserError(f'config.model={folder!r}: {name} is not a JSON object; copy it again.')
  return value


def read_text(folder: str, name: str) -> str | None:
  """The text of folder/name, None for a missing file. Raises UserError for one that is unreadable."""
  path = locate(folder, name)
  if not os.path.lexists(path):
    return None
  try:
    if os.path.getsize(path) > _MAX_BYTES:
      raise ValueError(f'its size is above {_MAX_BYTES // 2**20} MiB')
    return safe_files.read(path).decode()
  except (OSError, ValueError) as error:
    raise UserError(
      f'config.model={folder!r}: {name} is unreadable ({error}); copy it again.'
    ) from error
