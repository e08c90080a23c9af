"""metrics.jsonl: one JSON object per step, without gaps or duplicates after any number of kills and restarts."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable
from typing import TextIO, TypeAlias

from absl import logging

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.types import JsonObject

Row: TypeAlias = JsonObject  # metric → number; choices.jsonl has lists, too

STEP = 'training/global_step'
NONFINITE = 'training/nonfinite_metrics'
# Prefixes of the metrics that depend on time: two equal runs differ in these alone.
CLOCK = ('timing_s/', 'perf/')


class Writer:
  """Appends rows to a file. Opening it drops the rows of steps that will be repeated.

  A run resumed from a checkpoint of s steps passes start = s. All earlier rows exist, because each row is on disk
  before the checkpoint of its step begins; otherwise a warning names the missing ones.
  """

  def __init__(
    self,
    path: str,
    start: int,
    writes: bool = True,
    *,
    sync: bool = True,
    on_row: Callable[[int, dict], None] | None = None,
  ):
    """`start` is the first step that will be written. `writes` is true on one process alone.

    Without `sync` a row is not flushed to disk. `on_row(step, row)` is called after each row is written.
    """
    self._next, self._file, self._sync, self._on_row = start, None, sync, on_row
    self._path, self._bytes = path, 0
    if not writes:
      return
    rows = {row[STEP]: row for row in read(path) if row[STEP] < start}
    missing = sorted(set(range(start)) - set(rows))
    if missing:
      logging.warning('%s lacks %d steps, the first is step %d.', path, len(missing), missing[0])
    text = ''.join(_line(rows[step]) for step in sorted(rows))
    safe_files.write(path, text)
    self._bytes = len(text.encode())
    self._file = safe_files.retry(self._reopen)

  def __enter__(self) -> Writer:
    return self

  def __exit__(self, *_: object) -> None:
    if self._file is not None:
      self._file.close()

  def write(self, row: Row) -> None:
    """Writes one line, which is on disk when this returns.

    NaN and infinity become null, and are counted, except within lists. Raises ValueError for a duplicate or a gap.
    """
    if row[STEP] != self._next:
      raise ValueError(f'the row after step {self._next - 1} has step {row[STEP]}')
    self._next += 1
    if self._file is not None:
      safe_files.retry(self._append, _line(row))
    if self._on_row is not None:
      self._on_row(row[STEP], row)

  def _reopen(self) -> TextIO:
    file = open(self._path, 'a', encoding='utf-8')
    file.truncate(self._bytes)
    return file

  def _append(self, line: str) -> None:
    """Appends a line. After an error the handle may be stale and the line incomplete, so a retry truncates the file."""
    if self._file.closed:
      self._file = self._reopen()
    try:
      self._file.write(line)
      self._file.flush()
      if self._sync:
        os.fsync(self._file.fileno())
    except OSError:
      with contextlib.suppress(OSError):
        self._file.close()
      raise
    self._bytes += len(line.encode())


def read(path: str) -> list[Row]:
  """Returns the complete rows of a metrics.jsonl; a line that a kill cut short is left out."""
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


def comparable(rows: Iterable[Row]) -> list[Row]:
  """Returns the rows without the metrics that depend on time, to compare two runs."""
  return [{k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in rows]


def summary(path: str) -> dict[str, dict[str, float]]:
  """Returns {metric: first, last, mean, min, max and count over all steps}."""
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


def _line(row: Row) -> str:
  clean, non_finite = {}, 0
  for name, value in row.items():
    value = value.item() if hasattr(value, 'item') else value  # numpy and jax scalars
    if isinstance(value, float) and not math.isfinite(value):
      value, non_finite = None, non_finite + 1
    clean[name] = value
  if non_finite:
    clean[NONFINITE] = non_finite
  return json.dumps(clean, allow_nan=False) + '\n'
