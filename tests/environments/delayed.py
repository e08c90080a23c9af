"""Environments that take time, and fail where their turns say so. Workers import this module."""

from __future__ import annotations

import os
import random
import time


class Delayed:
  """Observations follow from the row, the seed and all turns; steps last a log-normal time with the given mean."""

  def __init__(self, mean_s: float, fails: str):
    self.mean_s, self.fails = mean_s, fails

  def reset(self, row, seed):
    self.texts = [str(seed % 97)]

  def step(self, text):
    self.texts.append(text)
    total = sum(map(ord, ''.join(self.texts)))
    time.sleep(latency_s(random.Random(total), self.mean_s))
    if self.fails and len(self.texts) == 3 and total % 3 == 0:
      getattr(self, f'_{self.fails}')()
    return f'<{total % 7}>', float(total % 2), len(self.texts) > 4 + total % 3

  def _hang(self):
    time.sleep(600)

  def _die(self):
    os._exit(3)

  def _raise(self):
    raise RuntimeError('broken')


def latency_s(source: random.Random, mean_s: float, sigma: float = 1.0) -> float:
  """A log-normal time in seconds with the given mean."""
  return mean_s * source.lognormvariate(-(sigma**2) / 2, sigma) if mean_s else 0.0


def delayed(*, mean_s: float = 0.0, fails: str = ''):
  return Delayed(mean_s, fails)
