"""One row, in the shape of whichever trainer it was written for → a Row.

Known by their columns: verl and SkyRL (`prompt`, `data_source`, `reward_model` or `reward_spec` with `ground_truth`),
TRL (`prompt`, as text or messages, and columns for the reward), verifiers (`prompt` or `question`, `answer`, `info`),
OpenRLHF and slime (`input`, `label`), AReaL (`messages`, `answer`), reasoning-gym (`question`, `answer`, `metadata`).
Other names are told by config.data.columns. No column is lost: what is not prompt or source goes to the grader.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.data.tasks import make_row
from jaxrl_llm.types import COLUMNS, Row, UserError

_PROMPTS = ('question', 'prompt', 'messages', 'input')
_ANSWERS = (
  *('reward_model.ground_truth', 'reward_spec.ground_truth', 'answer'),
  *('label', 'ground_truth', 'solution'),
)
_SOURCES = ('data_source', 'datasource', 'env_class', 'metadata.source_dataset')
_MAY_BE_JSON = ('info', 'metadata', 'extra_info', 'reward_model', 'reward_spec')


def to_row(given: Any, where: str, data: Mapping[str, Any], source: str) -> Row:
  """The row of a dict. `where` names it in messages, `data` is config.data, `source` is for rows that tell none.

  Raises UserError, with the names that would do, for a row without a prompt, or without an answer where
  data.answers asks for one. Source: none.
  """
  if not isinstance(given, dict):
    raise UserError(f'{where} is no JSON object but a {type(given).__name__}; write {{...}}.')
  given = {k: _decoded(v) if k in _MAY_BE_JSON else v for k, v in given.items()}
  check(given, where)
  names = data.get('columns', {})
  name = _prompt_column(given, names.get('question', ''), where)
  prompt = _prompt(at(given, name), f'{where}: {name!r}')
  column, raw = _found(given, names.get('answer', ''), _ANSWERS, 'answer', where)
  answer = _answer(raw, where, data)
  told_by, told = _found(given, names.get('source', ''), _SOURCES, 'source', where)
  # As the file has them, for graders that take columns by name; and apart, as an answer is no trait of a row's kind.
  apart = {column: given.get(column), 'answer': given.get('answer')}
  apart['data_source'] = given.get('data_source')
  apart['gym'] = given.get(
    'gym'
  )  # the field of rows that a generator drew here; a file names its task in metadata
  extra = {k: v for k, v in given.items() if k != name and k not in apart}
  if column == 'solution' and isinstance(raw, str):
    extra[column] = raw  # a demonstration, too
  known = {'answer': answer if column == 'answer' else None}
  known['data_source'] = told if told_by == 'data_source' else None
  apart = {k: v for k, v in apart.items() if v is not None and v != known.get(k)}
  if apart:
    extra[COLUMNS] = apart
  _of_gym(extra, raw)
  return make_row(str(told or source), prompt, answer, extra)


def at(given: Any, name: str) -> Any:
  """The value of a column, or of 'a.b.c' inside one; None where there is none. Source: none."""
  if isinstance(given, dict) and name in given:
    return given[name]
  for part in name.split('.'):
    given = given.get(part) if isinstance(given, dict) else None
  return given


def _found(given: dict, own: str, known: tuple[str, ...], key: str, where: str) -> tuple[str, Any]:
  """(column, value) of the first that the row has; the one of config.data.columns, where that names one."""
  names = (own,) if own else known
  name = next((name for name in names if at(given, name) is not None), '')
  if own and not name and key != 'answer':
    raise UserError(f'{where} has no column {own!r}; mend config.data.columns.{key}.')
  return name, at(given, name) if name else None


def _prompt_column(given: dict, own: str, where: str) -> str:
  if own:
    return _found(given, own, (), 'question', where)[0]
  has = [name for name in _PROMPTS if given.get(name) is not None]
  if not has:
    raise UserError(
      f"{where} has no prompt; give 'question' or 'prompt', or name its column in config.data.columns.question."
    )
  # Where a question was made into messages, these are what its author prompts with.
  return next((name for name in has if isinstance(given[name], list)), has[0])


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
    # Tables give every message the fields of all.
    return [{k: v for k, v in message.items() if v is not None} for message in value]
  raise UserError(f'{where} must be text or a list of messages, and not empty.')


def _answer(raw: Any, where: str, data: Mapping[str, Any]) -> str:
  """The answer as text, less what stands before config.data.answer_after."""
  text = '' if raw is None else raw if isinstance(raw, str) else json.dumps(raw, default=str)
  mark = data.get('answer_after', '')
  if mark:
    text = text.rpartition(mark)[2].strip()
  if not text.strip() and data.get('answers', True):
    own = data.get('columns', {}).get('answer', '')
    also = f' under {own!r} (config.data.columns.answer)' if own else ''
    raise UserError(
      f"{where} has no answer{also}; give 'answer' or 'reward_model': {{'ground_truth': ...}}, name its column in "
      'config.data.columns.answer, or set config.data.answers=False where the grader needs none.'
    )
  return text if text.strip() else ''


def _of_gym(extra: dict[str, Any], answer: Any) -> None:
  """What the grader `gym` wants to know of an entry of reasoning-gym that went through a file."""
  metadata = extra.get('metadata')
  if isinstance(metadata, dict) and isinstance(metadata.get('source_dataset'), str):
    told = dict(name=metadata['source_dataset'], settings={}, answer=answer)
    extra['gym'] = told


def _decoded(value: Any) -> Any:
  """A dict that was written as text, as some tables need it."""
  if not isinstance(value, str) or not value.lstrip().startswith('{'):
    return value
  try:
    return json.loads(value)
  except (ValueError, RecursionError):
    return value


_DEPTH = 50  # of lists and objects within each other


def check(value: Any, where: str, depth: int = 0) -> None:
  """All text is Unicode, and nothing is nested deeper than the functions that walk over rows can follow.

  Raises UserError. Source: none.
  """
  if depth > _DEPTH:
    raise UserError(f'{where} is nested more than {_DEPTH} deep; flatten it.')
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
      raise UserError(f'{where} is no Unicode text ({error.reason}); mend it.') from error
