"""The run folder: config.json, metrics.jsonl, rollouts/, eval/, checkpoints/. Files appear whole or not at all."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from typing import Any, NamedTuple

import jax

from jaxrl_llm.types import UserError

# What may differ between the two starts of a run; the rest decides what the steps compute.
_FREE = ('steps', 'eval', 'checkpoint', 'rollouts_every', 'grade.workers', 'grade.deadline_s')
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')


class Workdir(NamedTuple):
  """Where a run keeps its files."""

  root: str

  @property
  def metrics(self) -> str:
    return os.path.join(self.root, 'metrics.jsonl')

  @property
  def checkpoints(self) -> str:
    return os.path.join(self.root, 'checkpoints')

  def write_rollouts(self, step: int, rows: list[dict]) -> None:
    """rollouts/step_000012.jsonl, one row a rollout."""
    text = ''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows)
    write(os.path.join(self.root, 'rollouts', f'step_{step:06d}.jsonl'), text)

  def write_eval(self, step: int, metrics: dict[str, float], rows: list[dict]) -> None:
    """eval/step_000012.json: metrics, and every answer."""
    told = dict(step=step, metrics=metrics, rows=rows)
    write(self._eval(step), json.dumps(told, ensure_ascii=False, indent=1))

  def read_eval(self, step: int) -> dict[str, float] | None:
    """The metrics of a finished evaluation, None where there is none."""
    try:
      with open(self._eval(step), encoding='utf-8') as file:
        return json.load(file)['metrics']
    except (OSError, ValueError, KeyError):
      return None

  def _eval(self, step: int) -> str:
    return os.path.join(self.root, 'eval', f'step_{step:06d}.json')


def open_run(root: str, config: Any) -> Workdir:
  """Makes the folder, or checks that it is of the same config. Source: none.

  Raises UserError when it cannot be written, and for another config with what differs.
  """
  root = os.path.abspath(root)
  flat = json.loads(config.to_json())
  path = os.path.join(root, 'config.json')
  try:
    for name in ('rollouts', 'eval', 'checkpoints'):
      os.makedirs(os.path.join(root, name), exist_ok=True)
    if os.path.exists(path):
      with open(path, encoding='utf-8') as file:
        _same(root, json.load(file), flat)
    write(path, json.dumps(flat, indent=1, sort_keys=True))
    write(os.path.join(root, 'environment.json'), json.dumps(_environment(), indent=1))
  except (OSError, ValueError) as error:
    if isinstance(error, UserError):
      raise
    raise UserError(
      f'--workdir={root} cannot be used ({error}); choose a folder to write in.'
    ) from error
  return Workdir(root)


def write(path: str, text: str) -> None:
  """Writes a file under another name, then renames it. Source: none."""
  part = f'{path}.part'
  with open(part, 'w', encoding='utf-8') as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(part, path)


def _same(root: str, old: dict, new: dict) -> None:
  before, now = _flatten(old), _flatten(new)
  differ = [
    f'{name}: {before.get(name, "unset")!r} -> {now.get(name, "unset")!r}'
    for name in sorted(before | now)
    if before.get(name) != now.get(name)
    and not any(name == free or name.startswith(free + '.') for free in _FREE)
  ]
  if differ:
    raise UserError(
      f'--workdir={root} holds a run of another config ({"; ".join(differ[:5])}); give the old values, '
      'or another --workdir.'
    )


def _flatten(tree: dict, prefix: str = '') -> dict[str, Any]:
  flat = {}
  for key, value in tree.items():
    if isinstance(value, dict):
      flat |= _flatten(value, f'{prefix}{key}.')
    else:
      flat[prefix + key] = value
  return flat


def _environment() -> dict[str, Any]:
  return dict(
    python=sys.version.split()[0],
    machine=platform.platform(),
    cores=os.cpu_count(),
    devices=[str(d) for d in jax.devices()],
    packages={name: importlib.metadata.version(name) for name in _PACKAGES},
  )
