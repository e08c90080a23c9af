"""Loading: the defaults, then a file of configs/, then overrides such as --config.steps=10."""

from __future__ import annotations

import ast
import json
import math
import os
import pathlib
import runpy
from collections.abc import Sequence
from typing import Any

import ml_collections

from jaxrl_llm.config import paths, suggestions, user_code
from jaxrl_llm.config.schema import FIXED_FIELDS, DataConfig, Section, is_stage
from jaxrl_llm.config.schema import default as default
from jaxrl_llm.config.suggestions import near as near
from jaxrl_llm.types import JsonObject, JsonValue, UserError

_PLAIN = (bool, int, float, str)
_MIXED = ('remat',)  # fields that are 'auto' or a bool
# Fields of config.data that are about the rows of one source.
OF_SOURCE = ('tasks', 'template')
_DICTS = (dict, ml_collections.ConfigDict, Section)


def load(path: str = '', overrides: Sequence[str] = ()) -> ml_collections.ConfigDict:
  """Lays a config file over the defaults, then overrides such as `--config.a.b=v`.

  `path` is a file, or the name of one in configs/: 'dapo'. The file's `get_config()` returns only what it changes; with
  `base='sums'`, that file is laid first. A stage with an `fn` replaces the default stage; one without changes settings
  of the default function. Another data.source has the defaults of data.tasks and data.template. The config.json of a
  run is read, too. Raises UserError for a file that is missing or fails, for unknown fields, with the nearest valid
  name, and for values of another type.
  """
  config = default()
  for changes in _chain(path) if path else ():
    _merge(config, changes, 'config')
  # Functions and the source first: choosing one drops the settings of another, but not those typed before it.
  first = ('.fn', '.data.source')
  for override in sorted(overrides, key=lambda text: not text.partition('=')[0].endswith(first)):
    _override(config, override)
  return config


def _chain(name: str) -> list[JsonObject]:
  """The changes of a file, after those of its base."""
  chain: list[JsonObject] = []
  paths_read: list[str] = []
  path = paths.find(name)
  while path:
    if os.path.realpath(path) in map(os.path.realpath, paths_read):
      raise UserError(
        f'--config={paths_read[0]}: its base is in the end {path} again; name another base.'
      )
    paths_read.append(path)
    changes = dict(_read(path))
    base = changes.pop('base', '')
    if not isinstance(base, str):
      raise UserError(
        f'--config={path}: base={base!r} must be the name of a config file, such as sums.'
      )
    chain.insert(0, changes)
    path = paths.find(base, os.path.dirname(path)) if base else ''
  return chain


def _read(path: str) -> dict | ml_collections.ConfigDict:
  """The return value of get_config() in a file, or the content of a run's config.json."""
  if path.endswith('.json'):
    return _read_json(path)
  try:
    # An import would find a file that changed within a second in its bytecode cache.
    get_config = runpy.run_path(path).get('get_config')
    changes = get_config() if callable(get_config) else None
  except (Exception, SystemExit) as error:  # the file is the user's program
    raise UserError(f'--config={path} fails ({user_code.describe(error)}); mend it.') from error
  if not callable(get_config):
    raise UserError(f'--config={path} has no function get_config(); see configs/dapo.py.')
  if not isinstance(changes, dict | ml_collections.ConfigDict):
    raise UserError(
      f'--config={path}: get_config() returns {type(changes).__name__}, not a dict; see configs/dapo.py.'
    )
  return changes


def _read_json(path: str) -> JsonObject:
  """The config.json of a run, without its fingerprint."""
  try:
    settings = dict(json.loads(pathlib.Path(path).read_text('utf-8')))
  except (OSError, ValueError, TypeError) as error:
    raise UserError(
      f'--config={path} is damaged ({error}); restore the file, or name a file with get_config().'
    ) from error
  settings.pop('fingerprint', None)
  if unknown := sorted(settings.keys() - default().keys()):
    raise UserError(
      f'--config={path} is of an earlier version: {", ".join(unknown)} are no fields of the configuration any more; '
      'use the version that wrote it.'
    )
  return settings


