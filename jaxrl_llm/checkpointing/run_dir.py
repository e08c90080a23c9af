"""The run directory: config.json, environment.json, metrics.jsonl, choices.jsonl, rollouts/, eval/, checkpoints/, ...

Files are written atomically, by process 0.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np
from absl import logging

from jaxrl_llm.checkpointing import config_changes, metrics_log, safe_files
from jaxrl_llm.types import JsonObject, UserError

if TYPE_CHECKING:
  from jaxrl_llm.checkpointing.mirror import Publisher
  from jaxrl_llm.config.schema import Config

_P = ParamSpec('_P')
_R = TypeVar('_R')

TIMING = 'timing.json'
_LAST_CHECKPOINT = 'checkpoint.json'
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')
_MAX_STARTS = 100  # entries of environment.json


class RunDirectory(NamedTuple):
  """The paths and files of a run."""

  root: str
  changed: tuple[
    str, ...
  ] = ()  # config fields that differ from the last start, as 'steps: 60 -> 120'
  lock: IO[str] | None = None  # an open file; the directory is locked until it is closed
  # marks the files of evaluations that have other settings than the run's own; '' = its own settings
  variant: str = ''
  publisher: Publisher | None = None  # of a run directory in an object store, on process 0

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
    """Writes checkpoint.json: the checkpoint of `step` is on disk, and in the store, where the run has one."""
    if self.publisher is not None:
      self.publisher.commit(step)
    write(os.path.join(self.root, _LAST_CHECKPOINT), json.dumps(dict(step=step)))

  def write_rollouts(self, step: int, rows: list[dict]) -> None:
    """Writes rollouts/step_000012.jsonl, one line per rollout: input, output, gts, score, step and more."""
    write(os.path.join(self.root, 'rollouts', f'step_{step:06d}.jsonl'), _json_lines(rows))

  def write_suspects(self, rows: list[dict]) -> None:
    """Writes suspect_labels.jsonl: labels that rollouts contradict, for review by a person."""
    write(os.path.join(self.root, 'suspect_labels.jsonl'), _json_lines(rows))

  def write_non_finite(self, step: int, arrays: dict[str, np.ndarray], rows: list[dict]) -> str:
    """Writes non_finite/step_000012.npz and .jsonl, the batch of a skipped update. Returns the path without suffix."""
    path = os.path.join(self.root, 'non_finite', f'step_{step:06d}')
    if jax.process_index() == 0:
      os.makedirs(os.path.dirname(path), exist_ok=True)
      safe_files.retry(_write_arrays, f'{path}.npz', arrays)
    write(f'{path}.jsonl', _json_lines(rows))
    return path

  def write_eval(self, step: int, record: JsonObject) -> None:
    """Writes eval/step_000012.json: the record of an evaluation with all completions."""
    write(self.eval_path(step), json.dumps(record, ensure_ascii=False, indent=1))

  def read_eval(self, step: int, expected: JsonObject) -> JsonObject | None:
    """Returns the record of a finished evaluation whose fields include `expected`, or None."""
    try:
      record = dict(json.loads(safe_files.read(self.eval_path(step))))
    except (OSError, ValueError, TypeError):
      return None
    expected = json.loads(json.dumps(expected))  # tuples become lists, as in the file
    complete = record.keys() >= {'metrics', 'rows'}
    return record if complete and record | expected == record else None

  def eval_path(self, step: int) -> str:
    """The file of an evaluation."""
    mark = f'_{self.variant}' if self.variant else ''
    return os.path.join(self.root, 'eval', f'step_{step:06d}{mark}.json')


def open_run(
  root: str,
  config: Config,
  *,
  exclusive: bool = True,
  steps: Sequence[int] | None = None,
  saved: JsonObject | None = None,
) -> RunDirectory:
  """Creates a run directory, or opens one of the same config.

  `exclusive` locks it against other processes as long as the result exists. `steps` are the steps of its checkpoints,
  and `saved` is the config of the newest one. Raises UserError for a directory that cannot be written, is in use, holds
  another config (with the differences old -> new), or has lost the checkpoints of its metrics. No file is changed then.
  """
  root = os.path.abspath(root)
  settings = json.loads(config.to_json())
  changed, lock = (), None
  try:
    _check_files(root)
    stored = _read_config(os.path.join(root, 'config.json'), saved)
    for old in (saved, stored):
      changed = config_changes.check(root, old, settings) if old is not None else changed
    if steps is not None:
      _check_checkpoints(root, steps)
    if jax.process_index() == 0:
      for name in ('rollouts', 'eval', 'checkpoints'):
        os.makedirs(os.path.join(root, name), exist_ok=True)
      lock = _lock(root) if exclusive else None
      for name in ('', 'rollouts', 'eval', 'non_finite') if lock else ():
        safe_files.remove_parts(os.path.join(root, name))
      content = settings | dict(fingerprint=fingerprint(settings))
      write(os.path.join(root, 'config.json'), json.dumps(content, indent=1, sort_keys=True))
      _add_start(os.path.join(root, 'environment.json'))
  except OSError as error:
    raise UserError(
      f'--workdir={root} cannot be used ({error}); choose a writable folder.'
    ) from error
  return RunDirectory(root, changed, lock)


def view(root: str, variant: str = '') -> RunDirectory:
  """A run directory as it is: nothing is locked, created or changed, and no start is recorded."""
  root = os.path.abspath(root)
  _check_files(root)
  return RunDirectory(root, variant=variant)


def fingerprint(config: JsonObject) -> str:
  """Returns a hash of the fields that change what the steps compute: equal for any two starts of a run."""
  flat = config_changes.flatten(config).items()
  fields = {k: v for k, v in flat if not config_changes.is_changeable(k)}
  return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


class TimeSpent:
  """Seconds of a run outside of its steps, by phase, summed over its starts: timing.json."""

  def __init__(self, root: str):
    """Continues the sums in the directory `root`."""
    self._path = os.path.join(root, TIMING)
    try:
      content = json.loads(safe_files.read(self._path))
      self._seconds = {str(k): float(v) for k, v in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
      self._seconds = {}

  def add(self, phase: str, seconds: float) -> None:
    """Adds seconds to a phase and writes the file."""
    self._seconds[phase] = round(self._seconds.get(phase, 0.0) + seconds, 3)
    write(self._path, json.dumps(self._seconds))

  @contextlib.contextmanager
  def on(self, phase: str) -> Iterator[None]:
    """Adds the duration of the `with` block, unless it raises."""
    start_s = time.perf_counter()
    yield
    self.add(phase, time.perf_counter() - start_s)

  def timed(self, phase: str, fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns `fn` with the duration of each call added to the phase."""

    def run(*args: _P.args, **keywords: _P.kwargs) -> _R:
      with self.on(phase):
        return fn(*args, **keywords)

    return run


