"""Checkpoints: device arrays by orbax, host state as npz, committed together by one rename."""

from __future__ import annotations

import json
import os
import re
import shutil
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from jaxrl_llm.types import UserError

_NAME = re.compile(r'step_(\d{6,})$')
_SPARE = 1.1  # disk asked for, over the bytes to be written


def save(folder: str, step: int, tree: Any, host: dict[str, Any], *, keep: int) -> None:
  """Writes step_NNNNNN under a temporary name, reads it back, renames it, then drops old ones.

  `tree` holds device or numpy arrays; `host` JSON values, and dicts of numpy arrays. A kill at any
  moment leaves the older checkpoints whole. Raises UserError when the disk is too full. Source: none.
  """
  folder = os.path.abspath(folder)
  os.makedirs(folder, exist_ok=True)
  _check_space(folder, tree)
  target = os.path.join(folder, f'step_{step:06d}')
  part = f'{target}.part'
  shutil.rmtree(part, ignore_errors=True)
  with ocp.StandardCheckpointer() as writer:
    writer.save(os.path.join(part, 'device'), tree)
    writer.wait_until_finished()
  _write_host(part, host)
  if os.path.exists(target):  # a step done again after a resume
    shutil.rmtree(target)
  os.replace(part, target)
  for old in sorted(_steps(folder))[:-keep]:
    shutil.rmtree(os.path.join(folder, f'step_{old:06d}'))


def latest(folder: str) -> int | None:
  """The newest step whose checkpoint is whole; broken ones are named in a warning. Source: none."""
  for step in sorted(_steps(folder), reverse=True):
    path = os.path.join(folder, f'step_{step:06d}')
    try:
      _read_host(path)
      with ocp.StandardCheckpointer() as reader:
        reader.metadata(os.path.join(path, 'device'))
      return step
    except Exception as error:  # any damage at all: the one before it counts
      logging.warning('%s is broken (%s) and is skipped', path, error)
  return None


def restore(folder: str, step: int, abstract: Any) -> tuple[Any, dict[str, Any]]:
  """The arrays as `abstract` asks (shapes, dtypes, shardings of any mesh) and the host state.

  Raises UserError when the checkpoint is of another model. Source: none.
  """
  path = os.path.join(os.path.abspath(folder), f'step_{step:06d}')
  try:
    with ocp.StandardCheckpointer() as reader:
      tree = reader.restore(os.path.join(path, 'device'), abstract)
  except ValueError as error:
    raise UserError(
      f'{path} does not fit this config ({str(error).splitlines()[0]}); start another --workdir.'
    ) from error
  return tree, _read_host(path)


def _steps(folder: str) -> list[int]:
  names = os.listdir(folder) if os.path.isdir(folder) else []
  return [int(m.group(1)) for m in map(_NAME.match, names) if m]


def _check_space(folder: str, tree: Any) -> None:
  needed = int(_SPARE * sum(x.nbytes for x in jax.tree.leaves(tree)))
  free = shutil.disk_usage(folder).free
  if free < needed:
    raise UserError(
      f'{folder} has {free / 1e9:.1f} GB free and a checkpoint needs {needed / 1e9:.1f} GB; make room, or '
      'choose another --workdir.'
    )


def _write_host(path: str, host: dict[str, Any]) -> None:
  arrays = {
    f'{group}/{name}': x
    for group, value in host.items()
    if isinstance(value, dict)
    for name, x in value.items()
  }
  np.savez(os.path.join(path, 'host.npz'), **arrays)
  plain = {k: v for k, v in host.items() if not isinstance(v, dict)}
  with open(os.path.join(path, 'host.json'), 'w', encoding='utf-8') as file:
    json.dump(plain, file)
    file.flush()
    os.fsync(file.fileno())


def _read_host(path: str) -> dict[str, Any]:
  with open(os.path.join(path, 'host.json'), encoding='utf-8') as file:
    host = json.load(file)
  with np.load(os.path.join(path, 'host.npz'), allow_pickle=False) as arrays:
    for name in arrays.files:
      group, _, key = name.partition('/')
      host.setdefault(group, {})[key] = arrays[name]
  return host
