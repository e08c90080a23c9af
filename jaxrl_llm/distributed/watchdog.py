"""A watchdog between the processes of a run: if one dies or stops answering, the others report it and exit.

Without it the others wait forever inside a collective. jax 0.10.2 and gloo handle the cases as follows:

  process 0 dies           the coordination client of the others logs FATAL with a stack trace and aborts at once: 134
  another process dies     processes that wait for it in gloo get an exception at once; the rest abort as above, once
                           its heartbeats are missing for heartbeat_timeout_seconds (100)
  one hangs or is cut off  the same heartbeats; until then gloo waits
  callbacks                none can be registered from Python for any of this (it ends in std::bad_cast)

Therefore every process has a TCP connection to process 0, both sides send heartbeats, and a thread reads them. The
kernel closes the connections of a process that dies, and a process that hangs sends no heartbeats. The thread ends its
process with os._exit, because the main thread may be blocked. jax's own heartbeats remain, with twice the timeout.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

# Exit status after the loss of another process. The same command resumes the run (EX_PROTOCOL of sysexits.h).
EXIT_PEER_LOST = 76
EXIT_BAD_INPUT = 2
_KEY = 'jaxrl_llm/watch'  # in jax's key-value store: the port of process 0
_CONNECT_S = 60.0  # for the connections, after jax has found all processes
# A process whose peer fails may exit by itself within this time: all processes often find the same bad input.
_GRACE_S = 10.0
# Exceptions of collectives and of the coordination service, which the death of a process often causes.
_COLLECTIVE = re.compile('gloo|nccl|connection|timed out|deadline|barrier|unavailable', re.I)


class _Failure(NamedTuple):
  """A peer that exited with an error, and the exit of this process that follows."""

  deadline: float  # time.monotonic() at which this process exits
  process: int
  reason: str
  status: int


class Watchdog:
  """The watchdog thread of one process, and the calls of the main thread to it."""

  def __init__(
    self,
    process: int,
    count: int,
    links: dict[int, socket.socket],
    silent_s: float,
    end: Callable[[int], NoReturn] = os._exit,
  ):
    """Start the thread. `links` are the connections: to all others in process 0, to process 0 in the others.

    `end` is os._exit, which skips jax's shutdown (it waits for all processes) and works while the main thread is
    blocked.
    """
    self._process, self._count, self._silent_s, self._end = process, count, silent_s, end
    self._links, self._partial_lines = links, dict.fromkeys(links, b'')
    self._last_heard = dict.fromkeys(links, time.monotonic())  # of the processes still running
    self._exit_status: int | None = None  # set when the main thread has ended
    self._failure: _Failure | None = None
    self._selector = selectors.DefaultSelector()
    for other, link in links.items():
      link.setblocking(False)
      self._selector.register(link, selectors.EVENT_READ, other)
    self._thread = threading.Thread(target=self._run, name='watchdog', daemon=True)
    self._thread.start()

  def leave(self, status: int, well: bool) -> None:
    """Announce that this process exits with `status`. Unless `well`, end it here.

    A process that fails must skip jax's shutdown, which waits for processes that wait for this one.
    """
    self._exit_status = status
    self._send(f'bye {status} {int(well)}\n')
    if well:
      return
    deadline = time.monotonic() + _GRACE_S
    # Others that find the same error report it, too.
    while self._last_heard and time.monotonic() < deadline:
      time.sleep(0.05)
    self._end(status)

  def failed(self, error: Exception) -> None:
    """End this process after an unexpected exception; an exception of a collective counts as a lost process.

    A collective fails before its cause is known, so the thread gets time to find the process that died.
    """
    status = 1
    if _COLLECTIVE.search(f'{error}'):
      time.sleep(self._silent_s + 2)  # the thread ends this process meanwhile if another one died
      status = EXIT_PEER_LOST
    traceback.print_exception(error)
    if status == EXIT_PEER_LOST:
      _print_error(
        f'error: a collective failed although all {self._count} processes answer; check the network between them, and '
        'start the same command again: the run resumes at its last checkpoint.'
      )
    self.leave(status, well=False)

  def _run(self) -> None:
    interval_s = min(1.0, self._silent_s / 5)
    last_pass = last_sent = time.monotonic()
    while True:
      ready, now = self._selector.select(interval_s), time.monotonic()
      if now - last_pass > self._silent_s:  # the others have given this process up, and are gone
        self._lose(self._process, f'(this one) stood still for {now - last_pass:.0f} s')
      last_pass = now
      for key, _ in ready:
        self._read(key.data)
      if now - last_sent >= interval_s:
        last_sent = now
        self._send('.\n')
      for other, heard in self._last_heard.items():
        if now - heard > self._silent_s:
          self._lose(
            other,
            f'has not answered for {now - heard:.0f} s (config.processes.silent_s={self._silent_s:g})',
          )
      if self._failure is not None and now > self._failure.deadline:
        self._lose(self._failure.process, self._failure.reason, self._failure.status)

  def _read(self, other: int) -> None:
    data, now = b'', time.monotonic()
    with contextlib.suppress(OSError):
      data = self._links[other].recv(4096)
    if not data:
      since_s = now - self._last_heard[other]
      return self._lose(
        other, f'died (its connection closed {since_s:.1f} s after its last heartbeat)'
      )
    self._last_heard[other] = now
    *lines, self._partial_lines[other] = (self._partial_lines[other] + data).split(b'\n')
    for line in lines:
      kind, *fields = line.decode().split(' ', 3)
      if kind == 'lost':
        self._lose(int(fields[0]), fields[2], int(fields[1]))
      if kind == 'bye':
        self._on_exit(other, int(fields[0]), fields[1] == '1')

  def _on_exit(self, other: int, status: int, well: bool) -> None:
    self._selector.unregister(self._links[other])
    del self._last_heard[other]
    if not well and self._failure is None:
      reason = f'ended with status {status}, and its own last message states the reason'
      own_status = EXIT_BAD_INPUT if status == EXIT_BAD_INPUT else EXIT_PEER_LOST
      self._failure = _Failure(time.monotonic() + _GRACE_S, other, reason, own_status)

  def _lose(self, other: int, reason: str, status: int = EXIT_PEER_LOST) -> None:
    """Report the loss of `other` to the user and to the other processes, and exit."""
    if self._exit_status is not None:  # this process has finished, or has reported its own failure
      self._end(self._exit_status)
    if self._process == 0:
      self._send(f'lost {other} {status} {reason}\n')
    # jax's threads print their messages first, and this exit must not overtake the message just sent.
    time.sleep(1)
    remedy = 'fix it, and start' if status == EXIT_BAD_INPUT else 'start'
    _print_error(
      f'error: process {other} of {self._count} {reason}; {remedy} the same command again on all of them: the run '
      'resumes at its last checkpoint.'
    )
    self._end(status)

  def _send(self, text: str) -> None:
    for other in list(self._last_heard):
      with contextlib.suppress(OSError):  # a closed connection is detected on reading
        self._links[other].send(text.encode())


def start(silent_s: float) -> Watchdog | None:
  """Start a watchdog in every process of jax.distributed, after its initialize; all processes call it.

  Returns None and prints a message if the processes cannot connect: then only jax's heartbeats remain.
  """
  # No public API gives the address that is known to reach process 0, nor jax's key-value store.
  from jax._src.distributed import global_state

  process, count = global_state.process_id, global_state.num_processes
  try:
    if process:
      host = global_state.coordinator_address.rpartition(':')[0].strip('[]')
      links = {0: _connect(global_state.client, host, process)}
    else:
      links = _accept(global_state.client, count)
  except Exception as error:  # from sockets or from the store
    print(
      f'the watchdog cannot connect the processes ({error}); only jax watches them.', flush=True
    )
    return None
  if len(links) < (1 if process else count - 1):
    print(
      f'the watchdog reached {len(links)} of {count - 1} processes; only jax watches the others.',
      flush=True,
    )
  _delay_abort()
  print(
    f'a process that dies, or does not answer for {silent_s:g} s (config.processes.silent_s), ends all with status '
    f'{EXIT_PEER_LOST}',
    flush=True,
  )
  return Watchdog(process, count, links, silent_s)


# `client` is jaxlib's DistributedRuntimeClient, which has no public type.
def _connect(client: Any, host: str, process: int) -> socket.socket:
  port = int(client.blocking_key_value_get(_KEY, int(_CONNECT_S * 1000)))
  link = socket.create_connection((host, port), timeout=_CONNECT_S)
  link.sendall(f'{process:8d}'.encode())
  return link


def _accept(client: Any, count: int) -> dict[int, socket.socket]:
  dual_stack = socket.has_dualstack_ipv6()
  family = socket.AF_INET6 if dual_stack else socket.AF_INET
  links: dict[int, socket.socket] = {}
  with socket.create_server(
    ('', 0), family=family, backlog=count, dualstack_ipv6=dual_stack
  ) as server:
    client.key_value_set(_KEY, str(server.getsockname()[1]), allow_overwrite=True)
    deadline = time.monotonic() + _CONNECT_S
    with contextlib.suppress(TimeoutError):
      while len(links) < count - 1:
        server.settimeout(max(deadline - time.monotonic(), 0.01))
        link, _ = server.accept()
        link.settimeout(5)
        name = link.recv(8, socket.MSG_WAITALL).strip()
        if name.isdigit() and 0 < int(name) < count:
          links[int(name)] = link
  return links


def _delay_abort() -> None:
  """Delay SIGABRT by six seconds: the handler is C's sleep, whose argument is the number of the signal.

  jax aborts the moment process 0 dies, before the watchdog's thread can print its message.
  """
  libc = ctypes.CDLL(None)
  libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
  libc.signal.restype = ctypes.c_void_p
  libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def _print_error(text: str) -> None:
  """Write to standard error without the locks of Python's streams, which the main thread may hold."""
  os.write(sys.__stderr__.fileno(), f'{text}\n'.encode())
