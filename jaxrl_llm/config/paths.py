"""Where config files are: a path, or a name in configs/ and its folders."""

from __future__ import annotations

import difflib
import os
import pathlib

from jaxrl_llm.types import UserError

# In a checkout beside the package; in a wheel inside it (pyproject.toml maps configs/ to jaxrl_llm.configs).
_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
FOLDERS = (_PACKAGE.parent / 'configs', _PACKAGE / 'configs')


def folder() -> pathlib.Path:
  """The folder of the config files that come with the package."""
  return next((path for path in FOLDERS if (path / 'dapo.py').is_file()), FOLDERS[0])


def names() -> dict[str, str]:
  """The config files that come with the package: name → path."""
  return {path.stem: str(path) for path in sorted(folder().rglob('*.py'))}


def find(name: str, beside: str = '') -> str:
  """The path of `name`: a file, one in the folder `beside`, or one in configs/ by its name, with or without .py.

  Raises UserError that names the nearest one.
  """
  for path in (name, os.path.join(beside, name) if beside else ''):
    if path and os.path.isfile(path):
      return path
  known = names()
  stem = pathlib.PurePath(name).stem
  own = not os.path.dirname(name) or pathlib.PurePath(name).parts[0] == 'configs'
  if own and stem in known and pathlib.PurePath(name).suffix in ('', '.py'):
    return known[stem]
  close = difflib.get_close_matches(stem, list(known), n=1)
  meant = f'did you mean --config={close[0]}' if close else 'give a name such as dapo, or a file'
  raise UserError(f'--config={name} does not exist; {meant}.')
