"""Input and output of programs: files in memory, and output up to a deadline and a length."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import time
from collections.abc import Iterator

DONE, DEADLINE, FLOOD = 'done', 'deadline', 'flood'


@contextlib.contextmanager
def in_memory(text: bytes) -> Iterator[int]:
  """A descriptor of a file in memory with the content `text`, at its start."""
  file = os.memfd_create('sandbox')
  try:
    with open(file, 'wb', closefd=False) as stream:
      stream.write(text)
    os.lseek(file, 0, os.SEEK_SET)
    yield file
  finally:
    os.close(file)


def collect(
  process: subprocess.Popen, end: float, most_bytes: int
) -> tuple[str, tuple[bytes, bytes]]:
  """(outcome, (stdout, stderr)): read until both are closed, `end` is past, or one exceeds `most_bytes`."""
  streams = {process.stdout: bytearray(), process.stderr: bytearray()}
  output, outcome = (streams[process.stdout], streams[process.stderr]), DONE
  with selectors.DefaultSelector() as waiting:
    for stream in streams:
      waiting.register(stream, selectors.EVENT_READ)
    while outcome == DONE and waiting.get_map():
      ready = waiting.select(max(0.0, end - time.monotonic()))
      if time.monotonic() >= end:
        outcome = DEADLINE
      for key, _ in ready:
        if not (part := os.read(key.fd, 65536)):
          waiting.unregister(key.fileobj)
        streams[key.fileobj] += part
        if len(streams[key.fileobj]) > most_bytes:
          outcome = FLOOD
  if outcome == DONE:  # a program that closed its streams may still run
    try:
      process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
      outcome = DEADLINE
  return outcome, tuple(bytes(part[:most_bytes]) for part in output)
