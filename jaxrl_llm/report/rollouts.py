"""Reads the rollout files of a run: a few numbers per rollout, and the text of each file as deflated bytes."""

from __future__ import annotations

import json
import os
import zlib
from typing import NamedTuple

import numpy as np

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.types import JsonObject

COLUMNS = ('step', 'prompt', 'score', 'right', 'reason', 'length', 'hinted', 'success')
# Deflated bytes of rollout text in one page. Above this, texts of every second, fourth, ... file are dropped.
_TEXT_BYTES = 24_000_000


class RolloutFile(NamedTuple):
  """One rollout file."""

  stamp: tuple[int, int]  # size in bytes and modification time: a rewritten file is read again
  columns: np.ndarray  # float64 [rows, columns]
  text: bytes  # deflated lines, in the order of the rows; b'' = dropped
  prompts: dict[int, str]  # prompt number → JSON of [text, reference answer]


class Rollouts:
  """All rollouts of a run so far. Lines that are cut short or are no rollout are left out."""

  def __init__(self, folder: str, text_bytes: int = _TEXT_BYTES):
    self._folder, self._text_bytes = os.path.join(folder, 'rollouts'), text_bytes
    self._files: dict[str, RolloutFile] = {}
    self._stride, self._table = 1, None
    self.reasons: list[str] = []  # stop reasons; the column 'reason' holds indices into it

  def refresh(self) -> Rollouts:
    """Reads the files that are new or have changed; returns itself."""
    stamps = _stamps(self._folder)
    stale = [name for name, file in self._files.items() if stamps.get(name) != file.stamp]
    fresh = [name for name in stamps if name not in self._files or name in stale]
    for name in stale:
      del self._files[name]
    for name in sorted(fresh):
      self._files[name] = self._read(name, stamps[name])
    if stale or fresh:
      self._table = None
    self._drop_texts()
    return self

  def column(self, name: str) -> np.ndarray:
    """One of COLUMNS: float64 [rollouts], in the order of the files."""
    if self._table is None:
      tables = [self._files[n].columns for n in sorted(self._files)]
      self._table = np.concatenate([np.zeros((0, len(COLUMNS))), *tables])
    return self._table[:, COLUMNS.index(name)]

  @property
  def files(self) -> list[RolloutFile]:
    """The files in the order of their steps."""
    return [self._files[name] for name in sorted(self._files)]

  def prompts(self) -> dict[int, str]:
    """Prompt number → JSON of [text, reference answer], of its first rollout."""
    prompts: dict[int, str] = {}
    for file in self.files:
      for prompt, text in file.prompts.items():
        prompts.setdefault(prompt, text)
    return prompts

  def _read(self, name: str, stamp: tuple[int, int]) -> RolloutFile:
    lines, rows = [], []
    for line, row in _parsed_lines(os.path.join(self._folder, name)):
      values = self._values(row)
      if values is not None:
        lines.append(line)
        rows.append((values, row))
    columns = np.array([values for values, _ in rows], float).reshape(-1, len(COLUMNS))
    # Reversed, so that the first rollout of a prompt wins.
    first_rows = {int(values[1]): row for values, row in reversed(rows)}
    prompts = {prompt: _prompt_json(row) for prompt, row in sorted(first_rows.items())}
    # Level 6 takes twice the time for a tenth less.
    text = zlib.compress('\n'.join(lines).encode('utf-8', 'replace'), 3)
    return RolloutFile(stamp, columns, text, prompts)

  def _values(self, row: JsonObject) -> tuple[float, ...] | None:
    """The numbers of a row in the order of COLUMNS; None where one is missing or no number."""
    reason = str(row.get('reason', ''))
    if reason not in self.reasons:
      self.reasons.append(reason)
    try:
      score = float(row['score'])
      correct = float(row.get('right', score >= 1))  # older files lack the field
      return (
        float(row['step']),
        float(row['prompt']),
        score,
        correct,
        self.reasons.index(reason),
        float(row.get('length', 0)),
        float(bool(row.get('hint'))),
        float(row.get('success', correct)),  # files of graded scores alone have it
      )
    except (KeyError, TypeError, ValueError):
      return None

  def _drop_texts(self) -> None:
    """Drops the texts of files outside the stride until the others fit; the newest file always keeps its text."""
    names = sorted(self._files)
    while sum(len(self._files[n].text) for n in names[:: self._stride]) > self._text_bytes:
      if self._stride >= len(names):
        break
      self._stride *= 2
    for position, name in enumerate(names[:-1]):
      if position % self._stride:
        self._files[name] = self._files[name]._replace(text=b'')


def json_lines(path: str) -> list[JsonObject]:
  """Returns the complete objects of a JSON-lines file; [] where the file is absent."""
  return [row for _, row in _parsed_lines(path)]


def _prompt_json(row: JsonObject) -> str:
  return json.dumps([row.get('input', ''), row.get('gts', '')], ensure_ascii=False)


def _parsed_lines(path: str) -> list[tuple[str, JsonObject]]:
  parsed = []
  try:
    with safe_files.open_regular(path, errors='replace') as file:
      # splitlines would also cut at characters that JSON leaves in its strings.
      for line in file.read().split('\n'):
        try:
          row = json.loads(line)
        except ValueError:
          continue
        if isinstance(row, dict):
          parsed.append((line, row))
  except OSError:
    return []
  return parsed


def _stamps(folder: str) -> dict[str, tuple[int, int]]:
  try:
    with os.scandir(folder) as entries:
      files = [(e.name, e.stat()) for e in entries if e.name.endswith('.jsonl')]
  except OSError:
    return {}
  return {
    name: (stat.st_size, stat.st_mtime_ns) for name, stat in files if name.startswith('step_')
  }
