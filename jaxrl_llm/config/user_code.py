"""Errors of the user's own code: reward functions, environments, stages and config files."""

from __future__ import annotations

import functools
import os
import sysconfig
import traceback
from collections.abc import Callable
from typing import TypeVar

from jaxrl_llm.types import UserError

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LINE_CHARS = 80  # of the source line in a message
_R = TypeVar('_R')


def describe(error: BaseException) -> str:
  """'ZeroDivisionError: division by zero, at my_task.py:12: return 1 / 0', on one line.

  The place is the innermost line outside of this package, of the standard library and of installed packages.
  """
  try:
    message = ' '.join(str(error).split())
  except Exception:  # an exception class of the user's whose __str__ fails
    message = 'an error whose message cannot be read'
  text = f'{type(error).__name__}: {message}'.rstrip(': ')
  return f'{text}{location(error)}'


def location(error: BaseException) -> str:
  """', at my_task.py:12: return 1 / 0'; '' where no line of the user's own code is involved."""
  if isinstance(error, SyntaxError) and error.filename and _is_own(error.filename):
    return _place(error.filename, error.lineno, error.text)
  frames = traceback.extract_tb(error.__traceback__)
  own = [frame for frame in frames if _is_own(frame.filename)]
  return _place(own[-1].filename, own[-1].lineno, own[-1].line) if own else ''


def guarded(fn: Callable[..., _R], where: str) -> Callable[..., _R]:
  """`fn` of the user, whose exceptions become a UserError that begins with `where` and names the line."""

  @functools.wraps(fn)
  def call(*args, **keywords) -> _R:
    try:
      return fn(*args, **keywords)
    except UserError:
      raise
    except Exception as error:
      raise UserError(f'{where} fails: {describe(error)}; correct the function.') from error

  return call


def _place(path: str, line: int | None, text: str | None) -> str:
  shown = os.path.relpath(path) if _is_below(path, os.getcwd()) else path
  source = ' '.join((text or '').split())[:_LINE_CHARS]
  return f', at {shown}:{line}{f": {source}" if source else ""}'


def _is_own(path: str) -> bool:
  """Whether a file is the user's: none of Python, of installed packages or of this package."""
  if path.startswith('<'):
    return False
  return not any(_is_below(path, folder) for folder in (_PACKAGE, *_installed()))


@functools.cache
def _installed() -> tuple[str, ...]:
  names = ('stdlib', 'platstdlib', 'purelib', 'platlib')
  return tuple({sysconfig.get_path(name) for name in names} - {None})


def _is_below(path: str, folder: str) -> bool:
  return os.path.abspath(path).startswith(os.path.join(os.path.abspath(folder), ''))
