"""Reads rows from JSON lines, Parquet and data sets of Hugging Face; errors name the line or row."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import logging

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.config import extras
from jaxrl_llm.data.row_formats import to_row
from jaxrl_llm.data.tasks import question_key
from jaxrl_llm.types import JsonObject, JsonValue, Row, UserError

if TYPE_CHECKING:
  from jaxrl_llm.config.schema import DataConfig

HUB = 'hub:'  # prefix of a name on the Hugging Face hub


def read(
  path: str,
  field: str,
  data: DataConfig | Mapping | None = None,
  source: str = 'jsonl',
  **selection: str,
) -> list[Row]:
  """Returns the rows of a file, a folder or a data set without exact repetitions; `selection` as for `records`.

  `data` is config.data, and `source` that of rows without one. Raises UserError with the field and the number of the
  line or row.
  """
  rows: dict[str, Row] = {}
  count = 0
  for where, record in records(path, field, **selection):
    count += 1
    row = to_row(record, where, data or {}, source)
    rows.setdefault(row.id, row)
  if not rows:
    raise UserError(f'{field}={path!r} holds no row; give a file with one JSON object per line.')
  if len(rows) < count:
    logging.warning('%s: %d repeated rows were dropped.', path, count - len(rows))
  return list(rows.values())


def records(
  path: str, field: str, split: str = 'train', subset: str = ''
) -> Iterator[tuple[str, Any]]:
  """Yields (place, record) from a .parquet file, a folder saved by `datasets`, 'hub:owner/name', or JSON lines.

  `split` and `subset` are for data sets of Hugging Face, whose code is never executed. Raises UserError for a file that
  cannot be read and for a missing package.
  """
  if path.startswith(HUB):
    yield from _numbered(_hub(path, field, split, subset), f'{field}={path!r}')
  elif path.endswith('.parquet'):
    yield from _numbered(_parquet(path, field), f'{field}={path!r}')
  elif _is_saved_dataset(path):
    yield from _numbered(_folder(path, field, split), f'{field}={path!r}')
  else:
    lines = _lines(path, field)
    _check_kind(lines, path, field)
    for number, line in enumerate(lines, 1):
      if line.strip():
        where = f'{field}={path!r}, line {number}'
        yield where, _parse_json(line, where)


def separate(
  rows: list[Row],
  read_eval: Callable[[str, str], list[Row]],
  data: DataConfig,
  held_out: int,
  where: str,
) -> tuple[list[Row], list[Row]]:
  """Returns (training rows, held-out rows) without a common question.

  Held-out rows are of data.eval_path, which `read_eval(path, field)` reads, or of a split. `where` names the rows in
  messages. Raises UserError as `without_questions`.
  """
  path = data.get('eval_path', '')
  if not path:
    return split(rows, held_out, data.seed, where)
  eval_rows = read_eval(path, 'config.data.eval_path')
  training_rows = without_questions(rows, eval_rows, where, f'config.data.eval_path={path!r}')
  return training_rows, choose(eval_rows, held_out, data.seed)


def split(rows: list[Row], held_out: int, seed: int, where: str) -> tuple[list[Row], list[Row]]:
  """Returns a seeded split by question with at most a fifth of the questions held out."""
  keys = sorted({question_key(row) for row in rows}, key=_hash_order(seed))
  held_out_keys = set(keys[: min(held_out, len(keys) // 5)])
  if held_out and not held_out_keys:
    logging.warning('%s: too few questions to hold any out.', where)
  training_rows = [row for row in rows if question_key(row) not in held_out_keys]
  held_out_rows = {question_key(row): row for row in rows if question_key(row) in held_out_keys}
  return training_rows, list(held_out_rows.values())


def without_questions(
  rows: list[Row], eval_rows: Sequence[Row], where: str, eval_where: str
) -> list[Row]:
  """Returns the rows whose question is not in `eval_rows`. Raises UserError where none is left."""
  eval_keys = {question_key(row) for row in eval_rows}
  remaining = [row for row in rows if question_key(row) not in eval_keys]
  if not remaining:
    raise UserError(
      f'{where} holds only questions that are also in {eval_where}; give two different files.'
    )
  if len(remaining) < len(rows):
    logging.warning(
      '%s: %d rows were dropped, their questions are in %s.',
      where, len(rows) - len(remaining), eval_where,
    )  # fmt: skip
  return remaining


def choose(rows: list[Row], count: int, seed: int) -> list[Row]:
  """Returns a seeded choice of at most `count` rows, in their order."""
  order = _hash_order(seed)
  chosen = {row.id for row in sorted(rows, key=lambda row: order(row.id))[:count]}
  return [row for row in rows if row.id in chosen]


def first(rows: list[Row], size: int, where: str) -> list[Row]:
  """Returns the first `size` rows, or all for 0."""
  if size > len(rows):
    logging.warning(
      'config.data.size=%d, but %s has only %d rows to train on.', size, where, len(rows)
    )
  return rows[: size or None]


def _hash_order(seed: int) -> Callable[[str], str]:
  # By hash, not by position, so that a row added to the file moves no other row to the other set.
  return lambda key: hashlib.sha256(f'{seed}\n{key}'.encode()).hexdigest()


def _lines(path: str, field: str) -> list[str]:
  if not path:
    raise UserError(f'{field} is empty; name a JSON-lines or Parquet file.')
  if not os.path.isfile(path):
    raise UserError(f'{field}={path!r} is no file; give the path of a JSON-lines or Parquet file.')
  try:
    # Split at line feeds alone, because JSON allows other line separators within a string.
    lines = safe_files.read(path).removeprefix(codecs.BOM_UTF8).split(b'\n')
  except OSError as error:
    raise UserError(f'{field}={path!r} cannot be read: {error.strerror}; check it.') from error
  if lines[0].startswith((b'\x1f\x8b', b'PK\x03\x04', b'\xfd7zXZ', b'BZh', b'\x28\xb5\x2f\xfd')):
    raise UserError(f'{field}={path!r} is a compressed file; unpack it.')
  return [_decoded(line, f'{field}={path!r}, line {n}') for n, line in enumerate(lines, 1)]


def _check_kind(lines: Sequence[str], path: str, field: str) -> None:
  """Raises UserError for a table of text, and for one JSON array instead of a JSON object per line."""
  if path.lower().endswith(('.csv', '.tsv')):
    raise UserError(
      f'{field}={path!r} is a table of text; write one JSON object per line, as pandas.read_csv({path!r})'
      ".to_json('rows.jsonl', orient='records', lines=True) does."
    )
  if lines[0].lstrip().startswith('['):
    raise UserError(
      f"{field}={path!r} is one JSON array; write one JSON object per line, as jq -c '.[]' {path} > rows.jsonl does."
    )


def _decoded(line: bytes, where: str) -> str:
  try:
    return line.decode()
  except UnicodeDecodeError as error:
    raise UserError(f'{where} is no UTF-8 text ({error.reason}); convert the file.') from error


def _parse_json(line: str, where: str) -> JsonValue:
  try:
    return json.loads(line)
  except (ValueError, RecursionError) as error:
    raise UserError(f'{where} is not JSON: {getattr(error, "msg", error)}; correct it.') from error


def _numbered(rows: Iterable[Any], where: str) -> Iterator[tuple[str, Any]]:
  for number, row in enumerate(rows, 1):
    yield f'{where}, row {number}', row


def _parquet(path: str, field: str) -> Iterator[JsonObject]:
  try:
    from pyarrow import parquet
  except ImportError as error:
    raise UserError(f'{field}={path!r} {_missing("pyarrow")}') from error
  if not os.path.isfile(path):
    raise UserError(f'{field}={path!r} is no file; give the path of a Parquet file.')
  try:
    with parquet.ParquetFile(path) as file:
      for batch in file.iter_batches():
        yield from batch.to_pylist()
  except (OSError, ValueError) as error:  # the base classes of pyarrow's errors
    raise UserError(f'{field}={path!r} cannot be read as Parquet ({error}); check it.') from error


def _missing(package: str) -> str:
  return f'needs {package}; install the extra: {extras.install("data")}.'


def _is_saved_dataset(path: str) -> bool:
  marks = ('dataset_info.json', 'dataset_dict.json')
  return any(os.path.isfile(os.path.join(path, name)) for name in marks)


def _folder(path: str, field: str, split: str) -> Iterable[Any]:
  where = f'{field}={path!r}'
  datasets = _datasets(where)
  for root, _, names in os.walk(path):
    for name in names:
      if kind := safe_files.kind(os.path.join(root, name)):
        raise UserError(f'{where}: {name} is {kind}, not a file; save the data set again.')
  try:
    dataset = datasets.load_from_disk(path)
  except Exception as error:  # the package raises errors of many types
    raise UserError(
      f'{where} cannot be read ({type(error).__name__}: {error}); save the data set again.'
    ) from error
  if not isinstance(dataset, dict):  # DatasetDict is a dict
    return dataset
  if split not in dataset:
    raise UserError(f'{where} has no split {split!r}; choose of: {", ".join(sorted(dataset))}.')
  return dataset[split]


def _hub(path: str, field: str, split: str, subset: str) -> Iterable[Any]:
  where = f'{field}={path!r}'
  datasets = _datasets(where)
  try:
    # trust_remote_code is not set: these versions cannot execute the code of a data set.
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
    raise UserError(f'{where} {_missing("datasets")}') from error
  if int(datasets.__version__.partition('.')[0]) < 4:
    raise UserError(
      f'{where} needs datasets 4 or later, which runs no code of a data set; installed is {datasets.__version__}; '
      'pip install -U datasets.'
    )
  return datasets
