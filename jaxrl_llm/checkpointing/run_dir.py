"""The run folder: config.json, environment.json, metrics.jsonl, choices.jsonl, rollouts/, eval/, checkpoints/ and more.

Files appear whole or not at all; in a run of many processes the first one writes them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from jaxrl_llm.checkpointing import metrics_log, safe_files
from jaxrl_llm.config import loading as configs
from jaxrl_llm.types import UserError

# What may differ between two starts of a run: how long it goes on, what is looked at and kept, and
# how the same mathematics is laid out on a machine. All else decides what the steps compute.
_FREE = (
  'steps',
  'evaluation',
  'checkpoint',
  'rewards.workers',
  'rewards.deadline_s',
  'rewards.cpu_s',
  'rewards.memory_mb',
  'rewards.failed.stop_share',
  'rewards.failed.stop_steps',
  'monitoring',
  'mesh',
  'processes',
  'learner.microbatch_rollouts',
  'learner.remat',
  'objective.head_chunk_tokens',
)
TIMING = 'timing.json'
_COMMITTED = 'checkpoint.json'
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')
_TOLD = 8  # differing fields named in a refusal
_STARTS = 100  # entries kept in environment.json


class RunDirectory(NamedTuple):
  """Where a run keeps its files."""

  root: str
  changed: tuple[str, ...] = ()  # 'steps: 60 -> 120': what differs from the last start
  lock: Any = None  # an open file: the folder is this process's as long as it lives

  @property
  def metrics(self) -> str:
    return os.path.join(self.root, 'metrics.jsonl')

  @property
  def sft(self) -> str:
    return os.path.join(self.root, 'sft.jsonl')

  @property
  def choices(self) -> str:
    return os.path.join(self.root, 'choices.jsonl')

  @property
  def checkpoints(self) -> str:
    return os.path.join(self.root, 'checkpoints')

  def record_checkpoint(self, step: int) -> None:
    """Records in checkpoint.json that the checkpoint of `step` is on disk."""
    write(os.path.join(self.root, _COMMITTED), json.dumps(dict(step=step)))

  def write_rollouts(self, step: int, rows: list[dict]) -> None:
    """rollouts/step_000012.jsonl, one row a rollout: input, output, gts, score, step and more."""
    text = ''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows)
    write(os.path.join(self.root, 'rollouts', f'step_{step:06d}.jsonl'), text)

  def write_suspects(self, rows: list[dict]) -> None:
    """suspect_labels.jsonl: labels that rollouts contradict, for a human to look at."""
    text = ''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows)
    write(os.path.join(self.root, 'suspect_labels.jsonl'), text)

  def write_non_finite(self, step: int, arrays: dict[str, np.ndarray], rows: list[dict]) -> str:
    """non_finite/step_000012.npz and .jsonl: the batch of a skipped update; returns their path without the ending."""
    path = os.path.join(self.root, 'non_finite', f'step_{step:06d}')
    if jax.process_index() == 0:
      os.makedirs(os.path.dirname(path), exist_ok=True)
      safe_files.retry(_write_arrays, f'{path}.npz', arrays)
    write(f'{path}.jsonl', ''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows))
    return path

  def write_eval(self, step: int, told: dict[str, Any]) -> None:
    """eval/step_000012.json: what `evaluate.record` says, answers and all."""
    write(self._eval(step), json.dumps(told, ensure_ascii=False, indent=1))

  def read_eval(self, step: int, asked: dict[str, Any]) -> dict[str, Any] | None:
    """A finished evaluation whose fields `asked` are as they say, None where there is none."""
    try:
      told = dict(json.loads(safe_files.read(self._eval(step))))
    except (OSError, ValueError, TypeError):
      return None
    asked = json.loads(json.dumps(asked))  # as a file has it: tuples are lists there
    return told if told | asked == told and told.keys() >= {'metrics', 'rows'} else None

  def _eval(self, step: int) -> str:
    return os.path.join(self.root, 'eval', f'step_{step:06d}.json')


def open_run(
  root: str,
  config: Any,
  *,
  exclusive: bool = True,
  steps: Sequence[int] | None = None,
  saved: dict[str, Any] | None = None,
) -> RunDirectory:
  """Makes the folder of a run, or checks that it is of the same config. Source: none.

  `exclusive` keeps a second process out for as long as the result lives. `steps` are those of the
  checkpoints there, `saved` the config that the newest of them holds. Raises UserError when the folder
  cannot be written or is in use, for another config, with what differs (old -> new), and where the
  checkpoints behind its metrics were deleted. A refusal changes no file.
  """
  root = os.path.abspath(root)
  now = json.loads(config.to_json())
  changed, lock = (), None
  try:
    _check_files(root)
    before = _read_config(os.path.join(root, 'config.json'), saved)
    for held in (saved, before):
      changed = _compare(root, held, now) if held is not None else changed
    if steps is not None:
      _check_checkpoints(root, steps)
    if jax.process_index() == 0:
      for name in ('rollouts', 'eval', 'checkpoints'):
        os.makedirs(os.path.join(root, name), exist_ok=True)
      lock = _lock(root) if exclusive else None
      for name in ('', 'rollouts', 'eval', 'non_finite') if lock else ():
        safe_files.remove_parts(os.path.join(root, name))
      told = now | dict(fingerprint=fingerprint(now))
      write(os.path.join(root, 'config.json'), json.dumps(told, indent=1, sort_keys=True))
      _add_start(os.path.join(root, 'environment.json'))
  except OSError as error:
    raise UserError(
      f'--workdir={root} cannot be used ({error}); choose a folder to write in.'
    ) from error
  return RunDirectory(root, changed, lock)


def fingerprint(config: dict[str, Any]) -> str:
  """A hash of all that decides what the steps compute: equal for any two starts of a run.

  Source: none.
  """
  told = {k: v for k, v in _flatten(config).items() if not _free(k)}
  return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


class TimeSpent:
  """Seconds of a run beside its steps, by what they went to: timing.json, added up over its starts."""

  def __init__(self, root: str):
    """Goes on from what the folder says."""
    self._path = os.path.join(root, TIMING)
    try:
      self._told = {str(k): float(v) for k, v in json.loads(safe_files.read(self._path)).items()}
    except (OSError, ValueError, TypeError, AttributeError):
      self._told = {}

  def add(self, what: str, seconds: float) -> None:
    """Counts, and writes."""
    self._told[what] = round(self._told.get(what, 0.0) + seconds, 3)
    write(self._path, json.dumps(self._told))

  @contextlib.contextmanager
  def on(self, what: str) -> Iterator[None]:
    """Counts what runs inside, if it ends well."""
    began = time.perf_counter()
    yield
    self.add(what, time.perf_counter() - began)

  def timed(self, what: str, fn: Callable) -> Callable:
    """`fn`, counted whenever it is called."""

    def run(*args: Any) -> Any:
      with self.on(what):
        return fn(*args)

    return run


def write(path: str, text: str) -> None:
  """Writes a file whole or not at all; on the first process only. Source: none."""
  if jax.process_index():
    return
  safe_files.write(path, text)


def _write_arrays(path: str, arrays: dict[str, np.ndarray]) -> None:
  with safe_files.replacing(path) as part, open(part, 'xb') as file:
    np.savez_compressed(file, **arrays)


def _check_files(root: str) -> None:
  """Raises UserError for a named pipe, a device or a socket in the folder, which a run would wait for hours later."""
  for name in sorted(os.listdir(root)) if os.path.isdir(root) else ():
    found = safe_files.kind(os.path.join(root, name))
    if found not in ('', 'a folder'):
      raise UserError(
        f'--workdir={root} holds {name}, which is {found}; remove it, or give another --workdir.'
      )


def _check_checkpoints(root: str, steps: Sequence[int]) -> None:
  """Raises UserError where all checkpoints are gone that once stood behind the rows of metrics.jsonl."""
  try:
    committed = int(json.loads(safe_files.read(os.path.join(root, _COMMITTED)))['step'])
  except (OSError, ValueError, TypeError, KeyError):
    return  # before the first checkpoint a killed run begins again
  path = os.path.join(root, 'metrics.jsonl')
  if steps:
    if max(steps) < committed:
      logging.warning(
        '%s: the checkpoint of step %d is gone; the newest there is of step %d, and later steps are taken again.',
        root, committed, max(steps),
      )  # fmt: skip
  elif rows := len(metrics_log.read(path)):
    raise UserError(
      f'--workdir={root} has no checkpoint, but had one of step {committed}, and {path} holds {rows} rows, which a '
      'start from step 0 would overwrite; put the checkpoints back, give another --workdir, or move that file away to '
      'begin again.'
    )
  elif jax.process_index() == 0:
    os.remove(os.path.join(root, _COMMITTED))  # begun again on purpose


def _read_config(path: str, saved: dict[str, Any] | None) -> dict[str, Any] | None:
  """config.json, None where it is absent, or damaged and `saved` may stand for it."""
  if not os.path.exists(path):
    return None
  try:
    return dict(json.loads(safe_files.read(path)))
  except (ValueError, TypeError) as error:
    if saved is not None:
      logging.warning('%s is damaged (%s) and is written again.', path, error)
      return None
    raise UserError(
      f'{path} is damaged ({error}); restore it, or give another --workdir.'
    ) from error


def _compare(root: str, old: dict, new: dict) -> tuple[str, ...]:
  """What changed, all of it harmless; raises UserError for what is not."""
  # A field that did not exist yet when the run began had what is its default now.
  before, now = _defaults() | _flatten(old), _flatten(new)
  before.pop('fingerprint', None)
  differ = {
    name: f'{name}: {before.get(name, "unset")!r} -> {now.get(name, "unset")!r}'
    for name in sorted(before | now)
    if before.get(name, _ABSENT) != now.get(name, _ABSENT)
  }
  refused = [told for name, told in differ.items() if not _free(name)]
  if refused:
    more = f'; and {len(refused) - _TOLD} more' if len(refused) > _TOLD else ''
    raise UserError(
      f'--workdir={root} holds a run of another config ({"; ".join(refused[:_TOLD])}{more}); give '
      'the old values, or another --workdir.'
    )
  return tuple(differ.values())


_ABSENT = object()


def _defaults() -> dict[str, Any]:
  """The default fields outside of function specs, whose settings depend on the function."""
  whole = json.loads(configs.default().to_json())
  drop = lambda d: {  # noqa: E731
    k: drop(v) if isinstance(v, dict) else v
    for k, v in d.items()
    if not (isinstance(v, dict) and 'fn' in v)
  }
  return _flatten(drop(whole))


def _free(name: str) -> bool:
  return any(name == free or name.startswith(f'{free}.') for free in _FREE)


def _flatten(tree: dict, prefix: str = '') -> dict[str, Any]:
  flat = {}
  for key, value in tree.items():
    if isinstance(value, dict):
      flat |= _flatten(value, f'{prefix}{key}.')
    else:
      flat[prefix + key] = value
  return flat


def _lock(root: str) -> Any:
  """Two processes in one folder would write each other's files."""
  import fcntl  # not on Windows, where the parts can be imported all the same

  file = safe_files.open_regular(os.path.join(root, '.lock'), 'a+')
  try:
    # A record lock, which workers do not inherit: it ends with this process, however that ends.
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError as error:
    file.close()
    if error.errno in (errno.EACCES, errno.EAGAIN):
      raise UserError(
        f'--workdir={root} is in use by another process; wait for it, or give another --workdir.'
      ) from error
    return None  # a file system without locks
  return file


