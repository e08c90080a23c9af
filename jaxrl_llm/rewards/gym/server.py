"""The server process in the sandbox that scores completions, each in a child forked from untouched code.

A request is a line of JSON: [token, task, settings, text, entry]. So is the reply: [token, score, error]. The effects
of a completion end with its child. The child holds no descriptor but the pipe for its one score, may start no process,
and may write to no file. It has no access to the token of a later request, and the server is not dumpable, so that a
child cannot take its descriptors: no completion can write the score of another.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator

from jaxrl_llm.rewards.gym import scorers

_PR_SET_DUMPABLE = 4
_REPLY_BYTES = 1000


def main() -> None:
  """Serve requests from stdin until it ends. The argument 'sympy' is for the tasks of SANDBOX_ONLY."""
  requests, replies = os.fdopen(os.dup(0), 'rb'), os.fdopen(os.dup(1), 'wb', 0)
  null = os.open('/dev/null', os.O_RDWR)
  for stream in (0, 1, 2):
    os.dup2(null, stream)
  ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
  scorers.import_lightly(sympy=sys.argv[1:] == ['sympy'])
  gc.disable()  # a collection in a child would copy all pages shared with the server
  for line in requests:
    token, task, settings, text, entry = json.loads(line)
    try:
      scorers.warm(task)
      score, error = _score_in_child(scorers.safe_scorer(task, settings), text, entry)
    except Exception as failure:  # invalid settings of the task, or no memory to fork
      score, error = 0.0, f'{type(failure).__name__}: {failure}'[:_REPLY_BYTES]
    replies.write(json.dumps([token, score, error]).encode() + b'\n')


def _score_in_child(scorer: scorers.Scorer, text: str, entry: scorers.Entry) -> tuple[float, str]:
  """(score, error) of one completion, from a forked child."""
  read, write = os.pipe()
  child = os.fork()
  if child == 0:
    _run_child(scorer, text, entry, write)
  os.close(write)
  reply = b''.join(_parts(read))
  os.close(read)
  os.kill(child, signal.SIGKILL)
  _, status = os.waitpid(child, 0)
  try:
    return float(reply), ''
  except ValueError:
    message = reply.decode('utf-8', 'replace')
    return 0.0, message or f'the scorer ended with status {status}'


def _run_child(scorer: scorers.Scorer, text: str, entry: scorers.Entry, write: int) -> None:
  """In the child: write the score, or an error message, and exit."""
  try:
    os.closerange(0, write)
    os.closerange(write + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    reply = repr(float(scorer(text, entry)))
  except BaseException as error:
    reply = f'{type(error).__name__}: {error}'
  with contextlib.suppress(BaseException):
    os.write(write, reply.encode('utf-8', 'replace')[:_REPLY_BYTES])
  os._exit(0)


def _parts(read: int) -> Iterator[bytes]:
  size = 0
  while size <= _REPLY_BYTES and (part := os.read(read, _REPLY_BYTES)):
    size += len(part)
    yield part


if __name__ == '__main__':
  main()
