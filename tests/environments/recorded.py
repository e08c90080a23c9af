"""Environments that write every call into a file; the text of a turn decides what its step does.

Workers import this module, so it imports little.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time


class Recorded:
  """Writes every call into a file; a turn says what its step does."""

  def __init__(self, log: str):
    self.log = log

  def _write(self, call: str) -> None:
    with open(self.log, 'a') as file:
      file.write(f'{self.name} {call}\n')

  def reset(self, row, seed):
    self.name, self.steps, self.held = row.id, 0, None
    self._write('reset')
    if row.question == 'broken':
      raise RuntimeError('no reset')

  def step(self, text):
    self.steps += 1
    self._write('step')
    word, _, argument = text.partition(' ')
    getattr(self, f'_{word}', lambda _: None)(argument)
    return f'{os.getpid()} {id(self)} {self.steps} {self.held}', float(self.steps), False

  def close(self):
    self._write('close')

  def _raise(self, _):
    raise RuntimeError('broken')

  def _hang(self, _):
    time.sleep(600)

  def _deaf(self, _):
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    time.sleep(600)

  def _spin(self, _):
    while True:
      pass

  def _hold(self, mb):
    self.held = len(bytearray(int(mb) * 2**20))

  def _die(self, marker):
    """Kills its worker, the first time alone where there is a marker."""
    if not marker or not os.path.exists(marker):
      open(marker or os.devnull, 'w').close()
      os.kill(os.getpid(), signal.SIGKILL)

  def _leave(self, marker):
    """Ends its worker soon after the step, the first time alone."""
    if not os.path.exists(marker):
      open(marker, 'w').close()
      threading.Timer(0.3, os._exit, (3,)).start()

  def _child(self, _):
    self.held = subprocess.Popen(['sleep', '600']).pid


class Unreplayable(Recorded):
  replayable = False


def recorded(*, log):
  return Recorded(log)


def unreplayable(*, log):
  return Unreplayable(log)


_resets = 0


class Differing(Recorded):
  """Starts otherwise each time."""

  def reset(self, row, seed):
    global _resets
    super().reset(row, seed)
    _resets += 1
    return f'start {_resets}'


def differing(*, log):
  return Differing(log)
