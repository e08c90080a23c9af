"""Maps expected errors to a message on standard error and an exit status."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

from jaxrl_llm.checkpointing import safe_files, storage
from jaxrl_llm.distributed import preemption
from jaxrl_llm.types import UserError

EXIT_BAD_INPUT = 2
_EXIT_INTERRUPTED = 130


def guard(run: Callable[[], int], workdir: str) -> int:
  """The exit status of `run`: 2 for bad input and file errors, 75 after SIGTERM, 130 after Ctrl-C.

  Other exceptions pass. `workdir` is named where an OSError has no file name.
  """
  try:
    return run()
  except UserError as error:
    return _fail(str(error))
  except safe_files.NotRegularError as error:
    return _fail(f'{error.filename} cannot be read: {error.strerror}; put the file back.')
  except OSError as error:
    if (message := _os_error(error, workdir)) is None:
      raise
    return _fail(message)
  except preemption.Preempted:
    print(
      'stopped as asked (SIGTERM) and saved; the same command goes on from there.', file=sys.stderr
    )
    return preemption.EXIT_PREEMPTED
  except KeyboardInterrupt:
    print('interrupted; the same command resumes at the last checkpoint.', file=sys.stderr)
    return _EXIT_INTERRUPTED


def _fail(message: str) -> int:
  print(f'error: {storage.shown(message)}', file=sys.stderr)
  return EXIT_BAD_INPUT


def _os_error(error: OSError, workdir: str) -> str | None:
  """The message for an error of the disk; None for other errors."""
  where = f'{error.filename or workdir}'
  if safe_files.is_transient(error):
    return (
      f'{where} cannot be read or written ({error}), also when tried again; check the disk or the network '
      'mount, and the same command goes on.'
    )
  if error.errno in (errno.ENOSPC, errno.EDQUOT):
    return f'the disk of {where} is full ({error}); make room, and the same command goes on.'
  return None