def write(path: str, text: str) -> None:
  """Writes a file atomically, on process 0 only."""
  if jax.process_index():
    return
  safe_files.write(path, text)


def _json_lines(rows: Sequence[dict]) -> str:
  return ''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows)


def _write_arrays(path: str, arrays: dict[str, np.ndarray]) -> None:
  with safe_files.replacing(path) as part, open(part, 'xb') as file:
    np.savez_compressed(file, **arrays)


def _check_files(root: str) -> None:
  """Raises UserError for a named pipe, a device or a socket in the directory, which would block the run later."""
  for name in sorted(os.listdir(root)) if os.path.isdir(root) else ():
    kind = safe_files.kind(os.path.join(root, name))
    if kind not in ('', 'a folder'):
      raise UserError(
        f'--workdir={root} holds {name}, which is {kind}; remove it, or give another --workdir.'
      )


def _check_checkpoints(root: str, steps: Sequence[int]) -> None:
  """Raises UserError where metrics.jsonl has rows but all checkpoints of the run are gone."""
  try:
    last = int(json.loads(safe_files.read(os.path.join(root, _LAST_CHECKPOINT)))['step'])
  except (OSError, ValueError, TypeError, KeyError):
    return  # killed before its first checkpoint: the run starts from step 0
  path = os.path.join(root, 'metrics.jsonl')
  if steps:
    if max(steps) < last:
      logging.warning(
        '%s: the checkpoint of step %d is missing; the run resumes at step %d and repeats the later steps.',
        root, last, max(steps),
      )  # fmt: skip
  elif rows := len(metrics_log.read(path)):
    raise UserError(
      f'--workdir={root} has no checkpoint, but had one of step {last}, and {path} holds {rows} rows, which a '
      'start from step 0 would overwrite; restore the checkpoints, give another --workdir, or move that file away to '
      'start over.'
    )
  elif jax.process_index() == 0:
    os.remove(os.path.join(root, _LAST_CHECKPOINT))  # started over on purpose


def _read_config(path: str, saved: JsonObject | None) -> JsonObject | None:
  """The content of config.json; None where it is absent, or damaged and `saved` can replace it."""
  if not os.path.exists(path):
    return None
  try:
    return dict(json.loads(safe_files.read(path)))
  except (ValueError, TypeError) as error:
    if saved is not None:
      logging.warning('%s is damaged (%s) and is rewritten.', path, error)
      return None
    raise UserError(
      f'{path} is damaged ({error}); restore it, or give another --workdir.'
    ) from error


def _lock(root: str) -> IO[str] | None:
  """Locks the directory against other processes; None on a file system without locks."""
  try:
    return safe_files.lock(os.path.join(root, '.lock'))
  except BlockingIOError as error:
    raise UserError(
      f'--workdir={root} is in use by another process; wait for it, or give another --workdir.'
    ) from error


def _add_start(path: str) -> None:
  """Appends an entry to environment.json, because a run may be continued on another machine."""
  try:
    starts = json.loads(safe_files.read(path))
  except (OSError, ValueError):
    starts = []
  starts = starts if isinstance(starts, list) else [starts]
  write(path, json.dumps([*starts, _environment()][-_MAX_STARTS:], indent=1))


def _environment() -> JsonObject:
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
  """Returns {package: version} of the packages that determine what a step computes."""
  return {name: importlib.metadata.version(name) for name in _PACKAGES}


def _git_revision(folder: str) -> str | None:
  """Returns the commit of this package's source, with '+changes' if files differ from it; None without git."""

  def git(*argv: str) -> str:
    command = ['git', '-C', folder, *argv]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout

  try:
    # Limited to this folder: a package installed inside another repository has no revision.
    commit = git('log', '-1', '--format=%H', '--', '.').strip()
    if not commit:
      return None
    return commit + ('+changes' if git('status', '--porcelain', '--', '.').strip() else '')
  except (OSError, subprocess.SubprocessError):
    return None