def _override(config: ml_collections.ConfigDict, text: str) -> None:
  """Sets one field from '--config.a.b=value'."""
  name, equals, raw = text.removeprefix('--config.').partition('=')
  *parents, leaf = name.split('.')
  part, field = config, 'config'
  for known, parent in enumerate(parents):
    if parent not in part:
      meant = suggestions.field(config, name, known, raw)
      raise UserError(f'{field}.{parent} is unknown; {meant}.')
    part, field = part[parent], f'{field}.{parent}'
    if not isinstance(part, ml_collections.ConfigDict):
      raise UserError(f'{text} asks for a part of {field}={part!r}; write --{field}=VALUE.')
  if leaf not in part and not is_stage(part, field):
    meant = suggestions.field(config, name, len(parents), raw)
    raise UserError(f'{field}.{leaf} is unknown; {meant}.')
  if not equals:
    raise UserError(f'{text} has no value; write --config.{name}=VALUE.')
  old = part.get(leaf)
  if leaf == 'fn' and raw == old:
    return
  value = raw if isinstance(old, str) and leaf not in _MIXED else _literal(raw)
  if isinstance(old, ml_collections.ConfigDict) and not isinstance(value, dict):
    raise UserError(
      f'{field}.{leaf}={value!r} must be a dict of: {_section_flags(old, name, raw)}.'
    )
  if isinstance(old, int | float) and not isinstance(value, int | float | None):
    value = raw  # as it was typed: 1,000 is a tuple
  _merge(part, {leaf: value}, field)


def _section_flags(section: ml_collections.ConfigDict, name: str, raw: str) -> str:
  """The fields of a section, and the flags that set them, for an error message."""
  listed = ', '.join(section.keys())
  if raw in paths.names():
    return f'{listed}; did you mean --config={raw}'
  if is_stage(section, f'config.{name}'):
    return f'{listed}; write --config.{name}.fn={raw}'
  return f'{listed}; write --config.{name}.FIELD=VALUE'


def _merge(part: ml_collections.ConfigDict, changes: Any, field: str) -> None:
  """Lays `changes` over `part`; see `load`. `field` is its name, such as 'config.data'."""
  old = dict(part.items())
  if is_stage(old, field) and 'fn' in changes:
    for key in old.keys() - {'fn', *FIXED_FIELDS.get(field, ())}:
      del part[key]  # of another function, or left out on purpose
  if field == 'config.data' and changes.get('source', old['source']) != old['source']:
    part.update({key: getattr(DataConfig(), key) for key in OF_SOURCE})
  same = changes.get('fn', old.get('fn')) == old.get('fn')
  for key, value in changes.items():
    where, was = f'{field}.{key}', old.get(key)
    _check_name(key, field)
    if key not in old and not is_stage(old, field):
      raise UserError(f'{where} is unknown; {near(key, old)}.')
    if isinstance(was, ml_collections.ConfigDict):
      if not isinstance(value, dict | ml_collections.ConfigDict):
        raise UserError(f'{where}={value!r} must be a dict of: {", ".join(was.keys())}.')
      _merge(was, value, where)
    else:
      with part.ignore_type():
        # Settings of another function, or without a default, are checked by `stages.pick`.
        part[key] = of_type(value, was if same or key in part else None, where)


def of_type(value: JsonValue, old: JsonValue, field: str) -> Any:
  """`value` with the type of `old`, if there is one; an int may stand for a float.

  Raises UserError for another type, or a value that cannot be written to config.json.
  """
  if value is None:
    example = '' if old is None else f' such as {old!r}'
    raise UserError(f'{field} is missing; give it a value{example}.')
  if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool):
    value = float(value)
  if isinstance(old, tuple) and isinstance(value, list):
    value = tuple(value)
  mixed = field.rpartition('.')[2] in _MIXED
  if mixed and not isinstance(value, bool | str):
    raise UserError(f'{field}={value!r} must be True, False, or text such as {old!r}.')
  if old is not None and not mixed and type(value) is not type(old):
    example = (value,) if old == () and isinstance(value, str | dict) else old
    raise UserError(f'{field}={value!r} must be of type {type(old).__name__}, such as {example!r}.')
  check_plain(value, field)
  return value


def check_plain(value: JsonValue | Section | ml_collections.ConfigDict, field: str) -> None:
  """Raises UserError unless config.json can hold the value: strings, finite numbers, bools, lists and dicts of them."""
  if isinstance(value, _DICTS):
    for key, item in value.items():
      _check_name(key, field)
      check_plain(item, f'{field}.{key}')
  elif isinstance(value, list | tuple):
    for index, item in enumerate(value):
      check_plain(item, f'{field}[{index}]')
  elif not isinstance(value, _PLAIN) or (isinstance(value, float) and not math.isfinite(value)):
    raise UserError(
      f'{field}={value!r} must be a string, a finite number, a bool, or a list or dict of them.'
    )
  elif isinstance(value, str) and not value.isascii():
    try:
      value.encode()
    except UnicodeEncodeError as error:
      raise UserError(f'{field}={value!r} must be Unicode text ({error.reason}).') from error


def _check_name(key: JsonValue, field: str) -> None:
  if not isinstance(key, str) or not key or '.' in key:
    raise UserError(f'{field} has the field {key!r}; a name is text without dots.')


def _literal(raw: str) -> JsonValue:
  try:
    return ast.literal_eval({'true': 'True', 'false': 'False'}.get(raw, raw))
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    return raw
