"""Running estimates of the tokens of a rollout of each prompt."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Lengths = Callable[[np.ndarray], np.ndarray]  # prompt indices → expected tokens of a rollout


class LengthEstimate:
  """mean ← mean + rate·(observed − mean) per visit to a prompt; the first visit sets it; 0 = no visit yet."""

  def __init__(self, size: int, rate: float = 0.5):
    """`size` prompts; `rate` is the weight of the latest visit."""
    self.rate, self.mean = rate, np.zeros(size, np.float32)

  def observe(self, index_N: np.ndarray, tokens_N: np.ndarray) -> None:
    """Updates the estimates with the mean tokens of each visited group."""
    for i, tokens in zip(index_N, tokens_N, strict=True):
      old = self.mean[i]
      self.mean[i] = tokens if old == 0 else old + self.rate * (tokens - old)

  def __call__(self, index_N: np.ndarray) -> np.ndarray:
    """Expected tokens, float32 [N]; 0 where unknown."""
    return self.mean[index_N]

  def state_dict(self) -> dict[str, np.ndarray]:
    """State for the checkpoint."""
    return dict(mean=self.mean)

  def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
    """Restore from `state_dict`."""
    self.mean = np.asarray(state['mean'], np.float32).copy()


def expected_tokens(pool: np.ndarray, lengths: Lengths | None) -> tuple[np.ndarray, np.float32]:
  """Expected tokens of the candidates, and the mean of the known ones; 0 where unknown."""
  tokens = np.zeros(0, np.float32) if lengths is None else lengths(pool)
  known = np.count_nonzero(tokens)
  return tokens, np.float32(tokens.sum(dtype=float) / max(known, 1))
