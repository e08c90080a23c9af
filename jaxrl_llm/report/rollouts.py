"""The rollout files of a run: a few numbers of every rollout, and each file's text as deflated bytes."""

from __future__ import annotations

import json
import os
import zlib
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.checkpointing import safe_files

COLUMNS = ('step', 'prompt', 'score', 'right', 'reason', 'length', 'hinted', 'success')
# Text of a run that a page has room for, as deflated bytes; beyond, every second file gives its text up.
_ROOM = 24_000_000


class File(NamedTuple):
  """One rollout file."""

  stamp: tuple[int, int]  # size and time: another file of the same name is read again
  columns: np.ndarray  # float64 [rows, columns]
  text: bytes  # deflated lines, in the order of the rows
  prompts: dict[int, str]  # what each prompt says, as JSON


class Rollouts:
  """Grows with the run: `refresh` reads what is new. Lines that are no rollout, or cut short, are left out."""

  def __init__(self, folder: str, room: int = _ROOM):
    self._folder, self._room = os.path.join(folder, 'rollouts'), room
    self._files: dict[str, File] = {}
    self._stride, self.reasons, self._joined = 1, [], None

  def refresh(self) -> Rollouts:
    """Reads files that are new or were written again; returns itself. Source: none."""
    found = _stamps(self._folder)
    stale = [name for name, file in self._files.items() if found.get(name) != file.stamp]
    fresh = [name for name in found if name not in self._files or name in stale]
    for name in stale:
      del self._files[name]
    for name in sorted(fresh):
      self._files[name] = self._read(name, found[name])
    if stale or fresh:
      self._joined = None
    self._thin()
    return self

  def column(self, name: str) -> np.ndarray:
    """float64 [rollouts], in the order of the files. Source: none."""
    if self._joined is None:
      each = [self._files[n].columns for n in sorted(self._files)]
      self._joined = np.concatenate([np.zeros((0, len(COLUMNS))), *each])
    return self._joined[:, COLUMNS.index(name)]

  @property
  def files(self) -> list[File]:
    """In order; one that gave its text up has b''. Source: none."""
    return [self._files[name] for name in sorted(self._files)]

  def prompts(self) -> dict[int, str]:
    """What each prompt said when it was first asked. Source: none."""
    told: dict[int, str] = {}
    for file in self.files:
      for prompt, text in file.prompts.items():
        told.setdefault(prompt, text)
    return told

  def _read(self, name: str, stamp: tuple[int, int]) -> File:
    kept, rows = [], []
    for line, row in _parsed(os.path.join(self._folder, name)):
      values = self._values(row)
      if values is not None:
        kept.append(line)
        rows.append((values, row))
    columns = np.array([v for v, _ in rows], float).reshape(-1, len(COLUMNS))
    prompts = {int(v[1]): row for v, row in reversed(rows)}
    ask = lambda row: json.dumps([row.get('input', ''), row.get('gts', '')], ensure_ascii=False)  # noqa: E731
    # Level 6 takes twice the time for a tenth less.
    text = zlib.compress('\n'.join(kept).encode('utf-8', 'replace'), 3)
    return File(stamp, columns, text, {p: ask(row) for p, row in sorted(prompts.items())})

  def _values(self, row: dict) -> tuple | None:
    reason = str(row.get('reason', ''))
    if reason not in self.reasons:
      self.reasons.append(reason)
    try:
      score = float(row['score'])
      right = float(row.get('right', score >= 1))  # older files do not say
      where = float(row['step']), float(row['prompt']), score, right, self.reasons.index(reason)
      more = float(row.get('length', 0)), float(bool(row.get('hint')))
      return *where, *more, float(row.get('success', right))  # of graded scores alone
    except (KeyError, TypeError, ValueError):
      return None

  def _thin(self) -> None:
    """Files of the odd places give their text up until the others fit; the newest always keeps its own."""
    names = sorted(self._files)
    while sum(len(self._files[n].text) for n in names[:: self._stride]) > self._room:
      if self._stride >= len(names):
        break
      self._stride *= 2
    for at, name in enumerate(names[:-1]):
      if at % self._stride:
        self._files[name] = self._files[name]._replace(text=b'')


def lines(path: str) -> list[dict[str, Any]]:
  """The whole objects of a file of JSON lines, [] where there is none. Source: none."""
  return [row for _, row in _parsed(path)]


def _parsed(path: str) -> list[tuple[str, dict[str, Any]]]:
  found = []
  try:
    with safe_files.open_regular(path, errors='replace') as file:
      # Not splitlines, which cuts at characters that JSON leaves in its strings.
      for line in file.read().split('\n'):
        try:
          row = json.loads(line)
        except ValueError:
          continue
        if isinstance(row, dict):
          found.append((line, row))
  except OSError:
    return []
  return found


def _stamps(folder: str) -> dict[str, tuple[int, int]]:
  try:
    with os.scandir(folder) as entries:
      told = [(e.name, e.stat()) for e in entries if e.name.endswith('.jsonl')]
  except OSError:
    return {}
  return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in told if name.startswith('step_')}
