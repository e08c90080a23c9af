"""A running estimate of how many tokens a rollout of each prompt takes."""

from __future__ import annotations

import numpy as np


class LengthEstimate:
  """mean ← mean + rate·(seen − mean) per visit to a prompt, the first visit taken whole; 0 = not yet seen."""

  def __init__(self, size: int, rate: float = 0.5):
    """`size` prompts; `rate` is the weight of the newest visit. Source: none."""
    self.rate, self.mean = rate, np.zeros(size, np.float32)

  def observe(self, index_N: np.ndarray, tokens_N: np.ndarray) -> None:
    """Mean tokens of each visited group. Source: none."""
    for i, tokens in zip(index_N, tokens_N, strict=True):
      old = self.mean[i]
      self.mean[i] = tokens if old == 0 else old + self.rate * (tokens - old)

  def __call__(self, index_N: np.ndarray) -> np.ndarray:
    """Expected tokens, float32 [N]; 0 where unknown. Source: none."""
    return self.mean[index_N]

  def state_dict(self) -> dict:
    """For the checkpoint. Source: none."""
    return dict(mean=self.mean)

  def load_state_dict(self, state: dict) -> None:
    """Back from `state_dict`. Source: none."""
    self.mean = np.asarray(state['mean'], np.float32).copy()
