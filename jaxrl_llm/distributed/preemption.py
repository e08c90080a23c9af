"""Preemption: SIGTERM, which clouds and schedulers send some seconds before they take a machine away."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

# Exit status of a run that saved its state and stopped. The same command resumes it (EX_TEMPFAIL of sysexits.h).
EXIT_PREEMPTED = 75
_EXIT_AT_ONCE = 128 + signal.SIGTERM


class Preempted(Exception):
  """The run received SIGTERM, and its state is saved."""


class PreemptionHandler:
  """Handles SIGTERM within `with`: the first sets `requested`, the second ends the process at once.

  Has no effect outside the main thread, where Python cannot install signal handlers.
  """

  def __init__(self, alone: bool = True):
    """alone: False if other processes compute with this one, so that it may stop only at the end of a step."""
    self.requested = False
    self._alone = alone
    self._interruptible = False

  def __enter__(self) -> PreemptionHandler:
    if threading.current_thread() is not threading.main_thread():
      return self
    # Python's handlers run between two bytecodes of the main thread, which may be inside a compiler for minutes.
    # The number of a signal arrives through this pipe even then.
    self._receiver, sender = socket.socketpair()
    sender.setblocking(False)
    self._sender = sender
    self._previous_handler = signal.signal(signal.SIGTERM, self._on_sigterm)
    self._previous_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=self._count_signals, name='second SIGTERM', daemon=True).start()
    return self

  def __exit__(self, *_: object) -> None:
    if not hasattr(self, '_receiver'):
      return
    signal.set_wakeup_fd(self._previous_fd)
    signal.signal(signal.SIGTERM, self._previous_handler)
    self._sender.close()  # ends the thread
    self._receiver.close()

  @contextlib.contextmanager
  def interruptible(self, save: Callable[[], None] | None = None) -> Iterator[None]:
    """A section without state of its own: SIGTERM in it raises Preempted at once, after `save`."""
    self._interruptible = self._alone
    try:
      if self.requested and self._alone:
        raise Preempted
      yield
    except Preempted:
      self._interruptible = False
      if save is not None:
        save()
      raise
    finally:
      self._interruptible = False

  def _on_sigterm(self, *_: object) -> None:
    self.requested = True
    if self._interruptible:
      self._interruptible = False
      raise Preempted

  def _count_signals(self) -> None:
    count = 0
    with contextlib.suppress(OSError):
      while number := self._receiver.recv(1):
        count += number[0] == signal.SIGTERM
        if count == 2:
          os._exit(_EXIT_AT_ONCE)
