"""metrics.jsonl: one JSON object a step, without gaps or doubles however often a run was killed."""

from __future__ import annotations

import json
import math
import os
from typing import Any


class Writer:
  """Appends rows; rows of steps that will be taken again are dropped when it opens."""

  def __init__(self, path: str, start: int):
    """start: the first step that this run will write."""
    kept = [row for row in read(path) if row['training/global_step'] < start]
    part = f'{path}.part'
    with open(part, 'w', encoding='utf-8') as file:
      file.writelines(_line(row) for row in kept)
      file.flush()
      os.fsync(file.fileno())
    os.replace(part, path)
    self._file = open(path, 'a', encoding='utf-8')  # noqa: SIM115: closed in __exit__

  def __enter__(self) -> Writer:
    return self

  def __exit__(self, *_: Any) -> None:
    self._file.close()

  def write(self, row: dict[str, Any]) -> None:
    """One line, on its way to the disk before the next step begins. NaN and infinity become null."""
    self._file.write(_line(row))
    self._file.flush()


def read(path: str) -> list[dict[str, Any]]:
  """The whole rows of a metrics.jsonl; a last line cut short by a kill is left out. Source: none."""
  rows = []
  if os.path.exists(path):
    with open(path, encoding='utf-8') as file:
      for line in file:
        try:
          rows.append(json.loads(line))
        except ValueError:
          break
  return rows


def _line(row: dict[str, Any]) -> str:
  clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
  return json.dumps(clean) + '\n'
