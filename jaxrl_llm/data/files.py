"""Rows from files: JSON lines, Parquet, data sets of Hugging Face; and a sentence with the line number where one is
wrong."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from absl import logging

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.data.row_formats import to_row
from jaxrl_llm.data.tasks import question_key
from jaxrl_llm.types import Row, UserError

HUB = 'hub:'  # in front of a name on the hub


def read(
  path: str, field: str, data: Mapping[str, Any] | None = None, source: str = 'jsonl', **told: Any
) -> list[Row]:
  """The rows of a file, a folder or a data set, exact repetitions dropped; see `records`. Source: none.

  data: config.data, for how rows are read; source: of rows that tell none. Raises UserError, with the field and the
  number of the line or row, for whatever is wrong.
  """
  rows: dict[str, Row] = {}
  count = 0
  for where, given in records(path, field, **told):
    count += 1
    row = to_row(given, where, data or {}, source)
    rows.setdefault(row.id, row)
  if not rows:
    raise UserError(f'{field}={path!r} holds no row; give a file with one JSON object per line.')
  if len(rows) < count:
    logging.warning('%s: %d repeated rows were dropped.', path, count - len(rows))
  return list(rows.values())


def records(
  path: str, field: str, split: str = 'train', subset: str = ''
) -> Iterator[tuple[str, Any]]:
  """(where, what) of every row: of a .parquet file, of a folder that `datasets` saved, of 'hub:owner/name', else of
  JSON lines.

  split and subset are for data sets of Hugging Face. Their code is never run. Raises UserError for what cannot be read,
  or a package that is missing. Source: none.
  """
  if path.startswith(HUB):
    yield from _numbered(_hub(path, field, split, subset), f'{field}={path!r}')
  elif path.endswith('.parquet'):
    yield from _numbered(_parquet(path, field), f'{field}={path!r}')
  elif _saved(path):
    yield from _numbered(_folder(path, field, split), f'{field}={path!r}')
  else:
    for number, line in enumerate(_lines(path, field), 1):
      if line.strip():
        where = f'{field}={path!r}, line {number}'
        yield where, _object(line, where)


def split(rows: list[Row], held_out: int, seed: int, told: str) -> tuple[list[Row], list[Row]]:
  """A seeded split by question, at most a fifth of the questions held out. Source: none."""
  keys = sorted({question_key(row) for row in rows}, key=_shuffled(seed))
  theirs = set(keys[: min(held_out, len(keys) // 5)])
  if held_out and not theirs:
    logging.warning('%s: too few questions to hold any out.', told)
  ours = [row for row in rows if question_key(row) not in theirs]
  held = {question_key(row): row for row in rows if question_key(row) in theirs}
  return ours, list(held.values())


def without(rows: list[Row], other: Sequence[Row], told: str, eval_path: str) -> list[Row]:
  """`rows` less those whose question is in `other`; UserError where none is left. Source: none."""
  theirs = {question_key(row) for row in other}
  ours = [row for row in rows if question_key(row) not in theirs]
  if not ours:
    raise UserError(
      f'{told} holds only questions that are also in config.data.eval_path={eval_path!r}; give two different files.'
    )
  if len(ours) < len(rows):
    logging.warning(
      '%s: %d rows were dropped, their questions are in %s.',
      told, len(rows) - len(ours), eval_path,
    )  # fmt: skip
  return ours


def choose(rows: list[Row], count: int, seed: int) -> list[Row]:
  """A seeded choice of at most `count` rows, in their order. Source: none."""
  shuffled = _shuffled(seed)
  kept = {row.id for row in sorted(rows, key=lambda row: shuffled(row.id))[:count]}
  return [row for row in rows if row.id in kept]


def first(rows: list[Row], size: int, told: str) -> list[Row]:
  """The first `size` rows, 0 for all. Source: none."""
  if size > len(rows):
    logging.warning(
      'config.data.size=%d, but %s has only %d rows to train on.', size, told, len(rows)
    )
  return rows[: size or None]


def _shuffled(seed: int) -> Callable[[str], str]:
  # By hash, not by position: a row added to the file moves no other row to the other side.
  return lambda key: hashlib.sha256(f'{seed}\n{key}'.encode()).hexdigest()


def _lines(path: str, field: str) -> list[str]:
  if not path:
    raise UserError(f'{field} is empty; name a JSON-lines file.')
  if not os.path.isfile(path):
    raise UserError(f'{field}={path!r} is no file; give the path of a JSON-lines file.')
  try:
    # By line feeds alone: JSON allows other ends of lines within a text.
    lines = safe_files.read(path).removeprefix(codecs.BOM_UTF8).split(b'\n')
  except OSError as error:
    raise UserError(f'{field}={path!r} cannot be read: {error.strerror}; check it.') from error
  if lines[0].startswith((b'\x1f\x8b', b'PK\x03\x04', b'\xfd7zXZ', b'BZh', b'\x28\xb5\x2f\xfd')):
    raise UserError(f'{field}={path!r} is a compressed file; unpack it.')
  return [_decoded(line, f'{field}={path!r}, line {n}') for n, line in enumerate(lines, 1)]


def _decoded(line: bytes, where: str) -> str:
  try:
    return line.decode()
  except UnicodeDecodeError as error:
    raise UserError(f'{where} is no UTF-8 text ({error.reason}); convert the file.') from error


def _object(line: str, where: str) -> Any:
  try:
    return json.loads(line)
  except (ValueError, RecursionError) as error:
    raise UserError(f'{where} is not JSON: {getattr(error, "msg", error)}; mend it.') from error


def _numbered(rows: Iterable[Any], where: str) -> Iterator[tuple[str, Any]]:
  for number, row in enumerate(rows, 1):
    yield f'{where}, row {number}', row


def _parquet(path: str, field: str) -> Iterator[dict[str, Any]]:
  try:
    from pyarrow import parquet
  except ImportError as error:
    raise UserError(f'{field}={path!r} {_MISSING.format("pyarrow")}') from error
  if not os.path.isfile(path):
    raise UserError(f'{field}={path!r} is no file; give the path of a Parquet file.')
  try:
    with parquet.ParquetFile(path) as file:
      for batch in file.iter_batches():
        yield from batch.to_pylist()
  except (OSError, ValueError) as error:  # pyarrow's own errors are of these
    raise UserError(f'{field}={path!r} cannot be read as Parquet ({error}); check it.') from error


_MISSING = "needs {}; install the extra: pip install 'jaxrl_llm[data]'."


def _saved(path: str) -> bool:
  marks = ('dataset_info.json', 'dataset_dict.json')
  return any(os.path.isfile(os.path.join(path, name)) for name in marks)


def _folder(path: str, field: str, split: str) -> Iterable[Any]:
  where = f'{field}={path!r}'
  datasets = _datasets(where)
  for at, _, names in os.walk(path):
    for name in names:
      if kind := safe_files.kind(os.path.join(at, name)):
        raise UserError(f'{where}: {name} is {kind}, not a file; save the data set again.')
  try:
    found = datasets.load_from_disk(path)
  except Exception as error:  # the package's own, of many kinds
    raise UserError(
      f'{where} cannot be read ({type(error).__name__}: {error}); save the data set again.'
    ) from error
  if not isinstance(found, dict):  # DatasetDict is one
    return found
  if split not in found:
    raise UserError(f'{where} has no split {split!r}; choose of: {", ".join(sorted(found))}.')
  return found[split]


def _hub(path: str, field: str, split: str, subset: str) -> Iterable[Any]:
  where = f'{field}={path!r}'
  datasets = _datasets(where)
  try:
    # Nothing is said of trust: these versions have no loader that runs a data set's own code.
    return datasets.load_dataset(path.removeprefix(HUB), subset or None, split=split)
  except Exception as error:
    raise UserError(
      f'{where}, split {split!r}, cannot be fetched ({type(error).__name__}: {error}); check its name, split and '
      'subset, or save it as Parquet.'
    ) from error


def _datasets(where: str) -> Any:
  try:
    import datasets
  except ImportError as error:
    raise UserError(f'{where} {_MISSING.format("datasets")}') from error
  if int(datasets.__version__.partition('.')[0]) < 4:
    raise UserError(
      f'{where} needs datasets 4 or later, which runs no code of a data set, and this is {datasets.__version__}; '
      'pip install -U datasets.'
    )
  return datasets
