"""The journal of tests/bench/methods.py, one JSON line per finished run, and the table made of it."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

from tests.bench.lib import results

BASE = 'grpo'
OK, FAILED, TIMEOUT = 'ok', 'failed', 'timeout'
Key = tuple[str, int]  # method and seed


def read(path: pathlib.Path, fingerprints: Mapping[str, str]) -> dict[Key, dict]:
  """The newest row of every run whose settings are those of today; a line that a kill has torn is skipped."""
  found: dict[Key, dict] = {}
  lines = path.read_bytes().decode(errors='replace').split('\n') if path.exists() else []
  for line in lines:
    try:
      row = json.loads(line)
    except json.JSONDecodeError:
      continue
    if fingerprints.get(row['method']) == row['job']:
      found[row['method'], row['seed']] = row
  return found


def append(path: pathlib.Path, row: dict) -> None:
  """Add a row and wait until it is on the disk. A torn last line is ended first."""
  with open(path, 'a+b') as file:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 1, 0))
    is_torn = size > 0 and file.read(1) != b'\n'
    file.write(b'\n' * is_torn + json.dumps(row).encode() + b'\n')
    file.flush()
    os.fsync(file.fileno())


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
  """The mean over seeds and its standard error, s / √n; NaN for the error of a single seed."""
  n = len(values)
  error = float(np.std(values, ddof=1) / np.sqrt(n)) if n > 1 else float('nan')
  return float(np.mean(values)), error


class Difference(NamedTuple):
  """Of a method from GRPO, paired by seed."""

  mean: float
  error: float
  seeds: int


def paired(own: Mapping[int, float], base: Mapping[int, float]) -> Difference | None:
  """Mean and standard error of the differences of seeds that both have; None without any."""
  values = [own[seed] - base[seed] for seed in own.keys() & base.keys()]
  return Difference(*mean_and_error(values), len(values)) if values else None


def verdict(difference: float, error: float, seeds: int) -> str:
  """Whether the 95 % interval of Student's t of the paired difference lies above 0."""
  if seeds < 2:
    return 'one seed'
  half = special.stdtrit(seeds - 1, 0.975) * error
  if difference > half:
    return 'beats GRPO'
  return 'is worse than GRPO' if difference < -half else 'does not beat GRPO here'


def shown(value: float, error: float, sign: str = '') -> str:
  """A mean and its standard error in percent; the error of one seed is unknown."""
  text = f'{value:{sign}.1f}'
  return text if np.isnan(error) else f'{text} ± {error:.1f}'


def table(rows: Mapping[Key, dict], methods: Sequence[str], seeds: Collection[int]) -> str:
  """A Markdown row per method, GRPO first, then by the difference from it."""
  base = _measure(rows, BASE, seeds, 'mean')
  differences = {m: paired(_measure(rows, m, seeds, 'mean'), base) for m in methods}
  order = lambda m: (m != BASE, -(differences[m] or (-np.inf,))[0], m)  # noqa: E731
  header = ('method', 'mean@4', 'greedy', '− GRPO', 'completions', 'CPU-s', 'result')
  return results.table(
    header, [_line(rows, m, seeds, differences[m]) for m in sorted(methods, key=order)]
  )


def _line(rows, method: str, seeds, difference: Difference | None) -> list[str]:
  of = lambda name: [*_measure(rows, method, seeds, name).values()]  # noqa: E731
  missing = [rows[method, s]['status'] for s in seeds if (method, s) in rows]
  missing = [status for status in missing if status != OK]
  notes = [f'{missing.count(status)} {status}' for status in dict.fromkeys(missing)]
  if not of('mean'):
    return [f'`{method}`', '–', '–', '–', '–', '–', ', '.join(notes) or 'not run']
  is_compared = method != BASE and difference is not None
  return [
    f'`{method}`',
    shown(*mean_and_error(of('mean'))),
    shown(*mean_and_error(of('greedy'))),
    shown(difference.mean, difference.error, '+') if is_compared else '',
    f'{np.mean(of("completions")):,.0f}',
    f'{np.mean(of("cpu_s")):.0f}',
    ', '.join(([verdict(*difference)] if is_compared else []) + notes),
  ]


def _measure(rows, method: str, seeds, name: str) -> dict[int, float]:
  """Seed → value of the runs that ended well."""
  found = {s: rows[method, s] for s in seeds if (method, s) in rows}
  return {s: row[name] for s, row in found.items() if row['status'] == OK}
