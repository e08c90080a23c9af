"""Checks of the files and folders that a mode writes, made before its work."""

from __future__ import annotations

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.types import UserError


def check_file(flag: str, path: str) -> None:
  """Raises UserError where the file that `--flag` names cannot be written; '' names none."""
  if path and (problem := safe_files.file_write_problem(path)):
    raise UserError(f'--{flag}={path} cannot be written: {problem}; name another file.')


def check_folder(flag: str, folder: str) -> None:
  """Raises UserError where the folder that `--flag` names is not empty or cannot be written."""
  if problem := safe_files.folder_write_problem(folder):
    raise UserError(
      f'--{flag}={folder} cannot be written: {problem}; name a folder that is empty, or that is not there.'
    )
