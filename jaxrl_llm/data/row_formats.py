"""Converts rows written for other trainers into a Row.

Formats are recognized by their columns: verl and SkyRL (`prompt`, `data_source`, `reward_model` or `reward_spec` with
`ground_truth`), TRL (`prompt`, as text or messages, and columns for the reward), verifiers (`prompt` or `question`,
`answer`, `info`), OpenRLHF and slime (`input`, `label`), AReaL (`messages`, `answer`), reasoning-gym (`question`,
`answer`, `metadata`).
config.data.columns names other columns. All remaining columns are passed to the reward function.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxrl_llm.data.tasks import make_row
from jaxrl_llm.types import COLUMNS, JsonObject, JsonValue, Row, UserError

if TYPE_CHECKING:
  from jaxrl_llm.config.schema import DataConfig

_PROMPTS = ('question', 'prompt', 'messages', 'input')
_ANSWERS = (
  *('reward_model.ground_truth', 'reward_spec.ground_truth', 'answer'),
  *('label', 'ground_truth', 'solution'),
)
_SOURCES = ('data_source', 'datasource', 'env_class', 'metadata.source_dataset')
_MAY_BE_JSON = ('info', 'metadata', 'extra_info', 'reward_model', 'reward_spec')


def to_row(record: JsonValue, where: str, data: DataConfig | Mapping, source: str) -> Row:
  """Returns the Row of a JSON object. `where` is its place in messages, `source` the default for rows without one.

  Raises UserError, with the accepted names, for a row without a prompt, or without an answer where config.data.answers
  requires one.
  """
  if not isinstance(record, dict):
    raise UserError(f'{where} is no JSON object but a {type(record).__name__}; write {{...}}.')
  record = {k: _decoded(v) if k in _MAY_BE_JSON else v for k, v in record.items()}
  check(record, where)
  names = data.get('columns', {})
  name = _prompt_column(record, names.get('question', ''), where)
  prompt = read_prompt(column_value(record, name), f'{where}: {name!r}')
  column, raw = _find_column(record, names.get('answer', ''), _ANSWERS, 'answer', where)
  answer = _answer(raw, where, data)
  source_column, row_source = _find_column(
    record, names.get('source', ''), _SOURCES, 'source', where
  )
  # Unchanged values for reward functions that take columns by name. They are stored apart from `extra`, because an
  # answer is no trait of a row. 'gym' is reserved for rows of our own generators; a file has the task in metadata.
  apart = {key: record.get(key) for key in (column, 'answer', 'data_source', 'gym')}
  extra = {k: v for k, v in record.items() if k != name and k not in apart}
  if column == 'solution' and isinstance(raw, str):
    extra[column] = raw  # serves as a demonstration, too
  in_row = {
    'answer': answer if column == 'answer' else None,
    'data_source': row_source if source_column == 'data_source' else None,
  }
  apart = {k: v for k, v in apart.items() if v is not None and v != in_row.get(k)}
  if apart:
    extra[COLUMNS] = apart
  _add_gym_entry(extra, raw)
  return make_row(str(row_source or source), prompt, answer, extra)


def column_value(record: JsonValue, name: str) -> JsonValue:
  """Returns the value of a column, or of the nested field 'a.b.c'; None where it is absent."""
  if isinstance(record, dict) and name in record:
    return record[name]
  for part in name.split('.'):
    record = record.get(part) if isinstance(record, dict) else None
  return record


def _find_column(
  record: dict, configured: str, defaults: tuple[str, ...], key: str, where: str
) -> tuple[str, Any]:
  """(column, value) of the configured column, or of the first default that the record has; else ('', None)."""
  names = (configured,) if configured else defaults
  name = next((name for name in names if column_value(record, name) is not None), '')
  if configured and not name and key != 'answer':
    raise UserError(f'{where} has no column {configured!r}; correct config.data.columns.{key}.')
  return name, column_value(record, name) if name else None


def _prompt_column(record: dict, configured: str, where: str) -> str:
  if configured:
    return _find_column(record, configured, (), 'question', where)[0]
  present = [name for name in _PROMPTS if record.get(name) is not None]
  if not present:
    raise UserError(
      f"{where} has no prompt; give 'question' or 'prompt', or name its column in config.data.columns.question."
    )
  # Where a row has both the question and messages made from it, the messages are the prompt.
  return next((name for name in present if isinstance(record[name], list)), present[0])


def read_prompt(value: JsonValue, where: str) -> str | list[dict[str, str]]:
  """The text or the messages of a prompt, without empty fields. Raises UserError for anything else."""
  if isinstance(value, str) and value.strip():
    return value
  if isinstance(value, list) and value:
    for message in value:
      valid = isinstance(message, dict) and all(
        isinstance(message.get(key), str) for key in ('role', 'content')
      )
      if not valid:
        raise UserError(f"{where} needs text under 'role' and 'content' in every message.")
    # Tables fill the fields that a message lacks with None.
    return [{k: v for k, v in message.items() if v is not None} for message in value]
  raise UserError(f'{where} must be text or a list of messages, and not empty.')


def _answer(raw: JsonValue, where: str, data: DataConfig | Mapping) -> str:
  """The answer as text, without anything up to config.data.answer_after."""
  text = '' if raw is None else raw if isinstance(raw, str) else json.dumps(raw, default=str)
  mark = data.get('answer_after', '')
  if mark:
    text = text.rpartition(mark)[2].strip()
  if not text.strip() and data.get('answers', True):
    configured = data.get('columns', {}).get('answer', '')
    column = f' under {configured!r} (config.data.columns.answer)' if configured else ''
    raise UserError(
      f"{where} has no answer{column}; give 'answer' or 'reward_model': {{'ground_truth': ...}}, name its column in "
      'config.data.columns.answer, or set config.data.answers=False if the reward function needs none.'
    )
  return text if text.strip() else ''


def _add_gym_entry(extra: JsonObject, answer: JsonValue) -> None:
  """Adds the field that the reward function `gym` needs to an entry of reasoning-gym that was read from a file."""
  metadata = extra.get('metadata')
  if isinstance(metadata, dict) and isinstance(metadata.get('source_dataset'), str):
    extra['gym'] = dict(name=metadata['source_dataset'], settings={}, answer=answer)


def _decoded(value: JsonValue) -> JsonValue:
  """The value, parsed if it is a JSON object in text form, as some tables store it."""
  if not isinstance(value, str) or not value.lstrip().startswith('{'):
    return value
  try:
    return json.loads(value)
  except (ValueError, RecursionError):
    return value


_MAX_DEPTH = 50  # of nested lists and objects


def check(value: JsonValue, where: str, depth: int = 0) -> None:
  """Raises UserError for text that is not Unicode, and for nesting that is too deep for recursive functions."""
  if depth > _MAX_DEPTH:
    raise UserError(f'{where} is nested more than {_MAX_DEPTH} deep; flatten it.')
  if isinstance(value, dict):
    for key, item in value.items():
      check(key, f'{where}: {key!r}')
      check(item, f'{where}: {key!r}' if depth == 0 else where, depth + 1)
  elif isinstance(value, list):
    for item in value:
      check(item, where, depth + 1)
  elif isinstance(value, str) and not value.isascii():
    try:
      value.encode()
    except UnicodeEncodeError as error:
      raise UserError(f'{where} is no Unicode text ({error.reason}); correct it.') from error
