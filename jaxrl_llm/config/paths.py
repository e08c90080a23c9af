"""Where config files are: a path, or a name in configs/ and its folders."""

from __future__ import annotations

import difflib
import os
import pathlib

from jaxrl_llm.types import UserError

# In a checkout beside the package; in a wheel inside it (pyproject.toml maps configs/ to jaxrl_llm.configs).
_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
FOLDERS = (_PACKAGE / 'configs', _PACKAGE.parent / 'configs')


def folder() -> pathlib.Path:
  """The folder of the config files that come with the package."""
  return next((path for path in FOLDERS if (path / 'dapo.py').is_file()), FOLDERS[1])


def names() -> dict[str, str]:
  """The config files that come with the package: name → path."""
  return {path.stem: str(path) for path in sorted(folder().rglob('*.py'))}


def find(name: str, beside: str = '') -> str:
  """The path of a config file: `name` itself, one in the folder `beside`, or one in configs/ and its folders.

  '.py' may be left out, and the folder inside configs/. Raises UserError with the nearest name.
  """
  beside_it = os.path.join(beside, name)
  for path in (name, *([beside_it, f'{beside_it}.py'] if beside else ())):
    if os.path.isfile(path):
      return path
  pure, known = pathlib.PurePath(name), names()
  ours = len(pure.parts) == 1 or pure.parts[0] == 'configs'
  if ours and pure.stem in known and pure.suffix in ('', '.py'):
    return known[pure.stem]
  close = difflib.get_close_matches(pure.stem, list(known), n=1) if ours else ()
  meant = f'did you mean --config={close[0]}' if close else 'give a name such as dapo, or a file'
  raise UserError(f'--config={name} does not exist; {meant}.')
