"""The configuration: how a file and overrides are laid over the defaults, and `pick`."""

from __future__ import annotations

import ast
import difflib
import math
import os
import runpy
from collections.abc import Iterable, Sequence
from typing import Any

import ml_collections

from jaxrl_llm.config.schema import FIXED_FIELDS
from jaxrl_llm.config.schema import default as default
from jaxrl_llm.types import UserError


def load(path: str = '', overrides: Sequence[str] = ()) -> ml_collections.ConfigDict:
  """Lays a file of configs/ over the defaults, then overrides such as `--config.a.b=v`. Source: none.

  The file's `get_config()` names only what it changes; with `base='other.py'`, a file beside it is laid
  first. A part with an `fn` replaces the default part whole; one without changes settings of the
  default function. Raises UserError for a file that is missing or fails, for unknown fields, with the
  nearest valid name, and for values of another type.
  """
  config = default()
  for told in _chain(path) if path else ():
    _merge(config, told, 'config')
  # Functions first: choosing one drops the settings of another, but not those typed before it.
  for override in sorted(overrides, key=lambda text: not text.partition('=')[0].endswith('.fn')):
    _override(config, override)
  return config


def _chain(path: str) -> list[dict]:
  """What a file says, after what the files it stands on say."""
  told, seen = [], []
  while path:
    if os.path.realpath(path) in map(os.path.realpath, seen):
      raise UserError(
        f'--config={seen[0]}: its base is in the end {path} again; name another base.'
      )
    seen.append(path)
    changes = dict(_read(path))
    base = changes.pop('base', '')
    if not isinstance(base, str):
      raise UserError(f'--config={path}: base={base!r} must be the name of a file beside it.')
    told.insert(0, changes)
    path = os.path.join(os.path.dirname(path), base) if base else ''
  return told


_PLAIN = (bool, int, float, str)
_MIXED = ('remat',)  # 'auto' or a bool
def _read(path: str) -> dict:
  if not os.path.isfile(path):
    raise UserError(f'--config={path} does not exist; give a file such as configs/dapo.py.')
  try:
    # Not an import, which would look a file changed within a second up in its bytecode cache.
    get_config = runpy.run_path(path).get('get_config')
    told = get_config() if callable(get_config) else None
  except (Exception, SystemExit) as error:  # the file is the user's program: anything may come
    raise UserError(f'--config={path} fails ({type(error).__name__}: {error}); mend it.') from error
  if not callable(get_config):
    raise UserError(f'--config={path} has no function get_config(); see configs/dapo.py.')
  if not isinstance(told, dict | ml_collections.ConfigDict):
    raise UserError(
      f'--config={path}: get_config() returns {type(told).__name__}, not a dict; see configs/dapo.py.'
    )
  return told


def _override(config: ml_collections.ConfigDict, text: str) -> None:
  name, equals, raw = text.removeprefix('--config.').partition('=')
  *parents, leaf = name.split('.')
  part, field = config, 'config'
  for parent in parents:
    if parent not in part:
      raise UserError(f'{field}.{parent} is unknown; {near(parent, part.keys())}.')
    part, field = part[parent], f'{field}.{parent}'
    if not isinstance(part, ml_collections.ConfigDict):
      raise UserError(f'{text} asks for a part of {field}={part!r}; write --{field}=VALUE.')
  if not equals:
    raise UserError(f'{text} has no value; write --config.{name}=VALUE.')
  old = part.get(leaf)
  if leaf == 'fn' and raw == old:
    return
  value = raw if isinstance(old, str) and leaf not in _MIXED else _literal(raw)
  _merge(part, {leaf: value}, field)


def _merge(part: ml_collections.ConfigDict, changes: Any, field: str) -> None:
  """Lays `changes` over `part`; see `load`. `field` is where that is, such as 'config.data'."""
  old = dict(part.items())
  if 'fn' in old and 'fn' in changes:
    for key in old.keys() - {'fn', *FIXED_FIELDS.get(field, ())}:
      del part[key]  # of another function, or left out on purpose
  same = changes.get('fn', old.get('fn')) == old.get('fn')
  for key, value in changes.items():
    where, was = f'{field}.{key}', old.get(key)
    _check_name(key, field)
    if key not in old and 'fn' not in old:
      raise UserError(f'{where} is unknown; {near(key, old)}.')
    if isinstance(was, ml_collections.ConfigDict):
      if not isinstance(value, dict | ml_collections.ConfigDict):
        raise UserError(f'{where}={value!r} must be a dict of: {", ".join(was.keys())}.')
      _merge(was, value, where)
    else:
      with part.ignore_type():
        # The settings of another function, or of none here, are checked by `pick`.
        part[key] = of_type(value, was if same or key in part else None, where)


def of_type(value: Any, old: Any, field: str) -> Any:
  """`value` with the type of `old`, where there is one; an int may stand for a float.

  Raises UserError for another type, or what cannot be written to config.json. Source: none.
  """
  if value is None:
    such = '' if old is None else f' such as {old!r}'
    raise UserError(f'{field} is missing; give it a value{such}.')
  if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool):
    value = float(value)
  if isinstance(old, tuple) and isinstance(value, list):
    value = tuple(value)
  mixed = field.rpartition('.')[2] in _MIXED
  if mixed and not isinstance(value, bool | str):
    raise UserError(f'{field}={value!r} must be True, False, or text such as {old!r}.')
  if old is not None and not mixed and type(value) is not type(old):
    raise UserError(f'{field}={value!r} must be of type {type(old).__name__}, such as {old!r}.')
  check_plain(value, field)
  return value


def check_plain(value: Any, field: str) -> None:
  """A config is written to config.json and compared: strings, finite numbers and bools only, else UserError.

  Source: none.
  """
  if isinstance(value, dict | ml_collections.ConfigDict):
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


def _check_name(key: Any, field: str) -> None:
  if not isinstance(key, str) or not key or '.' in key:
    raise UserError(f'{field} has the field {key!r}; a name is text without dots.')


def _literal(raw: str) -> Any:
  try:
    return ast.literal_eval({'true': 'True', 'false': 'False'}.get(raw, raw))
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    return raw


def near(name: str, valid: Iterable[str]) -> str:
  """The valid name that is meant, or all of them, for an error message. Source: none."""
  close = difflib.get_close_matches(name, list(valid), n=1)
  return f'did you mean {close[0]}' if close else f'valid: {", ".join(sorted(valid))}'
