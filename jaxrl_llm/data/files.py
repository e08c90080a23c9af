"""Rows from JSON-lines files: the field names people use, and a sentence with the line number where
one is wrong."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from jaxrl_llm.data.tasks import make_row, question_key
from jaxrl_llm.types import Row, UserError

_PROMPTS = ('question', 'prompt')


def read(path: str, field: str) -> list[Row]:
  """The rows of a JSON-lines file, exact repetitions dropped. Source: none.

  Raises UserError, with the field and the number of the line, for whatever is wrong.
  """
  rows: dict[str, Row] = {}
  count = 0
  for number, line in enumerate(_lines(path, field), 1):
    if line.strip():
      count += 1
      row = _parse(line, f'{field}={path!r}, line {number}')
      rows.setdefault(row.id, row)
  if not rows:
    raise UserError(f'{field}={path!r} holds no row; give a file with one JSON object per line.')
  if len(rows) < count:
    logging.warning('%s: %d repeated rows were dropped.', path, count - len(rows))
  return list(rows.values())


def split(rows: list[Row], held_out: int, data: Any) -> tuple[list[Row], list[Row]]:
  """A seeded split by question, at most a fifth of the questions held out. Source: none."""
  keys = sorted({question_key(row) for row in rows}, key=_shuffled(data.seed))
  theirs = set(keys[: min(held_out, len(keys) // 5)])
  if held_out and not theirs:
    logging.warning('%s: too few questions to hold any out.', data.path)
  ours = [row for row in rows if question_key(row) not in theirs]
  held = {question_key(row): row for row in rows if question_key(row) in theirs}
  return _first(ours, data), list(held.values())


def without(rows: list[Row], other: Sequence[Row], data: Any) -> list[Row]:
  """`rows` less those whose question is in `other`; UserError where none is left. Source: none."""
  theirs = {question_key(row) for row in other}
  ours = [row for row in rows if question_key(row) not in theirs]
  if not ours:
    raise UserError(
      f'config.data.path={data.path!r} holds only questions that are also in '
      f'config.data.eval_path={data.eval_path!r}; give two different files.'
    )
  if len(ours) < len(rows):
    logging.warning(
      '%s: %d rows were dropped, their questions are in %s.',
      data.path, len(rows) - len(ours), data.eval_path,
    )  # fmt: skip
  return _first(ours, data)


def choose(rows: list[Row], count: int, seed: int) -> list[Row]:
  """A seeded choice of at most `count` rows, in their order. Source: none."""
  shuffled = _shuffled(seed)
  kept = {row.id for row in sorted(rows, key=lambda row: shuffled(row.id))[:count]}
  return [row for row in rows if row.id in kept]


def _first(rows: list[Row], data: Any) -> list[Row]:
  if data.size > len(rows):
    logging.warning('config.data.size=%d, but %s has only %d rows to train on.',
                    data.size, data.path, len(rows))  # fmt: skip
  return rows[: data.size or None]


def _shuffled(seed: int) -> Callable[[str], str]:
  # By hash, not by position: a row added to the file moves no other row to the other side.
  return lambda key: hashlib.sha256(f'{seed}\n{key}'.encode()).hexdigest()


def _lines(path: str, field: str) -> list[str]:
  if not path:
    raise UserError(f'{field} is empty; name a JSON-lines file.')
  if not os.path.isfile(path):
    raise UserError(f'{field}={path!r} is no file; give the path of a JSON-lines file.')
  try:
    with open(path, 'rb') as file:
      # By line feeds alone: JSON allows other ends of lines within a text.
      lines = file.read().removeprefix(codecs.BOM_UTF8).split(b'\n')
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


_DEPTH = 50  # of lists and objects within each other


def _check(value: Any, where: str, depth: int = 0) -> None:
  """All text is Unicode, and nothing is nested deeper than the functions that walk over rows can follow."""
  if depth > _DEPTH:
    raise UserError(f'{where} is nested more than {_DEPTH} deep; flatten it.')
  if isinstance(value, dict):
    for key, item in value.items():
      _check(key, f'{where}: {key!r}')
      _check(item, f'{where}: {key!r}' if depth == 0 else where, depth + 1)
  elif isinstance(value, list):
    for item in value:
      _check(item, where, depth + 1)
  elif isinstance(value, str) and not value.isascii():
    try:
      value.encode()
    except UnicodeEncodeError as error:
      raise UserError(f'{where} is no Unicode text ({error.reason}); mend it.') from error


def _parse(line: str, where: str) -> Row:
  try:
    given = json.loads(line)
  except (ValueError, RecursionError) as error:
    raise UserError(f'{where} is not JSON: {getattr(error, "msg", error)}; mend it.') from error
  if not isinstance(given, dict):
    raise UserError(f'{where} is no JSON object but a {type(given).__name__}; write {{...}}.')
  _check(given, where)
  name = next((name for name in _PROMPTS if given.get(name) is not None), None)
  if name is None:
    raise UserError(f"{where} has no prompt; give 'question' or 'prompt'.")
  extra = {k: v for k, v in given.items() if k not in (name, 'answer', 'data_source')}
  return make_row(
    str(given.get('data_source') or 'jsonl'),
    _prompt(given[name], f'{where}: {name!r}'),
    _answer(given, where),
    extra,
  )


def _prompt(value: Any, where: str) -> str | list[dict[str, str]]:
  if isinstance(value, str) and value.strip():
    return value
  if isinstance(value, list) and value:
    for message in value:
      good = isinstance(message, dict) and all(
        isinstance(message.get(key), str) for key in ('role', 'content')
      )
      if not good:
        raise UserError(f"{where} needs text under 'role' and 'content' in every message.")
    return value
  raise UserError(f'{where} must be text or a list of messages, and not empty.')


def _answer(given: dict[str, Any], where: str) -> str:
  """The answer as text; a ground truth that is none also stays, as it was, in extra."""
  answer = given.get('answer')
  if answer is None and isinstance(given.get('reward_model'), dict):
    answer = given['reward_model'].get('ground_truth')
  text = answer if isinstance(answer, str) else json.dumps(answer)
  if answer is None or not text.strip():
    raise UserError(
      f"{where} has no answer; give 'answer' or 'reward_model': {{'ground_truth': ...}}."
    )
  return text
