"""metrics.jsonl: one JSON object a step, without gaps or doubles however often a run was killed."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable
from typing import Any

from absl import logging

from jaxrl_llm.checkpointing import safe_files

STEP = 'training/global_step'
NONFINITE = 'training/nonfinite_metrics'
# What the clock decides: two equal runs differ here and nowhere else.
CLOCK = ('timing_s/', 'perf/')


class Writer:
  """Appends rows; rows of steps that will be taken again are dropped when it opens.

  A run resumed from a checkpoint of s steps passes start = s. The rows before that are there, since
  each was on the disk before its step's checkpoint was begun; if not, a warning says which.
  """

  def __init__(
    self,
    path: str,
    start: int,
    first: bool = True,
    *,
    sync: bool = True,
    also: Callable[[int, dict], None] | None = None,
  ):
    """start: the first step that this run will write. Of several processes only the `first` one has a file.

    Without `sync` a row is handed to the system and not waited for. also: is told (step, row) of every row then.
    """
    self._next, self._file, self._whole, self._also = start, None, sync, also
    self._path, self._bytes = path, 0
    if not first:
      return
    kept = {row[STEP]: row for row in read(path) if row[STEP] < start}
    missing = sorted(set(range(start)) - set(kept))
    if missing:
      logging.warning('%s lacks %d steps, from %d on.', path, len(missing), missing[0])
    text = ''.join(_line(kept[step]) for step in sorted(kept))
    safe_files.write(path, text)
    self._bytes = len(text.encode())
    self._file = safe_files.retry(self._reopen)

  def __enter__(self) -> Writer:
    return self

  def __exit__(self, *_: Any) -> None:
    if self._file is not None:
      self._file.close()

  def write(self, row: dict[str, Any]) -> None:
    """One line, on the disk when it returns. NaN and infinity become null, and are counted; not in lists.

    Raises ValueError for a step out of turn: a row twice, or a gap.
    """
    if row[STEP] != self._next:
      raise ValueError(f'the row after step {self._next - 1} is of step {row[STEP]}')
    self._next += 1
    if self._file is not None:
      safe_files.retry(self._append, _line(row))
    if self._also is not None:
      self._also(row[STEP], row)

  def _reopen(self) -> Any:
    file = open(self._path, 'a', encoding='utf-8')
    file.truncate(self._bytes)
    return file

  def _append(self, line: str) -> None:
    """After an error the handle may be stale and part of the line written: the next try begins where the line did."""
    if self._file.closed:
      self._file = self._reopen()
    try:
      self._file.write(line)
      self._file.flush()
      if self._whole:
        os.fsync(self._file.fileno())
    except OSError:
      with contextlib.suppress(OSError):
        self._file.close()
      raise
    self._bytes += len(line.encode())


def read(path: str) -> list[dict[str, Any]]:
  """The whole rows of a metrics.jsonl; a line cut short by a kill is left out. Source: none."""
  rows = []
  if os.path.exists(path):
    for line in safe_files.read(path).decode(errors='replace').split('\n'):
      try:
        row = json.loads(line)
      except ValueError:
        continue
      if isinstance(row, dict) and isinstance(row.get(STEP), int):
        rows.append(row)
  return rows


def comparable(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
  """The rows without what the clock decides, to hold two runs against each other. Source: none."""
  return [{k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in rows]


def summary(path: str) -> dict[str, dict[str, float]]:
  """name → first, last, mean, min, max and count of its numbers over all steps. Source: none."""
  columns: dict[str, list[float]] = {}
  for row in read(path):
    for name, value in row.items():
      if isinstance(value, int | float):
        columns.setdefault(name, []).append(value)
  return {
    name: dict(
      first=x[0], last=x[-1], mean=math.fsum(x) / len(x), min=min(x), max=max(x), count=len(x)
    )
    for name, x in columns.items()
  }


def _line(row: dict[str, Any]) -> str:
  clean, bad = {}, 0
  for name, value in row.items():
    value = value.item() if hasattr(value, 'item') else value  # numpy and jax scalars
    if isinstance(value, float) and not math.isfinite(value):
      value, bad = None, bad + 1
    clean[name] = value
  if bad:
    clean[NONFINITE] = bad
  return json.dumps(clean, allow_nan=False) + '\n'
