"""Watchdogs as threads with sockets between them; test_processes.py has real processes."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import pytest

from jaxrl_llm.distributed import watchdog


class Ended:
  """Replaces os._exit."""

  def __init__(self):
    self.status, self._called = None, threading.Event()

  def __call__(self, status: int) -> None:
    if self.status is None:
      self.status = status
    self._called.set()
    if threading.current_thread() is threading.main_thread():
      raise SystemExit
    threading.Event().wait()  # it does not return, and its thread is a daemon

  def wait(self, timeout: float = 20) -> int | None:
    self._called.wait(timeout)
    return self.status


def star(count: int, silent_s: float = 1e4):
  """Watchdogs of `count` processes, their exits, and both sides of each connection to process 0."""
  pairs = {i: socket.socketpair() for i in range(1, count)}
  ended = [Ended() for _ in range(count)]
  links = [{i: pair[0] for i, pair in pairs.items()}, *({0: pair[1]} for pair in pairs.values())]
  watches = [watchdog.Watchdog(i, count, links[i], silent_s, ended[i]) for i in range(count)]
  return watches, ended, pairs


def test_all_processes_report_a_death(capfd):
  _, ended, pairs = star(4)
  pairs[2][1].shutdown(socket.SHUT_RDWR)  # as the kernel does for a process that dies
  assert [ended[i].wait() for i in (0, 1, 3)] == [watchdog.EXIT_PEER_LOST] * 3
  # The socket of process 2 is closed on its own side, too, so that it regards process 0 as dead.
  assert ended[2].wait() == watchdog.EXIT_PEER_LOST
  errors = capfd.readouterr().err.splitlines()
  assert len(errors) == 4 and all('start the same command again' in line for line in errors)
  assert (
    sum(line.startswith('error: process 2 of 4 died (its connection closed ') for line in errors)
    == 3
  )
  assert sum(line.startswith('error: process 0 of 4 died') for line in errors) == 1


def test_all_report_the_death_of_process_0(capfd):
  _, ended, pairs = star(3)
  for ours, _ in pairs.values():
    ours.shutdown(socket.SHUT_WR)
  assert [e.wait() for e in ended[1:]] == [watchdog.EXIT_PEER_LOST] * 2
  assert capfd.readouterr().err.count('error: process 0 of 3 died') == 2


def test_silence_is_reported_with_its_setting(capfd):
  ours, theirs = socket.socketpair()
  ended = Ended()
  watchdog.Watchdog(0, 2, {1: ours}, 1.0, ended)
  assert ended.wait() == watchdog.EXIT_PEER_LOST
  errors = capfd.readouterr().err
  assert errors.startswith(
    'error: process 1 of 2 has not answered for 1 s (config.processes.silent_s=1);'
  )
  assert theirs.recv(1) == b'.'  # it sent heartbeats itself


def test_heartbeats_are_received():
  watches, *_ = star(3)
  for watch in watches:
    before, until = dict(watch._last_heard), time.monotonic() + 20
    while any(watch._last_heard[other] == heard for other, heard in before.items()):
      assert time.monotonic() < until
      time.sleep(0.05)


def test_a_normal_exit_is_not_reported(capfd):
  watches, ended, pairs = star(3)
  watches[1].leave(75, well=True)
  until = time.monotonic() + 20
  while 1 in watches[0]._last_heard:
    assert time.monotonic() < until
  pairs[1][1].shutdown(socket.SHUT_RDWR)
  assert ended[0].wait(1.5) is None and ended[2].status is None
  assert capfd.readouterr().err == ''


@pytest.mark.parametrize('status, theirs', [(2, 2), (1, watchdog.EXIT_PEER_LOST)])
def test_bad_input_of_one_ends_the_others_as_such(monkeypatch, capfd, status, theirs):
  monkeypatch.setattr(watchdog, '_GRACE_S', 0.3)
  watches, ended, _ = star(3)
  with pytest.raises(SystemExit):
    watches[1].leave(status, well=False)
  assert ended[1].status == status
  assert [ended[i].wait() for i in (0, 2)] == [theirs] * 2
  errors = capfd.readouterr().err
  assert (
    errors.count(f'error: process 1 of 3 ended with status {status}, and its own last message') == 2
  )


def test_an_error_found_by_all_is_reported_by_each(capfd):
  watches, ended, _ = star(2)
  threads = [threading.Thread(target=w.leave, args=(2, False), daemon=True) for w in watches]
  for thread in threads:
    thread.start()
  assert [e.wait() for e in ended] == [2, 2]
  assert capfd.readouterr().err == ''


def test_a_collective_that_failed_waits_for_the_cause(capfd):
  watches, ended, pairs = star(2, silent_s=20.0)
  error = ValueError('UNKNOWN: Gloo AllGather failed: Connection closed by peer [127.0.0.1]:60574')
  main = threading.Thread(target=watches[0].failed, args=(error,), daemon=True)
  main.start()
  pairs[1][1].shutdown(socket.SHUT_RDWR)
  # Both have printed by then: a message that is written while others are read is lost.
  assert [e.wait() for e in ended] == [watchdog.EXIT_PEER_LOST] * 2
  errors = capfd.readouterr().err
  assert 'process 1 of 2 died' in errors and 'Traceback' not in errors


def test_any_other_exception_is_printed_at_once(monkeypatch, capfd):
  monkeypatch.setattr(watchdog, '_GRACE_S', 0.3)
  watches, ended, _ = star(2)
  with pytest.raises(SystemExit):
    watches[1].failed(KeyError('of a bug'))
  assert ended[1].status == 1 and ended[0].wait() == watchdog.EXIT_PEER_LOST
  assert "KeyError: 'of a bug'" in capfd.readouterr().err


def test_an_abort_is_delayed_until_the_cause_is_reported():
  """jax's thread aborts when process 0 dies, before the watchdog can print its message."""
  code = (
    'import ctypes, os, threading, time; from jaxrl_llm.distributed import watchdog; watchdog._delay_abort();'
    'threading.Thread(target=ctypes.CDLL(None).abort).start(); time.sleep(0.5); os._exit(watchdog.EXIT_PEER_LOST)'
  )
  assert (
    subprocess.run([sys.executable, '-c', code], timeout=60).returncode == watchdog.EXIT_PEER_LOST
  )