def _add_start(path: str) -> None:
  """Appends to environment.json what this start runs on: one run may see several machines."""
  try:
    starts = json.loads(safe_files.read(path))
  except (OSError, ValueError):
    starts = []
  starts = starts if isinstance(starts, list) else [starts]
  write(path, json.dumps([*starts, _environment()][-_STARTS:], indent=1))


def _environment() -> dict[str, Any]:
  return dict(
    time=time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime()),
    command=sys.argv,
    python=sys.version.split()[0],
    machine=platform.platform(),
    cores=os.cpu_count(),
    processes=jax.process_count(),
    devices=[str(d) for d in jax.devices()],
    packages=versions(),
    git=_git_revision(os.path.dirname(os.path.abspath(__file__))),
  )


def versions() -> dict[str, str]:
  """package → version, of those that decide what a step computes. Source: none."""
  return {name: importlib.metadata.version(name) for name in _PACKAGES}


def _git_revision(folder: str) -> str | None:
  """The commit of this package's source, with '+changes' where files differ from it."""

  def git(*argv: str) -> str:
    command = ['git', '-C', folder, *argv]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout

  try:
    # Of this folder: a package installed inside another project has no revision.
    commit = git('log', '-1', '--format=%H', '--', '.').strip()
    if not commit:
      return None
    return commit + ('+changes' if git('status', '--porcelain', '--', '.').strip() else '')
  except (OSError, subprocess.SubprocessError):
    return None
