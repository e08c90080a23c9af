"""Commands that install optional dependencies, for error messages."""

from __future__ import annotations

import pathlib

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def install(extra: str) -> str:
  """The command that installs an extra: from the clone that this package runs from, else by name."""
  if not (_ROOT / 'pyproject.toml').is_file():
    return f"pip install 'jaxrl-llm[{extra}]'"
  folder = '.' if pathlib.Path.cwd() == _ROOT else _ROOT
  return f"pip install -e '{folder}[{extra}]'"
