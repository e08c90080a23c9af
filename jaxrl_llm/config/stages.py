"""Stages of the configuration: from a function's name and settings to the function."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar

from jaxrl_llm.config import user_code
from jaxrl_llm.config.schema import Stage
from jaxrl_llm.config.suggestions import near
from jaxrl_llm.types import JsonValue, Settings, UserError

_Result = TypeVar('_Result')


def pick(module: ModuleType, stage: Stage | Settings, field: str = '') -> functools.partial[Any]:
  """Resolves `dict(fn='name', **settings)` to `partial(module.name, **settings)`.

  `fn` is a public function that `module` defines, or the user's own as 'package.module:function'. Settings are its
  keyword-only parameters. Raises UserError that lists the valid names; `field` names the stage in messages.
  """
  settings = dict(stage)
  name = settings.pop('fn', None)
  field = field or module.__name__.rsplit('.', 1)[-1]
  fn = _function(module, name, f'config.{field}')
  allowed = _settings(fn)
  for key, value in settings.items():
    if key not in allowed:
      raise UserError(
        f'config.{field}.{key}={value!r} is not a setting of {name!r}, which takes: '
        f'{", ".join(allowed) or "none"}{_owners(module, key, field)}.'
      )
    kind = _annotation(allowed[key])
    if kind in _KINDS and not _KINDS[kind][0](value):
      raise UserError(f'config.{field}.{key}={value!r} of {name!r} must be {_KINDS[kind][1]}.')
  for key, setting in allowed.items():
    if setting.default is setting.empty and key not in settings:
      raise UserError(f'config.{field}.{key} is missing; {name!r} needs it.')
  return functools.partial(fn, **settings)


def active(stage: functools.partial[_Result]) -> functools.partial[_Result] | None:
  """The picked stage; None where its function has no inputs, as `none`: it stands for no stage and is never called."""
  parameters = inspect.signature(stage.func).parameters.values()
  keyword = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
  return stage if any(p.kind not in keyword for p in parameters) else None


def choices(module: ModuleType) -> dict[str, Callable]:
  """The public functions that a config may name in `module`."""
  return {
    name: fn
    for name, fn in vars(module).items()
    if inspect.isfunction(fn) and fn.__module__ == module.__name__ and not name.startswith('_')
  }


def imported(path: str, where: str) -> Callable:
  """The user's function of 'package.module:function'; raises UserError that begins with `where`."""
  module_name, _, name = path.partition(':')
  if module_name.endswith('.py') or os.sep in module_name:
    dotted = module_name.removesuffix('.py').strip('./').replace(os.sep, '.')
    raise UserError(
      f'{where} names a file, and a module is wanted; write {dotted}:{name}, and run from its folder.'
    )
  try:
    module = fn = importlib.import_module(module_name)
    for part in name.split('.'):
      fn = getattr(fn, part, None)
  except Exception as error:  # the import runs the user's code, which may raise anything
    raise UserError(
      f'{where}: importing {module_name!r} failed ({user_code.describe(error)}); '
      'give a module that can be imported, run from its folder or put that on PYTHONPATH.'
    ) from error
  if not callable(fn):
    own = [key for key, value in vars(module).items() if callable(value) and key[0] != '_']
    raise UserError(f'{where}: {module_name!r} has no function {name!r}; {near(name, own)}.')
  return fn


def _function(module: ModuleType, name: JsonValue, field: str) -> Callable:
  if isinstance(name, str) and ':' in name:
    where = f'{field}.fn={name!r}'
    return user_code.guarded(imported(name, where), where)
  valid = choices(module)
  if not isinstance(name, str) or name not in valid:
    raise UserError(f'{field}.fn={name!r} is unknown; choose one of: {", ".join(sorted(valid))}.')
  return valid[name]


def _owners(module: ModuleType, setting: str, field: str) -> str:
  """The functions of `module` that have a setting, for an error message; '' without one."""
  names = [name for name, fn in choices(module).items() if setting in _settings(fn)]
  return f'; --config.{field}.fn may be one that takes it: {", ".join(names)}' if names else ''


def _settings(fn: Callable) -> dict[str, inspect.Parameter]:
  """The keyword-only parameters that a config can write: those without a type, or with a plain one."""
  return {
    p.name: p
    for p in inspect.signature(fn).parameters.values()
    if p.kind == p.KEYWORD_ONLY and (p.annotation is p.empty or _annotation(p) in _KINDS)
  }


def _annotation(parameter: inspect.Parameter) -> str:
  """As text, which it already is where a module imports annotations from __future__."""
  annotation = parameter.annotation
  return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _is_int(value: JsonValue) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: JsonValue) -> bool:
  return _is_int(value) or isinstance(value, float)


def _is_text(value: JsonValue) -> bool:
  return isinstance(value, str)


def _all(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
  return lambda value: isinstance(value, list | tuple) and all(map(check, value))


def _numbers_by_name(value: Any) -> bool:
  return hasattr(value, 'values') and all(map(_is_number, value.values()))


# By the annotation of a setting: a test of its value, and a name for messages.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
  'bool': (lambda value: isinstance(value, bool), 'True or False'),
  'int': (_is_int, 'a whole number'),
  'float': (_is_number, 'a number'),
  'str': (_is_text, 'text'),
  'tuple[int, ...]': (_all(_is_int), 'a list of whole numbers'),
  'tuple[str, ...]': (_all(_is_text), 'a list of texts'),
  'Sequence[int]': (_all(_is_int), 'a list of whole numbers'),
  'Sequence[float]': (_all(_is_number), 'a list of numbers'),
  'Mapping[str, float]': (_numbers_by_name, 'a dict of numbers'),
  'Settings': (lambda value: isinstance(value, Mapping), 'a dict'),
}
