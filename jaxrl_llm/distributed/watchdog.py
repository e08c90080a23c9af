"""Processes of one run that watch each other: where one dies or stops answering, the others say so and end.

Left to themselves the others wait inside a collective for what never comes. What jax 0.10.2 and gloo do about it:

  the first process dies        the others' coordination client logs FATAL with a stack trace and aborts at once: 134
  another dies                  who waits for it in gloo gets an exception at once; the rest abort as above, when its
                                heartbeats have been missing for heartbeat_timeout_seconds (100)
  one is stopped, or cut off    the same heartbeats; until then gloo waits
  what is told                  no callback of Python's can be given for any of this (it ends in std::bad_cast)

So every process holds a TCP connection to the first, both send a dot now and then, and a thread looks at them: the
kernel closes the connections of a process that dies, and one that stands still sends no dots. The thread ends the
process by os._exit, as the main thread may be anywhere. jax's own heartbeats stay behind it, with twice its patience.
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
from typing import Any, NoReturn

EXIT_PEER_LOST = (
  76  # exit status where another process died: the same command goes on (EX_PROTOCOL of sysexits.h)
)
EXIT_BAD_INPUT = 2
_KEY = 'jaxrl_llm/watch'
_JOIN_S = 60.0  # for the connections, once jax has found all processes
_GRACE_S = (
  10.0  # to end by itself, for who hears that another ends: bad input is often found by all
)
# Exceptions of collectives and of the coordination service, whose cause is often that a process died.
_COLLECTIVE = re.compile('gloo|nccl|connection|timed out|deadline|barrier|unavailable', re.I)


class Watchdog:
  """The thread of one process, and what the main thread tells it."""

  def __init__(
    self,
    process: int,
    count: int,
    links: dict[int, socket.socket],
    silent_s: float,
    end: Callable[[int], NoReturn] = os._exit,
  ):
    """`links` leads to the others that it hears of: all of them for process 0, process 0 for the others.

    `end` is os._exit, without jax's shutdown, which waits for all, and whatever the main thread holds.
    """
    self._process, self._count, self._silent_s, self._end = process, count, silent_s, end
    self._links, self._rest = links, dict.fromkeys(links, b'')
    self._heard = dict.fromkeys(links, time.monotonic())  # of those that have not left
    self._status: int | None = None  # once the main thread has ended
    self._left: tuple[float, int, str, int] | None = (
      None  # who ended badly: when that ends us, process, why, status
    )
    self._selector = selectors.DefaultSelector()
    for other, link in links.items():
      link.setblocking(False)
      self._selector.register(link, selectors.EVENT_READ, other)
    self._thread = threading.Thread(target=self._run, name='watch', daemon=True)
    self._thread.start()

  def leave(self, status: int, well: bool) -> None:
    """Tells the others that this process ends with `status`; unless `well`, ends it here.

    A process that fails cannot go through jax's shutdown, which waits for those that wait for it.
    """
    self._status = status
    self._tell(f'bye {status} {int(well)}\n')
    if well:
      return
    until = time.monotonic() + _GRACE_S
    while self._heard and time.monotonic() < until:  # who finds the same fault tells it, too
      time.sleep(0.05)
    self._end(status)

  def failed(self, error: Exception) -> None:
    """An exception that is no sentence ends this process, of a collective as that of a process that died.

    A collective fails before its cause is known: the thread gets its time to find it.
    """
    status = 1
    if _COLLECTIVE.search(f'{error}'):
      time.sleep(self._silent_s + 2)  # the thread ends us meanwhile, if a process died
      status = EXIT_PEER_LOST
    traceback.print_exception(error)
    if status == EXIT_PEER_LOST:
      _say(
        f'error: a collective failed although all {self._count} processes answer; see the network between them, and '
        'start the same command again: the run resumes at its last checkpoint.'
      )
    self.leave(status, well=False)

  def _run(self) -> None:
    beat_s = min(1.0, self._silent_s / 5)
    last = beaten = time.monotonic()
    while True:
      ready, now = self._selector.select(beat_s), time.monotonic()
      if now - last > self._silent_s:  # the others have given us up, and are gone
        self._lose(self._process, f'(this one) stood still for {now - last:.0f} s')
      last = now
      for key, _ in ready:
        self._read(key.data)
      if now - beaten >= beat_s:
        beaten = now
        self._tell('.\n')
      for other, heard in self._heard.items():
        if now - heard > self._silent_s:
          self._lose(
            other,
            f'has not answered for {now - heard:.0f} s (config.processes.silent_s={self._silent_s:g})',
          )
      if self._left is not None and now > self._left[0]:
        self._lose(*self._left[1:])

  def _read(self, other: int) -> None:
    data, now = b'', time.monotonic()
    with contextlib.suppress(OSError):
      data = self._links[other].recv(4096)
    if not data:
      since = now - self._heard[other]
      return self._lose(other, f'died (its connection closed {since:.1f} s after its last sign)')
    self._heard[other] = now
    *lines, self._rest[other] = (self._rest[other] + data).split(b'\n')
    for line in lines:
      word, *more = line.decode().split(' ', 3)
      if word == 'lost':
        self._lose(int(more[0]), more[2], int(more[1]))
      if word == 'bye':
        self._bye(other, int(more[0]), more[1] == '1')

  def _bye(self, other: int, status: int, well: bool) -> None:
    self._selector.unregister(self._links[other])
    del self._heard[other]
    if not well and self._left is None:
      why = f'ended with status {status}, and its own last words say why'
      ours = EXIT_BAD_INPUT if status == EXIT_BAD_INPUT else EXIT_PEER_LOST
      self._left = time.monotonic() + _GRACE_S, other, why, ours

  def _lose(self, other: int, why: str, status: int = EXIT_PEER_LOST) -> None:
    """Says it, tells the others, and ends."""
    if self._status is not None:  # our own work is done, or our own failure told
      self._end(self._status)
    if self._process == 0:
      self._tell(f'lost {other} {status} {why}\n')
    # What jax's threads have to say of the same death comes first; nor may our own death overtake what we told.
    time.sleep(1)
    then = 'mend it, and start' if status == EXIT_BAD_INPUT else 'start'
    _say(
      f'error: process {other} of {self._count} {why}; {then} the same command again on all of them: the run resumes '
      'at its last checkpoint.'
    )
    self._end(status)

  def _tell(self, text: str) -> None:
    for other in list(self._heard):
      with contextlib.suppress(OSError):  # a closed connection is found where it is read
        self._links[other].send(text.encode())


def start(silent_s: float) -> Watchdog | None:
  """Begins to watch the processes of jax.distributed, after its initialize; all of them call it.

  None, with a word, where they cannot reach each other: then jax's heartbeats are all there is.
  """
  # There is no public way to the address that has proved to reach the first process, nor to its key-value store.
  from jax._src.distributed import global_state

  process, count = global_state.process_id, global_state.num_processes
  try:
    if process:
      host = global_state.coordinator_address.rpartition(':')[0].strip('[]')
      links = {0: _call(global_state.client, host, process)}
    else:
      links = _answer(global_state.client, count)
  except Exception as error:  # of sockets, or of the store
    print(f'processes cannot watch each other ({error}); jax alone does.', flush=True)
    return None
  if len(links) < (1 if process else count - 1):
    print(
      f'process 0 is watched by {len(links)} of {count - 1}; jax alone watches the others.',
      flush=True,
    )
  _slow_abort()
  print(
    f'a process that dies, or does not answer for {silent_s:g} s (config.processes.silent_s), ends all with status '
    f'{EXIT_PEER_LOST}',
    flush=True,
  )
  return Watchdog(process, count, links, silent_s)


def _call(client: Any, host: str, process: int) -> socket.socket:
  port = int(client.blocking_key_value_get(_KEY, int(_JOIN_S * 1000)))
  link = socket.create_connection((host, port), timeout=_JOIN_S)
  link.sendall(f'{process:8d}'.encode())
  return link


def _answer(client: Any, count: int) -> dict[int, socket.socket]:
  both = socket.has_dualstack_ipv6()
  family = socket.AF_INET6 if both else socket.AF_INET
  links: dict[int, socket.socket] = {}
  with socket.create_server(('', 0), family=family, backlog=count, dualstack_ipv6=both) as server:
    client.key_value_set(_KEY, str(server.getsockname()[1]), allow_overwrite=True)
    until = time.monotonic() + _JOIN_S
    with contextlib.suppress(TimeoutError):
      while len(links) < count - 1:
        server.settimeout(max(until - time.monotonic(), 0.01))
        link, _ = server.accept()
        link.settimeout(5)
        name = link.recv(8, socket.MSG_WAITALL).strip()
        if name.isdigit() and 0 < int(name) < count:
          links[int(name)] = link
  return links


def _slow_abort() -> None:
  """Holds a thread that aborts for six seconds, the number of its signal, in C's sleep; then it aborts.

  jax aborts the moment the first process dies, and the thread that would say so in a sentence loses that race.
  """
  libc = ctypes.CDLL(None)
  libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
  libc.signal.restype = ctypes.c_void_p
  libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def _say(text: str) -> None:
  """Whatever locks the main thread holds."""
  os.write(sys.__stderr__.fileno(), f'{text}\n'.encode())
