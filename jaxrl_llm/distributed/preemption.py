"""Being told to stop: SIGTERM, which clouds and schedulers send some seconds before they take a machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

EXIT_PREEMPTED = 75  # exit status of a run that stopped as asked: the same command goes on (EX_TEMPFAIL of sysexits.h)
_AT_ONCE = 128 + signal.SIGTERM


class Preempted(Exception):
  """The run was told to stop, and nothing of it is lost."""


class PreemptionHandler:
  """Listens to SIGTERM, in `with`: the first is a wish, kept in `asked`; the second ends the process at once.

  On other threads than the main one, where Python cannot listen, nobody ever asks.
  """

  def __init__(self, alone: bool = True):
    """Unless `alone`, other processes compute with this one: it stops at the end of a step, when all do."""
    self.requested = False
    self._alone = alone
    self._waits = False  # for nothing: may be stopped at any moment

  def __enter__(self) -> PreemptionHandler:
    if threading.current_thread() is not threading.main_thread():
      return self
    # Python's handlers run between two bytecodes of the main thread, which may be inside of a compiler for minutes.
    # The number of a signal comes through this pipe even then.
    self._ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    self._theirs = theirs
    self._before = signal.signal(signal.SIGTERM, self._told)
    self._fd = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=self._count, name='second SIGTERM', daemon=True).start()
    return self

  def __exit__(self, *_: object) -> None:
    if not hasattr(self, '_ours'):
      return
    signal.set_wakeup_fd(self._fd)
    signal.signal(signal.SIGTERM, self._before)
    self._theirs.close()  # ends the thread
    self._ours.close()

  @contextlib.contextmanager
  def interruptible(self, save: Callable[[], None] | None = None) -> Iterator[None]:
    """What runs inside loses nothing by a stop, after `save`: raises Preempted as soon as one is asked for."""
    self._waits = self._alone
    try:
      if self.requested and self._alone:
        raise Preempted
      yield
    except Preempted:
      self._waits = False
      if save is not None:
        save()
      raise
    finally:
      self._waits = False

  def _told(self, *_: object) -> None:
    self.requested = True
    if self._waits:
      self._waits = False
      raise Preempted

  def _count(self) -> None:
    told = 0
    with contextlib.suppress(OSError):
      while number := self._ours.recv(1):
        told += number[0] == signal.SIGTERM
        if told == 2:
          os._exit(_AT_ONCE)
